"""Measures how long an operation takes on this machine, forward and backward.

In: a node of a captured graph and a dtype. Out: nanoseconds, measured once per
operation, shapes and dtype, and cached on disk for processes under the same conditions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from halfstep.graph import capture
from halfstep.machine import hardware, rate_cache
from halfstep.policy import op_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_CACHE = "op-times"
"""Name of the cache file, for `rate_cache`."""
_REPEATS = 5
_LEAST_S, _MOST_S = 0.02, 0.2
"""Time limits in seconds: an operation is repeated `_REPEATS` times and for at least
`_LEAST_S`, since another process may take the CPU for milliseconds, but for at most
`_MOST_S`."""
_LEAST_PASSES, _PASSES_S = 3, 0.2
"""A whole model is run at least `_LEAST_PASSES` times, and for `_PASSES_S` seconds."""


class OpTimes:
    """Times of operations, cached by their arguments' layouts and dtypes."""

    def __init__(
        self,
        device: torch.device,
        low: torch.dtype,
        differentiable: Collection[fx.Node],
        *,
        refresh: bool = False,
    ) -> None:
        self.device = device
        self.low = low
        self._differentiable = differentiable
        self._key = hardware.cache_key(device.type)
        cached = {} if refresh else rate_cache.read(_CACHE, self._key)
        self._times = _valid_times(cached)
        self._num_cached = len(self._times)
        self.doubt = ""
        """Why the times may be wrong; "" if nothing was observed."""

    def save(self) -> None:
        """Cache new times for other processes."""
        if len(self._times) == self._num_cached:
            return
        with contextlib.suppress(OSError):  # if it fails, measure again next time
            rate_cache.write(_CACHE, self._key, {"times": self._times})

    def operation(self, node: fx.Node, *, low: bool) -> int | None:
        """Return a node's nanoseconds in one format; None if it cannot run alone.

        It cannot if there is no kernel for the format, or if it takes a subgraph, as
        for code under `no_grad`. 0 if shapes depend on data.
        """
        if any("val" not in each.meta for each in node.all_input_nodes):
            return None
        if not capture.has_static_shapes([node, *node.all_input_nodes]):
            return 0
        dtype = self.low if low else torch.float32
        op, device = capture.op_name(node), self.device.type
        keep = op_tables.fp32_arguments(op, device) if low else ()
        specs = pytree.tree_map(self._spec, (node.args, node.kwargs))
        key = f"{node.target} {specs!r} {dtype}"
        if key not in self._times:
            with preserve_rng(self.device):
                self._times[key] = self._measure(node, dtype, keep)
        return self._times[key]

    def cast(self, node: fx.Node) -> int:
        """Return the nanoseconds of casting a result, forward and backward.

        0 if the shape depends on data.
        """
        if not capture.has_static_shapes([node]):
            return 0
        shape = tuple(map(int, node.meta["val"].shape))
        key = f"cast {shape!r} {self.low}"
        if key not in self._times:
            value = torch.ones(shape, device=self.device, requires_grad=True)
            self._times[key] = self._time(lambda: value.to(self.low), [value])
        return self._times[key] or 0

    def time_pass(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Return the nanoseconds of a forward and a backward pass of a whole graph.

        Parameters, gradients, buffers and the random state are unchanged afterwards.
        """
        inputs = capture.own_copies(inputs)
        tensors = [*graph_module.parameters(), *capture.tensors(inputs)]
        layouts = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        text = f"{graph_module.code} {layouts!r}"
        names = dict(graph_module.named_parameters(remove_duplicate=False))
        key = f"pass {hashlib.sha256(text.encode()).hexdigest()}"
        if key not in self._times:
            leaves = [each for each in tensors if each.requires_grad]
            written = [
                graph_module.get_parameter(node.target)
                for node in capture.changed_in_place(graph_module.graph)
                if node.op == "get_attr" and node.target in names
            ]
            state = capture.preserve_state([*written, *graph_module.buffers()])
            with state, preserve_rng(self.device), capture.without_autocast():
                self._times[key] = self._time_passes(graph_module, inputs, leaves)
        return self._times[key] or 0

    def _spec(self, value: Any) -> Any:  # noqa: ANN401
        """Return what a time depends on: layouts and dtypes of tensors, or a value."""
        if not isinstance(value, fx.Node):
            return value
        layouts = [
            (tuple(map(int, v.shape)), tuple(map(int, v.stride())), v.dtype)
            for v in capture.tensors(value)
        ]
        return (layouts, value in self._differentiable)

    def _measure(
        self, node: fx.Node, dtype: torch.dtype, keep: Sequence[int]
    ) -> int | None:
        def example(source: fx.Node, dtype: torch.dtype = dtype) -> Any:  # noqa: ANN401
            def fill(fake: Tensor) -> Tensor:
                return self._example(
                    fake, dtype, needs_grad=source in self._differentiable
                )

            return pytree.tree_map_only(Tensor, fill, source.meta["val"])

        fp32 = functools.partial(example, dtype=torch.float32)
        args = [
            fx.map_arg(argument, fp32 if index in keep else example)
            for index, argument in enumerate(node.args)
        ]
        kwargs = fx.map_arg(node.kwargs, example)
        leaves = [
            leaf for leaf in capture.tensors([args, kwargs]) if leaf.requires_grad
        ]
        target: Any = node.target
        try:
            return self._time(lambda: target(*args, **kwargs), leaves)
        except (RuntimeError, NotImplementedError):
            return None  # no kernel for the format

    def _example(self, fake: Tensor, dtype: torch.dtype, *, needs_grad: bool) -> Tensor:
        shape = [int(size) for size in fake.shape]
        if not fake.is_floating_point():
            return torch.zeros(shape, dtype=fake.dtype, device=self.device)
        dtype = dtype if fake.dtype == torch.float32 else fake.dtype
        value = torch.rand(shape, device=self.device).to(dtype)
        return value.requires_grad_(needs_grad)

    def _time(self, call: Callable[[], Any], leaves: list[Tensor]) -> int:
        """Return the shortest time of several calls, each with its backward pass."""
        self._time_once(call, leaves)
        times: list[int] = []
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < _MOST_S and (
            len(times) < _REPEATS or spent < _LEAST_S
        ):
            times.append(self._time_once(call, leaves))
        times = times or [self._time_once(call, leaves)]
        return min(times)

    def _time_passes(
        self, run: Callable[..., Any], inputs: Sequence[Any], leaves: list[Tensor]
    ) -> int:
        """Return the median time of several passes, as training would take."""
        self._time_once(lambda: run(*inputs), leaves)
        times: list[int] = []
        while len(times) < _LEAST_PASSES or sum(times) < _PASSES_S * 1e9:
            times.append(self._time_once(lambda: run(*inputs), leaves))
        return int(statistics.median(times))

    def _time_once(self, call: Callable[[], Any], leaves: list[Tensor]) -> int:
        """Return the nanoseconds of a call and its backward pass."""
        start = time.perf_counter_ns()
        results = [value for value in capture.tensors(call()) if value.requires_grad]
        if leaves and results:
            ones = [torch.ones_like(value) for value in results]
            torch.autograd.grad(results, leaves, ones, allow_unused=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns() - start


def preserve_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores torch's random state."""
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices)


def _valid_times(cached: dict[str, Any]) -> dict[str, int | None]:
    """Return cached times after validation; {} if they are invalid."""
    times = cached.get("times")
    if not isinstance(times, dict):
        return {}
    are_times = all(t is None or (type(t) is int and t >= 0) for t in times.values())
    return times if are_times else {}

"""Backward passes of scaled losses that leave true gradients in `.grad`.

In: the roots of a graph, and a loss scale. Out: gradients divided by it before they are
added to `.grad`, and what a step must know of passes that overflowed.

Nothing is shared by passes that run at once, in threads or inside one another: hooks
find the scale of a gradient by the number that autograd gives to a pass.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_scales: dict[int, float] = {}
"""Number of a scaled pass under way -> its loss scale."""


Root = Tensor | GradientEdge
"""What a backward pass may begin from."""


def listed(value: Any) -> list[Any]:  # noqa: ANN401
    """Return what `torch.autograd.backward` takes one or many of as a list."""
    is_one = value is None or isinstance(value, Tensor | GradientEdge)
    return [value] if is_one else list(value)


def _first_nodes(roots: Iterable[Root]) -> set[Any]:
    """Return the nodes that roots come from."""
    edges = (
        root if isinstance(root, GradientEdge) else get_gradient_edge(root)
        for root in roots
        if isinstance(root, GradientEdge) or root.requires_grad
    )
    return {edge.node for edge in edges}


def scaled_roots(
    roots: Sequence[Root], grads: Sequence[Tensor | None], scale: float
) -> tuple[list[Root], list[Tensor | None]]:
    """Return roots and the gradients to begin with, scaled.

    Tensors are multiplied in fp32; of an edge, whose tensor is not known, the gradient.
    """
    scaled: list[Root] = []
    scaled_grads = list(grads)
    for index, root in enumerate(roots):
        if isinstance(root, GradientEdge):
            scaled.append(root)
            grad = grads[index]
            scaled_grads[index] = None if grad is None else grad * scale
        else:
            dtype = torch.promote_types(root.dtype, torch.float32)
            scaled.append(root.to(dtype) * scale)
    return scaled, scaled_grads


def leaf_nodes(roots: Sequence[Root]) -> list[Any]:
    """Return the nodes of a graph that add gradients to `.grad`."""
    to_visit: list[Any] = list(_first_nodes(roots))
    seen = set(to_visit)
    leaves = []
    while to_visit:
        node = to_visit.pop()
        if hasattr(node, "variable"):
            leaves.append(node)
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                to_visit.append(upstream)
    return leaves


def scale_of_pass() -> float | None:
    """Return the loss scale of the backward pass that calls this; None: it has none."""
    return _scales.get(torch._C._current_graph_task_id())  # noqa: SLF001


@contextlib.contextmanager
def unscaled_leaves(
    roots: Sequence[Root], nodes: Sequence[Any], scale: float
) -> Iterator[None]:
    """Divide gradients by a loss scale where a backward pass adds them to `.grad`.

    Args:
        roots: What the pass begins from, multiplied by the scale.
        nodes: Those of `leaf_nodes` that are to divide.
        scale: The loss scale.
    """
    number: int | None = None  # of this pass: autograd gives it one when it begins

    def begin(grads: tuple[Tensor | None, ...]) -> None:
        nonlocal number
        del grads
        number = torch._C._current_graph_task_id()  # noqa: SLF001
        _scales[number] = scale

    def unscale(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if torch._C._current_graph_task_id() != number:  # noqa: SLF001
            return grads  # of a pass in another thread
        return tuple(None if grad is None else grad * (1 / scale) for grad in grads)

    handles = [node.register_prehook(begin) for node in _first_nodes(roots)]
    handles += [node.register_prehook(unscale) for node in nodes]
    try:
        yield
    finally:
        if number is not None:
            del _scales[number]
        for handle in handles:
            handle.remove()


def wrap_register_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.register_hook`, whose hooks on leaves are given true gradients."""

    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:  # noqa: ANN401
        if not tensor.is_leaf:
            return original(tensor, hook)

        @functools.wraps(hook)
        def unscaled(grad: Tensor) -> Any:  # noqa: ANN401
            scale = scale_of_pass()
            if scale is None:
                return hook(grad)
            result = hook(grad * (1 / scale))
            return None if result is None else result * scale

        return original(tensor, unscaled)

    return register_hook


class OverflowFlags:
    """Which parameters hold gradients of passes that left inf or NaN.

    Why: clipping by value makes an inf finite before the step looks.
    """

    def __init__(self) -> None:
        self._flags = WeakIdKeyDictionary()
        """Leaf -> 0.0 or 1.0, shape (), shared with other leaves; and whether a step
        has used it."""

    def discarded(self, leaves: Iterable[Tensor]) -> bool:
        """Say whether a script threw overflowed gradients away without a step.

        Args:
            leaves: Those that a pass is about to reach.
        """
        flags = (self._flags.get(leaf) for leaf in leaves if leaf.grad is None)  # type: ignore[no-untyped-call]
        unused = {
            id(flag): flag for flag, is_used in filter(None, flags) if not is_used
        }
        return any(map(bool, unused.values()))

    def add(
        self, leaves: Iterable[Tensor], with_grad: set[int], found_inf: Tensor
    ) -> None:
        """Take note of a pass.

        Args:
            leaves: Those that it reached.
            with_grad: Ids of those that held gradients before.
            found_inf: 0.0 or 1.0, shape ().
        """
        merged: dict[int, Tensor] = {}
        for leaf in leaves:
            flag, is_used = self._flags.get(leaf) or (found_inf, True)  # type: ignore[no-untyped-call]
            if is_used or id(leaf) not in with_grad:
                flag = found_inf
            elif id(flag) in merged:
                flag = merged[id(flag)]
            else:
                flag = merged.setdefault(id(flag), torch.maximum(flag, found_inf))
            self._flags[leaf] = (flag, False)

    def of_step(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the flags that concern a step, which uses them up.

        Args:
            params: Those that the step changes.
        """
        flags = {}
        for param in params:
            flag, _ = self._flags.get(param) or (None, True)  # type: ignore[no-untyped-call]
            if flag is not None and param.grad is not None:
                flags[id(flag)] = flag
                self._flags[param] = (flag, True)
        return list(flags.values())


@torch.no_grad()
def find_inf(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return 1.0 if one of some gradients is inf or NaN, else 0.0; float32."""
    from halfstep.numerics.local_tensor import dense_values

    values = [dense_values(gradient) for gradient in gradients if gradient is not None]
    on_cpu = [value for value in values if value.is_cpu]
    # A sum is inf or NaN if a part is; on a CPU it takes a tenth of the largest norm.
    has_overflow = any(
        not value.sum().isfinite() and not value.isfinite().all() for value in on_cpu
    )
    on_devices = [value for value in values if not value.is_cpu and value.numel()]
    if has_overflow or not on_devices:
        return torch.tensor(float(has_overflow))
    return (~nn.utils.get_total_norm(on_devices, torch.inf).isfinite()).float()

"""Backward passes of scaled losses that leave unscaled gradients in `.grad`.

Hooks divide gradients by the loss scale before they are accumulated, and record for the
step which passes overflowed.

Passes that run at once, in threads or nested, share no state: hooks look up the scale
by autograd's id of the pass.
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
"""Autograd's id of a running scaled pass -> its loss scale."""


Root = Tensor | GradientEdge
"""A root of a backward pass."""


def listed(value: Any) -> list[Any]:  # noqa: ANN401
    """Return one or several arguments of `torch.autograd.backward` as a list."""
    is_one = value is None or isinstance(value, Tensor | GradientEdge)
    return [value] if is_one else list(value)


def _first_nodes(roots: Iterable[Root]) -> set[Any]:
    """Return the nodes that produced the roots."""
    edges = (
        root if isinstance(root, GradientEdge) else get_gradient_edge(root)
        for root in roots
        if isinstance(root, GradientEdge) or root.requires_grad
    )
    return {edge.node for edge in edges}


def scaled_roots(
    roots: Sequence[Root], grads: Sequence[Tensor | None], scale: float
) -> tuple[list[Root], list[Tensor | None]]:
    """Return roots and their initial gradients, scaled.

    Tensors are multiplied in fp32. The tensor of a GradientEdge is not known, so its
    gradient is multiplied instead.
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
    """Return the nodes of a graph that accumulate gradients into `.grad`."""
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
    """Return the loss scale of the current backward pass; None if it is not scaled."""
    return _scales.get(torch._C._current_graph_task_id())  # noqa: SLF001


@contextlib.contextmanager
def unscaled_leaves(
    roots: Sequence[Root], nodes: Sequence[Any], scale: float
) -> Iterator[None]:
    """Divide gradients by a loss scale, at leaf nodes, before a pass accumulates them.

    The roots of the pass are already multiplied by the scale.
    """
    number: int | None = None  # autograd's id of this pass, assigned when it begins

    def begin(grads: tuple[Tensor | None, ...]) -> None:
        nonlocal number
        del grads
        number = torch._C._current_graph_task_id()  # noqa: SLF001
        _scales[number] = scale

    def unscale(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        if torch._C._current_graph_task_id() != number:  # noqa: SLF001
            return grads  # belongs to a pass in another thread
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
    """Wrap `Tensor.register_hook`: hooks on leaves receive unscaled gradients."""

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
    """Overflow flags of the gradients that parameters hold, one flag per pass.

    Recorded right after each pass, because clipping by value makes an inf finite
    before the step checks.
    """

    def __init__(self) -> None:
        self._flags = WeakIdKeyDictionary()
        """Leaf -> (0.0 or 1.0 of shape (), shared with other leaves; whether a step has
        used it)."""

    def discarded(self, leaves: Iterable[Tensor]) -> bool:
        """Return whether a script discarded overflowed gradients without a step.

        `leaves` are those that the next pass will reach.
        """
        flags = (self._flags.get(leaf) for leaf in leaves if leaf.grad is None)  # type: ignore[no-untyped-call]
        unused = {
            id(flag): flag for flag, is_used in filter(None, flags) if not is_used
        }
        return any(map(bool, unused.values()))

    def add(
        self, leaves: Iterable[Tensor], with_grad: set[int], found_inf: Tensor
    ) -> None:
        """Record a pass: leaves that it reached, ids of those with gradients before."""
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
        """Return the flags of a step's gradients, and mark them as used."""
        flags = {}
        for param in params:
            flag, _ = self._flags.get(param) or (None, True)  # type: ignore[no-untyped-call]
            if flag is not None and param.grad is not None:
                flags[id(flag)] = flag
                self._flags[param] = (flag, True)
        return list(flags.values())


@torch.no_grad()
def find_inf(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return 1.0 if any gradient contains inf or NaN, else 0.0; float32, shape ()."""
    from halfstep.numerics.local_tensor import dense_values

    values = [dense_values(gradient) for gradient in gradients if gradient is not None]
    on_cpu = [value for value in values if value.is_cpu]
    # inf or NaN makes the sum non-finite; a CPU sums in 10% of the time of a max norm.
    has_overflow = any(
        not value.sum().isfinite() and not value.isfinite().all() for value in on_cpu
    )
    on_devices = [value for value in values if not value.is_cpu and value.numel()]
    if has_overflow or not on_devices:
        return torch.tensor(float(has_overflow))
    return (~nn.utils.get_total_norm(on_devices, torch.inf).isfinite()).float()

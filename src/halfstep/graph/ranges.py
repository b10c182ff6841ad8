"""Finds operations whose values or gradients would overflow fp16.

In: a captured graph and a function that runs training steps with it. Out: each node's
largest value and gradient in fp32, and the reason to keep it in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from halfstep.errors import UserError
from halfstep.graph import capture
from halfstep.numerics.formats import FP16

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

HEADROOM = 4
"""Safety factor below fp16's largest number, because other batches and later steps
reach larger values."""


@dataclass(frozen=True)
class Range:
    """Largest magnitudes of a node's fp32 results."""

    value: float
    gradient: float
    """Of the unscaled loss; 0.0 if no backward pass reached the node."""


class _Recorded(nn.Module):
    """A captured model that runs in fp32, and tracks magnitudes on the device."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.hooks: list[Any] = []
        """Handles on parameters and inputs, which outlive the steps."""

    def forward(self, *args: Any) -> Any:  # noqa: ANN401
        """Run the graph on the model's inputs."""
        return _Interpreter(self).run(*args)


class _Interpreter(fx.Interpreter):
    def __init__(self, recorded: _Recorded) -> None:
        super().__init__(recorded.graph_module, garbage_collect_values=False)
        self._recorded = recorded

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        result, to = super().run_node(n), self._recorded
        for tensor in capture.tensors(result):
            if tensor.dtype != torch.float32 or not tensor.numel():
                continue
            _raise_to(to.values, n.name, tensor)
            if tensor.requires_grad:
                hook = tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad, name=n.name: _raise_to(to.gradients, name, grad)
                )
                to.hooks += [hook] if tensor.is_leaf else []
        return result


def _raise_to(maxima: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        # Inside `torch.vmap`, where a maximum would be one of each row.
        tensor = torch._C._functorch.get_unwrapped(tensor)  # noqa: SLF001
    # inf is ignored: in a mask fp16 can hold it, and an fp32 overflow leads to NaN.
    magnitude = tensor.detach().abs()
    largest = magnitude.masked_fill(magnitude == torch.inf, 0.0).amax()
    if name in maxima:
        largest = torch.maximum(maxima[name], largest)
    maxima[name] = largest


def measure(
    graph_module: fx.GraphModule, step: Callable[[nn.Module], object]
) -> dict[str, Range]:
    """Return the largest magnitudes of each node in some fp32 steps.

    `step` is called with the model, calls it on batches of the captured shapes, and
    runs backward passes. Parameters, gradients and buffers are restored.
    """
    params = list(graph_module.parameters())
    grads = [param.grad for param in params]
    recorded = _Recorded(graph_module)
    with capture.preserve_state([*params, *graph_module.buffers()]):
        try:
            for param in params:
                param.grad = None
            step(recorded)
        finally:
            for hook in recorded.hooks:
                hook.remove()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
    if not recorded.values:
        raise UserError("calibrate never called the model it was given.")
    ranges = {
        name: Range(float(value), float(recorded.gradients.get(name, 0.0)))
        for name, value in recorded.values.items()
    }
    for name, range_ in ranges.items():
        if math.isnan(range_.value + range_.gradient):
            raise UserError(
                f"in fp32 {name} is NaN; halfstep.find_nonfinite(model, step) finds "
                "its origin."
            )
    return ranges


def why_fp32(nodes: Iterable[fx.Node], ranges: Mapping[str, Range]) -> str:
    """Return why an operation or an input of it overflows fp16; "" if none does."""
    limit = FP16.max / HEADROOM
    for node in nodes:
        seen = ranges.get(node.name, Range(0.0, 0.0))
        for what, largest in (("values", seen.value), ("gradients", seen.gradient)):
            if largest > limit:
                return (
                    f"{what} of {node.name} reached {largest:.3g} in fp32; fp16 ends "
                    f"at {FP16.max:.0f}, of which a {HEADROOM}th is used"
                )
    return ""

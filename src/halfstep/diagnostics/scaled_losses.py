"""Checks that every gradient is multiplied by the loss scale exactly once.

Walks the autograd graphs of the losses that a program passes to `GradScaler.scale` and
to backward passes.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from halfstep.nonfinite.graph import nodes_of
from halfstep.reporting.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    from halfstep.nonfinite.graph import Edge

RULE = "loss scale"
_PROPORTIONAL = 0.1
"""Largest relative difference of two gradient norms that should be equal: rounding of
float16 gradients at half the scale differs by less."""


class ScaledLosses:
    """Tracks which scaler scaled which loss; `say` gets the findings."""

    def __init__(self, say: Callable[[Finding], None]) -> None:
        self._say = say
        self._scaled: dict[Any, int] = {}
        """Graph node of a scaled loss -> id() of its scaler."""
        self._waiting: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """id() of a parameter with a gradient -> id() of its scaler, 0 for none."""
        self._has_checked_functions = False

    def _add(self, measured: str, advice: str) -> None:
        where, source = "the step", "its graphs"
        self._say(Finding("error", RULE, where, measured, "", source, advice, 0.9))

    def end_step(self) -> None:
        """Drop the graphs of the step."""
        self._scaled.clear()

    def on_scale(self, scaler: object, scaled: Tensor) -> None:
        """Record a scaled loss."""
        if scaled.grad_fn is not None:
            self._scaled[scaled.grad_fn] = id(scaler)

    def on_backward(self, loss: object) -> None:
        """Check the scalers of all gradients that a backward pass adds to."""
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if node is None or not (self._scaled or self._waiting):
            return
        scaled = {node} & self._scaled.keys()

        def is_unscaled(edge: Edge) -> bool:
            scaled.update({edge[0]} & self._scaled.keys())
            return edge[0] not in scaled

        by_scaler = {0: set() if scaled else nodes_of(node, is_unscaled)}
        for each in scaled:
            by_scaler.setdefault(self._scaled[each], set()).update(nodes_of(each))
        seen: dict[int, int] = {}
        for scaler, nodes in by_scaler.items():
            for param in _leaves(nodes):
                wait = self._waiting.get(id(param))
                others = {seen.setdefault(id(param), scaler)}
                if wait is not None and wait[0]() is param and param.grad is not None:
                    others |= {wait[1]} if bool(param.grad.any()) else set()
                self._compare(scaler, others, param)
                self._waiting[id(param)] = weakref.ref(param), scaler
        if isinstance(loss, Tensor) and len(by_scaler) > 1:
            self._check_functions(loss)

    def on_step(self, optimizer: Optimizer) -> None:
        """Drop the gradients that an optimizer step used."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._waiting.pop(id(param), None)

    def _compare(self, scaler: int, others: set[int], param: Tensor) -> None:
        name = f"a weight of shape {tuple(param.shape)}"
        if others == {scaler}:
            return
        if 0 in {scaler, *others}:
            self._add(
                "a loss that no scaler scaled adds to gradients of a scaled one "
                f"({name}): its share vanishes when they are unscaled",
                "Scale each loss: scaler.scale(loss).backward(); or add the losses "
                "first.",
            )
        else:
            self._add(
                "two GradScalers scale losses of one model: their gradients "
                f"({name}) are summed at different scales",
                "Scale all losses of a model by one scaler, and update it once.",
            )

    def _check_functions(self, loss: Tensor) -> None:
        """Check that the backward of custom functions is linear in its gradient."""
        nodes: set[Any] = nodes_of(loss.grad_fn)
        kinds = {
            type(node)._forward_cls  # type: ignore[attr-defined] # noqa: SLF001
            for node in nodes
            if isinstance(node, BackwardCFunction)
        }
        theirs = [each for each in kinds if each.__module__.split(".")[0] != "torch"]
        recomputes = len(theirs) < len(kinds)  # checkpointing may run only once
        if not theirs or recomputes or self._has_checked_functions:
            return
        self._has_checked_functions = True
        params = [each for each in _leaves(nodes) if each.numel()]
        norms = []
        with contextlib.suppress(RuntimeError):  # the program's own pass raises it
            for factor in (1.0, 0.5):
                start = torch.full_like(loss, factor)
                grads = torch.autograd.grad(
                    loss, params, start, retain_graph=True, allow_unused=True
                )
                some = [grad.float().norm() for grad in grads if grad is not None]
                norms.append(float(torch.stack(some).norm()) / factor)
        both = len(norms) == 2  # noqa: PLR2004 -- False if a pass raised
        # Not so of norms that are not finite.
        if both and abs(norms[0] - norms[1]) > _PROPORTIONAL * max(norms):
            names = ", ".join(sorted(each.__name__ for each in theirs))
            self._add(
                f"{names}: gradients behind it do not follow the loss scale: at "
                "half of it they are not half",
                f"backward() of {names} must multiply by the gradient that it is "
                "given.",
            )


def _leaves(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors of a graph's nodes."""
    return [node.variable for node in nodes if hasattr(node, "variable")]

"""Gradients of several micro-batches, added up as training adds them.

In: the gradients of each, which are finite. Out: an `Event` where their sum is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.diagnostics.replay import tensor_facts
from halfstep.diagnostics.replay.module_stack import ROOT, Place
from halfstep.diagnostics.replay.op_trace import NonFiniteEvent
from halfstep.distributed import ddp

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

SUM = "sum"
"""Source of such an event."""


class GradSums:
    """Adds up gradients.

    Args:
        model: Whose parameters they are of; bare or wrapped.
        dtype: To add up in; None for that of each gradient.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._root = ddp.unwrap(model)
        named = self._root.named_parameters()
        self._names = [name for name, param in named if param.requires_grad]
        self._dtype = dtype
        self._totals: dict[int, Tensor] = {}
        self._reach = 0.0

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of one micro-batch, as `gradients.gradients` has them.

        Those of pieces follow those of wholes, in the same order.
        """
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            part = local.detach().to(self._dtype or local.dtype)
            self._reach = max(
                self._reach, tensor_facts.absmax(tensor_facts.floats(part))
            )
            before = self._totals.get(place)
            self._totals[place] = part.clone() if before is None else before + part

    def event(self) -> NonFiniteEvent | None:
        """Return the event of the first sum that is not finite."""
        nonfinite: dict[int, tensor_facts.NonFiniteKinds] = {}
        for place, total in self._totals.items():
            dense = total.coalesce() if total.is_sparse else total
            for part in tensor_facts.floats(dense):
                kinds = tensor_facts.nonfinite_kinds(part)
                if kinds:
                    nonfinite[place] = kinds
        if not nonfinite:
            return None
        first = min(nonfinite)
        name = self._names[first % len(self._names)]
        path = name.rpartition(".")[0]
        kind = type(self._root.get_submodule(path)).__name__
        return NonFiniteEvent(
            number=0,
            place=Place(path or ROOT, kind),
            phase="backward",
            word="add",
            name="add",
            nonfinite=nonfinite[first],
            dtype=self._totals[first].dtype,
            inputs=self._reach,
            count=(len(nonfinite), len(self._totals)),
            source_kind=SUM,
            source=name,
        )

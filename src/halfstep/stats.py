"""What one optimizer step did, as a value.

In: tensors that may still be on the device. Out: `StepReport`, whose properties wait
for the device only when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _no_names() -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class StepReport:
    """The truth about one call of `step`.

    Why: `torch.amp` skips in silence, and whoever infers a skip from "was
    optimizer.step called?" is wrong for fused optimizers, whose kernel skips inside.
    This reads the flag itself.
    """

    step: int
    """Optimizer steps attempted so far, this one included; skipped ones count."""
    complete: bool
    """False while micro-batches accumulate: nothing was updated, nothing skipped."""
    scale_used: Tensor | float = 1.0
    """Loss scale of the backward pass, shape ()."""
    found_inf: Tensor | bool = False
    """Whether a gradient held inf or NaN; any non-zero number counts, shape ()."""
    norm: Tensor | None = None
    """Norm of all unscaled gradients before clipping; None where nobody asked."""
    names: Callable[[], tuple[str, ...]] = _no_names
    """Names the parameters whose gradients were not finite."""

    @property
    def skipped(self) -> bool:
        """The step was due, and left everything as it was. May wait for the device."""
        return self.complete and bool(self.found_inf)

    @property
    def applied(self) -> bool:
        """The step was due, and updated the weights. May wait for the device."""
        return self.complete and not self.found_inf

    @property
    def scale(self) -> float:
        """Loss scale of the backward pass. May wait for the device."""
        return float(self.scale_used)

    @property
    def grad_norm(self) -> float | None:
        """Norm before clipping, None where it was not taken. May wait."""
        return None if self.norm is None else float(self.norm)

    @property
    def found_inf_in(self) -> tuple[str, ...]:
        """Parameters whose gradients were not finite; () if applied. May wait."""
        return self.names() if self.skipped else ()


def non_finite(named: Sequence[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of those tensors that hold inf or NaN. Waits for the device."""
    return tuple(
        name for name, tensor in named if not bool(torch.isfinite(dense(tensor)).all())
    )


def dense(tensor: Tensor) -> Tensor:
    """Return the stored numbers of a tensor: the values of a sparse one."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor

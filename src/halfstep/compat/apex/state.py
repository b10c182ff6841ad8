"""Holds the process-wide state of `amp`, its error class and its printing."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from halfstep.errors import UserError

if TYPE_CHECKING:
    import torch


class AmpError(UserError, RuntimeError):
    """An error of `halfstep.compat.apex`; also a `RuntimeError`, as in apex."""


@dataclass(frozen=True)
class Properties:
    """The properties of a level, with apex's names."""

    enabled: bool
    opt_level: str | None
    cast_model_type: torch.dtype | bool | None
    """Dtype of weights and inputs; None or False: they are not cast."""
    patch_torch_functions: bool
    """Whether operations are cast one by one, as under autocast."""
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    """Whether the optimizer updates fp32 copies of 16-bit weights."""
    loss_scale: float | str
    """A number, or "dynamic"."""


@dataclass
class AmpState:
    """The state set by the last `initialize`; one per process, as in apex."""

    opt_properties: Properties | None = None
    """None before the first call."""
    loss_scalers: list[Any] = field(default_factory=list)
    """One `AmpScaler` for each `loss_id`."""
    handle: Any = None
    """The `AmpHandle` of O1's casts; None before the first."""
    registered: list[tuple[Any, str, str]] = field(default_factory=list)
    """(module or class, name, category) of functions whose arguments O1 casts."""
    verbosity: int = 1
    """0 prints nothing, not even skipped steps."""
    allow_incoming_model_not_fp32: bool = False
    """Accept models whose parameters are already 16-bit."""

    @property
    def scales(self) -> bool:
        """Whether any loss scale is dynamic or not 1."""
        return any(s.dynamic or s.loss_scale() != 1 for s in self.loss_scalers)

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without the casts of O1."""
        if self.handle is None:
            return contextlib.nullcontext()
        off: contextlib.AbstractContextManager[None] = self.handle.off()
        return off


STATE = AmpState()


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0`, on the first rank only."""
    joined = dist.is_available() and dist.is_initialized()
    if STATE.verbosity and not (rank0 and joined and dist.get_rank()):
        sys.stdout.write(f"{msg}\n")

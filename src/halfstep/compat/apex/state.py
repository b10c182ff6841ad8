"""What a process has set up through `amp`, and how amp prints."""

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
    """What one level does, in apex's words."""

    enabled: bool
    opt_level: str | None
    cast_model_type: torch.dtype | bool | None
    """Dtype of weights and inputs; None or False leaves them."""
    patch_torch_functions: bool
    """Operations are cast, one by one."""
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    """The optimizer updates fp32 copies of 16-bit weights."""
    loss_scale: float | str
    """A number, or "dynamic"."""


@dataclass
class AmpState:
    """What the last `initialize` set up; one for the process, as apex had it."""

    opt_properties: Properties | None = None
    """None before the first call."""
    loss_scalers: list[Any] = field(default_factory=list)
    """An `AmpScaler` for each `loss_id`."""
    handle: Any = None
    """A `AmpHandle` on the casts of O1; None where none were ever opened."""
    verbosity: int = 1
    """0 prints nothing, not even that a step was skipped."""
    hard_override: bool = False
    """Print what is refused, and go on."""
    allow_incoming_model_not_fp32: bool = False
    """Take models whose parameters are 16 bits already."""

    @property
    def scales(self) -> bool:
        """A loss is multiplied by something other than 1, now or later."""
        return any(s.dynamic or s.loss_scale() != 1 for s in self.loss_scalers)

    def without_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which operations run as called."""
        if self.handle is None:
            return contextlib.nullcontext()
        off: contextlib.AbstractContextManager[None] = self.handle.off()
        return off


STATE = AmpState()


def log(message: str, *, first_rank_only: bool = False) -> None:
    """Print a line, unless verbosity is 0."""
    joined = dist.is_available() and dist.is_initialized()
    if STATE.verbosity and not (first_rank_only and joined and dist.get_rank()):
        sys.stdout.write(f"{message}\n")


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Print as amp does; with `rank0` on the first rank only."""
    log(str(msg), first_rank_only=rank0)


def reject(message: str) -> None:
    """Raise; or print, where `hard_override` is set.

    Raises:
        AmpError: With the message.
    """
    if not STATE.hard_override:
        raise AmpError(message)
    log(f"Warning:  {message}", first_rank_only=True)

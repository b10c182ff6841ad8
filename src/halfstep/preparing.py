"""One call prepares a model and its optimizer to train in mixed precision.

In: a model, an optimizer, a level and a dtype, or "auto". Out: a `Session`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from halfstep import levels
from halfstep.choice import Choice, cautions, choose
from halfstep.errors import UserError
from halfstep.policy import Policy
from halfstep.scaler import ScaleRule
from halfstep.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str | Choice = "auto",
    *,
    dtype: str | torch.dtype = "auto",
    policy: Policy | str = "lean",
    loss_scale: str | float | ScaleRule = "auto",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    drop_bad_microbatch: bool = False,
    retries: int = 0,
    master: str = "fp32",
    scheduler: LRScheduler | None = None,
    names: Iterable[tuple[str, nn.Parameter]] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Session:
    """Prepare a model and its optimizer, in place, to train in mixed precision.

    Args:
        model: On its device, in fp32. Where the level stores weights in 16 bits, wrap
            `session.model` for data parallelism afterwards.
        optimizer: Any torch optimizer over the model's parameters.
        level: "O0" to "O3"; "auto" takes what this machine measures as worth it. A
            `Choice` is taken as it is, dtype included.
        dtype: "bf16", "fp16"; "auto" takes bf16 unless only fp16 is fast here.
        policy: "lean", the same on every device, or "torch", each with rules of your
            own behind it ("lean + module:head=fp32"); a TOML file; a `Policy`.
        loss_scale: "dynamic", "measured", "logmax", "none", a number, or a
            `halfstep.scaler.ScaleRule`; "auto" is dynamic for fp16, none otherwise.
            Steps with inf or NaN gradients are skipped in every case.
        clip_grad_norm: Largest norm of all unscaled gradients; None neither clips nor
            takes the norm, `math.inf` only takes it.
        accumulate: Micro-batches in one optimizer step, >= 1. The loss of each is
            divided by it, so that their mean counts.
        drop_bad_microbatch: Leave out a micro-batch whose gradients hold inf or NaN,
            and let the mean of the others stand for all, rather than lose the step.
            Under DDP every micro-batch is then averaged by itself.
        retries: How often a backward pass that overflowed is run again, at a lower
            scale, before it counts as lost. The host then waits for each pass. Not
            under DDP, which averages gradients once for each forward pass.
        master: "fp32", the one form of master weights there is.
        scheduler: Of the optimizer's learning rate; the session steps it, once for each
            step that is applied. May be set later: `session.scheduler`.
        names: (name, parameter) for reports; default the model's own.
        process_group: Ranks that must agree to skip. Not needed under DDP, whose
            averaged gradients carry an inf to every rank.

    Raises:
        UserError: If a word is unknown or a number out of range.
    """
    if accumulate < 1:
        message = f"accumulate={accumulate} must be at least 1 micro-batch a step."
        raise UserError(message)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        message = f"clip_grad_norm={clip_grad_norm} must be above 0, or None."
        raise UserError(message)
    if retries < 0:
        message = f"retries={retries} must be 0 or more tries of a backward pass."
        raise UserError(message)
    if master != "fp32":
        message = f"master={master!r} is not a form of master weights; choose 'fp32'."
        raise UserError(message)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(optimizer, torch.optim.LBFGS):
        message = "LBFGS evaluates the model inside its step; use another optimizer."
        raise UserError(message)
    kind = device.type
    choice = level if isinstance(level, Choice) else choose(level, dtype, kind)
    for caution in cautions(choice, optimizer, kind):
        warnings.warn(caution, stacklevel=2)
    if loss_scale == "auto":
        loss_scale = levels.DEFAULT_LOSS_SCALE[choice.format.name]
    rule = loss_scale
    if not isinstance(rule, ScaleRule):
        rule = ScaleRule.parse(rule)
    return Session(
        model,
        optimizer,
        choice,
        policy=Policy.parse(policy) if isinstance(policy, str) else policy,
        rule=rule,
        device=device,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        drop_bad_microbatch=drop_bad_microbatch,
        retries=retries,
        scheduler=scheduler,
        names=model.named_parameters() if names is None else names,
        process_group=process_group,
    )

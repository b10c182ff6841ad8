"""`prepare`: checks its arguments, converts a model and returns a `Session`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from halfstep.errors import UserError, require_bool, require_int
from halfstep.machine.recommendation import Choice, resolve, warnings_for
from halfstep.masters import encoding as encodings
from halfstep.masters import optimizer_in_backward as in_backward
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.policy.rules import Policy
from halfstep.scaling import ScaleRule
from halfstep.session import arguments, fsdp
from halfstep.session.chained_optimizer import optimizers_of
from halfstep.session.lr_schedule import check_scheduler
from halfstep.session.optimizer_step import check_clip_norm
from halfstep.session.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from typing import Never

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from halfstep.masters.encoding import MasterEncoding
    from halfstep.numerics.formats import FloatFormat
    from halfstep.policy.levels import Level


def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    level: str | Level | Choice = "auto",
    *,
    dtype: str | torch.dtype | FloatFormat = "auto",
    policy: Policy | str | os.PathLike[str] = "lean",
    loss_scale: str | float | ScaleRule = "auto",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    master: str = "fp32",
    optimizer_in_backward: bool = False,
    scheduler: LRScheduler | None = None,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    **unknown: Never,
) -> Session:
    """Prepare a model and its optimizer, in place, to train in mixed precision.

    Args:
        model: A module on its device, with fp32 weights; O2 and O3 also take 16-bit
            weights. A model can be prepared once. At O2 and O3 wrap `session.model` in
            DDP afterwards. Call `fully_shard` before, with
            `halfstep.fsdp.fsdp_policy`: its fp32 shards are the master weights. A
            list of models trains together; call each by itself, and under DDP make
            them one module.
        optimizer: Any torch optimizer over the model's parameters, not wrapped; or a
            list of optimizers, which step and skip together. Models and optimizers
            that take turns (a GAN) need a session each.
        level: "O0" (fp32), "O1" (autocast), "O2" (16-bit weights with fp32 master
            weights) or "O3" (all 16-bit). "auto" measures this machine and chooses. A
            `Choice` sets both level and dtype.
        dtype: "bf16" or "fp16". "auto" takes bf16, which needs no loss scale, unless
            only fp16 is fast here. At O0 a dtype has no effect, and a warning says so.
        policy: "lean", the same on every device, or "torch", torch's own table for the
            device; either with rules ("lean + module:head=fp32"), the path of a TOML
            file, or a `Policy`.
        loss_scale: "dynamic", "none", a number, or a
            `halfstep.scaling.ScaleRule`. "auto" is dynamic for fp16 and none otherwise,
            since bf16 has fp32's range. Steps with inf or NaN in a gradient are
            skipped in every case.
        clip_grad_norm: Maximum norm of all unscaled gradients. None neither clips nor
            computes the norm; `math.inf` only computes it.
        accumulate: Micro-batches per optimizer step, >= 1. Each loss is divided by it,
            so that the step uses their mean: leave out a division of your own.
        master: How O2 stores fp32 master weights: "fp32" as a copy; "split" as the 16
            bits that bf16 cuts off, bit-exact with 2 bytes less per parameter; "kahan"
            as a bf16 compensation term, and "stochastic" by stochastic rounding alone,
            both with bf16 moments. With "none" the optimizer updates 16-bit weights.
            All but "fp32" and "none" need bf16.
        optimizer_in_backward: Update each weight in `session.backward` as soon as its
            gradient exists, and free the gradient. It excludes loss scales, clipping
            and accumulation. A non-finite gradient skips its own parameter only
            (`StepReport.left_out`). Under DDP, whose buckets keep the gradients,
            weights are updated at the end of the backward pass and no memory is saved.
        scheduler: Learning-rate schedule of the optimizer. The session steps it after
            each applied step. It can be set later: `session.scheduler = ...`.
        named_parameters: (name, parameter) pairs for reports. Default: the model's own.
        process_group: Ranks that must agree to skip. Not needed under DDP, whose
            averaged gradients carry an inf to every rank.
        unknown: None; any other argument raises, with the nearest one's name.

    Returns:
        The session that trains the model.

    Raises:
        UserError: If an argument is of the wrong type or out of range, or the model was
            sharded for another level or dtype. Nothing has been changed then.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> session = prepare(model, optimizer, "O2", dtype="bf16")
        >>> with session.autocast():
        ...     loss = session.model(torch.ones(4, 2)).square().mean()
        >>> session.backward(loss)
        >>> session.step().applied
        True
    """
    arguments.check_unknown(unknown, prepare)
    model, optimizer = arguments.as_one(model, optimizer)
    arguments.check_model_and_optimizer(model, optimizer)
    accumulate = require_int("accumulate", accumulate, 1)
    clip_grad_norm = check_clip_norm(clip_grad_norm)
    optimizer_in_backward = require_bool("optimizer_in_backward", optimizer_in_backward)
    arguments.check_group(process_group)
    check_scheduler(scheduler, optimizer)
    named = arguments.check_named_parameters(named_parameters, model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    device_type = device.type
    choice = level if isinstance(level, Choice) else resolve(level, dtype, device_type)
    arguments.check_fp32_weights(model, choice)
    encoding = _master_encoding(master, choice)
    messages: list[str] = []
    if level is not choice and dtype != "auto" and not choice.level.low:
        messages += [choice.reason] if formats.parse(dtype) is not formats.FP32 else []
    for each in optimizers_of(optimizer):
        messages += warnings_for(
            choice, each, device_type, masters=encoding is not None
        )
    for message in dict.fromkeys(messages):
        warnings.warn(message, stacklevel=2)
    if isinstance(loss_scale, str) and loss_scale == "auto":
        loss_scale = levels.DEFAULT_LOSS_SCALE[choice.format.name]
    chosen_policy = Policy.of(policy)
    fsdp.check(
        model,
        optimizer,
        choice,
        chosen_policy,
        master=master,
        release=optimizer_in_backward,
    )
    if fsdp.is_sharded(model):
        encoding = None  # its fp32 shards are the master weights
    rule = loss_scale
    if not isinstance(rule, ScaleRule):
        rule = ScaleRule.parse(rule)
    if optimizer_in_backward:
        in_backward.check(
            rule,
            clip_grad_norm,
            accumulate,
            needs_agreement=process_group is not None,
        )
        in_backward.check_optimizer(optimizer)
    session = Session(
        model,
        optimizer,
        choice,
        policy=chosen_policy,
        rule=rule,
        device=device,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        scheduler=scheduler,
        named_parameters=named,
        process_group=process_group,
        master=encoding,
        optimizer_in_backward=optimizer_in_backward,
    )
    arguments.mark_prepared(model, optimizer, choice)
    return session


def _master_encoding(name: str, choice: Choice) -> MasterEncoding | None:
    """Return the encoding for `master` at a level; None: no master weights."""
    encoding = encodings.parse(name)
    if not choice.level.masters:
        if name not in {encodings.FP32.name, encodings.NONE}:
            raise UserError(
                f"master={name!r} at level {choice.level.name}, which has no master "
                "weights: use level='O2', or leave master out."
            )
        return None
    if encoding is not None:
        encodings.check(encoding, choice.format.dtype)
    return encoding

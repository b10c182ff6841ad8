"""Runs the check before training: takes all measurements and restores the model."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from halfstep._torch.rng_state import RandomState
from halfstep.diagnostics.doctor.rules_precision import MOST_FLUSHED
from halfstep.diagnostics.preflight.measurements import (
    Cost,
    Facts,
    ScalePoint,
    compare_gradients,
)
from halfstep.diagnostics.preflight.model_copy import ModelCopy
from halfstep.diagnostics.preflight.report import CheckReport
from halfstep.diagnostics.preflight.rules import (
    findings,
    is_decided,
    verdict,
)
from halfstep.diagnostics.preflight.scale_search import (
    ScaleSearch,
    fp32_error,
    line_of,
)
from halfstep.diagnostics.replay.model_snapshot import ModelSnapshot
from halfstep.diagnostics.replay.search import check_model
from halfstep.errors import UserError, require, require_int
from halfstep.machine import hardware
from halfstep.machine.recommendation import Choice, resolve
from halfstep.masters import encoding as masters
from halfstep.numerics.exponents import (
    flushed_share,
    largest_safe_scale,
    subnormal_share,
)
from halfstep.numerics.formats import FP16, is_low, tensors_in
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from halfstep.diagnostics.preflight.model_copy import LossFn, Pass
    from halfstep.diagnostics.preflight.scale_search import ScaleTrial

_MAX_MARGIN = 40
_CURVE = tuple(2.0**power for power in range(0, 28, 4))
_MAX_SECONDS = 15.0  # approximate limit; slow steps are timed fewer times
T = TypeVar("T")
_NOT_TIMED = "no steps were timed: fp16 is slow on this CPU, which has no fp16 matmuls"
_MORE = 4  # factor for the number of rounds if the result is undecided


def check(
    model: nn.Module,
    loss_fn: LossFn,
    batch: object,
    *,
    level: str | Choice = "auto",
    dtype: str | torch.dtype = "auto",
    policy: Policy | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    master: str = "fp32",
    more: Sequence[object] = (),
    margin: int = 1,
    steps: int = 5,
) -> CheckReport:
    """Check before training whether a level works for a model, and what it gains.

    It runs on copies: weights, gradients, buffers and random states are bit-identical
    afterwards. It needs memory for two more trainings of the model and some copies of
    its gradients, and the time of about ten training steps besides the timed ones. Side
    effects of your hooks and of `loss_fn` do occur.

    Args:
        model: In fp32, on its device, neither wrapped nor prepared, and in training
            mode if it will train so.
        loss_fn: `loss_fn(model, batch)` returns the mean loss, shape (). It is called
            with copies of the model, in the autocast context of the level.
        batch: For `loss_fn`, on the device that it expects.
        level: "O0" to "O3", "auto" or a `Choice`, as for `prepare`.
        dtype: "bf16", "fp16" or "auto", as for `prepare`.
        policy: As for `prepare`. None: "lean".
        optimizer: The optimizer of the training to come; it is copied. It matters for
            time and memory, and for 16-bit weights without master weights. None: AdamW
            with torch's defaults.
        master: As for `prepare`; it has no effect at levels without master weights.
        more: More batches, so that overflow, safe scale and underflow are those of all.
            The gradient noise is then measured between batches, not between halves.
        margin: Powers of two between the safe loss scale and overflow, >= 0. 1 leaves
            room for a batch whose gradients are twice as large.
        steps: Training steps to time at the level and in fp32, >= 0. With 0, speed,
            memory and lost updates are not reported. If the times vary too much, up to
            four times as many steps run. Slow steps are timed fewer times, with a note.

    Returns:
        A report; `print` it. `good` says whether training can begin, `verdict` why not.

    Raises:
        UserError: If the model cannot be copied or is not in fp32; if `loss_fn` is one
            of torch.nn's losses or raises in fp32; if the loss is not a scalar or has
            no gradient; if the optimizer belongs to another model; if the batch is on
            another device; or if an argument is of the wrong type or out of range.

    Example:
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> model.weight.data.fill_(1.0)  # gradients of 8: 2**13 would reach 65536
        tensor([[1., 1., 1., 1.]])
        >>> report = check(
        ...     model,
        ...     lambda model, batch: model(batch).square().mean(),
        ...     torch.ones(8, 4),
        ...     level="O1",
        ...     dtype="fp16",
        ...     steps=0,
        ... )
        >>> report.verdict
        'good with a loss scale of 2048'
    """
    began = time.perf_counter()
    unwrapped = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    _check_arguments(unwrapped, loss_fn, optimizer, more)
    _check_fp32(unwrapped)
    masters.parse(master)
    require_int("steps", steps, 0)
    fits = require_int("margin", margin, 0) <= _MAX_MARGIN
    require("margin", margin, fits, "40 powers of two at most: fp16 has no more")
    device = next(unwrapped.parameters()).device
    choice = level if isinstance(level, Choice) else resolve(level, dtype, device.type)
    rules = "lean" if policy is None else policy
    rules = Policy.parse(rules) if isinstance(rules, str) else rules
    expected = "'lean', 'torch', either with rules, or a Policy"
    require("policy", policy, isinstance(rules, Policy), expected)
    state = RandomState([device])
    snapshot = ModelSnapshot(unwrapped)  # a rejected loss_fn may have changed it
    try:
        make = partial(ModelCopy, unwrapped, optimizer, master=master, state=state)
        with default_context(device):
            search = ScaleSearch(
                make, unwrapped, loss_fn, [batch, *more], choice, margin
            )
            facts = _facts(search, rules, steps)
    finally:
        state.restore()
        snapshot.restore()
    notes, cautions = search.notes, search.cautions
    tensors = tensors_in(search.batches)
    shapes = (tuple(one.shape) for one in tensors if one.ndim and not len(one))
    if not (facts.finite_fp32 and facts.learns):
        notes += [f"the batch holds a tensor of shape {s}" for s in shapes][:1]
    if unwrapped is not model:
        notes.append("torch.compile was left out: passes and times are eager")
    if not unwrapped.training:
        notes.append("the model is in evaluation mode, and was checked so")
    facts.notes = tuple(notes)
    facts.cautions = tuple(c for c in cautions if c != facts.weight_nan_warning)
    facts.seconds = time.perf_counter() - began
    results = findings(facts)
    return CheckReport(verdict(facts, results), results, facts)


def _check_arguments(
    model: nn.Module,
    loss_fn: object,
    optimizer: torch.optim.Optimizer | None,
    more: object,
) -> None:
    """Check the types of model and `loss_fn`, and the optimizer's parameters."""
    check_model(model)
    if isinstance(loss_fn, nn.modules.loss._Loss):  # noqa: SLF001
        kind = type(loss_fn).__name__
        raise UserError(
            f"loss_fn={kind}() takes no model: give a function loss_fn(model, batch) "
            f"that calls the model on the batch and returns the loss {kind}() gives."
        )
    takes = callable(loss_fn) and not isinstance(loss_fn, type)
    require("loss_fn", loss_fn, takes, "a function loss_fn(model, batch) of the loss")
    require("more", more, isinstance(more, list | tuple), "a list of batches")
    if optimizer is not None:
        theirs = isinstance(optimizer, torch.optim.Optimizer)
        right = "a torch.optim.Optimizer over the model's parameters, or None"
        require("optimizer", optimizer, theirs, right)
        own = {id(param) for param in model.parameters()}
        groups = optimizer.param_groups
        if not any(id(param) in own for group in groups for param in group["params"]):
            raise UserError(
                f"optimizer={type(optimizer).__name__} holds no parameter of the model "
                "that is checked: make it over model.parameters()."
            )


def _check_fp32(model: nn.Module) -> None:
    """Check that an fp32 reference can be computed from the model."""
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UserError(
            f"check(model=...) got a {kind}: give the bare model, model.module."
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError(
            f"{kind} has no parameter that learns: there is nothing to check."
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.Parameter) and is_low(tensor.dtype):
            raise UserError(
                f"parameter {name!r} is stored in {tensor.dtype}: check compares with "
                "fp32, and needs the fp32 weights; load the model in fp32."
            )
        if tensor.is_meta or hasattr(tensor, "to_local"):
            state = "on the meta device" if tensor.is_meta else "sharded"
            raise UserError(f"{name!r} is {state}: check needs a whole model.")


@contextlib.contextmanager
def default_context(device: torch.device) -> Iterator[None]:
    """Disable autocast, and enable gradients, of the caller's contexts.

    Under autocast the fp32 reference would not run in fp32.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _facts(search: ScaleSearch, policy: Policy, steps: int) -> Facts:
    choice, plain = search.choice, search.fp32_copy
    right = search.fp32_passes
    scaled = choice.format == FP16
    seen = torch.stack([one.histogram for one in right]).sum(0)
    unfit = next((n for n, one in enumerate(right) if not one.sound), None)
    first = right[unfit or 0]
    facts = Facts(
        level=choice.level.name,
        dtype=choice.format.name,
        reason=choice.reason,
        device=plain.device.type,
        policy=str(policy),
        loss_fp32=first.loss,
        bad_batch="" if unfit is None else search.name_of(unfit),
        finite_fp32=first.sound,
        learns=any(bool(g.any()) for one in right for g in one.gradients.values()),
        optimizer=plain.optimizer,
        default_scale=search.default,
        scale=search.default,
        curve=_curve(seen, [search.default, *_CURVE]) if scaled else (),
        dropout_off=plain.device.type != "cpu",
    )
    if not (facts.finite_fp32 and facts.learns and choice.level.low):
        return facts
    trial, facts.fault, facts.rules = search.with_fp32_rules(policy)
    facts.failed, low_copy = trial.failed, trial.model_copy
    if low_copy is None:
        return facts
    if scaled and trial.safe is not None:
        top = trial.safe * 2.0**search.margin
        facts.curve = _curve(seen, [search.default, *_CURVE, trial.safe], top)
        facts.safe_scale = trial.safe
    facts.policy, facts.loss = str(trial.policy), trial.passes[0].loss
    facts.default_finite = trial.finite
    facts.weight_nan_warning = low_copy.weight_nan_warning
    used = _used(facts, trial)
    if used is None:
        return facts
    facts.scale = used.scale
    _compare(facts, search, used)
    facts.output_error = search.output_error(low_copy, trial.policy)
    dtype, device = low_copy.session.choice.format, low_copy.device.type
    if steps and dtype == FP16 and hardware.lacks(dtype.name, device):
        search.notes.append(_NOT_TIMED)
    elif steps:
        try:
            _time(facts, search, low_copy, used, steps)
        except StepError as error:
            facts.failed = str(error)
    return facts


def _used(facts: Facts, trial: ScaleTrial) -> Pass | None:
    """Return the pass to compare: at the safe scale if it is needed, or loses less."""
    if trial.finite:
        lost = facts.curve[0].flushed if facts.curve else 0.0
        higher = trial.safe is not None and trial.safe > facts.default_scale
        if not (higher and lost > MOST_FLUSHED):
            return trial.passes[0]
    return trial.at_safe


def _compare(facts: Facts, search: ScaleSearch, used: Pass) -> None:
    """Compare gradients with fp32's, and fp32's of two batches or halves."""
    right = search.fp32_passes[0]

    def owner(name: str) -> str:
        path = name.rpartition(".")[0]
        return path if path and path in search.kinds else name

    similarity = compare_gradients(right.gradients, used.gradients, owner)
    facts.gradients, facts.layers = similarity
    pair = search.pair()
    if pair is not None:
        facts.noise, facts.noise_layers = compare_gradients(*pair, owner)
        if len(search.batches) > 1:
            facts.noise_of = "two batches"


def _curve(
    histogram: Tensor, scales: Sequence[float], top: float | None = None
) -> tuple[ScalePoint, ...]:
    """Predict the effect of scales in fp16; `top` is the largest without overflow."""
    top = largest_safe_scale(histogram, margin=0).item() if top is None else top
    points = []
    for scale in dict.fromkeys(scales):
        power = torch.tensor(scale, dtype=torch.float32)
        points.append(
            ScalePoint(
                scale,
                flushed_share(histogram, power).item(),
                subnormal_share(histogram, power).item(),
                math.log2(top / scale),
            )
        )
    return tuple(points)


class StepError(Exception):
    """A training step failed at the level but not in fp32."""


def _time(
    facts: Facts, search: ScaleSearch, low_copy: ModelCopy, used: Pass, steps: int
) -> None:
    """Run steps of both in turn: speed-ups, costs, and what the steps do to weights."""
    copies = (search.fp32_copy, low_copy)
    search.fp32_copy.begin(1.0)
    low_copy.begin(used.scale)

    def make_round() -> tuple[float, float]:
        fp32, low = (_run_step(search, one, ModelCopy.step) for one in copies)
        return fp32, low

    warm_up = sum(make_round())  # allocates the optimizer's state
    fit = int(max(1, min(steps, _MAX_SECONDS / warm_up)))
    if fit < steps:
        search.notes.append(
            f"{fit} of {steps} steps were timed: a step of each kind takes some "
            f"{warm_up:.1f} s"
        )
    times = rounds(make_round, fit)
    passes = search.fp32_passes[0], used
    costs = []
    for one, seconds, run in zip(copies, zip(*times, strict=True), passes, strict=True):
        memory = _run_step(search, one, ModelCopy.last_step)
        memory = {**memory, "saved": run.saved_bytes}
        costs.append(Cost(statistics.median(seconds), memory))
    facts.cost_fp32, facts.cost = costs
    facts.ratios = tuple(plain / low for plain, low in times)
    fp32, low = (one.weights_finite() for one in copies)
    facts.weights_finite = low or not fp32
    facts.lost = low_copy.lost_share()


def _run_step(
    search: ScaleSearch,
    model_copy: ModelCopy,
    step: Callable[[ModelCopy, LossFn, object], T],
) -> T:
    """Return what a step returns; raise `UserError` for fp32's, else `StepError`."""
    try:
        return step(model_copy, search.loss_fn, search.batches[0])
    except UserError:
        raise
    except Exception as error:
        if model_copy is search.fp32_copy:
            advice = "Give check the optimizer that will train."
            what = f"a step of {model_copy.optimizer},"
            raise fp32_error(what, error, advice) from error
        raise StepError(line_of(error)) from error


def rounds(
    make_round: Callable[[], tuple[float, float]], count: int
) -> list[tuple[float, float]]:
    """Return the seconds of each round; run more rounds if the result is undecided.

    It is undecided if the machine is busy or the level about as fast as fp32. Then up
    to four times as many rounds run, within the time limit.
    """
    times = [make_round() for _ in range(count)]
    extra_seconds = 0.0
    while (
        not is_decided([plain / low for plain, low in times])
        and len(times) < _MORE * count
        and extra_seconds <= _MAX_SECONDS
    ):
        times.append(make_round())
        extra_seconds += sum(times[-1])
    return times

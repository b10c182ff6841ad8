"""Derives cause, evidence and advice from the events of a replay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep.diagnostics.replay import op_names
from halfstep.nonfinite.domains import (
    CHECKPOINT,
    RUNNING_STATS,
    backward_domain_error,
    dtype_name,
    range_text,
)
from halfstep.nonfinite.optimizer_eps import weight_advice
from halfstep.nonfinite.origin import BadOp, module_rule
from halfstep.reporting.table import format_count
from halfstep.scaling.collapse import LOWER_RATE, LossHistory

if TYPE_CHECKING:
    from torch import nn

    from halfstep.diagnostics.replay.module_stack import Place
    from halfstep.diagnostics.replay.op_trace import NonFiniteEvent, OutOfRange

_MEAN = (
    "Take a mean over elements, not a sum, divide the loss, or normalise its targets; "
    "or train in bfloat16."
)
_CONVERTED = (
    "A cast to float16 makes that of all above 65504. If it is finite in the float32 "
    "weights, keep its module in float32{rule} or train in bfloat16; if not, go back "
    "to the last good checkpoint."
)
_FIND = "Find it in the batch: print it, and leave it out or clean it."
_WIDE_LOSS = "Compute the loss in float32: call .float() on what the model gives."
_SCALE = (
    "That is normal while a loss scale settles: the step is skipped, the scale is "
    "halved, and training goes on."
)
_NO_SCALE = "No loss scale helps. "
_NOT_REPRODUCED = (
    "Either an operation is not deterministic (set "
    "torch.use_deterministic_algorithms(True)), or the replay had not the same batch "
    "and random numbers{more}, or the hardware erred: if it comes back on one machine "
    "alone, test its memory."
)
_OTHERS = (
    "Call find_nonfinite on every process: the one that made it names the "
    "operation. If none does,"
)
_ONE_PART = (
    ", or the gradients of several micro-batches are finite and their sum is not (give "
    "a list with one step for each)"
)
_EXP = "Subtract the maximum before exp, or clamp its argument."
_DOWN = "Scale down or normalise its inputs."
_PRINT = "Print its inputs: it is not defined for one of them."
_KEEP_OUT = "Keep that infinity out of it: mask with a large finite number, or later."
_MASK = "Leave something in each row unmasked."
_SOFTMAXES = {"softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class ReplayContext:
    """Facts about the replayed run that do not depend on the event."""

    step: int | None
    scale: float
    losses: LossHistory = field(default_factory=LossHistory)
    parts: int = 1
    """Number of micro-batches."""
    part: int | None = None
    """Index of the micro-batch that failed; None if the sum of gradients did."""
    low: NonFiniteEvent | None = None
    """The event at loss scale 1; None if everything was finite there."""
    boundary: float | None = None
    """Largest gradient that the loss function passes to the model at scale 1."""
    root: nn.Module | None = None
    """The model, without wrappers."""


class _Explanation(NamedTuple):
    cause: str
    evidence: str
    advice: str
    phase: str
    rule: str = ""
    normal: bool = False


def bad_op(event: NonFiniteEvent, context: ReplayContext) -> BadOp:
    """Return the report of an event."""
    event = _origin(event)
    place, op = event.consumer or (event.place, event.op)
    module = place.module
    if event.source_kind in {"weight", "buffer"}:
        module = event.source.rpartition(".")[0] or "model"
    return _report(
        context,
        _explain(event, context),
        module=module,
        kind=place.kind,
        op=op,
        dtype=dtype_name(event.dtype),
        inputs=event.inputs,
        nonfinite_kind=event.nonfinite.kind,
        wide=event.fp32_result[0],
    )


def out_of_range(error: OutOfRange, context: ReplayContext) -> BadOp:
    """Return the report of an index that is out of range."""
    cause, advice = "data", "Use the tokenizer of this model, or a larger table."
    if error.is_label:
        cause, advice = "label", "Fix the labels, or give the model more outputs."
    explanation = _Explanation(cause, error.evidence, advice, "input")
    module, kind = error.place.module, error.place.kind
    return _report(
        context, explanation, module=module, kind=kind, op=error.op, dtype="int64"
    )


def not_reproduced(
    number: int | None, scale: float, parts: int = 1, processes: int = 1
) -> BadOp:
    """Return the report of a step that failed, and was finite in two replays."""
    # For one micro-batch alone, the sum with others was not checked.
    more = _ONE_PART if parts == 1 else ""
    cause, advice = "hardware", _NOT_REPRODUCED.format(more=more)
    evidence = "the step failed, yet two replays of it are finite"
    if processes > 1:
        cause = "another process"
        evidence += f" here, and {processes} processes share gradients"
        advice = f"{_OTHERS} {advice[0].lower()}{advice[1:]}"
    explanation = _Explanation(cause, evidence, advice, "none")
    context = ReplayContext(number, scale, parts=parts)
    return _report(context, explanation, reproduced=False)


def nothing(context: ReplayContext, *, together: bool) -> BadOp:
    """Return the report of a finite step; `together`: other processes report theirs."""
    evidence = "loss and all gradients are finite, at loss scale "
    evidence = "on this process " * together + f"{evidence}{context.scale:g}"
    explanation = _Explanation("none", evidence, "", "none")
    return _report(context, explanation, reproduced=False)


def unobserved(context: ReplayContext, nonfinite_kind: str, num_ops: int) -> BadOp:
    """Return the report if no traced operation made the inf or NaN."""
    evidence = f"none of the {num_ops} traced operations of torch made it"
    advice = "Check custom kernels and what is computed outside of torch."
    explanation = _Explanation("loss function", evidence, advice, "forward")
    return _report(context, explanation, nonfinite_kind=nonfinite_kind)


def _report(
    context: ReplayContext,
    explanation: _Explanation,
    *,
    reproduced: bool = True,
    **fields: Any,  # noqa: ANN401
) -> BadOp:
    """Return an explanation as a report; `fields` are further fields of BadOp."""
    where = ""
    if context.part is not None and context.parts > 1:
        where = f" (micro-batch {context.part + 1} of {context.parts})"
    fields |= explanation._replace(evidence=explanation.evidence + where)._asdict()
    return BadOp(
        step=context.step, scale=context.scale, reproduced=reproduced, **fields
    )


def _origin(event: NonFiniteEvent) -> NonFiniteEvent:
    """Return the softmax of a fully masked row that an event results from, if any."""
    softmaxes = [one for one in event.parents if one.op in _SOFTMAXES and one.parents]
    return min(softmaxes, key=lambda one: one.number, default=event)


def _explain(event: NonFiniteEvent, context: ReplayContext) -> _Explanation:
    """Return cause, evidence and advice by the first check that applies."""
    checks = (
        *(_summed, _came_in, _masked, _constant, _undefined, _not_a_number),
        *(_diverged, _in_loss, _forward, _backward),
    )
    explanations = (check(event, context) for check in checks)
    return next(explanation for explanation in explanations if explanation is not None)


def _summed(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Check for a non-finite sum of finite gradients."""
    if event.source_kind != "sum":
        return None
    bad, of = event.count
    scale = context.scale if context.low is None else min(context.scale, 1)
    evidence = (
        f"the gradients of {context.parts} micro-batches are finite, up to "
        f"{event.inputs or 0.0:.1e}, and their sum is not ({range_text(event.dtype)}), "
        f"in {bad} of {of} parameters ({event.source} first), at loss scale {scale:g}"
    )
    advice = f"Divide each loss by {context.parts}."
    if event.dtype.itemsize < torch.float32.itemsize:
        advice = (
            "Add them up in float32, as prepare(level='O2', accumulate="
            f"{context.parts}) does, or divide each loss by {context.parts}."
        )
    normal = context.low is None
    if normal:
        evidence += "; at scale 1 the sum is finite"
        advice = f"{_SCALE} To keep the scale: {advice[0].lower()}{advice[1:]}"
    return _Explanation("backward range", evidence, advice, "backward", normal=normal)


def _came_in(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Check for inf or NaN in a parameter, buffer, input or target."""
    values = event.nonfinite.kind + _places(event)
    if event.source_kind in {"weight", "buffer"}:
        return _stored(event, context, values)
    if event.source_kind == "outside" and event.aten_name.startswith("nll_loss"):
        # Labels are integers, so the float argument is the class weights.
        evidence = f"the class weights hold {values}"
        return _Explanation("loss function", evidence, "Use finite ones.", "input")
    if event.source_kind:
        label = event.place.is_loss and event.source_kind == "outside"
        what = f"argument {event.source!r} of the model" if event.source else "a tensor"
        what = "a target" if label else what
        what += "" if event.source else " that no operation made"
        evidence = f"{what} holds {values}"
        return _Explanation("label" if label else "data", evidence, _FIND, "input")
    if event.raw_input and event.casts and event.phase == "forward":
        evidence = f"argument {event.raw_input!r} of the model reaches "
        evidence += f"{event.inputs or 0.0:.1e}, {range_text(event.dtype)}"
        other = "train in bfloat16"
        if event.written is not None and event.written.fixed:
            other = f"leave out the cast at {event.written.where}"
        advice = f"Normalise the data, or {other}."
        return _Explanation("data", evidence, advice, "forward")
    return None


def _stored(event: NonFiniteEvent, context: ReplayContext, values: str) -> _Explanation:
    path, _, name = event.source.rpartition(".")
    is_weight = event.source_kind == "weight"
    what = "parameter" if is_weight else "buffer"
    evidence = f"{what} {event.source} held {values} before the step"
    advice, rule = CHECKPOINT, ""
    if event.dtype == torch.float16 and not event.nonfinite.nan:
        # Training skips steps that would make inf; a conversion to fp16 does not.
        rule = module_rule(path) if path else ""
        advice = _CONVERTED.format(rule=f" (rule '{rule}')" if rule else "")
    elif name.startswith("running_"):
        advice = RUNNING_STATS
    if is_weight and context.root is not None:
        default = advice
        advice = weight_advice(context.root.get_parameter(event.source), default)
        rule = rule if advice.startswith(default) else ""
    return _Explanation("weight", evidence, advice, "weight", rule)


def _masked(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    """Check for NaN computed from an intended infinity (softmax of a masked row)."""
    if not event.parents:
        return None
    value = event.nonfinite.kind
    if event.op in _SOFTMAXES:
        evidence = f"a mask covers a whole row, so it returns {value}{_places(event)}"
        return _Explanation("zero", evidence, _MASK, event.phase)
    origin = min(event.parents, key=lambda parent: parent.number)
    source = origin.source or f"{origin.place.module} ({origin.op})"
    evidence = f"it makes {value}{_places(event)} of the infinity from {source}"
    if origin.source_kind in {"input", "outside"}:
        return _Explanation("data", evidence, _FIND, "input")
    return _Explanation("zero", evidence, _KEEP_OUT, event.phase)


def _constant(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    """Check for a non-finite constant that reached the loss."""
    if not (event.is_intended or event.constant) or event.parents:
        return None
    values = event.nonfinite.kind + _places(event)
    in_loss = event.place.is_loss and not event.is_selected
    filled = f"the {values} that it fills in reaches the loss"
    if event.is_selected:
        evidence, advice = filled, "Mask no class that a target names."
        evidence += ": a target names a masked class"
        return _Explanation("label", evidence, advice, "forward")
    if event.is_intended and not in_loss:
        return _Explanation("zero", filled, _KEEP_OUT, event.phase)
    evidence = f"one of its arguments is a non-finite constant, so it returns {values}"
    cause = "loss function" if in_loss else "zero"
    return _Explanation(cause, evidence, "Use a finite one.", event.phase)


def _undefined(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    """Check for arguments where the op or its derivative is undefined or infinite."""
    error = event.domain_error
    if error is None or event.fp32_result[0] == "finite":
        return None
    in_slope = event.phase == "backward" and not event.is_executed_op
    if in_slope and error.cause == "zero":
        error = backward_domain_error(event.op, error)
    phase = "weight" if error.cause == "weight" else event.phase
    return _Explanation(error.cause, error.evidence, error.advice, phase)


def _not_a_number(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    """Check for NaN, in fp32 too, from inputs too small to overflow."""
    inputs = event.inputs or 0.0
    small = inputs * inputs <= torch.finfo(torch.float32).max
    is_unexplained = event.nonfinite.nan or not inputs
    if event.fp32_result[0] != "not finite" or not is_unexplained or not small:
        return None
    evidence = (
        f"it makes {event.nonfinite.kind}{_places(event)} in float32 too, yet "
        f"its inputs reach {inputs:.1e} only"
    )
    return _Explanation("zero", evidence, _PRINT, event.phase)


def _diverged(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Check for a loss that diverged, or an overflow in one of the first steps."""
    losses = context.losses
    if not losses.applied or event.place.module == "input":
        return None
    diverged = losses.has_diverged(math.nan)
    young = losses.is_early and event.phase == "forward"
    if not diverged and not young:
        return None
    why = f"the forward pass worked for {format_count(losses.applied, 'step')} only"
    if diverged:
        why = f"the loss went from {losses.first:.3g} to {losses.last:.3g}"
    evidence = f"{_evidence(event)}; {why}"
    forward = _forward(event, context)
    advice, rule = LOWER_RATE, ""
    if forward is not None and not diverged:
        advice, rule = f"{LOWER_RATE} If it is low: {forward.advice}", forward.rule
    return _Explanation("learning rate", evidence, advice, event.phase, rule)


def _in_loss(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    if event.phase != "forward" or not event.place.is_loss:
        return None
    advice = _WIDE_LOSS if event.fp32_result[0] == "finite" else _DOWN
    advice = _EXP if event.aten_name == "exp" else advice
    return _Explanation("loss function", _evidence(event), advice, "forward")


def _forward(event: NonFiniteEvent, _: ReplayContext) -> _Explanation | None:
    if event.phase != "forward":
        return None
    if event.fp32_result[0] != "finite":
        advice = _EXP if event.aten_name in {"exp", "expm1"} else _DOWN
        return _Explanation("forward range", _evidence(event), advice, "forward")
    place, op = event.consumer or (event.place, event.op)
    advice, rule = _fp32_advice(place, op)
    cast = event.written
    if cast is not None and cast.fixed:
        nor, instead = ", nor does bfloat16", "cast to bfloat16 there"
        if op_names.is_matmul(event.aten_name):  # autocast casts its inputs
            nor, instead = "", "train in bfloat16"
        advice = (
            f"The code itself casts to {dtype_name(event.dtype)} at {cast.where}, "
            f"which no rule undoes{nor}: leave that cast out, or {instead}."
        )
        return _Explanation("forward range", _evidence(event), advice, "forward")
    if cast is not None:
        advice += f" If neither helps: the code casts at {cast.where}; leave that out."
    return _Explanation("forward range", _evidence(event), advice, "forward", rule)


def _backward(event: NonFiniteEvent, context: ReplayContext) -> _Explanation:
    if context.low is None:
        seen = f"{_evidence(event)}, at loss scale {context.scale:g}"
        evidence = f"{seen}; at scale 1 all gradients are finite"
        return _Explanation("backward range", evidence, _SCALE, "backward", normal=True)
    seen = f"{_evidence(event)}, at loss scale {min(context.scale, 1):g}"
    limit = torch.finfo(event.dtype).max
    out = context.boundary or 0.0
    if event.place.is_loss or out > limit:
        evidence = f"{_evidence(event)}, though the loss scale is 1"
        return _Explanation("loss function", evidence, _MEAN, "backward")
    if event.fp32_result[0] != "finite":
        return _Explanation("backward range", seen, _NO_SCALE + _DOWN, "backward")
    advice, rule = _fp32_advice(*(event.receiver or (event.place, event.op)))
    return _Explanation(
        "backward range", seen, f"{_NO_SCALE}{advice}", "backward", rule
    )


def _fp32_advice(place: Place, op: str) -> tuple[str, str]:
    """Return the advice that keeps an operation in fp32, and the rule for it."""
    rule = module_rule(place.module) if place.is_module else op_names.op_rule(op)
    if not rule:
        return "Compute it in float32, or train in bfloat16.", ""
    return f"Keep it in float32 (rule '{rule}') or train in bfloat16.", rule


def _evidence(event: NonFiniteEvent) -> str:
    """Return the magnitudes of inputs or result, and the largest value of the dtype."""
    inputs = event.inputs or 0.0
    kind, reach = event.fp32_result
    limit = torch.finfo(event.dtype).max
    ends = {
        "finite": "; in float32 the result is finite",
        "not finite": "; in float32 too" * (event.dtype != torch.float32),
        "not run": "",
    }[kind]
    what = f"inputs reach {inputs:.1e}"
    if inputs <= limit < reach and kind == "finite":
        what = f"its result reaches {reach:.1e}"
    return f"{what}, {range_text(event.dtype)}{ends}"


def _places(event: NonFiniteEvent) -> str:
    """Return how many elements are non-finite, of how many."""
    bad, of = event.count
    return f" at {bad} of {of} places" if of > 1 else ""

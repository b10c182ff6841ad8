"""Derives the cause, the evidence and the remedy from what a replay recorded.

In: an `Event`, and what is known of the run. Out: a `BadOp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.diagnostics.replay import op_names
from halfstep.nonfinite.domains import MASK, backward_domain_error
from halfstep.nonfinite.origin import BadOp, module_rule
from halfstep.nonfinite.saved_values import EPSILON

if TYPE_CHECKING:
    from halfstep.diagnostics.replay.index_checks import OutOfRange
    from halfstep.diagnostics.replay.module_stack import Place
    from halfstep.diagnostics.replay.op_trace import NonFiniteEvent
    from halfstep.scaling.step_history import LossHistory

_RATE = "Lower the learning rate, warm it up, or clip gradients (clip_grad_norm)."
_MEAN = (
    "Take a mean over elements, not a sum, or divide the loss; or train in bfloat16."
)
_CHECKPOINT = "Go back to the last good checkpoint: no loss scale mends a weight."
_CONVERTED = (
    "A cast to float16 makes that of all above 65504. If it is finite in the float32 "
    "weights, keep its module in float32{rule} or train in bfloat16; if not, go back "
    "to the last good checkpoint."
)
_FIND = "Find it in the batch: print it, and leave it out or clean it."
_WIDE_LOSS = "Compute the loss in float32: call .float() on what the model gives."
_SCALE = (
    "That is normal in float16: the step is skipped, the loss scale is halved, and "
    "training goes on."
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
    "operation. If "
    "none does,"
)
_ONE_PART = (
    ", or the gradients of several micro-batches are finite and their sum is not (give "
    "a list with one step for each)"
)
_EXP = "Subtract the maximum before exp, or clamp its argument."
_DOWN = "Scale down or normalise what flows in."
_PRINT = "Print its inputs: it is not defined for one of them."
_KEEP_OUT = "Keep that infinity out of it: mask with a large finite number, or later."
_MASKS = {"softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class ReplayContext:
    """Facts about the replayed run that do not depend on the event."""

    step: int | None
    scale: float
    losses: LossHistory
    parts: int = 1
    """Micro-batches that were run."""
    part: int | None = None
    """Index of the one that failed; None for their sum."""
    low: NonFiniteEvent | None = None
    """What was bad at scale 1; None if all was finite there."""
    boundary: float | None = None
    """Largest gradient that came out of the loss at scale 1."""
    processes: int = 1
    """That average gradients: each sees the inf or NaN that one of them made."""


@dataclass(frozen=True)
class _Explanation:
    cause: str
    evidence: str
    advice: str
    phase: str
    rule: str = ""
    normal: bool = False


def bad_op(event: NonFiniteEvent, context: ReplayContext) -> BadOp:
    """Return the report of an event."""
    event = _origin(event)
    explanation = _explain(event, context)
    place, word = event.consumer or (event.place, event.word)
    module, kind = place.module, place.kind
    if event.source_kind in {"weight", "buffer"}:
        module = event.source.rpartition(".")[0] or "model"
    return BadOp(
        phase=explanation.phase,
        module=module,
        kind=kind,
        op=word,
        step=context.step,
        scale=context.scale,
        dtype=_word(event.dtype),
        inputs=event.inputs,
        nonfinite_kind=event.nonfinite.kind,
        wide=event.fp32_result[0],
        cause=explanation.cause,
        evidence=explanation.evidence + _which(context),
        advice=explanation.advice,
        reproduced=True,
        rule=explanation.rule,
        normal=explanation.normal,
    )


def out_of_range(error: OutOfRange, context: ReplayContext) -> BadOp:
    """Return the report of an index that is out of range."""
    cause, advice = "data", "Use the tokenizer of this model, or a larger table."
    if error.label:
        cause, advice = "label", "Mend the labels, or give the model more outputs."
    return BadOp(
        phase="input",
        module=error.place.module,
        kind=error.place.kind,
        op=error.word,
        step=context.step,
        scale=context.scale,
        dtype="int64",
        cause=cause,
        evidence=error.says + _which(context),
        advice=advice,
        reproduced=True,
    )


def not_reproduced(context: ReplayContext) -> BadOp:
    """Return the report of a run that failed while two exact replays were finite."""
    # Of one micro-batch alone, the sum with others was not looked at.
    more = _ONE_PART if context.parts == 1 else ""
    cause, advice = "hardware", _NOT_REPRODUCED.format(more=more)
    evidence = "the step failed, yet two replays of it are finite"
    if context.processes > 1:
        cause = "another process"
        evidence += f" here, and {context.processes} processes share gradients"
        advice = f"{_OTHERS} {advice[0].lower()}{advice[1:]}"
    return BadOp(
        phase="none",
        step=context.step,
        scale=context.scale,
        cause=cause,
        evidence=evidence,
        advice=advice,
        reproduced=False,
    )


def unseen(context: ReplayContext, nonfinite_kind: str, watched: int) -> BadOp:
    """Return the report where none of the traced operations is to blame."""
    return BadOp(
        phase="forward",
        step=context.step,
        scale=context.scale,
        nonfinite_kind=nonfinite_kind,
        cause="loss function",
        evidence=f"none of the {watched} operations of torch's that were seen made it",
        advice="Look at custom kernels and at what is computed outside of torch.",
        reproduced=True,
    )


def _which(context: ReplayContext) -> str:
    """Name the micro-batch, where there are several."""
    if context.part is None or context.parts == 1:
        return ""
    return f" (micro-batch {context.part + 1} of {context.parts})"


def _origin(event: NonFiniteEvent) -> NonFiniteEvent:
    """Return the row that a mask left nothing, where another operation stumbles on it.

    A softmax makes NaN of such a row; a sum of exponentials gives -inf, which the next
    product makes NaN of.
    """
    rows = [one for one in event.parents if one.word in _MASKS and one.parents]
    return min(rows, key=lambda one: one.number, default=event)


def _explain(event: NonFiniteEvent, context: ReplayContext) -> _Explanation:
    """Return cause, evidence and remedy; the first charge that holds is taken."""
    charges = (
        *(_summed, _came_in, _masked, _constant, _undefined, _not_a_number),
        *(_diverged, _in_loss, _forward, _backward),
    )
    explanations = (charge(event, context) for charge in charges)
    return next(explanation for explanation in explanations if explanation is not None)


def _summed(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Each micro-batch has finite gradients, and their sum is not."""
    if event.source_kind != "sum":
        return None
    bad, of = event.count
    name, limit = _word(event.dtype), torch.finfo(event.dtype).max
    scale = context.scale if context.low is None else min(context.scale, 1)
    evidence = (
        f"the gradients of {context.parts} micro-batches are finite, up to "
        f"{event.inputs or 0.0:.1e}, and their sum in {name}, which holds {limit:.6g}, "
        f"is not, in {bad} of {of} parameters ({event.source} first), at loss scale "
        f"{scale:g}"
    )
    advice = f"Divide each loss by {context.parts}."
    if event.dtype.itemsize < torch.float32.itemsize:
        advice = (
            "Add them up in float32, as prepare(level='O2', accumulate="
            f"{context.parts}) does, or divide each loss by {context.parts}."
        )
    if context.low is None:
        evidence += "; at scale 1 the sum is finite"
        advice = f"{_SCALE} To keep the scale: {advice[0].lower()}{advice[1:]}"
        return _Explanation("backward range", evidence, advice, "backward", normal=True)
    return _Explanation("backward range", evidence, advice, "backward")


def _came_in(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Something not finite was there before any operation ran."""
    del context
    values = event.nonfinite.kind + _places(event)
    if event.source_kind in {"weight", "buffer"}:
        what = "parameter" if event.source_kind == "weight" else "buffer"
        evidence = f"{what} {event.source} held {values} before the step"
        path = event.source.rpartition(".")[0]
        if event.dtype == torch.float16 and not event.nonfinite.nan:
            # Training skips a step that would make one; a conversion does not.
            rule = module_rule(path) if path else ""
            rule_note = f" (rule '{rule}')" if rule else ""
            advice = f"{_CONVERTED.format(rule=rule_note)} {EPSILON}"
            return _Explanation("weight", evidence, advice, "weight", rule)
        own = event.source_kind == "weight" and event.dtype == torch.float16
        advice = f"{_CHECKPOINT} {EPSILON}" if own else _CHECKPOINT
        return _Explanation("weight", evidence, advice, "weight")
    if event.source_kind == "outside" and event.name.startswith("nll_loss"):
        # Its labels are whole numbers.
        evidence = f"the class weights hold {values}"
        return _Explanation("loss function", evidence, "Use finite ones.", "input")
    if event.source_kind:
        label = event.place.is_loss and event.source_kind == "outside"
        what = f"argument {event.source!r} of the model" if event.source else "a tensor"
        what = "a target" if label else what
        evidence = f"{what} that no operation made holds {values}"
        if event.source:
            evidence = f"{what} holds {values}"
        return _Explanation("label" if label else "data", evidence, _FIND, "input")
    if event.raw_input and event.casts and event.phase == "forward":
        evidence = f"argument {event.raw_input!r} of the model {_too_large(event)}"
        advice = "Normalise the data, or train in bfloat16."
        if event.written is not None and event.written.fixed:
            advice = (
                f"Normalise the data, or leave out the cast at {event.written.where}."
            )
        return _Explanation("data", evidence, advice, "forward")
    return None


def _masked(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """It made NaN of an infinity that was meant, as a softmax does of a masked row."""
    del context
    if not event.parents:
        return None
    value = event.nonfinite.kind
    if event.word in _MASKS:
        evidence = f"a mask leaves a row nothing, so it gives {value}{_places(event)}"
        return _Explanation("zero", evidence, MASK, event.phase)
    origin = min(event.parents, key=lambda parent: parent.number)
    source = origin.source or f"{origin.place.module} ({origin.word})"
    evidence = f"it makes {value}{_places(event)} of the infinity that {source} puts in"
    if origin.source_kind in {"input", "outside"}:
        return _Explanation("data", evidence, _FIND, "input")
    return _Explanation("zero", evidence, _KEEP_OUT, event.phase)


def _constant(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """A constant that is not finite reached the loss."""
    del context
    if not (event.is_intended or event.constant) or event.parents:
        return None
    values = event.nonfinite.kind + _places(event)
    if event.place.is_loss and not event.is_selected:
        evidence = f"it is given a constant that is not finite, so it gives {values}"
        return _Explanation("loss function", evidence, "Use a finite one.", event.phase)
    if event.source_kind:
        return None
    if event.is_selected:
        evidence = f"the {values} that it puts in reaches the loss: "
        evidence += "a target names a masked class"
        return _Explanation(
            "label", evidence, "Mask no class that a target names.", "forward"
        )
    if event.is_intended:
        evidence = f"the {values} that it puts in reaches the loss"
        return _Explanation("zero", evidence, _KEEP_OUT, event.phase)
    evidence = f"it is given a constant that is not finite, so it gives {values}"
    return _Explanation("zero", evidence, "Use a finite one.", event.phase)


def _undefined(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """Its result, or its slope, is infinite or undefined at its arguments."""
    del context
    domain_error = event.domain_error
    if domain_error is None or event.fp32_result[0] == "finite":
        return None
    if (
        event.phase == "backward"
        and domain_error.cause == "zero"
        and not event.is_executed_op
    ):
        domain_error = backward_domain_error(event.word, domain_error)
    phase = "weight" if domain_error.cause == "weight" else event.phase
    return _Explanation(
        domain_error.cause, domain_error.evidence, domain_error.advice, phase
    )


def _not_a_number(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """It made NaN of numbers too small to overflow, in float32 too."""
    del context
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
    """Training had run away, or the forward pass worked for some steps only."""
    losses = context.losses
    if not losses.applied or event.place.module == "input":
        return None
    diverged = losses.has_diverged(math.nan)
    young = losses.is_early and event.phase == "forward"
    if not diverged and not young:
        return None
    evidence = (
        f"{_evidence(event)}; the forward pass worked for {losses.applied} steps only"
    )
    if diverged:
        went = f"the loss went from {losses.first:.3g} to {losses.last:.3g}"
        evidence = f"{_evidence(event)}; {went}"
    return _Explanation("learning rate", evidence, _RATE, event.phase)


def _in_loss(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """It left its range after the model had given finite numbers."""
    del context
    if event.phase != "forward" or not event.place.is_loss:
        return None
    advice = _WIDE_LOSS if event.fp32_result[0] == "finite" else _DOWN
    if event.name == "exp":
        advice = _EXP
    return _Explanation("loss function", _evidence(event), advice, "forward")


def _forward(event: NonFiniteEvent, context: ReplayContext) -> _Explanation | None:
    """A format was left on the way forward."""
    del context
    if event.phase != "forward":
        return None
    if event.fp32_result[0] != "finite":
        advice = _EXP if event.name in {"exp", "expm1"} else _DOWN
        return _Explanation("forward range", _evidence(event), advice, "forward")
    place, word = event.consumer or (event.place, event.word)
    advice, rule = _fp32_advice(place, word)
    cast = event.written
    if cast is not None and cast.fixed:
        nor, instead = ", nor does bfloat16", "cast to bfloat16 there"
        if op_names.is_product(event.name):  # autocast casts what it takes once more
            nor, instead = "", "train in bfloat16"
        advice = (
            f"The code itself casts to {_word(event.dtype)} at {cast.where}, which no "
            f"rule undoes{nor}: leave that cast out, or {instead}."
        )
        return _Explanation("forward range", _evidence(event), advice, "forward")
    if cast is not None:
        advice += f" If neither helps: the code casts at {cast.where}; leave that out."
    return _Explanation("forward range", _evidence(event), advice, "forward", rule)


def _backward(event: NonFiniteEvent, context: ReplayContext) -> _Explanation:
    """A format was left on the way back."""
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
    advice, rule = _fp32_advice(*(event.receiver or (event.place, event.word)))
    return _Explanation(
        "backward range", seen, f"{_NO_SCALE}{advice}", "backward", rule
    )


def _fp32_advice(place: Place, word: str) -> tuple[str, str]:
    """Return what keeps an operation in float32, and the row of a policy that does."""
    rule = module_rule(place.module) if place.is_module else op_names.op_rule(word)
    if not rule:
        return "Compute it in float32, or train in bfloat16.", ""
    return f"Keep it in float32 (rule '{rule}') or train in bfloat16.", rule


def _evidence(event: NonFiniteEvent) -> str:
    """Say what was too large for which format."""
    inputs = 0.0 if event.inputs is None else event.inputs
    kind, reach = event.fp32_result
    name, limit = _word(event.dtype), torch.finfo(event.dtype).max
    ends = {
        "finite": "; in float32 the result is finite",
        "not finite": "; in float32 too" * (event.dtype != torch.float32),
        "not run": "",
    }[kind]
    if inputs > limit:
        return f"inputs reach {inputs:.1e}, {name} holds {limit:.6g}{ends}"
    if kind == "finite" and reach > limit:
        return f"its result reaches {reach:.1e}, {name} holds {limit:.6g}{ends}"
    return f"inputs reach {inputs:.1e}, {name} holds {limit:.6g}{ends}"


def _too_large(event: NonFiniteEvent) -> str:
    name, limit = _word(event.dtype), torch.finfo(event.dtype).max
    return f"reaches {event.inputs or 0.0:.1e}, {name} holds {limit:.6g}"


def _places(event: NonFiniteEvent) -> str:
    """Say where it is not finite."""
    bad, of = event.count
    return f" at {bad} of {of} places" if of > 1 else ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

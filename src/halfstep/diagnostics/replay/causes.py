"""From what a replay showed to what is said: the cause, the evidence and the remedy.

In: an `Event`, and what is known of the run. Out: a `BadOp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.diagnostics.replay import op_names
from halfstep.nonfinite.domains import MASK, backward_flaw
from halfstep.nonfinite.origin import BadOp, module_rule
from halfstep.nonfinite.saved_values import EPSILON

if TYPE_CHECKING:
    from halfstep.diagnostics.replay.index_checks import OutOfRange
    from halfstep.diagnostics.replay.module_stack import Place
    from halfstep.diagnostics.replay.op_trace import Event
    from halfstep.scaling.step_history import Losses

_RATE = "Lower the learning rate, warm it up, or clip gradients (clip_grad_norm)."
_MEAN = (
    "Take a mean over elements, not a sum, or divide the loss; or train in bfloat16."
)
_CHECKPOINT = "Go back to the last good checkpoint: no loss scale mends a weight."
_CONVERTED = (
    "A cast to float16 makes that of all above 65504. If it is finite in the float32 "
    "weights, keep its module in float32{kept} or train in bfloat16; if not, go back "
    "to the last good checkpoint."
)
_FIND = "Find it in the batch: print it, and leave it out or clean it."
_WIDE_LOSS = "Compute the loss in float32: call .float() on what the model gives."
_SCALE = (
    "That is normal in float16: the step is skipped, the loss scale is halved, and "
    "training goes on."
)
_NO_SCALE = "No loss scale helps. "
_NOT_AGAIN = (
    "Either an operation is not deterministic (set "
    "torch.use_deterministic_algorithms(True)), or the replay had not the same batch "
    "and random numbers{more}, or the hardware erred: if it comes back on one machine "
    "alone, test its memory."
)
_OTHERS = (
    "Call first_bad on every process: the one that made it names the operation. If "
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
class Known:
    """What is known of the run beside the event."""

    step: int | None
    scale: float
    losses: Losses
    parts: int = 1
    """Micro-batches that were run."""
    part: int | None = None
    """Place of the one that was spoilt; None for their sum."""
    low: Event | None = None
    """What was bad at scale 1; None if all was finite there."""
    boundary: float | None = None
    """Largest gradient that came out of the loss at scale 1."""
    processes: int = 1
    """That average gradients: each sees what one of them made."""


@dataclass(frozen=True)
class _Said:
    cause: str
    evidence: str
    advice: str
    phase: str
    rule: str = ""
    normal: bool = False


def bad_op(event: Event, known: Known) -> BadOp:
    """Return what is said of an event."""
    event = _origin(event)
    said = _said(event, known)
    place, word = event.consumer or (event.place, event.word)
    module, kind = place.module, place.kind
    if event.given in {"weight", "buffer"}:
        module = event.source.rpartition(".")[0] or "model"
    return BadOp(
        phase=said.phase,
        module=module,
        kind=kind,
        op=word,
        step=known.step,
        scale=known.scale,
        dtype=_word(event.dtype),
        inputs=event.inputs,
        made=event.held.made,
        wide=event.wide[0],
        cause=said.cause,
        evidence=said.evidence + _which(known),
        advice=said.advice,
        reproduced=True,
        rule=said.rule,
        normal=said.normal,
    )


def out_of_range(error: OutOfRange, known: Known) -> BadOp:
    """Return what is said of an index that points nowhere."""
    cause, advice = "data", "Use the tokenizer of this model, or a larger table."
    if error.label:
        cause, advice = "label", "Mend the labels, or give the model more outputs."
    return BadOp(
        phase="input",
        module=error.place.module,
        kind=error.place.kind,
        op=error.word,
        step=known.step,
        scale=known.scale,
        dtype="int64",
        cause=cause,
        evidence=error.says + _which(known),
        advice=advice,
        reproduced=True,
    )


def not_reproduced(known: Known) -> BadOp:
    """Return what is said where the run failed and two exact replays were finite."""
    # Of one micro-batch alone, the sum with others was not looked at.
    more = _ONE_PART if known.parts == 1 else ""
    cause, advice = "hardware", _NOT_AGAIN.format(more=more)
    evidence = "the step failed, yet two replays of it are finite"
    if known.processes > 1:
        cause = "another process"
        evidence += f" here, and {known.processes} processes share gradients"
        advice = f"{_OTHERS} {advice[0].lower()}{advice[1:]}"
    return BadOp(
        phase="none",
        step=known.step,
        scale=known.scale,
        cause=cause,
        evidence=evidence,
        advice=advice,
        reproduced=False,
    )


def unseen(known: Known, made: str, watched: int) -> BadOp:
    """Return what is said where none of the operations watched is to blame."""
    return BadOp(
        phase="forward",
        step=known.step,
        scale=known.scale,
        made=made,
        cause="loss function",
        evidence=f"none of the {watched} operations of torch's that were seen made it",
        advice="Look at custom kernels and at what is computed outside of torch.",
        reproduced=True,
    )


def _which(known: Known) -> str:
    """Name the micro-batch, where there are several."""
    if known.part is None or known.parts == 1:
        return ""
    return f" (micro-batch {known.part + 1} of {known.parts})"


def _origin(event: Event) -> Event:
    """Return the row that a mask left nothing, where another operation stumbles on it.

    A softmax makes NaN of such a row; a sum of exponentials gives -inf, which the next
    product makes NaN of.
    """
    rows = [one for one in event.parents if one.word in _MASKS and one.parents]
    return min(rows, key=lambda one: one.number, default=event)


def _said(event: Event, known: Known) -> _Said:
    """Return cause, evidence and remedy; the first charge that holds is taken."""
    charges = (
        *(_summed, _came_in, _masked, _constant, _undefined, _not_a_number),
        *(_ran_away, _in_loss, _forward, _backward),
    )
    found = (charge(event, known) for charge in charges)
    return next(said for said in found if said is not None)


def _summed(event: Event, known: Known) -> _Said | None:
    """Each micro-batch has finite gradients, and their sum is not."""
    if event.given != "sum":
        return None
    bad, of = event.count
    name, limit = _word(event.dtype), torch.finfo(event.dtype).max
    scale = known.scale if known.low is None else min(known.scale, 1)
    evidence = (
        f"the gradients of {known.parts} micro-batches are finite, up to "
        f"{event.inputs or 0.0:.1e}, and their sum in {name}, which holds {limit:.6g}, "
        f"is not, in {bad} of {of} parameters ({event.source} first), at loss scale "
        f"{scale:g}"
    )
    advice = f"Divide each loss by {known.parts}."
    if event.dtype.itemsize < torch.float32.itemsize:
        advice = (
            "Add them up in float32, as prepare(level='O2', accumulate="
            f"{known.parts}) does, or divide each loss by {known.parts}."
        )
    if known.low is None:
        evidence += "; at scale 1 the sum is finite"
        advice = f"{_SCALE} To keep the scale: {advice[0].lower()}{advice[1:]}"
        return _Said("backward range", evidence, advice, "backward", normal=True)
    return _Said("backward range", evidence, advice, "backward")


def _came_in(event: Event, known: Known) -> _Said | None:
    """Something not finite was there before any operation ran."""
    del known
    made = event.held.made + _places(event)
    if event.given in {"weight", "buffer"}:
        what = "parameter" if event.given == "weight" else "buffer"
        evidence = f"{what} {event.source} held {made} before the step"
        path = event.source.rpartition(".")[0]
        if event.dtype == torch.float16 and not event.held.nan:
            # Training skips a step that would make one; a conversion does not.
            rule = module_rule(path) if path else ""
            kept = f" (rule '{rule}')" if rule else ""
            advice = f"{_CONVERTED.format(kept=kept)} {EPSILON}"
            return _Said("weight", evidence, advice, "weight", rule)
        own = event.given == "weight" and event.dtype == torch.float16
        advice = f"{_CHECKPOINT} {EPSILON}" if own else _CHECKPOINT
        return _Said("weight", evidence, advice, "weight")
    if event.given == "outside" and event.name.startswith("nll_loss"):
        # Its labels are whole numbers.
        evidence = f"the class weights hold {made}"
        return _Said("loss function", evidence, "Use finite ones.", "input")
    if event.given:
        label = event.place.is_loss and event.given == "outside"
        what = f"argument {event.source!r} of the model" if event.source else "a tensor"
        what = "a target" if label else what
        evidence = f"{what} that no operation made holds {made}"
        if event.source:
            evidence = f"{what} holds {made}"
        return _Said("label" if label else "data", evidence, _FIND, "input")
    if event.raw and event.casts and event.phase == "forward":
        evidence = f"argument {event.raw!r} of the model {_too_large(event)}"
        advice = "Normalise the data, or train in bfloat16."
        if event.written is not None and event.written.fixed:
            advice = (
                f"Normalise the data, or leave out the cast at {event.written.where}."
            )
        return _Said("data", evidence, advice, "forward")
    return None


def _masked(event: Event, known: Known) -> _Said | None:
    """It made NaN of an infinity that was meant, as a softmax does of a masked row."""
    del known
    if not event.parents:
        return None
    made = event.held.made
    if event.word in _MASKS:
        evidence = f"a mask leaves a row nothing, so it gives {made}{_places(event)}"
        return _Said("zero", evidence, MASK, event.phase)
    origin = min(event.parents, key=lambda parent: parent.number)
    source = origin.source or f"{origin.place.module} ({origin.word})"
    evidence = f"it makes {made}{_places(event)} of the infinity that {source} puts in"
    if origin.given in {"input", "outside"}:
        return _Said("data", evidence, _FIND, "input")
    return _Said("zero", evidence, _KEEP_OUT, event.phase)


def _constant(event: Event, known: Known) -> _Said | None:
    """A constant that is not finite reached the loss."""
    del known
    if not (event.meant or event.constant) or event.parents:
        return None
    made = event.held.made + _places(event)
    if event.place.is_loss and not event.picked:
        evidence = f"it is given a constant that is not finite, so it gives {made}"
        return _Said("loss function", evidence, "Use a finite one.", event.phase)
    if event.given:
        return None
    if event.picked:
        evidence = f"the {made} that it puts in reaches the loss: "
        evidence += "a target names a masked class"
        return _Said("label", evidence, "Mask no class that a target names.", "forward")
    if event.meant:
        evidence = f"the {made} that it puts in reaches the loss"
        return _Said("zero", evidence, _KEEP_OUT, event.phase)
    evidence = f"it is given a constant that is not finite, so it gives {made}"
    return _Said("zero", evidence, "Use a finite one.", event.phase)


def _undefined(event: Event, known: Known) -> _Said | None:
    """Its result, or its slope, is infinite or undefined at its arguments."""
    del known
    found = event.flaw
    if found is None or event.wide[0] == "finite":
        return None
    if event.phase == "backward" and found.cause == "zero" and not event.itself:
        found = backward_flaw(event.word, found)
    phase = "weight" if found.cause == "weight" else event.phase
    return _Said(found.cause, found.says, found.advice, phase)


def _not_a_number(event: Event, known: Known) -> _Said | None:
    """It made NaN of numbers too small to overflow, in float32 too."""
    del known
    inputs = event.inputs or 0.0
    small = inputs * inputs <= torch.finfo(torch.float32).max
    made = event.held.nan or not inputs
    if event.wide[0] != "not finite" or not made or not small:
        return None
    evidence = (
        f"it makes {event.held.made}{_places(event)} in float32 too, yet its inputs "
        f"reach {inputs:.1e} only"
    )
    return _Said("zero", evidence, _PRINT, event.phase)


def _ran_away(event: Event, known: Known) -> _Said | None:
    """Training had run away, or the forward pass worked for some steps only."""
    losses = known.losses
    if not losses.applied or event.place.module == "input":
        return None
    diverged = losses.ran_away(math.nan)
    young = losses.few and event.phase == "forward"
    if not diverged and not young:
        return None
    evidence = (
        f"{_seen(event)}; the forward pass worked for {losses.applied} steps only"
    )
    if diverged:
        went = f"the loss went from {losses.first:.3g} to {losses.last:.3g}"
        evidence = f"{_seen(event)}; {went}"
    return _Said("learning rate", evidence, _RATE, event.phase)


def _in_loss(event: Event, known: Known) -> _Said | None:
    """It left its range after the model had given finite numbers."""
    del known
    if event.phase != "forward" or not event.place.is_loss:
        return None
    advice = _WIDE_LOSS if event.wide[0] == "finite" else _DOWN
    if event.name == "exp":
        advice = _EXP
    return _Said("loss function", _seen(event), advice, "forward")


def _forward(event: Event, known: Known) -> _Said | None:
    """A format was left on the way forward."""
    del known
    if event.phase != "forward":
        return None
    if event.wide[0] != "finite":
        advice = _EXP if event.name in {"exp", "expm1"} else _DOWN
        return _Said("forward range", _seen(event), advice, "forward")
    place, word = event.consumer or (event.place, event.word)
    advice, rule = _kept(place, word)
    cast = event.written
    if cast is not None and cast.fixed:
        nor, instead = ", nor does bfloat16", "cast to bfloat16 there"
        if op_names.is_product(event.name):  # autocast casts what it takes once more
            nor, instead = "", "train in bfloat16"
        advice = (
            f"The code itself casts to {_word(event.dtype)} at {cast.where}, which no "
            f"rule undoes{nor}: leave that cast out, or {instead}."
        )
        return _Said("forward range", _seen(event), advice, "forward")
    if cast is not None:
        advice += f" If neither helps: the code casts at {cast.where}; leave that out."
    return _Said("forward range", _seen(event), advice, "forward", rule)


def _backward(event: Event, known: Known) -> _Said:
    """A format was left on the way back."""
    if known.low is None:
        seen = f"{_seen(event)}, at loss scale {known.scale:g}"
        evidence = f"{seen}; at scale 1 all gradients are finite"
        return _Said("backward range", evidence, _SCALE, "backward", normal=True)
    seen = f"{_seen(event)}, at loss scale {min(known.scale, 1):g}"
    limit = torch.finfo(event.dtype).max
    out = known.boundary or 0.0
    if event.place.is_loss or out > limit:
        evidence = f"{_seen(event)}, though the loss scale is 1"
        return _Said("loss function", evidence, _MEAN, "backward")
    if event.wide[0] != "finite":
        return _Said("backward range", seen, _NO_SCALE + _DOWN, "backward")
    advice, rule = _kept(*(event.receiver or (event.place, event.word)))
    return _Said("backward range", seen, f"{_NO_SCALE}{advice}", "backward", rule)


def _kept(place: Place, word: str) -> tuple[str, str]:
    """Return what keeps an operation in float32, and the row of a policy that does."""
    rule = module_rule(place.module) if place.is_module else op_names.op_rule(word)
    if not rule:
        return "Compute it in float32, or train in bfloat16.", ""
    return f"Keep it in float32 (rule '{rule}') or train in bfloat16.", rule


def _seen(event: Event) -> str:
    """Say what was too large for which format."""
    inputs = 0.0 if event.inputs is None else event.inputs
    kind, reach = event.wide
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


def _too_large(event: Event) -> str:
    name, limit = _word(event.dtype), torch.finfo(event.dtype).max
    return f"reaches {event.inputs or 0.0:.1e}, {name} holds {limit:.6g}"


def _places(event: Event) -> str:
    """Say where it is not finite."""
    bad, of = event.count
    return f" at {bad} of {of} places" if of > 1 else ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

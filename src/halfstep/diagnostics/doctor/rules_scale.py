"""Doctor rules on the loss scale, skipped steps and non-finite values."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from halfstep.diagnostics.doctor.run_record import RunFacts, Step
    from halfstep.nonfinite.origin import BadOp
    from halfstep.reporting.finding import Severity

_FEW = 3  # skips, or rounds of growth and backoff, needed for a finding
_FEW_FALLS = 5  # the same for a dynamic scale in fp16
_SKIPS = 0.01  # share of steps that may be skipped
_STABLE_STEPS = 10  # consecutive applied steps that show that the scale has settled
_WINDOW = 1000
_LAWS = "our choice; growth_interval=2000, the default, makes one in 2,000 steps"
_WARNING: Severity = "warning"
_SCHEDULE = "the rate is a function of the updates made"


def _warm(facts: RunFacts) -> Sequence[Step]:
    """Return the steps after the initial search for a scale.

    They begin with the first of `_STABLE_STEPS` consecutive applied steps, or else with
    the first applied one: a dynamic scale starts too high on purpose, and is lowered by
    skipped steps.
    """
    applied = [step.skipped is False for step in facts.steps]
    for stretch in (_STABLE_STEPS, 1):
        for start in range(len(applied) - stretch + 1):
            if all(applied[start : start + stretch]):
                return facts.steps[start:]
    return facts.steps


def _by_trial(facts: RunFacts) -> bool:
    """Return whether the loss scale is dynamic, or unknown."""
    return facts.config.loss_scale in {None, "dynamic"}


def _trials(steps: Sequence[Step]) -> set[int]:
    """Return the steps that are the first skipped one after a growth of the scale."""
    trials, grown, before = set(), False, math.inf
    for step in steps:
        scale = step.scale or before
        grown = scale > before or (grown and scale == before)
        if grown and step.skipped:
            trials.add(step.step)
            grown = False
        before = scale
    return trials


def _skipped(facts: RunFacts) -> tuple[list[Step], set[int], float]:
    """Return the skipped steps that are not trials, the trials, and the former's share.

    Steps of the initial search are left out.
    """
    steps = _warm(facts)
    trials = _trials(steps) if _by_trial(facts) else set()
    skipped = [step for step in steps if step.skipped and step.step not in trials]
    return skipped, trials, len(skipped) / max(1, len(steps))


def _few_skips(facts: RunFacts) -> int:
    """Return how many skips are reported; a dynamic scale falls as training goes on."""
    return _FEW_FALLS if facts.dtype == "fp16" and _by_trial(facts) else _FEW


def _advice_on_skips(facts: RunFacts) -> str:
    """Return the advice against repeated skips, the likeliest fix first."""
    rules = [bad.rule for bad in facts.bad_ops if bad.rule]
    rule = Counter(rules).most_common(1)[0][0] if rules else "module:NAME=fp32"
    ask = "" if rules else ", whose NAME halfstep.find_nonfinite(model, step) tells"
    keep = f"keep what overflows in fp32 (--policy 'lean + {rule}'{ask})"
    if facts.dtype != "fp16":
        return (
            "Ask halfstep.find_nonfinite(model, step) which operation makes it; "
            "lower --lr, "
            f"look at the data of these steps, or {keep}."
        )
    stuck = facts.stuck_scale
    if stuck is not None and stuck > 1:
        return (
            f"The loss scale stands at {stuck:g} and never falls: --loss-scale dynamic "
            f"finds one that fits. Or train in bf16 (--dtype bf16), or {keep}."
        )
    return f"Train in bf16 (--dtype bf16), or {keep}. Lower --lr if the loss rises too."


def _second_half(facts: RunFacts) -> tuple[list[float], int, int]:
    """Return the scales of the second half, and how often they fell and rose."""
    steps = _warm(facts)
    scales = [step.scale for step in steps[len(steps) // 2 :] if step.scale]
    fell = sum(b < a for a, b in pairwise(scales))
    rose = sum(b > a for a, b in pairwise(scales))
    return scales, fell, rose


def _unscaled(facts: RunFacts) -> bool | None:
    """Return whether the loss is unscaled; None if unknown."""
    word = facts.config.loss_scale
    if word is not None:
        return word == "none" or facts.config.fixed_scale == 1
    scales = {step.scale for step in facts.steps if step.scale}
    return scales == {1.0} if scales else None


def _events(facts: RunFacts, ending: str) -> list[tuple[int, str]]:
    """Return (step, name) of each non-finite tensor, in the order of the steps."""
    events = [
        (event.step, name)
        for event in facts.non_finite
        for name in event.where
        if name.endswith(ending)
    ]
    # Names of an event are in the order observed; samples of a step are not.
    event_steps = {step for step, _ in events}
    events += [
        (each.step, name)
        for name, samples in facts.stats.items()
        for each in samples
        if (each.summary.infs or each.summary.nans) and name.endswith(ending)
        if each.step not in event_steps
    ]
    return sorted(events, key=lambda each: each[0])


def _nonfinite_text(steps: Sequence[int]) -> str:
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    return f"it, or what follows it, was non-finite {times}, first at step {steps[0]}"


def _steps_of(events: Iterable[tuple[int, str]]) -> list[int]:
    return sorted({step for step, _ in events})


def _failed_steps(facts: RunFacts, events: Iterable[tuple[int, str]]) -> set[int]:
    """Return the failed steps among those with a non-finite output.

    A step without a record failed if the model's own output or a gradient was
    non-finite.
    """
    succeeded = {
        step.step: not step.skipped and math.isfinite(step.loss)
        for step in facts.steps
        if step.skipped is not None and step.loss is not None
    }
    lost = {step for step, name in events if name == "model:output"}
    lost |= {step for step, _ in _events(facts, ":grad")}
    skipped = facts.skipped
    return {
        step
        for step, _ in events
        if step in skipped or not succeeded.get(step, step not in lost)
    }


RULES: Rules[RunFacts] = Rules()


@RULES.add("a replay of the step", needs=("probe",), severity="error")
def bad_op(facts: RunFacts) -> Iterator[Observation]:
    """What made the first inf or NaN of a step that was replayed."""
    groups: dict[tuple[str, str, str], list[BadOp]] = {}
    for bad in facts.bad_ops:
        groups.setdefault((bad.place, bad.cause, bad.phase), []).append(bad)
    for same in groups.values():
        first, count = same[0], len(same)
        finding = first.finding()
        times = "" if count == 1 else f", {count} times"
        measured = f"{finding.measured} (step {first.step}{times})"
        advice, severity = finding.advice, finding.severity
        if first.phase == "none":
            severity = _WARNING  # a replay was finite
        elif first.cause == "backward range" and not first.rule:
            # A lower scale fixes it, which is normal with a dynamic scale.
            stuck, (lost, _, share) = facts.stuck_scale, _skipped(facts)
            if stuck is not None and stuck > 1:
                severity, advice = "error", _advice_on_skips(facts)
            elif len(lost) >= _few_skips(facts) and share > _SKIPS:
                severity, advice = _WARNING, _advice_on_skips(facts)
            else:
                severity = "note"
        weight = count / max(1, len(facts.steps))
        where = finding.where
        yield Observation(where, measured, advice, weight=weight, severity=severity)


@RULES.add(
    "any is one too many",
    needs=("probe",),
    severity="error",
    limit=Limit(0, "{:g} steps"),
)
def not_finite_forward(facts: RunFacts) -> Iterator[Observation]:
    """Steps in which a module's output was non-finite."""
    events = _events(facts, ":output")
    if not events:
        return
    failed = _failed_steps(facts, events)
    # A tensor with inf in successful steps, such as a mask, does not explain failures.
    usual = {name for step, name in events if step not in failed}
    odd = [(step, name) for step, name in events if name not in usual]
    steps = _steps_of(odd or events)
    where = (odd or events)[0][1]
    weight = len(steps) / max(1, len(facts.steps))
    if not odd:
        measured = _nonfinite_text(steps) + "; loss and gradients stayed finite then"
        advice = "Fine if it is a mask's -inf and meant; otherwise look at its inputs."
        yield Observation(where, measured, advice, len(steps), weight, "note")
        return
    module = where.removesuffix(":output")
    advice = f"Keep it in fp32: --policy 'lean + module:{module}=fp32', or train "
    advice += "in bf16; no loss scale fixes a forward pass."
    if facts.dtype != "fp16":
        advice = "Look at its inputs at that step; lower --lr."
    yield Observation(where, _nonfinite_text(steps), advice, len(steps), weight)


@RULES.add(
    "any is one too many; under a loss scale it is normal",
    needs=("dtype", "probe"),
    limit=Limit(0, "{:g} steps"),
    concerns=lambda facts: facts.dtype in {None, "fp32", "bf16"},
)
def not_finite_backward(facts: RunFacts) -> Iterator[Observation]:
    """Steps in which a gradient was non-finite without a loss scale."""
    events = _events(facts, ":grad")
    if events:
        steps, where = _steps_of(events), events[0][1]
        advice = "Not a matter of the loss scale: look for log, sqrt or division at 0 "
        advice += "there, at the data of that step, and lower --lr."
        weight = len(steps) / max(1, len(facts.steps))
        yield Observation(where, _nonfinite_text(steps), advice, len(steps), weight)


@RULES.add(
    "any is one too many",
    needs=("losses",),
    severity="error",
    limit=Limit(0, "{:g} steps"),
)
def loss_not_finite(facts: RunFacts) -> Iterator[Observation]:
    """Steps with a non-finite loss that were not skipped."""
    recorded = [step for step in facts.steps if step.loss is not None]
    bad = [s for s in recorded if not math.isfinite(s.loss or 0.0) and not s.skipped]
    applied = [step for step in bad if step.skipped is False]
    nonfinite, severity = applied or bad, None if applied else _WARNING
    if not nonfinite:
        return
    count = "1 step" if len(nonfinite) == 1 else f"{len(nonfinite)} steps"
    measured = f"it was not finite in {count}{' with an update' * bool(applied)}, "
    measured += f"first in step {nonfinite[0].step}"
    measured += "" if applied else "; nothing tells whether there was an update"
    advice = (
        "Ask halfstep.find_nonfinite(model, step) which operation made it; lower --lr."
    )
    weight = len(nonfinite) / len(recorded)
    yield Observation("loss", measured, advice, len(nonfinite), weight, severity)


@RULES.add(
    OURS, needs=("steps",), limit=Limit(_SKIPS, "{:.0%} of the steps", severe=0.25)
)
def skipped_steps(facts: RunFacts) -> Iterator[Observation]:
    """Share of steps skipped after the first applied one, except right after growth."""
    skipped, trials, share = _skipped(facts)
    if len(skipped) < _few_skips(facts):
        return
    names = Counter(name for step in skipped for name in step.found_inf_in)
    where = "steps"
    if names:
        where = f"steps, most often in {names.most_common(1)[0][0]}"
    num_steps = len(_warm(facts))
    measured = f"{len(skipped)} of {num_steps} steps were skipped for inf or NaN, "
    measured += f"{percent(share)}; the last is step {skipped[-1].step}"
    measured += f"; {len(trials)} more were skipped after a growth" if trials else ""
    yield Observation(where, measured, _advice_on_skips(facts), share, share)


@RULES.add(
    _LAWS, needs=("scales",), limit=Limit(1, "{:g} in 1,000 steps"), concerns=_by_trial
)
def scale_unsettled(facts: RunFacts) -> Iterator[Observation]:
    """Rounds of growth and back-off in 1,000 steps of the second half."""
    scales, fell, rose = _second_half(facts)
    if min(fell, rose) >= _FEW:
        measured = f"it fell {fell} and rose {rose} times in the last "
        measured += f"{len(scales):,} steps"
        advice = "Raise it less often (ScaleRule(growth_interval=2000)), tolerate "
        advice += "overflows (hysteresis=2), or train in bf16 (--dtype bf16)."
        share = min(fell, rose) / len(scales)
        yield Observation("loss scale", measured, advice, _WINDOW * share, share)


@RULES.add(
    OURS, needs=("scales",), limit=Limit(2, "a factor of 2^{:g}"), concerns=_by_trial
)
def scale_falling(facts: RunFacts) -> Iterator[Observation]:
    """Powers of two that the scale fell in the second half, never rising."""
    scales, fell, rose = _second_half(facts)
    if not scales or rose:
        return
    down, share = math.log2(scales[0] / scales[-1]), fell / len(scales)
    measured = f"it fell {fell} times in the last {len(scales):,} steps, to "
    measured += f"{scales[-1]:g}, and never rose"
    advice = _advice_on_skips(facts)
    severity: Severity | None = "error" if scales[-1] <= 1 else None
    yield Observation("loss scale", measured, advice, down, share, severity)


@RULES.add(
    _SCHEDULE, needs=("rates of learning", "steps"), limit=Limit(0.5, "{:.0%} of them")
)
def schedule_on_skipped_steps(facts: RunFacts) -> Iterator[Observation]:
    """Share of skipped steps after which the learning rate moved on."""
    pairs = [
        (a.lr, b.lr)
        for a, b in pairwise(facts.steps)
        if a.skipped and b.step == a.step + 1 and a.lr is not None and b.lr is not None
    ]
    if pairs:
        moved = sum(a != b for a, b in pairs)
        measured = f"the rate moved on after {moved} of {len(pairs)} skipped steps"
        advice = "Step it only if report.applied (StepReport), or pass it to prepare: "
        advice += "prepare(..., scheduler=scheduler)."
        num_steps = max(1, len(facts.steps))
        yield Observation(
            "learning rate", measured, advice, moved / len(pairs), moved / num_steps
        )


@RULES.add(
    "format fact: fp16 makes 0 of 2^-25 and less",
    needs=("dtype", "loss scale"),
    severity="error",
    concerns=lambda facts: facts.dtype in {None, "fp16"},
)
def no_loss_scale(facts: RunFacts) -> Iterator[Observation]:
    """fp16 without a loss scale."""
    if _unscaled(facts):
        measured = "fp16 without a loss scale: gradients below 2^-25 become 0"
        yield Observation(
            "loss scale", measured, "Use --loss-scale dynamic, or bf16.", weight=1.0
        )


@RULES.add(
    "format fact: bf16 has the exponents of fp32",
    needs=("dtype", "loss scale"),
    concerns=lambda facts: facts.dtype in {None, "bf16", "fp32"},
)
def needless_loss_scale(facts: RunFacts) -> Iterator[Observation]:
    """A loss scale where the format has fp32's range."""
    if _unscaled(facts) is False:
        word = facts.config.loss_scale or f"{facts.scale:g}"
        lost = len(facts.skipped)
        cost = f", and {lost} steps were skipped" if lost else ""
        measured = f"{facts.dtype} with loss scale {word}{cost}"
        advice = "Leave it out (--loss-scale none): the range is that of fp32."
        yield Observation(
            "loss scale", measured, advice, weight=lost / max(1, len(facts.steps))
        )

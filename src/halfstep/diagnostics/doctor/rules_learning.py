"""Doctor rules on losses, evaluations, gradient clipping and repeated texts."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules, percent
from halfstep.scaling.step_report import first_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfstep.diagnostics.doctor.run_record import RunFacts
    from halfstep.reporting.finding import Severity

_FIRST = 5  # losses needed for a finding; their median is the initial loss
_SHORTEST = 3  # smallest window of a median
_LONGEST = 50  # largest window of a median
_FEW = 50  # steps after which the loss should have fallen
_FLAT = 0.97  # of the initial loss: above it, the loss has not fallen
_WORTH = 0.1  # of the initial loss: smallest fall for which a later rise counts
_ENDED = 1.5  # times the initial loss: above it, a final loss has diverged
_PEAK = 5.0  # times the initial loss: above it, a peak is reported
_STEEP = 1.3  # times the lowest dev loss: from there a rise is a warning
_SMALL = 0.05  # of the first dev loss: smallest rise that counts
_TRUE = 5  # texts of a class needed for a finding that it is never predicted
_STRONG = 10.0  # times the limit: from there clipping is a warning
_LEAKED, _LEAKED_MOST = 0.02, 0.1  # shares from which a leak is a warning, an error
_REPEATED, _CONTRADICTING = 0.1, 0.01  # shares from which they are warnings

_NOTE: Severity = "note"
_ERROR: Severity = "error"


def _losses(facts: RunFacts) -> list[tuple[int, float]]:
    """Return (step, loss) of the applied steps with a finite loss."""
    return [
        (step.step, step.loss)
        for step in facts.steps
        if step.loss is not None and math.isfinite(step.loss) and not step.skipped
    ]


def _begun(facts: RunFacts, losses: Sequence[tuple[int, float]]) -> float:
    """Return the loss of the untrained model: that of the first step.

    Not a mean of several: a learning rate that is far too high has changed the second
    already. It is at least log(number of classes), the loss of uniform predictions, in
    case the first batch is easy.
    """
    num_classes = [len(one.classes) for one in facts.evaluations]
    return max(losses[0][1], math.log(max(num_classes, default=1) or 1))


def _window(losses: Sequence[tuple[int, float]]) -> int:
    return min(_LONGEST, max(_SHORTEST, len(losses) // 10))


def _medians(losses: Sequence[tuple[int, float]], size: int) -> list[tuple[int, float]]:
    """Return (last step, median loss) of windows up to the end, overlapping by half."""
    half = max(1, size // 2)
    ends = range(len(losses), size - 1, -half)
    return [
        (losses[end - 1][0], statistics.median(x for _, x in losses[end - size : end]))
        for end in reversed(ends)
    ]


def _rate(facts: RunFacts) -> float:
    return max((step.lr or 0.0 for step in facts.steps), default=0.0)


def _lower(facts: RunFacts) -> str:
    rate = _rate(facts)
    if not rate:
        return "Lower the learning rate to a tenth (--lr)"
    return f"Lower --lr, which reaches {rate:.2g}, to a tenth or less"


def _train_loss(facts: RunFacts, after: int, until: int) -> float | None:
    losses = [loss for step, loss in _losses(facts) if after < step <= until]
    return statistics.median(losses) if losses else None


RULES: Rules[RunFacts] = Rules()


@RULES.add(
    OURS + "; a loss above that of the untrained model has unlearned",
    needs=("losses",),
    severity="error",
    limit=Limit(_ENDED, "{:g} times the beginning"),
)
def divergence(facts: RunFacts) -> Iterator[Observation]:
    """Training loss at the end, or at its highest, over that at the beginning."""
    losses = _losses(facts)
    if len(losses) < _FIRST:
        return
    begun, ended = _begun(facts, losses), _medians(losses, _window(losses))[-1][1]
    peak_at, peak = max(_medians(losses, _SHORTEST), key=lambda each: each[1])
    if begun <= 0 or peak <= begun:
        return
    measured = f"it begins at {begun:.3g}, reaches {peak:.3g} about step {peak_at}, "
    measured += f"and ends at {ended:.3g} (medians)"
    advice = f"{_lower(facts)}; raise --warmup."
    worst, severity = ended / begun, _ERROR
    if peak >= _PEAK * begun and worst <= _ENDED:
        worst, severity = peak / begun, "warning"
    yield Observation("training loss", measured, advice, worst, 1.0, severity)


@RULES.add(OURS, needs=("losses",), severity="error", limit=Limit(0.5, "{:.0%}"))
def loss_rebound(facts: RunFacts) -> Iterator[Observation]:
    """Rise of the training loss after its minimum, as a share of the fall before."""
    losses = _losses(facts)
    if len(losses) < 2 * _FIRST:
        return
    begun, medians = _begun(facts, losses), _medians(losses, _window(losses))
    best_at, best = min(medians, key=lambda each: each[1])
    ended = medians[-1][1]
    if begun - best < _WORTH * begun or ended > _ENDED * begun:
        return  # rules loss_does_not_fall and divergence
    measured = f"it fell from {begun:.3g} to {best:.3g} about step {best_at}, and is "
    measured += f"back at {ended:.3g} in the end (medians)"
    advice = f"{_lower(facts)}; raise --warmup. Keep the checkpoint from before."
    yield Observation(
        "training loss", measured, advice, (ended - best) / (begun - best), 1.0
    )


@RULES.add(OURS, needs=("losses",), limit=Limit(_FLAT, "{:g} of the beginning"))
def loss_does_not_fall(facts: RunFacts) -> Iterator[Observation]:
    """Training loss at the end over that at the beginning, from 50 steps on."""
    losses = _losses(facts)
    if len(losses) < _FEW:
        return
    begun = statistics.median(loss for _, loss in losses[:_FIRST])
    ended = _medians(losses, _window(losses))[-1][1]
    dev = [one.loss for one in facts.evaluations if one.loss is not None]
    if begun <= 0 or ended > _ENDED * begun:
        return
    if len(dev) > 1 and dev[-1] < _FLAT * dev[0]:
        return
    measured = f"it is {begun:.3g} at the beginning and {ended:.3g} after "
    measured += f"{len(losses):,} applied steps (medians)"
    rate = _rate(facts)
    try_ = f", which is {rate:.2g} at most" if rate else ""
    advice = f"Raise --lr{try_}; check that labels match their texts, and "
    advice += "whether what should learn is frozen (--freeze)."
    yield Observation("training loss", measured, advice, ended / begun, 1.0)


@RULES.add(
    OURS + "; a note below 1.3",
    needs=("evaluations",),
    limit=Limit(1.1, "{:g} times the lowest"),
)
def overfitting(facts: RunFacts) -> Iterator[Observation]:
    """Last dev loss over the lowest one, while the training loss falls."""
    losses_of = [(one.step, one.loss) for one in facts.evaluations]
    evals = [(s, x) for s, x in losses_of if x is not None and math.isfinite(x)]
    if len(evals) < 3:  # noqa: PLR2004 -- two points show no turn
        return
    steps, losses = zip(*evals, strict=True)
    best = losses.index(min(losses))
    if best >= len(losses) - 2 or losses[-1] <= losses[best + 1] or not losses[best]:
        return  # a rise at the last evaluation only is no trend
    if losses[-1] - losses[best] < _SMALL * losses[0]:
        return  # a multiple of a loss near 0 means little
    before = _train_loss(facts, steps[best - 1] if best else 0, steps[best])
    after = _train_loss(facts, *steps[-2:])
    if before is None or after is None or after >= before:
        return
    share = losses[-1] / losses[best]
    measured = f"it is lowest at step {steps[best]}, {losses[best]:.3g}, and "
    measured += f"{losses[-1]:.3g} at step {steps[-1]}, while the training loss went "
    measured += f"from {before:.3g} to {after:.3g}: the model memorizes its texts"
    advice = "Stop earlier (--epochs, or --patience 3); or more texts, --dropout, "
    advice += "--mask-tokens, --label-smoothing."
    severity = None if share >= _STEEP else _NOTE
    yield Observation(
        "dev loss", measured, advice, share, min(1.0, share - 1), severity
    )


@RULES.add(
    OURS + "; an error where all texts get one class",
    needs=("classes",),
    limit=Limit(_TRUE - 1, "{:g} of a class"),
)
def class_never_predicted(facts: RunFacts) -> Iterator[Observation]:
    """Dev texts of a class (entities of a type) that the model never predicts."""
    evaluations = [one for one in facts.evaluations if one.classes]
    last = evaluations[-1]
    second_half = evaluations[len(evaluations) // 2 :]
    ever = {c.label for one in second_half for c in one.classes if c.predicted}
    never = [c for c in last.classes if c.true and c.label not in ever]
    present = [c for c in last.classes if c.true]
    if not never:
        return
    total = sum(c.true for c in present)
    never.sort(key=lambda c: -c.true)
    share = sum(c.true for c in never) / total
    only = [c for c in last.classes if c.predicted]
    names = first_names([f"{c.label} ({c.true})" for c in never])
    measured = f"never predicted on dev, with how often each is there: {names}"
    measured += f"; {percent(share)} of {total:,} in all, up to step {last.step}"
    advice = "Give rare classes more weight (--class-weights balanced), or more texts; "
    advice += "train longer (--epochs)."
    severity: Severity | None = None
    if not only or (len(only) == 1 and only[0].predicted == total):
        measured = f"nothing is predicted on dev, which holds {total:,} entities"
        if only:
            measured = f"all {total:,} predictions on dev are {only[0].label!r}"
        measured += f", up to step {last.step}: the model has not learned to tell "
        measured += f"{len(present)} classes"
        advice = "Train longer (--epochs) or with another --lr; look whether labels "
        advice += "belong to their texts."
        severity = _ERROR if len(evaluations) > 1 else None
    yield Observation("classes", measured, advice, never[0].true, share, severity)


@RULES.add(
    OURS + "; a note where the median norm is below 10 times the limit",
    needs=("clip", "norms"),
    limit=Limit(0.9, "{:.0%} of the steps"),
)
def clipping(facts: RunFacts) -> Iterator[Observation]:
    """Share of the applied steps whose gradients were clipped."""
    limit = facts.config.clip
    applied = (step.grad_norm for step in facts.steps if not step.skipped)
    norms = [norm for norm in applied if norm is not None and math.isfinite(norm)]
    if limit is None or len(norms) < _FIRST:
        return
    over = sum(norm > limit for norm in norms)
    share, middle = over / len(norms), statistics.median(norms)
    measured = f"{over:,} of {len(norms):,} steps, {percent(share)}, were clipped to "
    measured += f"norm {limit:g}; the median norm before that is {middle:.3g}"
    advice = "Lower --lr if the loss is unsteady; if it falls well, --clip "
    advice += f"{float(f'{2 * middle:.1g}'):g} clips only what stands out."
    severity = None if middle >= _STRONG * limit else _NOTE
    yield Observation("gradients", measured, advice, share, share, severity)


def _share_of_train(
    facts: RunFacts, field: str, what: str, advice: str, warn: float
) -> Iterator[Observation]:
    train = facts.splits.get("train")
    if train is not None and train.texts:
        count = getattr(train, field)
        share = count / train.texts
        measured = f"{count:,} of {train.texts:,} texts, {percent(share)}, {what}"
        severity = None if share >= warn else _NOTE
        yield Observation("train texts", measured, advice, share, share, severity)


@RULES.add(OURS + "; a note below 10%", needs=("texts",), limit=Limit(0.02, "{:.0%}"))
def repeated_texts(facts: RunFacts) -> Iterator[Observation]:
    """Share of the training texts that equal an earlier one, label included."""
    advice = "Drop them, unless they are meant to count more often."
    what = "equal an earlier one"
    return _share_of_train(facts, "repeated", what, advice, _REPEATED)


@RULES.add(OURS + "; a note below 1%", needs=("texts",), limit=Limit(0.002, "{:.1%}"))
def contradicting_labels(facts: RunFacts) -> Iterator[Observation]:
    """Share of the training texts that also occur with another label."""
    advice = "Decide which label is right; no model can learn both."
    what = "also occur with another label"
    return _share_of_train(facts, "contradicting", what, advice, _CONTRADICTING)


@RULES.add(
    OURS + "; a note below 2%",
    needs=("texts",),
    limit=Limit(0.005, "{:.1%}", severe=_LEAKED_MOST),
)
def leak(facts: RunFacts) -> Iterator[Observation]:
    """Share of the dev or test texts that are also in train."""
    for name, split in facts.splits.items():
        if name == "train" or not split.texts:
            continue
        share = split.in_train / split.texts
        measured = f"{split.in_train:,} of {split.texts:,} texts, {percent(share)}, "
        measured += f"are in train too: scores on {name} are too good"
        advice = f"Take them out of train or {name}."
        severity = _NOTE if share < _LEAKED else None
        yield Observation(f"{name} texts", measured, advice, share, share, severity)

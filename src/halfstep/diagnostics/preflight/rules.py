"""Evaluates the measurements of a check before training: limits, rules and verdict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules
from halfstep.diagnostics.doctor.rules_precision import MOST_FLUSHED, swamped_updates
from halfstep.diagnostics.doctor.run_record import Config, LostUpdates, RunFacts
from halfstep.diagnostics.preflight.measurements import FAR
from halfstep.numerics.formats import FP32
from halfstep.reporting.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfstep.diagnostics.preflight.measurements import Facts, GradientSimilarity

COSINE_WARN = 0.99
"""Smallest cosine to fp32's gradients that is not reported. Our choice: a relative
error of 14 %."""

NOISE_SHARE = 0.1
"""Largest cosine distance that is not reported, relative to that of two halves of the
batch. Our choice: rounding then adds a twentieth to the gradient noise."""

NORM_SHARE = 1e-3
"""Smallest share of the total gradient norm for which a layer is reported: the gradient
of a key's bias in attention is zero, so its computed value is only rounding error."""

LOSS_WARN = 0.01
"""Relative difference of the loss. Our choice; bf16 rounds by 0.4 % at most."""

WORTH_TIME, WORTH_MEMORY = 1.05, 0.1
"""Speed-up, and saved share of the memory, from which a level is worth it. Our choice:
medians of a few steps vary by a few percent."""

TIME_FOR_MEMORY = 0.8
"""Smallest speed relative to fp32 at which saved memory is worth it. Our choice."""

_CONFIDENCE = 0.999
"""Confidence level of the interval of the speed-up. Our choice: it is computed up to 20
times, as rounds come in."""
_MIN_ROUNDS, _WIDENING = 11, 1.5
"""Number of rounds from which that level is possible, as 2 / 2**11 < 0.1 %; factor by
which the range of fewer rounds is widened. Our choice."""

DYNAMIC = 1.0, 2.0**24
"""Range of dynamic scales: `ScaleRule.min_scale` and `max_scale`."""

NO_GRADIENT = "no parameter gets a gradient other than zero"
"""Finding for a loss that does not depend on the weights."""

_NO_RULE = "No rule on modules fixes it: train in bf16, or keep the numbers smaller."

RULES: Rules[Facts] = Rules()


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of all rules, notes and cautions, worst first."""
    results = [finding for rule in RULES for finding in rule.evaluate(facts)]
    if facts.lost is not None:
        run = RunFacts(
            config=Config(facts.level, facts.dtype),
            lost=(LostUpdates(1, 0, facts.lost, facts.optimizer),),
        )
        results += swamped_updates.evaluate(run)
    results += [_note(facts, note, "note") for note in facts.notes]
    results += [_note(facts, caution, "warning") for caution in facts.cautions]
    return tuple(sorted(results, key=lambda one: one.rank))


def _note(facts: Facts, text: str, severity: Severity) -> Finding:
    where = f"{facts.words} on {facts.device}"
    rule = "note" if severity == "note" else "caution"
    return Finding(severity, rule, where, text.rstrip("."), "", "", "")


def speed_up_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a 99.9 % confidence interval of the median speed-up.

    Order statistics: the median is between the k-th smallest and the k-th largest of n
    rounds with probability 1 - 2 P(fewer than k of n fair coins show heads); k is the
    largest with at least 99.9 %. With fewer than 11 rounds there is no such k: the
    result is the minimum and maximum, widened by the factor 1.5.
    """
    ordered, n = sorted(ratios), len(ratios)
    if n < _MIN_ROUNDS:
        return ordered[0] / _WIDENING, ordered[-1] * _WIDENING
    k, missed = 0, 0.0
    while missed + math.comb(n, k) / 2**n <= (1 - _CONFIDENCE) / 2:
        missed += math.comb(n, k) / 2**n
        k += 1
    return ordered[k - 1], ordered[-k]


def is_decided(ratios: Sequence[float]) -> bool:
    """Return whether the interval of the speed-up contains no limit."""
    low, high = speed_up_interval(ratios)
    return not any(low < limit <= high for limit in (WORTH_TIME, TIME_FOR_MEMORY))


def cost(facts: Facts) -> tuple[str, str]:
    """Return "worth", "not worth", "cannot tell" or "" (not timed), and why."""
    faster, saved = facts.speed_up, facts.memory_saved
    if faster is None or saved is None:
        return "", ""
    low, high = speed_up_interval(facts.ratios)
    lean = saved >= WORTH_MEMORY
    worth = [f >= WORTH_TIME or (lean and f >= TIME_FOR_MEMORY) for f in (low, high)]
    less = f"{saved:.0%} less" if saved > 0 else f"{-saved:.0%} more"
    memory = f"{less} memory" if round(saved, 2) else "as much memory"
    if worth[0] != worth[1]:
        measured = f"{low:.2f} to {high:.2f} times the speed of fp32 in "
        measured += f"{len(facts.ratios)} rounds, {memory}"
        return "cannot tell", measured
    measured = f"{faster:.2f} times the speed of fp32, {memory}"
    return "worth" if worth[0] else "not worth", measured


def _distance(similarity: GradientSimilarity) -> float:
    """Return 1 - cosine, >= 0; inf if it is NaN."""
    far = 1 - similarity.cosine
    return math.inf if math.isnan(far) else max(far, 0.0)


def is_far(similarity: GradientSimilarity, noise: GradientSimilarity | None) -> bool:
    """Return whether gradients are too far from fp32's, relative to their noise."""
    far = _distance(similarity)
    if far <= 1 - COSINE_WARN or math.isinf(far):
        return math.isinf(far)
    return noise is None or far > NOISE_SHARE * _distance(noise)


def gradients_differ(facts: Facts) -> bool:
    """Return whether the whole gradient is too far from fp32's."""
    return facts.gradients is not None and is_far(facts.gradients, facts.noise)


@RULES.add(severity="error")
def fp32(facts: Facts) -> Iterator[Observation]:
    """Loss and gradients are finite in fp32."""
    if not facts.finite_fp32:
        yield Observation(
            "loss",
            f"loss {facts.loss_fp32:g} of {facts.bad_batch}, or its gradients, are not "
            "finite in fp32",
            "No format can fix that: check the batch, its labels, the weights and "
            "the loss function; halfstep.find_nonfinite names the operation at fault.",
            weight=1.0,
        )


@RULES.add(severity="error")
def no_gradient(facts: Facts) -> Iterator[Observation]:
    """Some parameter has a gradient other than zero, in fp32."""
    if facts.finite_fp32 and not facts.learns:
        advice = (
            "The loss does not depend on the weights: look for a factor of 0, a loss "
            "that is clamped or saturated, and labels or masks that leave every target "
            "out."
        )
        measured = f"{NO_GRADIENT}, not even in fp32"
        yield Observation("gradients", measured, advice, weight=1.0)


@RULES.add(severity="error")
def level(facts: Facts) -> Iterator[Observation]:
    """Passes and steps run at the level."""
    if facts.failed:
        advice = "Use level O1, where operations are cast one by one, or fix the model."
        measured = f"raises {facts.failed}"
        yield Observation(facts.words, measured, advice, weight=1.0)


@RULES.add("the format")
def overflow(facts: Facts) -> Iterator[Observation]:
    """The first inf or NaN of a pass that is finite in fp32."""
    bad = facts.fault
    tried = facts.finite_fp32 and facts.learns and facts.format != FP32
    if bad is None and not facts.finite and not facts.failed and tried:
        measured = "inf or NaN at each loss scale that was tried"
        yield Observation("gradients", measured, _NO_RULE, None, 1.0, "error")
    if bad is None or (bad.normal and facts.safe_scale and facts.safe_scale >= 1):
        return  # a lower scale fixes it: rule `loss_scale`
    wrong = not facts.finite or bool(facts.rules) or gradients_differ(facts)
    passed = " in its backward pass" if bad.phase == "backward" else ""
    measured = f"{bad.nonfinite_kind or 'inf or NaN'}{passed} at loss scale "
    measured += f"{power(bad.scale)}: {bad.evidence}"
    advice = _NO_RULE
    if facts.rules:
        rules = f"{', '.join(facts.rules)} (policy={facts.policy!r})"
        advice = f"Keep in float32: {rules}; or train in bf16."
    elif passed and facts.finite and facts.safe_scale is not None:
        scale = power(facts.safe_scale)
        advice = f"Only a loss scale below 1 fixes it, such as {scale}; or train in "
        advice += "bf16."
    elif not wrong:
        advice = "Loss and gradients still match fp32's; to be sure, keep "
        advice += "it in float32."
    severity: Severity = "error" if wrong else "warning"
    limit = _format_limit(facts)
    yield Observation(bad.place, measured, advice, None, 1.0, severity, limit)


def _format_limit(facts: Facts) -> str:
    return f"{facts.dtype} holds {facts.format.max:g}"


@RULES.add("the format")
def loss_scale(facts: Facts) -> Iterator[Observation]:
    """Gradients are finite at the default loss scale."""
    if facts.safe_scale is None or facts.default_finite:
        return
    bad = facts.fault
    where = "gradients" if bad is None or bad.phase != "backward" else bad.place
    advice = _how(facts.safe_scale)
    if facts.safe_scale >= DYNAMIC[0]:
        steps = round(math.log2(facts.default_scale / facts.safe_scale))
        advice += f" A dynamic scale skips about {steps} steps on its way there."
    measured = "gradients overflow at the default loss scale "
    measured += f"{power(facts.default_scale)}; {power(facts.safe_scale)} is safe"
    yield Observation(where, measured, advice, weight=0.5, limit=_format_limit(facts))


def _how(scale: float) -> str:
    low, high = DYNAMIC
    if low <= scale <= high:
        return f"Begin at {power(scale)}, by loss_scale=ScaleRule(init_scale=...)."
    return f"Use loss_scale={power(scale)}, or bf16."


@RULES.add(
    "our choice, after Micikevicius et al. 2018", limit=Limit(MOST_FLUSHED, "{:.0%}")
)
def underflow(facts: Facts) -> Iterator[Observation]:
    """Share of fp32's gradients that become zero at the default loss scale."""
    if not facts.curve:
        return
    lost, scale = facts.curve[0].flushed, facts.curve[0].scale
    best = next((p for p in facts.curve[1:] if p.scale == facts.safe_scale), None)
    advice = "Train in bf16, which reaches as far as fp32."
    if best is not None and best.flushed < lost / 2:
        advice = f"{_how(best.scale)} There {best.flushed:.1%} are lost."
    measured = f"{lost:.1%} of fp32's gradients other than zero become zero in "
    measured += f"{facts.dtype} at loss scale {power(scale)}"
    yield Observation("gradients", measured, advice, lost, lost)


@RULES.add(OURS, severity="error")
def gradients(facts: Facts) -> Iterator[Observation]:
    """Cosine of all gradients to fp32's."""
    if gradients_differ(facts):
        measured = f"cosine of all gradients to fp32's {cosine(facts.gradients)}"
        advice = "Keep the modules named below in float32, or train in fp32."
        limit = f"at least cosine {COSINE_WARN}"
        yield Observation("gradients", measured, advice, weight=0.9, limit=limit)


@RULES.add(OURS, places=None)
def gradient(facts: Facts) -> Iterator[Observation]:
    """Cosine of a module's gradients to fp32's."""
    noise = {one.where: one for one in facts.noise_layers}
    total_norm = facts.gradients.norm if facts.gradients is not None else 0.0
    for one in facts.layers:
        share = one.norm / total_norm if total_norm else 0.0
        own_noise = noise.get(one.where)
        if share < NORM_SHARE or not is_far(one, own_noise):
            continue
        measured = f"cosine to fp32's gradient {cosine(one)}, SQNR {one.sqnr:.1f} dB, "
        measured += f"{one.flushed:.1%} flushed"
        measured += f", {facts.noise_of} {own_noise.cosine:.4f}" if own_noise else ""
        advice = f"Keep it in float32: 'module:{one.where}=fp32'."
        limit = f"at least cosine {COSINE_WARN}"
        yield Observation(one.where, measured, advice, weight=share, limit=limit)


@RULES.add(OURS, limit=Limit(LOSS_WARN, "{:.0%}"))
def loss(facts: Facts) -> Iterator[Observation]:
    """Relative difference of the loss to fp32's."""
    error = facts.loss_error
    if error is not None and facts.finite:
        measured = f"{facts.loss:.6g}, in fp32 {facts.loss_fp32:.6g}: {error:+.2%}"
        advice = "Compute the loss, and what leads up to it, in float32."
        yield Observation("loss", measured, advice, abs(error), abs(error))


@RULES.add(OURS, limit=Limit(FAR, "{:.0%}"), severity="error")
def output(facts: Facts) -> Iterator[Observation]:
    """Relative error of a module's output, where its inputs agree with fp32's."""
    error = facts.output_error
    if error is None:
        return
    place = f"{error.path or 'model'} ({error.kind})"
    measured = f"its output is {error.error:.0%} away from fp32's, its inputs "
    measured += f"{error.inputs:.1%}: positions, angles or sums in {facts.dtype}"
    advice = "No rule helps: compute it, and keep its buffers, in float32 by hand."
    if error.rule:
        advice = f"Keep it in float32: policy='{facts.policy} + {error.rule}'."
    yield Observation(place, measured, advice, error.error, 1.0)


@RULES.add(severity="error", name="caution")
def weight_nan(facts: Facts) -> Iterator[Observation]:
    """Causes of NaN weights."""
    if facts.weight_nan_warning:
        measured, _, advice = facts.weight_nan_warning.partition(". ")
        yield Observation(facts.optimizer, measured, advice, weight=1.0)


@RULES.add(severity="error")
def weights(facts: Facts) -> Iterator[Observation]:
    """Weights are finite after the timed steps."""
    if not facts.weights_finite:
        measured = "weights of the copy are inf or NaN after the timed steps"
        advice = "Use level O2, whose optimizer works in fp32, or lower the learning "
        yield Observation(facts.words, measured, advice + "rate.", weight=1.0)


@RULES.add(OURS, name="cost")
def too_costly(facts: Facts) -> Iterator[Observation]:
    """Whether a level is worth its cost."""
    state, measured = cost(facts)
    if state not in {"not worth", "cannot tell"} or not facts.finite:
        return
    advice = "Train in fp32 (level O0), or try larger batches, where matrix products "
    advice += "take more of the time."
    if state == "cannot tell":
        advice = "Check again on an idle machine, with more steps=."
    limit = f"worth it: {WORTH_TIME} times as fast, or {WORTH_MEMORY:.0%} less memory "
    limit += f"at no less than {TIME_FOR_MEMORY} times the speed"
    severity: Severity = "warning" if state == "not worth" else "note"
    # Without a weight: numbers that are wrong come before costs.
    yield Observation(facts.words, measured, advice, None, 0.0, severity, limit)


def failures(facts: Facts, results: Sequence[Finding]) -> list[Finding]:
    """Return the errors that no rule on modules and no loss scale fixes."""
    return [
        one
        for one in results
        if one.severity == "error" and not (one.rule == overflow.name and facts.rules)
    ]


def is_good(facts: Facts, results: Sequence[Finding]) -> bool:
    """Return whether training can begin as asked, at worst with another loss scale."""
    if failures(facts, results) or facts.rules:
        return False
    return facts.format == FP32 or cost(facts)[0] != "not worth"


def verdict(facts: Facts, results: Sequence[Finding]) -> str:
    """Return the most important result as a sentence.

    Numerical problems come before costs; "not worth it" is about costs only.
    """
    failed = failures(facts, results)
    if failed:
        return f"fails: {failed[0].where}: {failed[0].measured}"
    if facts.format == FP32:
        level = f"{facts.level} is fp32 itself, and finite ({facts.reason})"
        return f"nothing to compare: {level}"
    state, measured = cost(facts)
    asked = None if facts.scale == facts.default_scale else facts.safe_scale
    scale = f"a loss scale of {power(asked)}" if asked else ""
    if facts.rules:
        parts = [f"keep these modules in float32: {', '.join(facts.rules)}"]
        parts += [f"with {scale}"] * bool(scale)
    elif state == "not worth":
        parts = [f"overflows: use {scale}"] * (bool(scale) and not facts.default_finite)
    else:
        parts = [f"good with {scale}" if scale else "good"]
    if state == "not worth":
        parts.append(f"not worth it: {measured}")
    elif state == "cannot tell":
        parts.append(f"cannot tell whether it is worth it: {measured}")
    return "; ".join(parts)


def power(scale: float) -> str:
    """Format a loss scale: 1024, or 2**30 if it is large or below 1."""
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not 1 <= scale <= 2**20:  # noqa: PLR2004
        return f"2**{exponent - 1}"
    return f"{scale:g}" if scale < 1e5 else f"{scale:.0f}"  # noqa: PLR2004


def cosine(similarity: GradientSimilarity | None) -> str:
    """Format a cosine with 5 digits."""
    assert similarity is not None  # noqa: S101 -- the pass was finite
    return f"{similarity.cosine:.5f}"

"""Doctor rules on range and precision of values, weights, updates and sums.

Gradients are judged as in the backward pass: multiplied by the loss scale.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules, percent
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.numerics.tensor_summary import (
    flushed_share,
    max_exponent,
    merged,
    share_below,
    underflow_exponent,
)
from halfstep.policy.levels import Level, parse
from halfstep.scaling.step_report import first_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.diagnostics.doctor.run_record import RunFacts

_FINE = 0.001  # flushed share of gradients that does no harm: arXiv 1710.03740
MOST_FLUSHED = 0.01  # share of gradients beyond which a scale is too low
_MARGIN = 1  # powers of two between the largest gradient and overflow
_HIGHEST = 24  # exponent of the largest dynamic loss scale by default
_GUIDE = (
    "our choice; 1710.03740: at 5 % master weights were needed, at 31 % SSD diverged"
)
_FORMAT = "format fact: fp16 holds numbers up to 65504"


def _in_fp16(facts: RunFacts) -> bool:
    return facts.dtype in {None, "fp16"}


def safe_scale(facts: RunFacts) -> float:
    """Return the largest loss scale at which no sampled gradient is near overflow.

    It is 2**(15 - largest exponent of the unscaled gradients - 1), at most 2**24, the
    default maximum of a dynamic scale. There must be gradients.
    """
    samples = [s for history in facts.gradients.values() for s in history]
    largest = max(s.summary.amax / s.scale for s in samples)
    highest = math.frexp(largest)[1] - 1
    return float(2.0 ** min(max_exponent(formats.FP16) - highest - _MARGIN, _HIGHEST))


def _scale_word(scale: float) -> str:
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"


def _scale_advice(facts: RunFacts) -> str:
    """Return the common advice of the findings on small and large gradients.

    It names one loss scale, since a run has one for all tensors. Estimate: if small
    values are evenly distributed, each doubling of the scale halves the flushed share.
    """
    safe = safe_scale(facts)
    word, low = _scale_word(safe), underflow_exponent(formats.FP16)
    per_tensor = facts.gradients.values()
    worst_flushed = max(flushed_share(s, formats.FP16) for s in per_tensor)
    raised = max(0, math.ceil(math.log2(worst_flushed / _FINE))) if worst_flushed else 0
    lost = max(share_below(merged(s, safe), low) for s in per_tensor)
    if raised and facts.scale * 2.0**raised > safe:
        needed = _scale_word(facts.scale * 2.0**raised)
        return (
            f"Train in bf16 (--dtype bf16): fp16 would take a loss scale of {needed} "
            f"here, and the largest gradient allows {word}."
        )
    if lost > MOST_FLUSHED:
        return (
            f"Train in bf16 (--dtype bf16): the largest gradient allows a loss scale "
            f"of {word}, at which {percent(lost)} of a tensor's gradients become 0."
        )
    return (
        f"Use --loss-scale {word}: the largest that keeps "
        "all gradients away from overflow."
    )


def _fixed(facts: RunFacts) -> bool:
    """Return whether the loss scale is fixed, or unknown."""
    config = facts.config
    return config.loss_scale in {None, "none"} or config.fixed_scale is not None


_LOW = ("bf16", "fp16")


def _level(facts: RunFacts) -> Level | None:
    """Return the run's level; None if it is unknown or not one of O0 to O3."""
    try:
        return parse(facts.config.level or "")
    except UserError:
        return None


def _masters_advice(facts: RunFacts) -> str:
    if facts.dtype == "fp16":
        return "Keep fp32 master weights: level O2, master fp32."
    return (
        "Keep master weights: level O2 with master split (exact, 16 bits a weight), "
        "kahan (as lean, bf16 moments too) or stochastic (nothing kept, right on "
        "average)."
    )


def _low_and_alone(facts: RunFacts) -> bool:
    """Return whether weights are (or may be) 16-bit without master weights."""
    level = _level(facts)
    if facts.dtype == "fp32" or level is None:
        return facts.dtype != "fp32"
    has_masters = level.masters and facts.config.master_weights != "none"
    return level.low_weights and not has_masters


RULES: Rules[RunFacts] = Rules()


@RULES.add(
    _GUIDE,
    needs=("dtype", "gradients", "scale of gradients"),
    limit=Limit(MOST_FLUSHED, "{:.0%}", severe=0.05),
    concerns=_in_fp16,
)
def underflow(facts: RunFacts) -> Iterator[Observation]:
    """Estimated share of a tensor's gradients that fp16 flushes to zero."""
    advice = _scale_advice(facts)
    for name, samples in facts.gradients.items():
        share = flushed_share(samples, formats.FP16)
        measured = f"about {percent(share)} of its gradients become 0 in fp16"
        measured += f" at loss scale {_scale_word(samples[-1].scale)}"
        yield Observation(name, measured, advice, share, share)


@RULES.add(
    _FORMAT + "; the margin is our choice",
    needs=("dtype", "outputs"),
    limit=Limit(1, "a factor of 2^{:g}", below=True),
    concerns=_in_fp16,
)
def output_near_overflow(facts: RunFacts) -> Iterator[Observation]:
    """Powers of two between a module's largest output and 65504."""
    for name, samples in facts.samples(":output"):
        stats = [s.summary for s in samples if s.summary.dtype == "fp16"]
        stats = [one for one in stats if 0 < one.amax <= formats.FP16.max]
        if stats:
            amax = max(one.amax for one in stats)
            room = math.log2(formats.FP16.max / amax)
            module = name.removesuffix(":output")
            advice = f"Keep it in fp32: --policy 'lean + module:{module}=fp32', "
            advice += "or train in bf16."
            measured = f"it reaches {amax:.3g}, a factor of 2^{room:.1f} below overflow"
            yield Observation(name, measured, advice, room, min(1.0, 2.0**-room))


@RULES.add(
    _FORMAT + "; the margin is our choice",
    needs=("dtype", "loss scale", "gradients"),
    limit=Limit(1, "a factor of 2^{:g}", below=True),
    concerns=lambda facts: _in_fp16(facts) and _fixed(facts),
)
def gradient_near_overflow(facts: RunFacts) -> Iterator[Observation]:
    """Powers of two between the largest gradient and 65504, at a fixed scale."""
    if facts.config.loss_scale is None:
        return  # recorded scales may be constant although the scale is dynamic
    largest = {
        name: max(s.summary.amax / s.scale for s in samples) * facts.scale
        for name, samples in facts.gradients.items()
    }
    for name, amax in largest.items():
        if not amax:
            continue  # rescaling underflowed to 0: far from overflow
        room = math.log2(formats.FP16.max / amax)
        measured = f"its largest gradient, times the scale, is {amax:.3g}, a factor of "
        measured += f"2^{room:.1f} below overflow"
        advice = _scale_advice(facts)
        if facts.config.loss_scale == "none":
            advice = "Take a mean, not a sum, as the loss; or train in bf16."
        yield Observation(name, measured, advice, room, min(1.0, 2.0**-room))


@RULES.add(
    OURS + "; rounding alone costs 7.5 dB at worst, as of numbers all alike",
    needs=("dtype", "outputs"),
    severity="note",
    limit=Limit(8, "{:g} dB"),
    concerns=lambda facts: facts.dtype != "fp32",
)
def coarse(facts: RunFacts) -> Iterator[Observation]:
    """How far the SQNR of a cast of an output is below the format's best, in dB."""
    format_ = formats.parse(facts.dtype or "bf16")
    # 10 log10(28) + 6.02 mantissa_bits dB for uniform mantissas; normally distributed
    # values have about 1 dB less, and equal values all half an ulp off 7.5 dB less.
    best = 13.5 + 6.02 * format_.mantissa_bits
    for name, samples in facts.samples(":output"):
        casts = [s.summary.casts.get(format_.name) for s in samples]
        sqnrs = [sqnr for sqnr in casts if sqnr is not None]
        if sqnrs:
            lost = best - min(sqnrs)
            module = name.removesuffix(":output")
            advice = f"Keep it in fp32: --policy 'lean + module:{module}=fp32'."
            measured = f"{min(sqnrs):.0f} dB are left of it in {format_}, of {best:.0f}"
            yield Observation(name, measured, advice, lost)


@RULES.add(
    "our choice; bf16 loses updates below 2^-9 to 2^-8 of the weight",
    needs=("dtype", "lost updates"),
    limit=Limit(0.05, "{:.0%}", severe=0.5),
    concerns=lambda facts: bool(facts.lost) or _low_and_alone(facts),
)
def swamped_updates(facts: RunFacts) -> Iterator[Observation]:
    """Share of a parameter group's updates lost to rounding."""
    groups: dict[str, list[float]] = {}
    for lost in facts.lost:
        where = lost.optimizer or f"parameter group {lost.group}"
        groups.setdefault(where, []).append(lost.share)
    for where, shares in groups.items():
        share = sum(shares) / len(shares)
        measured = f"{percent(share)} of its updates were rounded away, over "
        measured += "one count" if len(shares) == 1 else f"{len(shares)} counts"
        yield Observation(where, measured, _masters_advice(facts), share, share)


@RULES.add(
    "at lr 2e-5 and weights of 0.04, bf16 loses 85 % of the updates",
    needs=("level", "dtype"),
    severity="note",
    concerns=_low_and_alone,
)
def no_masters(facts: RunFacts) -> Iterator[Observation]:
    """16-bit weights without master weights; lost updates were not counted."""
    if not facts.lost:
        measured = f"{facts.dtype} weights without master weights, and updates lost to "
        measured += "rounding were not counted"
        advice = _masters_advice(facts)
        advice += " session.count_rounding_loss(every=100) counts."
        yield Observation("weights", measured, advice)


@RULES.add(
    "the level's promise: fp32 weights",
    needs=("level", "weights"),
    severity="error",
    limit=Limit(0, "{:g} parameters"),
    concerns=lambda facts: (level := _level(facts)) is None or not level.low_weights,
)
def weights_already_low(facts: RunFacts) -> Iterator[Observation]:
    """Parameters in 16 bits before a level that keeps fp32 weights."""
    low = [name for name, word in facts.weights.items() if word in _LOW]
    level = _level(facts)
    if low and level is not None and not level.low_weights:
        word = facts.weights[low[0]]
        measured = f"{len(low)} of {len(facts.weights)} parameters came in {word}, "
        measured += f"which level {level} updates without master weights: "
        measured += first_names(low)
        advice = "Call model.float() before prepare; or store them low on purpose, "
        advice += "with master weights: --level O2."
        share = len(low) / len(facts.weights)
        yield Observation("weights", measured, advice, len(low), share)


@RULES.add(
    "torch: allow_fp16_accumulation; sums beyond 2,048 lose ones",
    needs=("dtype", "machine"),
    concerns=lambda facts: facts.dtype in {None, "fp16"} and facts.device != "cpu",
)
def fp16_sums(facts: RunFacts) -> Iterator[Observation]:
    """Matmuls that accumulate in fp16."""
    machine = facts.machine
    if machine is not None and machine.fp16_accumulation and facts.dtype == "fp16":
        measured = "torch may add up products of fp16 numbers in fp16"
        advice = "Set torch.backends.cuda.matmul.allow_fp16_accumulation = False."
        yield Observation("matrix products", measured, advice, weight=1.0)


@RULES.add(
    OURS + "; each addition rounds at 2^-8 in bf16, at 2^-11 in fp16",
    needs=("level", "dtype"),
    limit=Limit(3),
    concerns=_low_and_alone,
)
def gradients_summed_low(facts: RunFacts) -> Iterator[Observation]:
    """Micro-batches whose gradients are summed in 16 bits."""
    count = facts.config.accumulate or 1
    measured = f"{count} micro-batches are added up in {facts.dtype}"
    advice = "Keep master weights, which add them up in fp32: --level O2."
    yield Observation("gradients", measured, advice, count)

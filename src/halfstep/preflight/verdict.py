"""The verdict of a check before training, in one sentence.

In: `Facts`. Out: the sentence, and the findings that it rests on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.formats import FP32
from halfstep.preflight import rules

if TYPE_CHECKING:
    from halfstep.finding import Finding
    from halfstep.preflight.facts import Facts

NOTHING = "nothing to compare"
"""How the verdict on fp32 begins."""


def judge(facts: Facts) -> tuple[str, tuple[Finding, ...]]:
    """Return the verdict and the findings, worst first."""
    return verdict(facts), rules.findings(facts)


def verdict(facts: Facts) -> str:
    """Return "good", or with a loss scale, or with rules, or "not worth it: why".

    Of fp32 itself, that there is nothing to compare.
    """
    why_not = _why_not(facts)
    if why_not:
        return f"not worth it: {why_not}"
    if facts.format == FP32:
        itself = f"{facts.level} is fp32 itself, and finite"
        return f"{NOTHING}: {itself} ({facts.reason})"
    asked = _scale_asked(facts)
    scale = f"a loss scale of {rules.power(asked)}" if asked else ""
    if facts.rules:
        kept = f"keep these modules in float32: {', '.join(facts.rules)}"
        return f"{kept}; with {scale}" if scale else kept
    return f"good with {scale}" if scale else "good"


def _why_not(facts: Facts) -> str:
    """Return the first reason against the level, "" where there is none."""
    if not facts.finite_fp32:
        return "loss or gradients are not finite in fp32 either"
    if not facts.learns:
        return f"{rules.NO_GRADIENT}, in fp32 either"
    if facts.format == FP32:
        return ""
    if facts.failed:
        return f"{facts.words} fails: {facts.failed}"
    if not facts.finite:
        where = facts.fault.where if facts.fault else "the gradients"
        return f"{where} overflows {facts.dtype} and no rule on modules mends it"
    return _why_not_better(facts)


def _why_not_better(facts: Facts) -> str:
    """Return the same of a level whose passes are finite."""
    if strays(facts):
        return f"gradients differ from fp32's: cosine {rules.cosine(facts.gradients)}"
    if facts.ruin:
        return facts.ruin.partition(". ")[0]
    if not facts.weights_finite:
        return "weights are inf or NaN after a few steps, in fp32 they are finite"
    if facts.lost is not None and facts.lost > rules.LOST_ALARM:
        return f"{facts.lost:.0%} of the updates are rounded away"
    return rules.costs_more(facts)


def strays(facts: Facts) -> bool:
    """Say whether the whole gradient is too far from fp32's."""
    assert facts.gradients is not None  # noqa: S101 -- the pass was finite
    return rules.is_far(facts.gradients, facts.noise)


def _scale_asked(facts: Facts) -> float | None:
    """Return the loss scale that the verdict names, where the default is not good."""
    if facts.safe_scale is None or facts.scale == facts.default_scale:
        return None
    return facts.safe_scale

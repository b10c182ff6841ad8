"""The verdict of a check before training, in one sentence.

In: `Facts`. Out: the sentence, and the findings that it rests on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.diagnostics.preflight import rules
from halfstep.numerics.formats import FP32

if TYPE_CHECKING:
    from halfstep.diagnostics.preflight.measurements import Facts
    from halfstep.reporting.finding import Finding

NOTHING = "nothing to compare"
"""How the verdict on fp32 begins."""


def verdict_and_findings(facts: Facts) -> tuple[str, tuple[Finding, ...]]:
    """Return the verdict and the findings, worst first."""
    return verdict(facts), rules.findings(facts)


def verdict(facts: Facts) -> str:
    """Return the gravest of what was found, as a sentence.

    Numbers come before costs: "not worth it" is only said of what costs more.
    """
    wrong = _failure(facts)
    if wrong:
        return f"fails: {wrong}"
    if facts.format == FP32:
        itself = f"{facts.level} is fp32 itself, and finite"
        return f"{NOTHING}: {itself} ({facts.reason})"
    state, measured = rules.cost(facts)
    numbers = _numbers(facts)
    if state == "not worth":
        words = f"not worth it: {measured}"
        if facts.rules:
            return f"{numbers}; {words}"
        return words if facts.default_finite else f"{_use(numbers)}; {words}"
    if state == "cannot tell":
        return f"{numbers}; cannot tell whether it is worth it: {measured}"
    return numbers


def _use(numbers: str) -> str:
    """Return what numbers need where something else keeps them from being good."""
    return numbers.replace("good with", "overflows: use", 1)


def _numbers(facts: Facts) -> str:
    """Return what loss and gradients need to be like fp32's."""
    asked = _scale_asked(facts)
    scale = f"a loss scale of {rules.power(asked)}" if asked else ""
    if facts.rules:
        fp32_modules = f"keep these modules in float32: {', '.join(facts.rules)}"
        return f"{fp32_modules}; with {scale}" if scale else fp32_modules
    return f"good with {scale}" if scale else "good"


def _failure(facts: Facts) -> str:
    """Return the first reason why training would be wrong, "" where there is none."""
    if not facts.finite_fp32:
        return "loss or gradients are not finite in fp32 either"
    if not facts.learns:
        return f"{rules.NO_GRADIENT}, in fp32 either"
    if facts.format == FP32:
        return ""
    if facts.failed:
        return f"{facts.words} raises {facts.failed}"
    where = facts.fault.where if facts.fault else "the gradients"
    overflows = f"{where} overflows {facts.dtype} and no rule on modules fixes it"
    if not facts.finite:
        return overflows
    return _numeric_failure(facts, overflows)


def _numeric_failure(facts: Facts, overflows: str) -> str:
    """Return the same of a level whose passes are finite."""
    if gradients_differ(facts):
        if facts.fault is not None and facts.fault.op and not facts.rules:
            return overflows
        return f"gradients differ from fp32's: cosine {rules.cosine(facts.gradients)}"
    if facts.weight_nan_warning:
        return facts.weight_nan_warning.partition(". ")[0]
    if not facts.weights_finite:
        return "weights are inf or NaN after a few steps, in fp32 they are finite"
    if facts.lost is not None and facts.lost > rules.LOST_ALARM:
        return f"{facts.lost:.0%} of the updates are rounded away"
    return ""


def gradients_differ(facts: Facts) -> bool:
    """Say whether the whole gradient is too far from fp32's."""
    assert facts.gradients is not None  # noqa: S101 -- the pass was finite
    return rules.is_far(facts.gradients, facts.noise)


def _scale_asked(facts: Facts) -> float | None:
    """Return the loss scale that the verdict names, where the default is not good."""
    if facts.safe_scale is None or facts.scale == facts.default_scale:
        return None
    return facts.safe_scale

"""Defines rules of the doctor and evaluates them on the facts of a run.

A rule's function returns observations; `Rule.evaluate` compares them with the limit.
`NEEDS` says why a rule cannot be evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from halfstep.reporting.finding import Finding, Severity
from halfstep.reporting.table import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from halfstep.diagnostics.doctor.run_record import RunFacts

F = TypeVar("F")

OURS = "our choice"
"""Source of a limit without a published one."""


@dataclass(frozen=True)
class Observation:
    """What a rule observed in one place; the last two override those of the rule."""

    where: str
    measured: str
    advice: str
    value: float | None = None
    """Compared with the limit; None: the observation is a finding in any case."""
    weight: float = 0.0
    """Affected share of the time or of the values, 0 to 1."""
    severity: Severity | None = None
    limit: str | None = None


@dataclass(frozen=True)
class Limit:
    """A threshold beyond which a value is a finding."""

    value: float
    unit: str = "{:g}"
    """Format string of a value with its unit."""
    severe: float | None = None
    """Upper threshold beyond which the finding is an error."""
    below: bool = False
    """Whether values below the threshold are findings, instead of those above."""

    def is_passed(self, value: float) -> bool:
        """Return whether a value is beyond the limit."""
        return value < self.value if self.below else value > self.value

    def __str__(self) -> str:
        """Return the limit in words."""
        if not self.value:
            return "none"
        return f"at {'least' if self.below else 'most'} {self.unit.format(self.value)}"


@dataclass(frozen=True)
class Rule(Generic[F]):
    """A check for one kind of problem."""

    name: str
    about: str
    source: str
    """Where the limit is from."""
    observe: Callable[[F], Iterable[Observation]]
    needs: tuple[str, ...] = ()
    """Facts without which the rule cannot be evaluated: names in `NEEDS`."""
    severity: Severity = "warning"
    limit: Limit | None = None
    """None: every observation is a finding."""
    concerns: Callable[[F], bool] = lambda _: True
    places: int | None = 3
    """Findings that are listed, further ones are counted; None: no limit."""

    def evaluate(self, facts: F) -> list[Finding]:
        """Return the rule's findings, worst first; the last may count further ones."""
        findings = [*filter(None, map(self._finding, self.observe(facts)))]
        findings.sort(key=lambda each: each.rank)
        listed = findings[: self.places]
        if rest := len(findings) - len(listed):
            last = listed[-1]
            more = f"{last.measured}; and so in {format_count(rest, 'more place')}"
            listed[-1] = replace(last, measured=more)
        return listed

    def _finding(self, each: Observation) -> Finding | None:
        """Return an observation as a finding; None if it is within the limit."""
        limit, value = self.limit, each.value
        severity, words = each.severity or self.severity, each.limit
        if limit is not None and value is not None:
            if not limit.is_passed(value):
                return None
            if limit.severe is not None and value > limit.severe:
                severity = "error"
        if words is None:
            words = "" if limit is None else str(limit)
        return Finding(
            severity,
            rule=self.name,
            where=each.where,
            measured=each.measured,
            limit=words,
            source=self.source,
            advice=each.advice,
            weight=min(1.0, max(0.0, each.weight)),
        )


class Rules(list[Rule[F]], Generic[F]):
    """Rules in the order of the docs."""

    def add(
        self,
        source: str = "",
        *,
        name: str = "",
        **fields: Any,  # noqa: ANN401 -- of `Rule`
    ) -> Callable[[Callable[[F], Iterable[Observation]]], Rule[F]]:
        """Decorate a function to become the `observe` of a new rule.

        The first line of its docstring becomes `about`. The rule's name is `name`, or
        the function's with blanks for underscores.
        """

        def decorate(observe: Callable[[F], Iterable[Observation]]) -> Rule[F]:
            words = name or observe.__name__.replace("_", " ")
            about = (observe.__doc__ or "").partition("\n")[0].rstrip(".")
            about = about[:1].lower() + about[1:]
            rule = Rule(words, about, source, observe, **fields)
            self.append(rule)
            return rule

        return decorate


_BY_PROBE = (
    "which a probe writes: halfstep train --probe sampled, or halfstep.Probe(model, "
    '"sampled", log=...) in a loop of your own'
)


def _recorded(field: str) -> Callable[[RunFacts], bool]:
    """Return a predicate: whether the record of any step has a field."""
    return lambda facts: any(getattr(s, field) is not None for s in facts.steps)


def _is_profiled(facts: RunFacts) -> bool:
    return facts.profile is not None and facts.profile.wall_s > 0


def _has_loss_scale(facts: RunFacts) -> bool:
    is_set = facts.config.loss_scale == "none" or any(s.scale for s in facts.steps)
    samples = (s for history in facts.gradients.values() for s in history)
    return is_set or any(s.scale != 1 for s in samples)


def _is_probed(facts: RunFacts) -> bool:
    on = facts.config.probe not in {None, "off"}
    return on or bool(facts.stats or facts.non_finite or facts.bad_ops)


NEEDS: dict[str, tuple[Callable[[RunFacts], bool], str]] = {
    "level": (
        lambda f: f.config.level is not None,
        'the level is not known (level=, or "level" in config.json)',
    ),
    "dtype": (
        lambda f: f.dtype is not None,
        'the 16-bit format is not known (dtype=, or "dtype" in config.json)',
    ),
    "loss scale": (
        lambda f: f.config.loss_scale is not None or any(s.scale for s in f.steps),
        "neither settings nor records have a loss scale",
    ),
    "steps": (_recorded("skipped"), "no records of which steps were skipped"),
    "losses": (_recorded("loss"), "no records of steps have a loss"),
    "scales": (_recorded("scale"), "no records of steps have a loss scale"),
    "rates of learning": (_recorded("lr"), "no records of steps have a learning rate"),
    "outputs": (
        lambda f: any(True for _ in f.samples(":output")),
        f"no statistics of outputs, {_BY_PROBE}",
    ),
    "gradients": (
        lambda f: bool(f.gradients),
        f"no statistics of fp16 gradients, {_BY_PROBE}",
    ),
    "scale of gradients": (
        _has_loss_scale,
        'the loss scale of the observed gradients is not known ("scale" in records)',
    ),
    "probe": (_is_probed, f"no records of non-finite tensors, {_BY_PROBE}"),
    "profile": (
        _is_profiled,
        "no profile of a step (profile.json, or halfstep.diagnose on your own step)",
    ),
    "input time": (
        lambda f: (
            _is_profiled(f) or any(s.input_s is not None and s.total_s for s in f.steps)
        ),
        "neither records nor a profile have the time of data loading",
    ),
    "machine": (
        lambda f: f.machine is not None,
        "no facts about the machine (environment.json)",
    ),
    "weights": (
        lambda f: bool(f.weights),
        "the format of the weights before prepare is not known (environment.json)",
    ),
    "lost updates": (
        lambda f: bool(f.lost),
        "updates lost to rounding were not counted (session.count_rounding_loss)",
    ),
}
"""Name of a fact -> whether it is known, and the reason to report if not."""


@dataclass(frozen=True)
class Examination:
    """The result of evaluating rules on a run."""

    findings: tuple[Finding, ...]
    """Worst first."""
    not_evaluated: Mapping[str, Sequence[str]]
    """Why a fact is missing that could be provided -> rules that need it."""
    num_evaluated: int


def percent(share: float) -> str:
    """Format a share as a percentage, with one more digit near 0 and near 1."""
    if math.isnan(share):  # recorded times may sum beyond float64
        return "an unknown part"
    is_round = not share or 0.1 <= share < 0.99 or share == 1  # noqa: PLR2004
    return f"{share:.0%}" if is_round else f"{share:.1%}"

"""A rule as a row, and what comes of holding it against a run.

In: a `Rule` and `RunFacts`. Out: findings, or why there was nothing to look at. The
comparison with the limit is here, once; a rule's function only says what was seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.reporting.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from halfstep.diagnostics.doctor.run_record import RunFacts

OURS = "our choice"
"""Source of a limit for which nobody has published a better one."""
_PLACES = 3  # of one rule that are findings of their own; the rest is counted


@dataclass(frozen=True)
class Observation:
    """What a rule's function saw in one place, healthy or not."""

    where: str
    measured: str
    """In words, with its unit."""
    advice: str
    value: float | None = None
    """What is held against the limit; None: seeing it at all is the finding."""
    weight: float = 0.0
    """Share of the time or of the numbers that it concerns, 0 to 1."""
    severity: Severity | None = None
    """Where this place's is not the rule's."""


def _always(facts: RunFacts) -> bool:
    del facts
    return True


@dataclass(frozen=True)
class Rule:
    """One thing that the doctor looks for."""

    name: str
    about: str
    """What is held against the limit."""
    needs: tuple[str, ...]
    """Facts without which nothing can be said: names in `NEEDS`."""
    observe: Callable[[RunFacts], Iterable[Observation]]
    """Pure: the same facts, the same answer."""
    severity: Severity
    source: str
    """Where the limit is from."""
    limit: float | None = None
    """Values beyond it are findings; None where there is no number."""
    severe: float | None = None
    """Beyond this the finding is an error."""
    below: bool = False
    """Values under the limit are the findings, not those over it."""
    limit_format: str = "{:g}"
    """How the limit is written."""
    concerns: Callable[[RunFacts], bool] = _always
    """Whether the rule has anything to do with such a run."""

    def limit_text(self) -> str:
        """Return the limit in words; nothing where there is none."""
        if self.limit is None:
            return ""
        if not self.limit:
            return "none"
        word = "at least" if self.below else "at most"
        return f"{word} {self.limit_format.format(self.limit)}"

    def _beyond(self, value: float | None, limit: float | None) -> bool:
        if value is None or limit is None:
            return value is None
        return value < limit if self.below else value > limit

    def evaluate(self, facts: RunFacts) -> list[Finding]:
        """Return the rule's findings, worst first.

        Of many places the worst are named, and the others counted in the last.
        """
        beyond = [s for s in self.observe(facts) if self._beyond(s.value, self.limit)]
        findings = sorted(map(self._finding, beyond), key=_order)
        rest = len(findings) - _PLACES
        if rest <= 0:
            return findings
        *first, last = findings[:_PLACES]
        places = "place" if rest == 1 else "places"
        more = f"{last.measured}; and so in {rest} more {places}"
        return [*first, Finding.from_data({**last.data(), "measured": more})]

    def _finding(self, seen: Observation) -> Finding:
        severity = seen.severity or self.severity
        if self.severe is not None and self._beyond(seen.value, self.severe):
            severity = "error"
        return Finding(
            severity=severity,
            rule=self.name,
            where=seen.where,
            measured=seen.measured,
            limit=self.limit_text(),
            source=self.source,
            advice=seen.advice,
            weight=min(1.0, max(0.0, seen.weight)),
        )


def _order(finding: Finding) -> tuple[int, float]:
    return finding.rank


_NO_MACHINE = "nothing is known of the machine (environment.json)"
_PROBE = (
    "halfstep train --probe sampled attaches one, in a loop of your own it is "
    'halfstep.Probe(model, "sampled", log=...)'
)
_SAMPLES = ("sampled", "full")
"""Modes of a probe that write statistics; "flags" writes only what is not finite."""


def _no_stats(facts: RunFacts) -> str:
    """Return why there are no statistics, and how to get them."""
    mode = facts.config.probe
    if mode in _SAMPLES:
        return f"the probe ({mode}) has written no such statistics"
    if mode not in {None, "off"}:
        return f'no statistics of tensors: the probe is on {mode!r}, not on "sampled"'
    return f"no statistics of tensors, for no probe was on ({_PROBE})"


def _no_gradients(facts: RunFacts) -> str:
    if any(name.endswith(":grad") for name in facts.stats):
        return "no gradient was in fp16 where the probe looked"
    return _no_stats(facts)


_NO_LEVEL = 'the level is not known (level=, or "level" in config.json)'
_NO_DTYPE = 'the 16-bit format is not known (dtype=, or "dtype" in config.json)'

NEEDS: dict[str, tuple[Callable[[RunFacts], bool], str | Callable[[RunFacts], str]]] = {
    "level": (lambda f: f.config.level is not None, _NO_LEVEL),
    "dtype": (lambda f: f.dtype is not None, _NO_DTYPE),
    "loss scale": (
        lambda f: f.config.loss_scale is not None or any(s.scale for s in f.steps),
        "neither a setting nor a record tells of a loss scale",
    ),
    "steps": (
        lambda f: any(s.skipped is not None for s in f.steps),
        "no records of steps say whether they were skipped",
    ),
    "losses": (
        lambda f: any(s.loss is not None for s in f.steps),
        "no records of steps hold a loss",
    ),
    "scales": (
        lambda f: any(s.scale for s in f.steps),
        "no records of steps hold a loss scale",
    ),
    "rates of learning": (
        lambda f: any(s.lr is not None for s in f.steps),
        "no records of steps hold a learning rate",
    ),
    "evaluations": (
        lambda f: any(one.loss is not None for one in f.evaluations),
        "no evaluation is recorded",
    ),
    "classes": (
        lambda f: any(one.classes for one in f.evaluations),
        "no evaluation tells how often each class is predicted",
    ),
    "clip": (
        lambda f: f.config.clip is not None,
        "the norm to which gradients are clipped is not known (clip)",
    ),
    "norms": (
        lambda f: any(s.grad_norm is not None for s in f.steps),
        "no records of steps hold the norm of the gradients",
    ),
    "texts": (
        lambda f: bool(f.splits),
        "texts that come more than once were not counted (data.json)",
    ),
    "outputs": (
        lambda f: any(True for _ in f.samples(":output")),
        _no_stats,
    ),
    "gradients": (
        lambda f: bool(f.gradients),
        _no_gradients,
    ),
    "scale of gradients": (
        lambda f: (
            f.config.loss_scale == "none"
            or any(s.scale for s in f.steps)
            or any(s.scale != 1 for samples in f.gradients.values() for s in samples)
        ),
        'nothing tells at which loss scale gradients were seen ("scale" in records)',
    ),
    "probe": (
        lambda f: (
            f.config.probe not in {None, "off"}
            or bool(f.stats or f.non_finite or f.bad_ops)
        ),
        _no_stats,
    ),
    "profile": (
        lambda f: f.profile is not None and f.profile.wall_s > 0,
        "no profile of a step (profile.json, or halfstep.diagnose on your own step)",
    ),
    "operations": (
        lambda f: bool(f.plan or f.bad_ops or (f.profile and f.profile.rows)),
        "no profile (profile.json) or plan tells which operations ran",
    ),
    "input time": (
        lambda f: (
            (f.profile is not None and f.profile.wall_s > 0)
            or any(s.input_s is not None and s.total_s for s in f.steps)
        ),
        "neither records nor a profile tell how long batches took",
    ),
    "padding": (
        lambda f: f.padding is not None,
        "nothing tells how much was padding (summary.json)",
    ),
    "machine": (lambda f: f.machine is not None, _NO_MACHINE),
    "rates": (
        lambda f: f.machine is not None and "fp32" in f.machine.rates,
        _NO_MACHINE,
    ),
    "weights": (
        lambda f: bool(f.weights),
        "nothing tells in which format the weights came (environment.json)",
    ),
    "lost updates": (
        lambda f: bool(f.lost),
        "lost updates were not counted (lost_updates_every)",
    ),
}
"""Name of a fact -> whether it is known, and what to say where it is not."""


@dataclass(frozen=True)
class NotEvaluated:
    """Rules that could not be evaluated, and why."""

    why: str
    rules: tuple[str, ...]


def missing(rule: Rule, facts: RunFacts) -> str | None:
    """Return the fact without which a rule cannot judge a run; None where it can."""
    return next((name for name in rule.needs if not NEEDS[name][0](facts)), None)


@dataclass(frozen=True)
class Examination:
    """The result of evaluating rules on a run."""

    findings: tuple[Finding, ...]
    """Worst first."""
    not_evaluated: tuple[NotEvaluated, ...]
    """What nothing can be said about for want of a fact that there could be."""
    num_evaluated: int
    """Rules that could be evaluated."""


def evaluate(
    rules: Iterable[Rule], facts: RunFacts, hints: Mapping[str, str] | None = None
) -> Examination:
    """Evaluate the rules that concern a run.

    Args:
        rules: To evaluate.
        facts: Of the run.
        hints: Name of a fact -> what to say where it is not known, for each that could
            have been had; None: as `NEEDS` has it, for the folder of a run.
    """
    if hints is None:
        hints = {
            name: why if isinstance(why, str) else why(facts)
            for name, (_, why) in NEEDS.items()
        }
    findings: list[Finding] = []
    reasons: dict[str, list[str]] = {}
    num_evaluated = 0
    for rule in (each for each in rules if each.concerns(facts)):
        lacks = missing(rule, facts)
        if lacks is not None:
            if lacks in hints:
                reasons.setdefault(hints[lacks], []).append(rule.name)
            continue
        num_evaluated += 1
        findings += rule.evaluate(facts)
    not_evaluated = tuple(
        NotEvaluated(why, tuple(names)) for why, names in reasons.items()
    )
    return Examination(
        tuple(sorted(findings, key=_order)), not_evaluated, num_evaluated
    )


def percent(share: float) -> str:
    """Return a share as people write it, with a digit more near 0 and near all."""
    if math.isnan(share):
        return "an unknown part"
    is_round = not share or 0.1 <= share < 0.99 or share == 1  # noqa: PLR2004
    return f"{share:.0%}" if is_round else f"{share:.1%}"

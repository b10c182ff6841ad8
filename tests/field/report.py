"""Troubles that people reported, each as a small program: what it is made of.

A report is a function that builds the program, sick or cured, for torch's classes or
for ours. What is claimed of it stands beside it, and `test_field` holds it to that.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.diagnostics.doctor import rules_speed

if TYPE_CHECKING:
    from collections.abc import Callable

Command = Literal["diagnose", "check", "find_nonfinite", "run", "impossible"]
"""What answers: `hs.diagnose` of the program as it is, `hs.check` before training,
`hs.find_nonfinite` after it; "run": our drop-in classes, by an error or a warning;
"impossible": nothing, since the trouble does not occur with our classes."""

SPEED = "speed and memory"
"""The area of the reports about the time of a step."""
SPEED_RULES = frozenset(rule.name for rule in rules_speed.RULES)
"""Findings of `hs.diagnose` about that: small programs on a CPU have them, and reports
of other areas are not about them."""


class Amp(Protocol):
    """The classes that a program is written with."""

    name: str

    def autocast(self, dtype: torch.dtype = ..., **options: Any) -> Any:
        """Return a context for the CPU."""

    def scaler(self, **options: Any) -> Any:
        """Return a `GradScaler` for the CPU."""


class Torch:
    """torch.amp's."""

    name = "torch"

    def autocast(self, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
        """Return torch's context."""
        return torch.autocast("cpu", dtype, **options)

    def scaler(self, **options: Any) -> Any:
        """Return torch's scaler."""
        return torch.amp.GradScaler("cpu", **options)


class Halfstep:
    """Ours, as drop-ins."""

    name = "halfstep"

    def autocast(self, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
        """Return our context."""
        return hs.autocast("cpu", dtype, **options)

    def scaler(self, **options: Any) -> Any:
        """Return our scaler."""
        return hs.GradScaler("cpu", **options)


@dataclass
class Program:
    """A training program that is run a step at a time."""

    model: nn.Module
    step: Callable[[], object]
    """Makes one step; may raise what the report is about."""
    is_sick: Callable[[], bool] = bool
    """After some steps: is the trouble there? By default only an error shows it."""
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of `hs.diagnose`, where the program as it is does not tell."""
    loss: Callable[[], Tensor] | None = None
    """For `hs.find_nonfinite`: a forward pass up to the loss, as the program has it."""
    check: dict[str, Any] = field(default_factory=dict)
    """For `hs.check`: `loss_fn`, `batch`, `level`, `dtype` ..."""


@dataclass(frozen=True)
class Report:
    """A kind of trouble, and what is claimed of it."""

    name: str
    area: str
    symptom: str
    """What people see, in their words."""
    sources: tuple[str, ...]
    """Public threads, as owner/repository#number."""
    cause: str
    command: Command
    says: str
    """Regular expression, found in what the command prints: the cause, by its name."""
    truth: str
    """Regular expression that knows no tool's wording: what names the culprit."""
    cure: str
    """What to do, for the page; `build(..., cured=True)` does it."""
    build: Callable[..., Program]
    steps: int = 4
    """After which the trouble shows."""

    def __str__(self) -> str:
        """Return its name."""
        return self.name

    def program(self, amp: Amp, *, cured: bool = False) -> Program:
        """Return the program, from the same random numbers each time."""
        torch.manual_seed(0)
        return self.build(amp, cured=cured)

    def trouble(self, amp: Amp, *, cured: bool = False) -> str:
        """Run the program; return what is wrong then, or nothing."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = self.program(amp, cured=cured)
                for _ in range(self.steps):
                    program.step()
                return "sick" if program.is_sick() else ""
        except Exception as error:  # noqa: BLE001 -- whatever the program raises
            return f"{type(error).__name__}: {error}"

    def answer(self, *, cured: bool = False) -> str:
        """Return what the command says of the program."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                texts = _COMMANDS[self.command](self, cured)
            except Exception as error:  # noqa: BLE001 -- an error is an answer, too
                texts = [str(error), *getattr(error, "__notes__", ())]
        return "\n".join([*texts, *(str(each.message) for each in warned)])


def _diagnose(report: Report, cured: bool) -> list[str]:
    program = report.program(Torch(), cured=cured)
    diagnosis = hs.diagnose(program.step, **program.given)
    unasked = SPEED_RULES if report.area != SPEED else frozenset()
    return [str(one) for one in diagnosis.findings if one.rule not in unasked]


def _check(report: Report, cured: bool) -> list[str]:
    program = report.program(Halfstep(), cured=cured)
    return [str(one) for one in hs.check(program.model, **program.check).findings]


def _find_nonfinite(report: Report, cured: bool) -> list[str]:
    program = report.program(Halfstep(), cured=cured)
    assert program.loss is not None, f"{report}: no loss="
    bad_op = hs.find_nonfinite(program.model, program.loss)
    return [] if bad_op is None else [str(bad_op)]


def _run(report: Report, cured: bool) -> list[str]:
    program = report.program(Halfstep(), cured=cured)
    for _ in range(report.steps):
        program.step()
    return []


_COMMANDS: dict[str, Callable[[Report, bool], list[str]]] = {
    "diagnose": _diagnose,
    "check": _check,
    "find_nonfinite": _find_nonfinite,
    "run": _run,
    "impossible": lambda *_: [],
}

REPORTS: dict[str, Report] = {}
"""By name."""


def load() -> None:
    """Import the files that register reports."""
    for path in sorted(Path(__file__).parent.glob("reports_*.py")):
        importlib.import_module(f"tests.field.{path.stem}")


def report(
    sources: str,
    *,
    area: str,
    symptom: str,
    cause: str,
    cure: str,
    command: Command = "diagnose",
    says: str = "",
    truth: str = "",
    steps: int = 4,
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register a function `build(amp, *, cured)` as the program of a report.

    Args:
        sources: Public threads, each as owner/repository#number, with spaces between.
        area: Chapter of the page: "call order", "range", "dtype error" ...
        symptom: What people see.
        cause: What it is.
        cure: What ends it.
        command: What answers.
        says: Of the answer, for all but "impossible".
        truth: See `Report`; by default `says`.
        steps: After which the trouble shows.
    """
    assert says or command == "impossible"
    threads = tuple(sources.split())
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in threads)

    def register(build: Callable[..., Program]) -> Callable[..., Program]:
        name = build.__name__
        assert name not in REPORTS, f"{name}: two reports bear this name"
        REPORTS[name] = Report(
            name=name,
            area=area,
            symptom=symptom,
            sources=threads,
            cause=cause,
            command=command,
            says=says,
            truth=truth or says,
            cure=cure,
            build=build,
            steps=steps,
        )
        return build

    return register


def reports_of(area: str) -> Callable[..., Any]:
    """Return `report` for the reports of one area."""
    return functools.partial(report, area=area)

"""Troubles that people reported, each as a small program: what it is made of.

A report is a row of docs/reports.md, which says symptom, cause, the call that finds it
and the cure, and a function of the same name that builds the program, sick or cured,
for torch's classes or for ours. `test_field` holds the program to the row.
"""

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.diagnostics.doctor import rules_speed

PAGE = Path(__file__).parents[2] / "docs" / "reports.md"
COMMANDS = {
    "`hs.diagnose(step)`": "diagnose",
    "`hs.check(model, loss_fn, batch)`": "check",
    "`hs.find_nonfinite(model, step)`": "find_nonfinite",
    "error or warning": "run",
    "does not occur": "impossible",
}
"""What answers, as the page says it: `hs.diagnose` of the program as it is, `hs.check`
before training, `hs.find_nonfinite` after it; our drop-in classes, by an error or a
warning; or nothing, since the trouble does not occur with our classes."""

SPEED_RULES = frozenset(rule.name for rule in rules_speed.RULES)
"""Findings of `hs.diagnose` about the time of a step: small programs on a CPU have
them, and reports of other areas are not about them."""


@dataclass(frozen=True)
class Amp:
    """The classes that a program is written with."""

    name: str
    context: Callable[..., Any]
    grad_scaler: Callable[..., Any]

    def autocast(self, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
        return self.context("cpu", dtype, **options)

    def scaler(self, **options: Any) -> Any:
        return self.grad_scaler("cpu", **options)


TORCH = Amp("torch", torch.autocast, torch.amp.GradScaler)
HALFSTEP = Amp("halfstep", hs.autocast, hs.GradScaler)


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
    command: str
    is_explained: bool
    says: str
    """Regular expression, found in what the command prints: the cause, by its name."""
    truth: str
    """Regular expression that knows no tool's wording: what names the culprit."""
    build: Callable[..., Program]
    steps: int
    """After which the trouble shows."""

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
                texts = self._ask(cured=cured)
            except Exception as error:  # noqa: BLE001 -- an error is an answer, too
                texts = [str(error), *getattr(error, "__notes__", ())]
        return "\n".join([*texts, *(str(each.message) for each in warned)])

    def _ask(self, *, cured: bool) -> list[str]:
        if self.command == "impossible":
            return []
        amp = TORCH if self.command == "diagnose" else HALFSTEP
        program = self.program(amp, cured=cured)
        if self.command == "diagnose":
            found = hs.diagnose(program.step, **program.given).findings
            unasked = SPEED_RULES if self.area != "Speed and memory" else ()
            return [str(one) for one in found if one.rule not in unasked]
        if self.command == "check":
            found = hs.check(program.model, **program.check).findings
            return [str(one) for one in found]
        if self.command == "find_nonfinite":
            assert program.loss is not None, f"{self.name}: no loss="
            bad_op = hs.find_nonfinite(program.model, program.loss)
            return [str(bad_op)] if bad_op else []
        for _ in range(self.steps):
            program.step()
        return []


def rows() -> dict[str, dict[str, Any]]:
    """Return what the page says of each program, by its name."""
    row = re.compile(r"\|.*\| (.*?)( \(not found yet\))? \|.*\|.*\| `(\w+)` \|")
    area, found = "", {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif match := row.fullmatch(line):
            by, unexplained, name = match.groups()
            assert name not in found, f"{name}: two rows name this program"
            found[name] = {
                "area": area,
                "command": COMMANDS[by],
                "is_explained": unexplained is None,
            }
        else:
            is_row = line.startswith("| ") and not line.startswith("| you see |")
            assert not (area and is_row), f"a row without a program: {line}"
    return found


ROWS = rows()
REPORTS: dict[str, Report] = {}
"""By name, in the order of the page once `load` has run."""


def load() -> None:
    """Import the files that register reports."""
    for path in sorted(Path(__file__).parent.glob("reports_*.py")):
        importlib.import_module(f"tests.field.{path.stem}")
    assert REPORTS.keys() == ROWS.keys()


def report(
    *, says: str = "", truth: str = "", steps: int = 4
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register a function `build(amp, *, cured)` as the program of a row of the page.

    Args:
        says: See `Report`; for all but what is impossible.
        truth: See `Report`; by default `says`.
        steps: After which the trouble shows.
    """

    def register(build: Callable[..., Program]) -> Callable[..., Program]:
        name = build.__name__
        assert name not in REPORTS, f"{name}: two programs bear this name"
        row = ROWS[name]
        assert says or row["command"] == "impossible"
        REPORTS[name] = Report(
            name, **row, says=says, truth=truth or says, build=build, steps=steps
        )
        return build

    return register

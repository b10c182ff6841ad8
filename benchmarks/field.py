"""What tools say of the troubles in tests/field: torch.amp, anomaly mode, others, ours.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.field [--write FILE] [NAME ...]

Each report's program runs, in this order, by itself, in anomaly mode and under the
`DebugUnderflowOverflow` of transformers; then halfstep is asked by the command that the
report names. What is counted is whether the words name the culprit, by one regular
expression of the report's for all tools: errors with their lines of source, warnings,
and what is printed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import platform
import re
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from benchmarks.page import parser, write
from tests.field.report import HALFSTEP, REPORTS, TORCH, load
from transformers.debug_utils import DebugUnderflowOverflow

from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tests.field.report import Program, Report

TOOLS = ("torch.amp", "anomaly mode", "DebugUnderflowOverflow", "halfstep")


TEXT = """
Each runs with torch's classes by itself, in anomaly mode
(`torch.autograd.set_detect_anomaly`) and under the `DebugUnderflowOverflow` of
transformers; then halfstep is asked by the command that the report names.

A tool names the culprit where its words (errors, with the source lines of their
tracebacks, warnings, what it prints) match one regular expression, the same for all
tools; halfstep also where the trouble does not occur with its classes. "Rightly
explained" is stricter: the cause by its name, or impossible. halfstep was fixed with
these very programs; the others had no such chance, and look for less by design: anomaly
mode for NaN in backward passes, `DebugUnderflowOverflow` for inf and NaN in forward
passes.
"""


@dataclass(frozen=True)
class Answer:
    """What became of one report."""

    report: Report
    named: tuple[bool, ...]
    """By each of `TOOLS`: do its words name the culprit?"""
    occurs: bool
    """With halfstep's classes in place of torch's."""
    explained: bool
    """As the report claims: impossible with them, or the cause told by its name."""


def nothing(_: Program) -> AbstractContextManager[object]:
    """Watch nothing."""
    return contextlib.nullcontext()


def anomaly_mode(_: Program) -> AbstractContextManager[object]:
    """Let autograd look for NaN, and for the forward pass that led to it."""
    return torch.autograd.set_detect_anomaly(mode=True)


def hooks_of_transformers(program: Program) -> AbstractContextManager[object]:
    """Let hooks look at what each module takes and gives."""
    return contextlib.nullcontext(DebugUnderflowOverflow(program.model))


def words(report: Report, watch: Callable[[Program], object]) -> str:
    """Return what is said while the program runs with torch's classes."""
    printed, said = io.StringIO(), []
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        warnings.simplefilter("always")
        try:
            program = report.program(TORCH)
            with watch(program):
                for _ in range(report.steps):
                    program.step()
        except Exception as error:  # noqa: BLE001 -- an error is an answer, too
            frames = traceback.extract_tb(error.__traceback__)
            lines = [each.line or "" for each in frames if each.filename != __file__]
            said = [*lines, str(error)]
    said += [str(each.message) for each in warned]
    # The path of a file may tell what its programs are about.
    return re.sub(r'File ".*?"', "", "\n".join([*said, printed.getvalue()]))


def answer(report: Report) -> Answer:
    """Ask all tools about one report."""
    said = [
        words(report, watch) for watch in (nothing, anomaly_mode, hooks_of_transformers)
    ]
    ours, occurs = report.answer(), bool(report.trouble(HALFSTEP))
    names = re.compile(report.truth or "(?!)", re.DOTALL)
    named = [names.search(each) is not None for each in (*said, ours)]
    named[-1] = named[-1] or not occurs
    explained = not occurs
    if report.command != "impossible":
        explained = re.search(report.says, ours, re.DOTALL) is not None
    if dist.is_initialized():
        dist.destroy_process_group()
    return Answer(report, tuple(named), occurs, explained)


def by_area(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    """Return a row for each area, and one for all."""
    rows = []
    areas = list(dict.fromkeys(each.report.area for each in answers))
    for area in [*areas, "all"]:
        some = [each for each in answers if area in {each.report.area, "all"}]
        named = [
            sum(flags) for flags in zip(*(each.named for each in some), strict=True)
        ]
        counts = [*named, sum(not each.occurs for each in some)]
        counts.append(sum(each.explained for each in some))
        rows.append((area, str(len(some)), *map(str, counts)))
    return rows


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(answers: Sequence[Answer], command: str) -> str:
    """Return the tables with the date, the machine and the command."""
    machine = hardware.capabilities()
    sets = ", ".join(machine.instruction_sets) or "no 16-bit instructions"
    today = dt.datetime.now(dt.UTC).date()
    commands = Counter(each.report.command for each in answers)
    asked = ", ".join(f"`{name}` {count}" for name, count in commands.most_common())
    areas = markdown(
        ("area", "reports", *TOOLS, "does not occur", "rightly explained"),
        by_area(answers),
    )
    each_one = markdown(
        ("report", "command", *TOOLS, "explained"),
        [
            (
                f"`{one.report.name}`",
                one.report.command,
                *("yes" if flag else "-" for flag in one.named),
                "yes" if one.explained else "no",
            )
            for one in answers
        ],
    )
    return f"""# {today}: what tools say of troubles that people report

{machine.cores} cores of {machine.cpu} ({sets}),
torch {machine.torch}, Python {platform.python_version()}.

```text
{command}
```

{len(answers)} small programs, one a kind of trouble:
[docs/reports.md](../docs/reports.md).
{TEXT}
Commands: {asked}.

{areas}

{each_one}
"""


def main() -> None:
    """Ask about all reports, or those that are named; print the tables."""
    flags = parser(__doc__)
    flags.add_argument("names", nargs="*", metavar="NAME", help="reports; default all")
    given = flags.parse_args()
    load()
    answers = [answer(REPORTS[name]) for name in given.names or REPORTS]
    command = " ".join(["python -m benchmarks.field", *sys.argv[1:]])
    write(page(answers, command), given.write)


if __name__ == "__main__":
    main()

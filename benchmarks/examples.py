"""What the programs in examples/ take: their final losses and wall times, by form.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.examples [--write FILE]

Each program runs in a process of its own, twice, forms in turn; times include the start
of Python and torch, and are the lesser of the two.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from tests.examples import programs  # noqa: E402

from halfstep.machine import hardware  # noqa: E402

ROUNDS = 2
WHAT = (
    "lines removed and added, final loss, seconds of a whole process with its start "
    f"(least of {ROUNDS})."
)


def cell(folder: str, form: str, times: dict[str, list[float]], loss: float) -> str:
    """Return what is told of one form of a program."""
    program = next((p for p in programs.afters(folder) if p.form == form), None)
    lines = ""
    if program is not None:
        _, removed, added = program.changes(programs.before(folder))
        lines = f"-{removed} +{added}, "
    return f"{lines}{loss:.4f}, {min(times[form]):.1f} s"


def row(folder: str) -> str:
    """Return the row of one example."""
    forms = [programs.before(folder), *programs.afters(folder)]
    if folder == "apex" and not importlib.util.find_spec("apex"):
        forms = forms[1:]
    times, losses = defaultdict[str, list[float]](list), dict[str, float]()
    for _ in range(ROUNDS):
        for program in forms:
            start = time.perf_counter()
            losses[program.form] = programs.final_loss(program.run(apart=True))
            times[program.form].append(time.perf_counter() - start)
    cells = {form: cell(folder, form, times, losses[form]) for form in losses}
    others = [f"{form}: {cells[form]}" for form in cells.keys() - {"before", "drop_in"}]
    parts = (cells.get("before", "-"), cells.get("drop_in", "-"), ", ".join(others))
    return f"| {folder.replace('_', ' ')} | {' | '.join(parts)} |"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file to write in place of printing")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    # The sick one has no time of its own: the drop-in stops it with the cause.
    left_out = {"overflow"} if has_gpu else {"overflow", "cuda_graphs"}
    folders = [f for f in programs.folders() if f not in left_out]
    machine = (
        f"{hardware.capabilities().cpu}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    text = "\n".join(
        (
            f"# {dt.datetime.now(tz=dt.UTC).date()}: the examples",
            "",
            f"{machine}. `python -m benchmarks.examples`: {WHAT}",
            "",
            "| example | before | drop-in | session, or other |",
            "|---|---|---|---|",
            *map(row, folders),
            "",
        )
    )
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Changed lines, final losses and wall times of the programs in examples/.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.examples [--write FILE]

Each program runs in a process of its own, twice, forms in turn; times include the start
of Python and torch, and are the lesser of the two.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import os
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


def cell(folder: str, form: str, times: dict[str, list[float]], loss: float) -> str:
    """Return what one form of a program needs, and reaches."""
    program = next((p for p in programs.afters(folder) if p.form == form), None)
    lines = ""
    if program is not None:
        before = programs.before(folder)
        _, removed, added = program.changes(before)
        lines = f"{program.changed_lines(before)} (-{removed} +{added}), "
    return f"{lines}{loss:.4f}, {min(times[form]):.1f} s"


def columns(folder: str, rounds: int) -> list[str]:
    """Return the name of an example, and a cell for each column of the table."""
    forms = [programs.before(folder), *programs.afters(folder)]
    if folder == "apex" and not importlib.util.find_spec("apex"):
        forms = forms[1:]
    times, losses = defaultdict[str, list[float]](list), dict[str, float]()
    for _ in range(rounds):
        for program in forms:
            start = time.perf_counter()
            losses[program.form] = programs.final_loss(program.run(apart=True))
            times[program.form].append(time.perf_counter() - start)
    texts = {form: cell(folder, form, times, losses[form]) for form in losses}
    names = {p.form: "adapter" if p.is_adapter else p.form for p in forms}
    others = losses.keys() - {"before", "drop_in"}
    name = folder.replace("_", " ")
    return [
        name,
        texts.get("before", "-"),
        texts.get("drop_in", "-"),
        *(f"{names[form]}: {texts[form]}" for form in others),
    ]


def heading(module: str, rounds: int, versions: str = "") -> str:
    """Return the machine, the versions, the command, and what the columns mean."""
    threads = os.environ.get("OMP_NUM_THREADS")
    prefix = f"OMP_NUM_THREADS={threads} " if threads else ""
    return (
        f"{hardware.capabilities().cpu}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}{versions}. "
        f"`{prefix}python -m benchmarks.{module}`: changed lines (one that is replaced "
        "counts once; then those removed and added), final loss, seconds of a whole "
        f"process with its start (least of {rounds})."
    )


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file to write in place of printing")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    # The one that overflows has no time of its own: the drop-in stops it.
    left_out = {"overflow"} if has_gpu else {"overflow", "cuda_graphs"}
    folders = [f for f in programs.folders() if f not in left_out]
    rows = [(*columns(folder, ROUNDS), "")[:4] for folder in folders]
    text = "\n".join(
        (
            f"# {dt.datetime.now(tz=dt.UTC).date()}: the examples",
            "",
            heading("examples", ROUNDS),
            "",
            "| example | before | drop-in | session, or other |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        )
    )
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Changed lines, final losses and wall times of the programs in examples/.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.examples [--write FILE]

Each program runs in a process of its own, twice, forms in turn; times include the start
of Python and torch, and are the lesser of the two.
"""

from __future__ import annotations

import importlib.util
import time
from collections import defaultdict

import torch
from benchmarks import page
from tests.examples import programs

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


def main() -> None:
    """Print the table, or write it."""
    arguments = page.parser(__doc__).parse_args()
    has_gpu = torch.cuda.is_available()
    # The one that overflows has no time of its own: the drop-in stops it.
    left_out = {"overflow"} if has_gpu else {"overflow", "cuda_graphs"}
    folders = [f for f in programs.folders() if f not in left_out]
    rows = [(*columns(folder, ROUNDS), "")[:4] for folder in folders]
    top = (
        f"{page.head('the examples', 'python -m benchmarks.examples')}: changed lines "
        "(one that is replaced counts once; then those removed and added), final loss, "
        f"seconds of a whole process with its start (least of {ROUNDS})."
    )
    lines = (
        top,
        "",
        "| example | before | drop-in | session, or other |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    )
    page.write("\n".join(lines), arguments.write)


if __name__ == "__main__":
    main()

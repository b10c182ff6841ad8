"""Writes docs/op_tables.md, the category of each operation, when the site is built.

The tables hold the operations of the torch that is installed, so the page is not in the
repository. `python docs/op_tables.py` writes it too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from halfstep.policy import op_tables

PAGE = Path(__file__).with_suffix(".md")
COLUMNS = (("torch", "cpu"), ("torch", "cuda"), ("lean", "cpu"), ("lean", "cuda"))
HEAD = """\
# Operation tables

The [category](policies.md#categories) of each operation, for torch {version}, under the
two tables that a [policy](policies.md) starts from. An empty cell means that the
operation runs as it is called. `halfstep.policy.decide` gives the same answer in
Python, for `mps` and `xpu` too. Names are those of aten, with the overload where
overloads are treated differently: `F.softmax` is `softmax.int`.

| operation | "torch" on CPU | "torch" on CUDA | "lean" | reason |
|---|---|---|---|---|
"""


def line(operation: str) -> str:
    """Return one line of the table."""
    rows = [op_tables.NAMED[name][device].get(operation) for name, device in COLUMNS]
    torch_cpu, torch_cuda, *lean = [row.category if row else "" for row in rows]
    lean_text = lean[0] if lean[0] == lean[1] else f"{lean[0] or 'as called'} on CPU"
    reasons = "; ".join(dict.fromkeys(row.reason for row in rows if row))
    cells = (f"`{operation}`", torch_cpu, torch_cuda, lean_text, reasons)
    return f"| {' | '.join(cells)} |"


def text() -> str:
    """Return the page."""
    tables = [op_tables.NAMED[name][device] for name, device in COLUMNS]
    operations = sorted(set().union(*tables), key=lambda name: name.lstrip("_"))
    version = torch.__version__.partition("+")[0]
    lines = [HEAD.format(version=version), *(line(name) + "\n" for name in operations)]
    return "".join(lines)


def write(_app: object = None) -> None:
    """Write the page, unless it is there as it should be."""
    page = text()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()

"""Draw the packages of halfstep, floor by floor, as pyproject.toml orders them.

`python docs/pictures/house.py` writes house.svg beside this file; a test compares them.
"""

from __future__ import annotations

import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")

PURPOSES = {
    "__main__": "python -m halfstep",
    "cli": "the command line",
    "bench": "halfstep bench: measurements against torch.amp",
    "parity": "compare: levels against fp32, over seeds",
    "train": "halfstep train: text classifiers and taggers",
    "launch": "halfstep run: unmodified scripts",
    "diagnostics": "check, Probe, replay, diagnose, doctor",
    "compat": "apex, Lightning, Accelerate, Trainer",
    "testing": "checks for your own tests",
    "session": "prepare and Session: one step after another, DDP, FSDP2, state",
    "masters": "fp32 master weights and their update kernels",
    "graph": "plan, rewrite, torch.compile backend",
    "casting": "autocast, weight cache, conversion",
    "scaling": "loss scale, unscaling, GradScaler",
    "machine": "measured speed, recommended level",
    "policy": "rules, op tables, levels",
    "nonfinite": "origin of an inf or NaN",
    "checkpoint": "atomic folders with checksums",
    "numerics": "formats, norms, statistics of tensors",
    "reporting": "tables, findings, HTML",
    "distributed": "process groups, all-reduce",
    "fast_dropout": "dropout for CPUs",
    "errors": "UserError, argument checks",
    "_torch": "private torch API, patches",
}
"""Package or module -> what it is for."""

WIDTH, EDGE, GAP = 460, 12, 8  # of the picture, in units of its viewBox
LINE, PAD = 15, 9  # height of a line of text, space above and below it
LETTER = 6.3  # width of a letter of size 12, on average
# A page of its own, so that light and dark themes show the same.
PAPER, CARD, FRAME, INK, PALE = "#ffffff", "#eef3fb", "#9db4d6", "#1f2933", "#52606d"


def floors() -> list[list[str]]:
    """Return the packages of each floor, the highest first."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = content["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    return [layer.split(" | ") for layer in layers]


def text(x: float, y: float, words: str, style: str) -> str:
    """Return one line of text."""
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def draw() -> str:
    """Return the picture as SVG."""
    parts, y = list[str](), EDGE
    name_style = (
        f'font-family="monospace" font-weight="bold" font-size="13" fill="{INK}"'
    )
    style = f'font-size="12" fill="{PALE}"'
    for floor in floors():
        width = (WIDTH - 2 * EDGE - GAP * (len(floor) - 1)) / len(floor)
        letters = int((width - 2 * PAD) / LETTER)
        purposes = [textwrap.wrap(PURPOSES[name], letters) for name in floor]
        height = 2 * PAD + LINE * (1 + max(map(len, purposes)))
        for number, (name, lines) in enumerate(zip(floor, purposes, strict=True)):
            x = EDGE + number * (width + GAP)
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                f'rx="5" fill="{CARD}" stroke="{FRAME}"/>'
            )
            for row, words in enumerate([name, *lines]):
                place = (x + PAD, y + PAD + LINE * (row + 0.8))
                parts.append(text(*place, words, style if row else name_style))
        y += height + GAP
    y += LINE
    parts.append(
        text(
            EDGE, y, "A package imports from floors below its own, never across.", style
        )
    )
    height = y + EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        "<title>The packages of halfstep, by floor</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        '<g font-family="sans-serif">',
    )
    return "\n".join((*head, *parts, "</g>", "</svg>", ""))


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

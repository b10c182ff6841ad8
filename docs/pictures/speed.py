"""Draw the time of a step beside torch.amp's: speed.svg, beside this file.

`python docs/pictures/speed.py` reads what `halfstep bench recipe --json FILE` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "2026-11-26-recipe-adamw.json"
NAMES = {
    "fp32": "fp32",
    "accelerate": "Accelerate bf16",
    "torch.amp": "torch.amp bf16",
    "torch.amp-fused": "torch.amp bf16, fused AdamW",
    "torch.amp-kept": "torch.amp bf16, memory kept",
    "torch.amp-fused-kept": "torch.amp bf16, both",
    "O1": "halfstep O1",
    "O1-fused": "halfstep O1, fused AdamW",
    "O2": "halfstep O2",
    "O2-kept": "halfstep O2, memory kept",
    "O2-split": "halfstep O2, split",
    "O2-stochastic": "halfstep O2, stochastic",
}
# Readable on light pages and on dark ones.
TEXT, OURS, OTHERS = "#777777", "#3d85d0", "#a9a9a9"


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draw a bar for each candidate, with its peak memory."""
    names = [next(iter(row.values())) for row in rows]  # in the first column
    by_name = dict(zip(map(str, names), rows, strict=True))
    rows = [by_name[name] for name in NAMES if name in by_name]
    labels = [label for name, label in NAMES.items() if name in by_name]
    ratios = [row["x torch.amp"] for row in rows]
    colors = [OURS if name.startswith("halfstep") else OTHERS for name in labels]
    style = dict.fromkeys(["text.color", "axes.labelcolor", "ytick.color"], TEXT)
    style |= {"svg.hashsalt": "halfstep", "font.size": 11, "xtick.color": TEXT}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(8, 4.4), layout="tight")
        axis.barh(labels, ratios, color=colors)
        for place, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
            axis.text(
                ratio + 0.03,
                place,
                f"{ratio:.2f}, {row['peak MiB']:.0f} MiB",
                va="center",
            )
        axis.invert_yaxis()
        axis.set_xlim(0, max(ratios) * 1.35)
        axis.set_title("Time of a step (torch.amp = 1), peak memory", loc="left")
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
        axis.patch.set_alpha(0)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    tables = json.loads(FIGURES.read_text(encoding="utf-8"))
    draw(tables[0]["rows"], Path(__file__).with_suffix(".svg"))

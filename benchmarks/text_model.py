"""Trains classifiers from scratch and scores them beside logistic regression.

    python -m benchmarks.text_model --data none keywords:400 FOLDER --level O2:bf16

Data are `none` (the built-in texts), `keywords:N` (N posts whose class one of two words
decides, three classes of 70, 22 and 8 %), or what `halfstep train --data` takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from pathlib import Path

from halfstep.train.plan import CLIP_SCRATCH
from halfstep.train.run import run

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FILLERS, _KEYS = 200, 6


def keyword_posts(count: int, seed: int) -> list[dict[str, str]]:
    """Return posts of 7 to 21 words, of which one decides the class."""
    draw, names = random.Random(seed), random.Random(0)  # noqa: S311
    words = [
        "".join(names.choices(_LETTERS, k=names.randint(3, 8)))
        for _ in range(_FILLERS + _KEYS)
    ]
    keys, fillers = words[:_KEYS], words[_KEYS:]
    rows = []
    for _ in range(count):
        label = draw.choices(range(3), [0.7, 0.22, 0.08])[0]
        post = draw.choices(fillers, k=draw.randint(6, 20))
        post.insert(draw.randrange(len(post)), keys[2 * label + draw.randrange(2)])
        rows.append({"text": " ".join(post), "label": "abc"[label]})
    return rows


def _write_keywords(folder: Path, count: int) -> None:
    for seed, (split, size) in enumerate(
        {"train": count, "dev": max(32, count // 10), "test": 1000}.items()
    ):
        lines = "\n".join(map(json.dumps, keyword_posts(size, seed)))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    """Print a line of Markdown for each data set, level and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["none", "keywords:400"])
    parser.add_argument("--level", nargs="+", default=["O2:bf16"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-steps", type=int)
    args = parser.parse_args()
    print("| data | level | seed | model accuracy, macro F1 | baseline | clipped | s |")  # noqa: T201
    print("|---|---|---|---|---|---|---|", flush=True)  # noqa: T201
    every = itertools.product(args.data, args.level, range(args.seeds))
    for name, level, seed in every:
        with tempfile.TemporaryDirectory() as folder:
            data = None if name == "none" else name
            if name.startswith("keywords:"):
                data = folder
                _write_keywords(Path(folder), int(name.partition(":")[2]))
            words = dict(zip(("level", "dtype"), level.split(":"), strict=False))
            more = {"seed": seed, "max_steps": args.max_steps, **words}
            result = run({"data": data, "out": f"{folder}/run", **more})
            summary = result.summary
            norms = [
                record["grad_norm"]
                for record in result.folder.records()
                if record.get("grad_norm") is not None
            ]
        baseline = summary["baseline"]
        both = [
            f"{scores['accuracy']:.3f}, {scores['macro_f1']:.3f}"
            for scores in (summary[baseline["split"]], baseline)
        ]
        clipped = sum(norm > CLIP_SCRATCH["classify"] for norm in norms) / len(norms)
        seconds = summary["train_seconds"]
        line = f"{' | '.join(both)} | {clipped:.2f} | {seconds:.0f}"
        print(f"| {name} | {level} | {seed} | {line} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

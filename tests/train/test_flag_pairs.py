"""`halfstep train` with each two values of two flags, in one process and in two.

Started by `run_ranks`, this file is the program of one process of two.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_ranks
from pairwise import Row, covering_rows
from small_training import (
    assert_same_run,
    letters,
    small_and_measured,
    small_settings,
    steps_of,
    without_figures,
    write_letters,
    write_marked,
)

from halfstep.distributed import process_group
from halfstep.distributed.process_group import World
from halfstep.errors import UserError
from halfstep.train.checkpointing import run_on_first_rank
from halfstep.train.run import run

pytestmark = pytest.mark.integration  # also those in one process: a run each
STEPS, SAVED = 3, 2
RULE = "lean + module:classifier=fp32"
CHOICES: dict[str, tuple[Any, ...]] = {
    "processes": (1, 2),
    "parallel": ("ddp", "fsdp2"),
    "level": ("O2", "O0", "O1", "O3"),
    "dtype": ("bf16", "fp16"),
    "master_weights": ("fp32", "split", "kahan", "stochastic", "none"),
    "loss_scale": ("auto", "dynamic", "1024", "none"),
    "policy": ("lean", "torch", RULE),
    "problem": ("class", "ner", "multi_label", "regression"),
    "class_weights": (None, "balanced"),
    "label_smoothing": (0.0, 0.1),
    "accumulate": (1, 3),
    "freeze": (None, "*.embeddings.*"),
    "layer_decay": (1.0, 0.9),
    "recompute": (False, True),
    "probe": ("off", "flags", "full"),
    "compare_fp32": (None, 2),
    "workers": (0, 1),
    "tensorboard": (False, True),
}
"""Flags that change how a run computes, the plainest value first.

Not --compile, whose compiler takes half a minute: test_compiled.py.
"""
PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "class": ("letters.json", {}),
    "ner": ("marked.jsonl", {"task": "ner"}),
    "multi_label": ("sets.jsonl", {"multi_label": True}),
    "regression": ("numbers.jsonl", {"regression": True}),
}
"""Kind of label -> its data and settings."""
RESIDUALS = ("split", "kahan", "stochastic")
REFUSED: tuple[tuple[dict[str, tuple[Any, ...]], str], ...] = (
    ({"processes": (1,), "parallel": ("fsdp2",)}, "there is one"),
    ({"parallel": ("fsdp2",), "level": ("O3",)}, "--level O3"),
    (
        {"parallel": ("fsdp2",), "master_weights": (*RESIDUALS, "none")},
        "--master-weights",
    ),
    (
        {"parallel": ("fsdp2",), "policy": (RULE,), "level": ("O2",)},
        "a rule keeps 'classifier' in fp32",
    ),
    ({"master_weights": RESIDUALS, "level": ("O0", "O1", "O3")}, "no master weights"),
    ({"master_weights": RESIDUALS, "dtype": ("fp16",)}, "needs bf16 weights"),
    (
        {"problem": ("ner", "regression"), "class_weights": ("balanced",)},
        "--class-weights",
    ),
    (
        {"problem": ("multi_label", "regression"), "label_smoothing": (0.1,)},
        "--label-smoothing",
    ),
)
"""Values that do not go together, by design, and what the refusal names."""


def refusal(row: Row) -> str:
    """Return what the refusal of these settings names; "" where they go together."""
    for values, named in REFUSED:
        if all(row.get(name, ...) in chosen for name, chosen in values.items()):
            return named
    return ""


PLAIN = {name: values[0] for name, values in CHOICES.items()}
ROWS = covering_rows(CHOICES, lambda row: not refusal(row)) + [
    PLAIN | {"processes": 2} | pair
    for values, _ in REFUSED
    for pair in covering_rows(values, bool)
]


def trial(folder: Path, number: int, world: World) -> str:
    """Train one row, cut its end off and resume it; return why it is refused, or ""."""
    row = ROWS[number]
    own = ("processes", "problem")
    told = {name: value for name, value in row.items() if name not in own}
    data, kind = PROBLEMS[row["problem"]]
    fixed = {"max_steps": STEPS, "eval_every": SAVED, "keep": STEPS}
    settings = small_settings(folder, folder / data, **fixed, **kind, **told)
    whole, cut = folder / f"{number}", folder / f"{number} cut"
    try:
        result = run(settings | {"out": str(whole)})
    except UserError as error:
        return str(error)
    steps = steps_of(result.folder.records())
    assert len(steps) == STEPS
    assert all(step["skipped"] or math.isfinite(step["loss"]) for step in steps)
    lost = shutil.ignore_patterns(f"step-{STEPS:08d}", "model", "summary.json")
    run_on_first_rank(world, lambda: shutil.copytree(whole, cut, ignore=lost))
    run({"out": str(cut)}, resume=True)
    assert_same_run(cut, whole, sharded=row["parallel"] == "fsdp2")
    return ""


def write_data(folder: Path) -> None:
    write_letters(folder, 54, lengths=(2, 12))
    write_marked(folder, 54)
    texts = letters(54, "abcxy", "defxy", lengths=(2, 12))
    labels = {
        "sets": lambda text: [c for c in "abc" if c in text],
        "numbers": lambda text: len(text) / 2,
    }
    for name, label_of in labels.items():
        rows = [{"text": text, "label": label_of(text)} for text, _ in texts]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)


def process(folder: Path, *numbers: int) -> None:
    """Be one of two processes: train some rows, up to one that fails."""
    told = {}
    with pytest.MonkeyPatch.context() as patch, process_group.join("cpu") as world:
        small_and_measured(patch)
        without_figures(patch)
        # One process group for all: torchrun's store takes no second.
        patch.setattr(process_group, "join", lambda _: contextlib.nullcontext(world))
        for number in numbers:
            try:
                told[number] = trial(folder, number, world)
            except Exception:
                told[number] = traceback.format_exc()
                raise
            finally:
                path = folder / f"told-{os.environ['RANK']}.json"
                path.write_text(json.dumps(told))


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What two processes told of those of their rows that are to be tested."""
    folder = tmp_path_factory.mktemp("two")
    write_data(folder)
    tests = [each for each in request.session.items if each.path == Path(__file__)]
    numbers = [each.callspec.params["number"] for each in tests]
    words = [str(number) for number in numbers if ROWS[number]["processes"] == 2]
    run_ranks(__file__, str(folder), *words, timeout=600, check=False)
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda n: f"row{n}")
@pytest.mark.usefixtures("small_runs")
def test_pairs(number: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Law: a run ends well, and as well if it is cut off; or the refusal names why."""
    if ROWS[number]["processes"] == 2:
        both = request.getfixturevalue("two")
        told = [rank.get(str(number), "not reached") for rank in both]
    else:
        write_data(tmp_path)
        told = [trial(tmp_path, number, World(0, 1, torch.device("cpu")))]
    expected = refusal(ROWS[number])
    for each in told:
        assert (expected in each) if expected else (each == ""), ROWS[number]


if __name__ == "__main__":
    process(Path(sys.argv[1]), *map(int, sys.argv[2:]))

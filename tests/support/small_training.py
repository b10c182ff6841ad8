"""Runs of `halfstep train` that take a moment: a small size, few texts, no figures.

In: pytest's patches. Out: texts whose characters tell their class, and what compares
states.
"""

import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.checkpoint import atomic_directory, single
from halfstep.machine import hardware
from halfstep.train import loop, model
from halfstep.train.loop import Trainer
from halfstep.train.output import html_report
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.step_dataset import StepBatch

TIMED = {
    *("seconds", "examples_per_s", "train_seconds", "evaluate_seconds"),
    *("save_seconds", "fit_seconds", "tokenise_seconds", "peak_memory_bytes"),
    "padded_share",
    *("ms", "time_ratio", "time_spread"),
}
"""What of records and summaries is of one process alone, not of what was learned."""


def small_and_measured(patch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    patch.setitem(model.SIZES, "mini", shape | {"intermediate_size": 64})
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)


def small_settings(folder: Path, source: Path, **more: Any) -> dict[str, Any]:
    """Return settings of a run in a folder, of the size that `small_and_measured` adds.

    Args:
        folder: The run goes into `folder / "run"`.
        source: Texts to train on.
        more: Settings by name, beside these or in their place.
    """
    shared = {"data": str(source), "dev_share": 0.1, "model": "mini", "batch_size": 16}
    return shared | {"out": str(folder / "run")} | more


def without_figures(patch: pytest.MonkeyPatch) -> None:
    """Draw no page, and profile no step: both take longer than the training here."""
    patch.setattr(html_report, "page", lambda *_: "<html></html>")
    patch.setattr(loop, "is_profile_step", lambda *_: False)


def interrupt_before(patch: pytest.MonkeyPatch, *steps: int) -> None:
    left = list(steps)
    step = Trainer.train_step

    def interrupted(self: Trainer, batch: StepBatch, *rest: Any) -> dict[str, Any]:
        if left and batch.number == left[0]:
            left.pop(0)
            raise KeyboardInterrupt
        return step(self, batch, *rest)

    patch.setattr(Trainer, "train_step", interrupted)


def overflow_in(patch: pytest.MonkeyPatch, *steps: int) -> None:
    clean = Trainer.micro_batch_loss

    def loss(self: Trainer, part: dict[str, Tensor]) -> Tensor:
        bad = self.state.step + 1 in steps
        return clean(self, part) * (math.inf if bad else 1.0)

    patch.setattr(Trainer, "micro_batch_loss", loss)


def letters(
    count: int, *alphabets: str, lengths: tuple[int, int]
) -> list[tuple[str, int]]:
    """Return texts and their classes, which take turns: each has an alphabet.

    Args:
        count: How many texts.
        alphabets: The characters of each class.
        lengths: The shortest text and the longest.
    """
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    rows = []
    for number in range(count):
        label = number % len(alphabets)
        size = draw.randint(*lengths)
        rows.append(("".join(draw.choices(alphabets[label], k=size)), label))
    return rows


def write_letters(
    path: Path,
    count: int = 100,
    *alphabets: str,
    lengths: tuple[int, int] = (3, 20),
) -> Path:
    """Write texts and their classes, as `letters` makes them; return the path.

    Args:
        path: A file of JSON, or a folder for one called letters.json.
        count: How many texts.
        alphabets: The characters of each class; two by default.
        lengths: The shortest text and the longest.
    """
    if path.is_dir():
        path = path / "letters.json"
    rows = letters(count, *(alphabets or ("abcxy", "defxy")), lengths=lengths)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


# Of each kind: what begins an entity, and what goes on with it.
KINDS = {"LOC": ("pq", "rs"), "PER": ("ab", "cd")}
FILLER = "uvwxyz"


def marked_text(draw: random.Random) -> dict[str, Any]:
    text, spans = "", []
    for _ in range(draw.randint(1, 3)):
        text += "".join(draw.choices(FILLER, k=draw.randint(1, 4)))
        kind = draw.choice(sorted(KINDS))
        start = len(text)
        first, more = KINDS[kind]
        text += draw.choice(first) + "".join(draw.choices(more, k=draw.randint(0, 2)))
        spans.append((start, len(text), kind))
    return {"text": text + "u", "entities": spans}


def write_marked(
    folder: Path,
    count: int,
    make: Callable[[random.Random], dict[str, Any]] = marked_text,
) -> Path:
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    path = folder / "marked.jsonl"
    path.write_text("".join(json.dumps(make(draw)) + "\n" for _ in range(count)))
    return path


def seal_again(folder: Path) -> None:
    """Seal a model's folder as it is now: a seal does not tell who wrote it."""
    (folder / atomic_directory.MANIFEST).unlink(missing_ok=True)
    files = {path.name: atomic_directory.digest(path) for path in folder.iterdir()}
    facts = {"schema": 1, "format": "halfstep model", "files": files, "notes": {}}
    whole = facts | {"seal": atomic_directory.seal(facts)}
    (folder / atomic_directory.MANIFEST).write_text(json.dumps(whole), encoding="utf-8")


def timeless(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records, and those in them, without what time told."""

    def stripped(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: stripped(v) for k, v in value.items() if k not in TIMED}

    return [*map(stripped, records)]


def steps_of(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return timeless(each for each in records if "event" not in each)


def assert_same_run(one: Path, other: Path, *, sharded: bool = False) -> None:
    """Hold that two runs are the same; of sharded checkpoints, what they led to."""
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    folders = RunFolder(one), RunFolder(other)
    metrics = [timeless(folder.records()) for folder in folders]
    assert metrics[0] == metrics[1]
    told = [json.loads((path / "summary.json").read_text()) for path in (one, other)]
    mine, others = timeless(told)
    assert mine == others
    assert folders[0].steps() == folders[1].steps()
    for step in () if sharded else folders[0].steps():
        states = [single.load(folder.checkpoint_path(step)) for folder in folders]
        assert same(states[0].weights, states[1].weights), step
        assert same(states[0].state, states[1].state), step
        assert states[0].notes == states[1].notes, step


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

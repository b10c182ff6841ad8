"""`halfstep bench train`: both tables, where time goes, and runs of a small size."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from small_training import letters, one_thread, small_and_measured, without_figures

from halfstep import cli
from halfstep.bench import measure, train, train_worker
from halfstep.bench.flags import TRAINS, add_train

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

MIB = 2**20


@pytest.fixture(autouse=True)
def _small_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small size, plant rates that warn of nothing, draw nothing."""
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)


def flags(words: str) -> Namespace:
    """Return settings as the command line reads them."""
    parser = ArgumentParser()
    add_train(parser)
    return parser.parse_args(words.split())


def texts(folder: Path) -> str:
    """Write texts whose characters tell their class; return where they are."""
    place = folder / "letters.json"
    place.write_text(json.dumps(letters(80, "de", "ab", lengths=(3, 9))))
    return str(place)


# The tables


def measured(rate: float, mib: int = 4, **parts: float) -> dict[str, Any]:
    """Return what a run of 8 steps and 64 texts came to."""
    return {
        "seconds": 64 / rate,
        "examples_per_s": rate,
        "peak_memory_bytes": mib * MIB,
        "train_loss": 1 / rate,
        "dev_loss": 2 / rate,
        "dev_accuracy": rate / 64,
        "skipped": mib,
        "steps": 8,
        "parts": parts,
    }


FOUND = {
    "plain-fp32": [measured(4, 3), measured(2, 1), measured(1, 2)],
    "plain-amp": [measured(8), measured(4), measured(16)],
    "O2-bf16": [measured(32), measured(8), measured(16)],
}


def table(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the first table, by contender and column."""
    made = train._table(found, {"data": None, "seed": 3})
    assert "data None, seed 3; median of 3 runs, contenders in turn" in made.notes
    return {str(row[0]): dict(zip(made.columns, row, strict=True)) for row in made.rows}


def test_table() -> None:
    """Law: each number is a median over runs; ratios are of the medians' rates."""
    found = table(FOUND)
    assert list(found) == list(FOUND)
    assert found["plain-fp32"] == {
        "contender": "plain-fp32",
        "seconds": 32.0,
        "examples/s": 2.0,
        "x plain-amp": 0.25,
        "x plain-fp32": 1.0,
        "peak MiB": 2.0,
        "train loss": 0.5,
        "dev loss": 1.0,
        "dev accuracy": 1 / 32,
        "skipped": 2,
    }
    ratios = {n: (r["x plain-amp"], r["x plain-fp32"]) for n, r in found.items()}
    assert ratios["plain-amp"] == (1.0, 4.0)
    assert ratios["O2-bf16"] == (2.0, 8.0)


def test_table_without_a_baseline() -> None:
    """Law: what did not run is no baseline; the other still is."""
    found = table({n: r for n, r in FOUND.items() if n != "plain-amp"})
    assert found["O2-bf16"]["x plain-amp"] is None
    assert found["O2-bf16"]["x plain-fp32"] == 8.0
    alone = table({"O2-bf16": FOUND["O2-bf16"]})["O2-bf16"]
    assert (alone["x plain-amp"], alone["x plain-fp32"]) == (None, None)


def test_where() -> None:
    """Law: a part is its milliseconds a step, the median over runs; a row adds up."""
    runs = [
        measured(8, tokenise=0.8, forward=1.6, rest=0.08),
        measured(8, tokenise=0.4, forward=3.2, rest=0.16),
        measured(8, tokenise=1.6, forward=0.8, rest=0.04),
    ]
    made = train._step_time_table(
        {"O2-bf16": runs, "plain-amp": [measured(8, input=0.8)]}
    )
    assert made.columns == ("contender", *train.PARTS, "sum")
    one, other = ([*row] for row in made.rows)
    assert one[0] == "O2-bf16"
    assert one[1:] == pytest.approx([100, 0, 200, 0, 0, 10, 310])
    assert other[1:] == pytest.approx([0, 100, 0, 0, 0, 0, 100])


def test_parts() -> None:
    """Law: what steps took is added up by part; a part may be new in any step."""
    records = [
        {"seconds": {"input": 1.0, "forward": 2.0}},
        {"seconds": {"input": 0.5, "rest": 0.25}},
    ]
    assert train_worker._parts(records) == {"input": 1.5, "forward": 2.0, "rest": 0.25}
    assert train_worker._parts([]) == {}


# Runs


def test_names() -> None:
    """Law: what the command line knows is what can run."""
    assert (*train.CONTENDERS,) == TRAINS


def test_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: contenders take turns; they differ only in what they are."""
    tasks = []

    def apart(module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.train_worker"
        tasks.append(task)
        return measured(64)

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    data = texts(tmp_path)
    names = ["O3-bf16", "plain-amp"]
    words = f"--data {data} --limit 60 --seed 5 --model mini --repeats 2"
    train.tables(flags(f"{words} --contenders {','.join(names)}"))
    shared = {"data": data, "limit": 60, "seed": 5, "epochs": 1, "model": "mini"}
    turns = [*names, *reversed(names)]
    assert tasks == [train.CONTENDERS[name] | shared for name in turns]
    assert capsys.readouterr().err.splitlines() == [
        f"run {1 + number // 2}/2 {name}: 1.0 s" for number, name in enumerate(turns)
    ]


def test_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: both loops train the same texts, and all their time is in some part.

    Of 60 texts 55 train, in 2 steps, and 5 are dev: 8 % of them.
    """
    found = []

    def apart(_: str, task: dict[str, Any]) -> dict[str, Any]:
        came_to = train_worker.measure(json.loads(json.dumps(task)))
        found.append(cast("dict[str, Any]", json.loads(json.dumps(came_to))))
        return found[-1]

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))  # a contender sets its own
    names = ["plain-fp32", "plain-amp", "O2-bf16"]
    words = f"--data {texts(tmp_path)} --limit 60 --model mini"
    with one_thread():
        first, second = train.tables(flags(f"{words} --contenders {','.join(names)}"))
    assert [row[0] for row in first.rows] == names
    assert "run 1/1 O2-bf16: " in capsys.readouterr().err
    for came_to, row in zip(found, second.rows, strict=True):
        seconds = came_to["seconds"]
        assert came_to["steps"] == 2
        assert came_to["examples_per_s"] == pytest.approx(55 / seconds)
        assert 0 < came_to["dev_loss"] < 2  # about log 2, of weights just drawn
        assert 0 < came_to["train_loss"] < 2
        right = came_to["dev_accuracy"] * 5
        assert right == pytest.approx(round(right))
        assert came_to["peak_memory_bytes"] > 0
        assert {*came_to["parts"]} <= {*train.PARTS}
        assert min(came_to["parts"].values()) >= 0
        assert sum(came_to["parts"].values()) == pytest.approx(seconds)
        assert row[-1] == pytest.approx(1000 * seconds / 2)


REFUSALS = {
    "--contenders O0,O9": "argument --contenders: 'O9' must be all or of plain-fp32, ",
    "--contenders O0,O0": "argument --contenders: 'O0' ",
    "--repeats 0": "argument --repeats: '0' must be a whole number of at least 1",
    "--epochs 0": "argument --epochs: '0' must be a whole number of at least 1",
    "--data nothing.json": "nothing.json",
    "--limit 1 --data letters.json": "--limit 1 must be from 2 ",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    """Law: what cannot be used is refused in one line, before anything runs."""
    texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure, "run_in_subprocess", lambda *_: pytest.fail("it ran"))
    try:
        status: Any = cli.run(["bench", "train", *words.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: error: {REFUSALS[words]}")

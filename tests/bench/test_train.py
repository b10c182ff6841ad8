"""`halfstep bench train`: both tables, where time goes, and runs of a small size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from bench_runs import flags
from small_training import letters, one_thread, small_and_measured, without_figures

from halfstep.bench import train, worker_process
from halfstep.bench.contenders import TRAIN

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small size, draw nothing."""
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write texts whose characters tell their class; return where they are."""
    place = tmp_path / "letters.json"
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


def table(results: train.Runs) -> dict[Any, dict[str, Any]]:
    """Return the rows of the first table, by contender."""
    return {row["contender"]: row for row in train.run_rows(results)}


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


def test_parts_of_a_step() -> None:
    """Law: a part is its milliseconds a step, the median over runs; a row adds up."""
    runs = [
        measured(8, tokenise=0.8, forward=1.6, rest=0.08),
        measured(8, tokenise=0.4, forward=3.2, rest=0.16),
        measured(8, tokenise=1.6, forward=0.8, rest=0.04),
    ]
    plain = [measured(8, input=0.8)]
    both = train.part_rows({"O2-bf16": runs, "plain-amp": plain})
    one, other = ([*row.values()] for row in both)
    assert [*both[0]] == ["contender", *train.PARTS, "sum"]
    assert one[0] == "O2-bf16"
    assert one[1:] == pytest.approx([100, 0, 200, 0, 0, 10, 310])
    assert other[1:] == pytest.approx([0, 100, 0, 0, 0, 0, 100])


def test_sum_of_parts() -> None:
    """Law: what steps took is added up by part; a part may be new in any step."""
    steps = [{"input": 1.0, "forward": 2.0}, {"input": 0.5, "rest": 0.25}]
    assert train.sum_parts(steps) == {"input": 1.5, "forward": 2.0, "rest": 0.25}
    assert train.sum_parts([]) == {}


# Runs


def test_turns(
    texts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: contenders take turns; they differ only in what they are."""
    tasks = []

    def run_once(name: str, module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.train"
        tasks.append((name, task["settings"]))
        return measured(64)

    monkeypatch.setattr(worker_process, "run_once", run_once)
    names = ["O3-bf16", "plain-amp"]
    words = f"--data {texts} --limit 60 --seed 5 --model mini --repeats 2"
    first, _ = train.train(flags("train", f"{words} --contenders {','.join(names)}"))
    note = f"data {texts}, limit 60, seed 5, epochs 1, model mini; median of 2 runs"
    assert first.notes[0] == f"{note}, contenders in turn"
    shared = {"data": texts, "limit": 60, "seed": 5, "epochs": 1, "model": "mini"}
    turns = [*names, *reversed(names)]
    assert tasks == [(name, TRAIN[name] | shared) for name in turns]
    assert capsys.readouterr().err.splitlines() == [
        f"run {1 + number // 2}/2 {name}: 1.0 s" for number, name in enumerate(turns)
    ]


def test_for_real(texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: both loops train the same texts, and all their time is in some part.

    Of 60 texts 55 train, in 2 steps, and 5 are dev: 8 % of them.
    """
    results: list[dict[str, Any]] = []

    def run_once(_name: str, _module: str, task: dict[str, Any]) -> dict[str, Any]:
        answer = train.worker(**json.loads(json.dumps(task)))(None)
        results.append(json.loads(json.dumps(answer)))
        return results[-1]

    monkeypatch.setattr(worker_process, "run_once", run_once)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))  # a contender sets its own
    names = ["plain-fp32", "plain-amp", "O2-bf16"]
    words = f"--data {texts} --limit 60 --model mini --contenders {','.join(names)}"
    with one_thread():
        first, second = train.train(flags("train", words))
    assert [row[0] for row in first.rows] == names
    for result, row in zip(results, second.rows, strict=True):
        seconds = result["seconds"]
        assert result["steps"] == 2
        assert result["examples_per_s"] == pytest.approx(55 / seconds)
        assert 0 < result["dev_loss"] < 2  # about log 2, of weights just drawn
        assert 0 < result["train_loss"] < 2
        correct = result["dev_accuracy"] * 5
        assert correct == pytest.approx(round(correct))
        assert result["peak_memory_bytes"] > 0
        assert {*result["parts"]} <= {*train.PARTS}
        assert min(result["parts"].values()) >= 0
        assert sum(result["parts"].values()) == pytest.approx(seconds)
        assert row[-1] == pytest.approx(1000 * seconds / 2)

"""`halfstep bench quality` and `bench ner`: intervals, tables, and runs."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bench_runs import flags, rejected, rows
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_corpora import marked
from small_training import letters, one_thread, small_and_measured, without_figures

from halfstep.bench import accuracy, worker_process
from halfstep.bench.commands import BENCHES
from halfstep.bench.contenders import NER, QUALITY
from halfstep.machine import fp16_emulation, hardware
from halfstep.masters import encoding
from halfstep.scaling import LossScaleCollapse
from halfstep.train.signals import Diverged

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.reporting.table import Table

MIB = 2**20
SCORES = ("loss", "accuracy", "macro_f1", "macro_precision", "macro_recall", "mcc")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small size, draw nothing."""
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)


def tables(bench: str, words: str) -> list[Table]:
    """Return the tables of a run."""
    return BENCHES[bench].tables(flags(bench, f"{words} --device cpu"))


def test_contenders() -> None:
    """Law: the baseline is a contender; O2 comes with every form of masters."""
    assert accuracy.BASELINE in QUALITY
    assert accuracy.BASELINE in NER
    masters = {each.get("master") for each in QUALITY.values()}
    assert masters == {None, *encoding.ENCODINGS, encoding.NONE}


# Intervals


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9))
def test_interval_is_scipys(values: list[float]) -> None:
    """Law: the ends of an interval are scipy's, of its own mean and standard error."""
    mean, half = accuracy.interval(values)
    error = float(stats.sem(values))
    assert mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)
    # The spread of nearly equal values is what rounding leaves of the largest.
    few = max(map(abs, values)) * 2.0**-40
    expected = stats.t.interval(0.95, len(values) - 1, 0.0, 1.0)[1] * error
    assert half == pytest.approx(expected, rel=2.0**-40, abs=few)


def test_interval_of_few() -> None:
    """Law: one value has no spread, and none has no mean."""
    assert accuracy.interval([0.5]) == (0.5, None)
    assert accuracy.interval([]) == (None, None)


# The tables


def result(score: float, seconds: float, mib: int, **more: float) -> dict[str, Any]:
    """Return a run's result, its precision half of F1, its recall a quarter."""
    scores = {"accuracy": score, "f1": score}
    scores |= {"precision": score / 2, "recall": score / 4}
    figures = {"scores": scores, "seconds": seconds, "peak_bytes": mib * MIB}
    return figures | {"dev_loss": 1.0, "skipped": 0} | more


DIVERGED = {"diverged": "the loss is nan"}
FP32 = [
    result(0.50, 10.0, 30),
    result(0.75, 20.0, 10, dev_loss=0.5),
    result(0.25, 40.0, 20, dev_loss=1.5),
]
O2 = [result(0.625, 5.0, 8, dev_loss=0.75), DIVERGED, result(0.375, 10.0, 6)]
FP16 = [result(0.75, 5.0, 8, skipped=2), DIVERGED, result(0.375, 160.0, 6, skipped=3)]
ONE = 12.706204736174694
"""Student's bound with one degree of freedom; the median of |t| there is 1."""
TWO = 4.302652729749462
_NO_BASELINE = dict.fromkeys(("to fp32", "+- to fp32"))


def test_quality_table() -> None:
    """Law: differences are of one seed; who diverged is counted, named, and left out.

    Of fp32 the standard deviation is 25 points; of the differences in loss, -1/4 and
    -1/2, it is sqrt(1/32), their standard error 1/8.
    """
    table = accuracy.quality_table({"fp32": FP32, "O2": O2}, ["more"])
    fp32, o2 = rows(table)
    assert fp32 == {
        "contender": "fp32",
        "accuracy %": 50.0,
        "+-": pytest.approx(TWO * 25 / math.sqrt(3)),
        **_NO_BASELINE,
        "dev loss": 1.0,
        "loss to fp32": None,
        "+- of loss": None,
        "time x fp32": None,
        "peak MiB": 20.0,
        "diverged": 0,
    }
    assert o2 == {
        "contender": "O2",
        "accuracy %": 50.0,
        "+-": pytest.approx(ONE * 12.5),
        "to fp32": 12.5,
        "+- to fp32": 0.0,
        "dev loss": 0.875,
        "loss to fp32": -0.375,
        "+- of loss": pytest.approx(ONE / 8),
        "time x fp32": 0.375,
        "peak MiB": 7.0,
        "diverged": 1,
    }
    assert "O2, seed 2: the loss is nan" in table.notes
    assert table.notes[-1] == "more"


def test_ner_table() -> None:
    """Law: as above, with precision, recall, skipped steps and speed, not time.

    Of fp16, 75 and 37.5 points, half the distance is their standard error; of the
    differences, 25 and 12.5, too.
    """
    fp32, fp16 = rows(accuracy.ner_table({"fp32": FP32, "O1-fp16": FP16}, []))
    assert fp32 == {
        "contender": "fp32",
        "F1 %": 50.0,
        "+-": pytest.approx(TWO * 25 / math.sqrt(3)),
        **_NO_BASELINE,
        "precision %": 25.0,
        "recall %": 12.5,
        "speed x fp32": None,
        "peak MiB": 20.0,
        "skipped": 0,
        "diverged": 0,
    }
    assert fp16 == {
        "contender": "O1-fp16",
        "F1 %": 56.25,
        "+-": pytest.approx(ONE * 18.75),
        "to fp32": 18.75,
        "+- to fp32": pytest.approx(ONE * 6.25),
        "precision %": 28.125,
        "recall %": 14.0625,
        "speed x fp32": (2 + 1 / 4) / 2,
        "peak MiB": 7.0,
        "skipped": 5,
        "diverged": 1,
    }


def test_tables_without_a_baseline() -> None:
    """Law: without fp32 nothing is compared with it; of no run there is no figure."""
    o2, o3 = accuracy.quality_table({"O2": O2, "O3": [DIVERGED] * 3}, []).rows
    half = pytest.approx(ONE * 12.5)
    assert o2 == ("O2", 50.0, half, None, None, 0.875, None, None, None, 7.0, 1)
    assert o3 == ("O3", *[None] * 9, 3)
    one, none = accuracy.ner_table({"x": FP16, "y": [DIVERGED] * 3}, []).rows
    half = pytest.approx(ONE * 18.75)
    assert one == ("x", 56.25, half, None, None, 28.125, 14.0625, None, 7.0, 5, 1)
    assert none == ("y", *[None] * 9, 3)


def test_one_seed() -> None:
    """Law: one seed has a difference, and no spread."""
    _, fp16 = rows(accuracy.ner_table({"fp32": FP32[:1], "O1-fp16": FP16[:1]}, []))
    assert (fp16["F1 %"], fp16["+-"]) == (75.0, None)
    assert (fp16["to fp32"], fp16["+- to fp32"]) == (25.0, None)
    assert fp16["speed x fp32"] == 2.0


# Runs


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write texts whose characters tell their class; return where they are."""
    rows = letters(40, "de", "ab", lengths=(3, 9))
    (tmp_path / "letters.json").write_text(json.dumps(rows))
    return str(tmp_path / "letters.json")


@pytest.fixture
def entities(tmp_path: Path) -> str:
    """Write texts with names in them; return where they are."""
    names = [(f"{'ab' * (n % 3)}xyz{'ba' * (n % 2)}", 2 * (n % 3)) for n in range(40)]
    marks = [(text, [(start, start + 3, "PER")]) for text, start in names]
    marked(tmp_path / "names.jsonl", marks, ["PER"])
    return str(tmp_path / "names.jsonl")


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let no process start: of seed 2 each run diverges; return the tasks."""
    tasks: list[dict[str, Any]] = []

    def run_once(name: str, module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.accuracy"
        tasks.append({"name": name, **task["task"]})
        return FP16[task["task"]["seed"]]

    monkeypatch.setattr(worker_process, "run_once", run_once)
    return tasks


def test_quality_turns(
    texts: str, tasks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a seed meets all contenders before the next does, there and back.

    Runs differ in nothing but what the contender is and the seed.
    """
    words = f"--data {texts} --limit 30 --share 0.5 --epochs 2 --seeds 2"
    names = ["O2-split", "fp32"]
    (table,) = tables("quality", f"{words} --contenders {','.join(names)}")
    shared = {"data": texts, "limit": 30, "dev_share": 0.5, "model": "tiny"}
    shared |= {"epochs": 2, "device": "cpu"}
    assert tasks == [
        shared | QUALITY[name] | {"seed": seed, "name": name}
        for seed, name in [(0, names[0]), (0, names[1]), (1, names[1]), (1, names[0])]
    ]
    assert capsys.readouterr().err.splitlines() == [
        "seed 1/2 O2-split: accuracy 0.7500, dev loss 1.0000, 5.0 s, 8 MiB",
        "seed 1/2 fp32: accuracy 0.7500, dev loss 1.0000, 5.0 s, 8 MiB",
        "seed 2/2 fp32: the loss is nan",
        "seed 2/2 O2-split: the loss is nan",
    ]
    assert [row[0] for row in table.rows] == names
    (evaluated,) = [note for note in table.notes if note.startswith("accuracy:")]
    assert " of 15 dev texts" in evaluated
    assert evaluated.endswith("trained on 15")


@pytest.mark.usefixtures("tasks")
def test_a_test_split_is_evaluated(tmp_path: Path) -> None:
    """Law: where the data has a test split, accuracy is of that."""
    for split, count in {"train": 20, "dev": 8, "test": 6}.items():
        examples = letters(count, "de", "ab", lengths=(3, 9))
        (tmp_path / f"{split}.json").write_text(json.dumps(examples))
    (table,) = tables("quality", f"--data {tmp_path} --seeds 1")
    (evaluated,) = [note for note in table.notes if note.startswith("accuracy:")]
    assert " of 6 test texts" in evaluated


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("low", ["O1-bf16", "O1-fp16-unscaled"])
def test_ner_turns(
    *,
    entities: str,
    tasks: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    low: str,
    slow: bool,
) -> None:
    """Law: each run has its contender's settings and learning rate.

    That matmuls are emulated is noted where fp16 ran on a CPU without them, only there.
    """
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: slow)
    words = f"--data {entities} --limit 30 --epochs 2 --seeds 1"
    lr = f"--lr 1e-3,{low}=5e-4"
    (table,) = tables("ner", f"{words} --contenders {low},fp32 {lr}")
    shared: dict[str, Any] = {"mask_tokens": None, "task": "ner", "data": entities}
    shared |= {"limit": 30, "model": "tiny", "epochs": 2, "device": "cpu", "seed": 0}
    shared |= {"batch_size": 32, "max_length": 192}
    assert tasks == [
        shared | NER[low] | {"name": low, "lr": 5e-4},
        shared | NER["fp32"] | {"name": "fp32", "lr": 1e-3},
    ]
    assert any(note.startswith("F1: of 2 dev texts") for note in table.notes)
    assert any(lr in note for note in table.notes)
    notes = [note for note in table.notes if "fp16 matmuls" in note]
    assert len(notes) == (slow and "fp16" in low)
    for note in notes:
        assert "its speed is that of the emulation" in note
        assert "its peak MiB holds the fp32 copies" in note


def test_learning_rates() -> None:
    """Law: a rate is a contender's own, that of all others, or training's default."""
    names = ["fp32", "O1-bf16", "O1-fp16"]
    words = flags("ner", "--lr O1-fp16=5e-4,1e-3,fp32=0.25").lr
    rates = accuracy.learning_rates(words, names)
    assert rates == {"fp32": 0.25, "O1-bf16": 1e-3, "O1-fp16": 5e-4}
    alone = accuracy.learning_rates(["O1-fp16=2"], names)
    assert alone == {"fp32": None, "O1-bf16": None, "O1-fp16": 2.0}
    assert accuracy.learning_rates([], names) == dict.fromkeys(names)


@pytest.mark.parametrize("name", QUALITY)
def test_one_run(texts: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Law: a run has the contender's settings; only its end is evaluated."""
    runs, run = [], accuracy.run

    def keep(task: dict[str, Any]) -> Any:
        done = run(task)
        runs.append((done.summary, done.folder.records()))
        return done

    monkeypatch.setattr(accuracy, "run", keep)
    task = {"data": texts, "model": "mini", "epochs": 1, "device": "cpu", "seed": 3}
    with one_thread():
        answer = accuracy.worker(task | QUALITY[name])(None)
    ((summary, records),) = runs
    assert summary | QUALITY[name] == summary
    assert [r["step"] for r in records if "event" in r] == [summary["steps"]]
    assert answer == {
        "seed": 3,
        "scores": {k: summary["dev"][k] for k in SCORES},
        "dev_loss": summary["dev"]["loss"],
        "skipped": summary["skipped"],
        "seconds": summary["train_seconds"],
        "peak_bytes": summary["peak_memory_bytes"],
    }
    assert answer["seconds"] > 0
    assert answer["peak_bytes"] > 100 * MIB  # torch alone takes more


@pytest.mark.parametrize("error", [Diverged, LossScaleCollapse])
def test_a_run_that_diverges(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Law: a run that diverges is a result, in one line."""

    def run(_task: dict[str, Any]) -> None:
        message = "training\n  has diverged"
        raise error(message)

    monkeypatch.setattr(accuracy, "run", run)
    assert accuracy.train_once({}) == {"diverged": "training has diverged"}


def test_in_a_process(
    texts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run in a process of its own gives what it gives here, to the bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on it
    words = f"--data {texts} --contenders O2-kahan --epochs 1 --seeds 1"
    (table,) = tables("quality", words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seed 1/1 O2-kahan: accuracy ")
    task = {"data": texts, "dev_share": 0.2, "epochs": 1, "device": "cpu", "seed": 0}
    with one_thread():
        here = accuracy.train_once(task | QUALITY["O2-kahan"])
    (row,) = rows(table)
    assert row["accuracy %"] == 100 * here["scores"]["accuracy"]
    assert row["dev loss"] == here["dev_loss"]


def test_ner_for_real(entities: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a run has what the table needs, with fp16 matmuls emulated too."""
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: None)
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: True)

    def run_once(_name: str, _module: str, task: dict[str, Any]) -> Any:
        answer = accuracy.worker(**json.loads(json.dumps(task)))(None)
        return json.loads(json.dumps(answer))

    monkeypatch.setattr(worker_process, "run_once", run_once)
    words = f"--data {entities} --model mini --epochs 1 --seeds 1"
    with one_thread():
        (table,) = tables("ner", f"{words} --contenders fp32,O1-fp16")
    for row in rows(table):
        assert row["diverged"] == 0
        assert 0 <= row["F1 %"] <= 100  # type: ignore[operator]
        assert row["peak MiB"] > 100  # type: ignore[operator] # torch alone takes more


REJECTED = {
    "quality --share 0 --data letters.json": "--dev-share 0.0 must be above 0 and ",
    "quality --data nothing.json": "nothing.json",
    "quality --limit 1 --data letters.json": "--limit 1 must be from 2 ",
    "ner --contenders fp32 --lr O1-bf16=1e-3": "--lr O1-bf16=0.001: O1-bf16 is not ",
    "ner --data nothing.jsonl": "nothing.jsonl",
    "ner --limit 1 --data names.jsonl": "--limit 1 must be from 2 ",
    "ner --max-length 2": "--max-length 2 must be ",
    "train --data nothing.json": "nothing.json",
    "train --limit 1 --data letters.json": "--limit 1 must be from 2 ",
}


@pytest.mark.usefixtures("texts", "entities")
@pytest.mark.parametrize("words", REJECTED)
def test_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    """Law: what cannot be used is rejected in one line, before anything runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fail = partial(pytest.fail, "it ran")
    monkeypatch.setattr(worker_process, "run_once", lambda *_: fail())
    bench, _, more = words.partition(" ")
    assert rejected(bench, more, capsys).startswith(REJECTED[words])

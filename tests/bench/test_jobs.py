"""`halfstep bench train` and `ner`: intervals, tables, and runs."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from bench_runs import Candidate, rejected, rows, tables
from small_training import (
    small_and_measured,
    without_figures,
    write_letters,
)

from halfstep.bench import jobs
from halfstep.bench.jobs import NER, TRAIN
from halfstep.machine import hardware
from halfstep.parity.train_workload import TrainRuns
from halfstep.scaling import LossScaleCollapse
from halfstep.train.config import TrainConfig
from halfstep.train.signals import Diverged

MIB = 2**20
SCORES = ("loss", "accuracy", "macro_f1", "macro_precision", "macro_recall", "mcc")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)


# The tables


def result(score: float, seconds: float, mib: int, **more: float) -> dict[str, Any]:
    scores = dict.fromkeys(("accuracy", "f1", "precision", "recall"), score)
    figures = {"scores": scores, "train_seconds": seconds, "peak_bytes": mib * MIB}
    figures |= {"seconds": seconds, "train_loss": 2.0, "examples_per_s": 64 / seconds}
    figures |= {"steps": 10, "state_bytes": 10**8, "dtype": "fp32"}
    return figures | {"dev_loss": 1.0, "skipped": 0, "floor_seconds": 2.5} | more


DIVERGED = {"diverged": "the loss is nan"}
FP32 = [result(0.50, 10.0, 30), result(0.75, 20.0, 10, dev_loss=0.5)]
FP32 += [result(0.25, 40.0, 20, dev_loss=1.5)]
O2 = [result(0.625, 5.0, 8, dev_loss=0.75), DIVERGED, result(0.375, 10.0, 6)]
FP16 = [result(0.75, 5.0, 8, skipped=2), DIVERGED, result(0.375, 160.0, 6, skipped=3)]
ONE = 12.706204736174694
"""Student's bound with one degree of freedom; the median of |t| there is 1."""
TWO = 4.302652729749462


def test_score_table() -> None:
    """Law: differences are of one seed; who diverged is counted, named, and left out.

    Of fp32 the standard deviation is 25 points; of the differences in loss, -1/4 and
    -1/2, it is sqrt(1/32), their standard error 1/8. A difference within the interval
    is none: of fp16, 25 and 12.5 points better, that is +- 79 points.
    """
    runs = {"fp32": FP32, "O2": O2}
    table = jobs.score_table("Entities", runs, ["more"])
    columns = ("candidate", "F1 %", "+-", "to fp32", "+- to fp32", "result")
    columns += ("precision %", "recall %")
    losses = ("dev loss", "loss to fp32", "+- of loss")
    costs = ("time x fp32", "texts/s", "of floor", "peak MiB", "skipped", "diverged")
    assert table.columns == (*columns, *losses, *costs)
    fp32 = ("fp32", 50.0, pytest.approx(TWO * 25 / math.sqrt(3)), *[None] * 3)
    o2 = ("O2", 50.0, pytest.approx(ONE * 12.5), 12.5, 0.0, "better")
    spread, rate = pytest.approx(ONE / 8), pytest.approx(9.6)
    assert table.rows == (
        (*fp32, *[50.0] * 2, 1.0, None, None, None, 3.2, 0.125, 20.0, 0, 0),
        (*o2, *[50.0] * 2, 0.875, -0.375, spread, 0.375, rate, 0.375, 7.0, 0, 1),
    )
    assert "O2, seed 2: the loss is nan" in table.notes
    assert table.notes[-1] == "more"
    runs = {"fp32": FP32, "O1-fp16": FP16}
    _, fp16 = rows(jobs.score_table("Entities", runs, []))
    assert fp16["F1 %"] == fp16["precision %"] == fp16["recall %"] == 56.25
    assert (fp16["to fp32"], fp16["skipped"]) == (18.75, 5)
    assert fp16["+- to fp32"] == pytest.approx(ONE * 6.25)
    assert fp16["result"] == "no difference beyond the spread"


def test_tables_without_a_baseline() -> None:
    """Law: without fp32 nothing is compared with it; of no run there is no figure.

    One seed has a difference, no spread, and no verdict.
    """
    runs = {"O2": O2, "O3": [DIVERGED] * 3}
    o2, o3 = jobs.score_table("Entities", runs, []).rows
    half, rate = pytest.approx(ONE * 12.5), pytest.approx(9.6)
    costs = (rate, 0.375, 7.0)
    scores = ("O2", 50.0, half, *[None] * 3, 50.0, 50.0)
    assert o2 == (*scores, 0.875, *[None] * 3, *costs, 0, 1)
    assert o3 == ("O3", *[None] * 15, 3)
    runs = {"fp32": FP32[:1], "O1-fp16": FP16[:1]}
    _, fp16 = rows(jobs.score_table("Entities", runs, []))
    assert (fp16["F1 %"], fp16["+-"]) == (75.0, None)
    assert (fp16["to fp32"], fp16["+- to fp32"], fp16["result"]) == (25.0, None, None)


def test_train_table() -> None:
    """Law: each number is a median over runs; ratios are of the medians' rates.

    Who diverged is counted and left out; of no other run there is no figure.
    """
    runs = {"plain-amp": [result(0.5, s, 2) for s in (8.0, 16.0, 4.0)]}
    runs["O2-bf16"] = [result(0.5, 2.0, 1), DIVERGED]
    plain, ours = jobs.run_rows(runs)
    assert (plain["seconds"], plain["texts/s"], plain["x plain-amp"]) == (8, 8, 1)
    assert (ours["x plain-amp"], ours["x plain-fp32"]) == (4.0, None)
    assert (ours["floor s"], ours["of floor"]) == (2.5, 1.25)
    assert (ours["seconds"], ours["diverged"]) == (2, 1)
    assert (ours["peak MiB"], ours["accuracy"], ours["dev loss"]) == (1, 0.5, 1)
    plain, ours = jobs.run_rows(runs | {"plain-amp": [DIVERGED]})
    assert {*plain.values()} == {"plain-amp", None, 1}
    assert ours["x plain-amp"] is None


# Runs


def test_flops(texts: str) -> None:
    """Law: a text has 6 FLOPs for each weight of a linear layer and token: by hand.

    Texts of 3 to 9 letters and two special tokens have 8 tokens on average; "mini" has
    four 32 x 32 and two 32 x 64 matrices, a classifier of the mean of tokens, and
    products of all tokens with all in attention: 2 x 32 FLOPs each, three times.
    """
    config = TrainConfig(data=texts, model="mini", epochs=2, dev_share=0.1)
    runs = TrainRuns(config)
    length, layer = 8, 4 * 32 * 32 + 2 * 32 * 64
    by_hand = 6 * (length * layer + 2 * 32) + 3 * 2 * (2 * 32 * length**2)
    assert jobs.matmul_flops(runs) == by_hand * 2 * len(runs.corpus.train)


def write_splits(folder: Path) -> str:
    for split, count in {"train": 20, "dev": 8, "test": 6}.items():
        path = folder / f"{split}.json"
        write_letters(path, count, "de", "ab", lengths=(3, 9))
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write texts whose characters tell their class; return where they are."""
    return str(write_letters(tmp_path, 40, "de", "ab", lengths=(3, 9)))


@pytest.fixture
def entities(tmp_path: Path) -> str:
    names = [(f"{'ab' * (n % 3)}xyz{'ba' * (n % 2)}", 2 * (n % 3)) for n in range(40)]
    rows = [{"text": t, "entities": [(n, n + 3, "PER")]} for t, n in names]
    path = tmp_path / "names.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


class Process(Candidate):
    """No process: of seed 2 each run diverges."""

    log: list[Any]

    def __init__(self, name: str, module: str, task: Any, env: Any) -> None:
        assert (module, env) == ("halfstep.bench.jobs", {})
        self.log.append({"name": name, **task["settings"]})
        self.seed = task["settings"]["seed"]

    def request(self, question: Any = None) -> dict[str, Any]:
        assert question is None
        return FP16[self.seed % 3]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let no process start; return the tasks."""
    Process.log = []
    monkeypatch.setattr(jobs, "WorkerProcess", Process)
    return Process.log


@pytest.mark.usefixtures("tasks")
def test_a_test_split_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the data has a test split, scores are of that, and losses of dev.

    The plain loop clips the gradients of each step, and counts those it skips.
    """
    data = write_splits(tmp_path)
    (table,) = tables("train", f"--data {data} --candidates O2-bf16")
    (evaluated,) = [note for note in table.notes if note.startswith("accuracy:")]
    assert " of 6 test texts" in evaluated
    monkeypatch.setattr(TrainRuns, "scores", lambda *of: {"loss": of[2]})
    task = {"data": data, "model": "mini", "epochs": 1, "mask_tokens": 0.0}
    clip = Mock(wraps=jobs.clip_grad_norm_)
    monkeypatch.setattr(jobs, "clip_grad_norm_", clip)
    plain = jobs.run_once(task | {"amp": False})
    assert (plain["dev_loss"], plain["scores"]) == ("dev", {"loss": "test"})
    assert (clip.call_count, plain["skipped"]) == (plain["steps"], 0)


def test_ner_turns(
    entities: str,
    tasks: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Law: a seed meets all candidates before the next does, there and back.

    Each run has its candidate's settings.
    """
    low = "O1-fp16-unscaled"
    words = f"--data {entities} --limit 30 --epochs 2 --seeds 2 --device cpu"
    words += f" --lr 1e-3,1e-4 --candidates {low},fp32"
    table, other = tables("ner", words)
    assert (table.title[-5:], other.title[-6:]) == ("0.001", "0.0001")
    shared: dict[str, Any] = {"mask_tokens": None, "task": "ner", "data": entities}
    shared |= {"limit": 30, "model": "tiny", "epochs": 2, "device": "cpu"}
    shared |= {"batch_size": 32, "max_length": 192}
    turns = [(name, lr) for lr in (1e-3, 1e-4) for name in (low, "fp32")]
    assert tasks == [
        shared | NER[name] | {"name": f"{name}, lr {lr:g}", "lr": lr, "seed": seed}
        for seed, turn in enumerate((turns, turns[::-1]))
        for name, lr in turn
    ]
    assert capsys.readouterr().err.splitlines() == [
        *(
            f"run 1/2 {name}, lr {lr:g}: F1 0.7500, dev loss 1.0000, 5.0 s, 8 MiB"
            for name, lr in turns
        ),
        *(f"run 2/2 {name}, lr {lr:g}: the loss is nan" for name, lr in turns[::-1]),
    ]
    (evaluated,) = [note for note in table.notes if note.startswith("F1:")]
    assert " dev texts, by which nothing was chosen: " in evaluated


def test_train_turns(texts: str, tasks: list[dict[str, Any]]) -> None:
    """Law: candidates take turns with one seed; they differ only in what they are."""
    names = ["O3-bf16", "plain-amp"]
    words = f"--data {texts} --limit 60 --seed 3 --model mini --repeats 2"
    tables("train", f"{words} --candidates {','.join(names)}")
    shared = {"data": texts, "limit": 60, "epochs": 1, "model": "mini", "seed": 3}
    shared |= {"mask_tokens": 0.0}
    turns = [*names, *reversed(names)]
    assert tasks == [shared | TRAIN[name] | {"name": name} for name in turns]


@pytest.mark.parametrize("name", ["O0", "O2-bf16"])
def test_one_run(texts: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Law: a run has the candidate's settings; only its end is evaluated."""
    runs, run = [], jobs.run

    def keep(task: dict[str, Any]) -> Any:
        done = run(task)
        runs.append((done.summary, done.folder.records()))
        return done

    monkeypatch.setattr(jobs, "run", keep)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "")  # a run sets its own
    task = {"data": texts, "model": "mini", "epochs": 1, "device": "cpu", "seed": 3}
    answer = jobs.worker(task | TRAIN[name])(None)
    ((summary, records),) = runs
    assert summary | TRAIN[name] == summary
    assert [r["step"] for r in records if "event" in r] == [summary["steps"]]
    assert answer["scores"] == {k: summary["dev"][k] for k in SCORES}
    assert answer["dev_loss"] == summary["dev"]["loss"]
    assert answer["train_seconds"] == summary["train_seconds"] < answer["seconds"]
    assert answer["peak_bytes"] > 100 * MIB  # torch alone takes more


@pytest.mark.parametrize("error", [Diverged, LossScaleCollapse])
def test_a_run_that_diverges(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Law: a run that diverges is a result, in one line."""
    failed = error("training\n  has diverged")
    monkeypatch.setattr(jobs, "run", Mock(side_effect=failed))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "")
    assert jobs.run_once({"device": "cpu"}) == {"diverged": "training has diverged"}


def test_for_real(
    texts: str, entities: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: runs in processes have what the tables need, fp16 too.

    The plain loop and ours train the same texts, from the same learning rate.
    """
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: None)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(jobs, "WorkerProcess", Candidate)
    ner = f"--data {entities} --epochs 1 --seeds 1 --candidates fp32,O1-fp16 --lr 1e-3"
    train = f"--data {texts} --limit 60 --candidates plain-fp32,plain-amp,O2-bf16"
    (scores,) = tables("ner", f"{ner} --model mini --device cpu")
    (times,) = tables("train", f"{train} --model mini")
    for row in rows(scores):
        assert row["diverged"] == 0
        assert 0 <= row["F1 %"] <= 100  # type: ignore[operator]
    for row in rows(times):
        assert 0 < row["dev loss"] < 2  # type: ignore[operator] # about log 2
        assert 0 < row["train loss"] < 2  # type: ignore[operator]
        assert row["texts/s"] > 0  # type: ignore[operator]


REJECTED = {
    "train --limit 1 --data letters.json": "--limit 1 must be from 2 ",
    "ner --max-length 2": "--max-length 2 must be ",
    "train --data nothing.json": "nothing.json",
}


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("words", REJECTED)
def test_rejected(tmp_path: Path, monkeypatch: Any, capsys: Any, words: str) -> None:
    """Law: what cannot be used is rejected in one line, before anything runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "WorkerProcess", lambda *_: pytest.fail("it ran"))
    bench, _, more = words.partition(" ")
    assert rejected(bench, more, capsys).startswith(REJECTED[words])

"""`halfstep bench quality`: intervals, the table, and runs of the same seeds."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_training import letters, one_thread, small_and_measured

from halfstep import cli
from halfstep.bench import accuracy, commands, measure
from halfstep.bench.flags import QUALITIES
from halfstep.masters import encoding as forms
from halfstep.scaling import LossScaleCollapse
from halfstep.train import result
from halfstep.train.signals import Diverged

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

MIB = 2**20
SCORES = ("loss", "accuracy", "macro_f1", "macro_precision", "macro_recall", "mcc")


@pytest.fixture(autouse=True)
def _small_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small size, plant rates that warn of nothing."""
    small_and_measured(monkeypatch)


def flags(words: str) -> Namespace:
    """Return settings as the command line reads them."""
    parser = ArgumentParser()
    commands.BENCHES["quality"].add_flags(parser)
    return parser.parse_args(words.split())


def test_words() -> None:
    """Law: what can be typed can be run; O2 comes with every form of masters."""
    assert tuple(accuracy.CONTENDERS) == QUALITIES
    assert accuracy.BASELINE in accuracy.CONTENDERS
    there = [each.get("master") for each in accuracy.CONTENDERS.values()]
    assert {*there} == {None, *forms.ENCODINGS, forms.NONE}


# Intervals


@pytest.mark.parametrize("freedom", [*range(1, 12), 29, 30, 99, 1000])
def test_students_table(freedom: int) -> None:
    """Law: the bound is scipy's."""
    # A sum of `freedom / 2` terms, each within an ulp, under a slope of about 1.
    few = max(16, freedom) * 2.0**-52
    assert accuracy.student(freedom) == pytest.approx(
        stats.t.ppf(0.975, freedom), rel=few
    )


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9))
def test_interval_is_scipys(values: list[float]) -> None:
    """Law: the ends of an interval are scipy's, of its own mean and standard error."""
    known = accuracy.interval(values)
    assert known is not None
    assert known.half is not None
    error = float(stats.sem(values))
    assert known.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)
    # The spread of nearly equal values is what rounding leaves of the largest.
    few = max(map(abs, values)) * 2.0**-40
    half = stats.t.interval(0.95, len(values) - 1, 0.0, 1.0)[1] * error
    assert known.half == pytest.approx(half, rel=2.0**-40, abs=few)


def test_interval_of_few() -> None:
    """Law: one value has no spread, and none has no mean."""
    assert accuracy.interval([0.5]) == accuracy.Interval(0.5, None)
    assert accuracy.interval([]) is None


# The table


def ended(accuracy: float, loss: float, seconds: float, mib: int) -> dict[str, Any]:
    """Return what a run came to."""
    return {
        "accuracy": accuracy,
        "dev_loss": loss,
        "seconds": seconds,
        "peak_bytes": mib * MIB,
    }


FOUND = {
    "fp32": [
        ended(0.50, 1.0, 10.0, 30),
        ended(0.75, 0.5, 20.0, 10),
        ended(0.25, 1.5, 40.0, 20),
    ],
    "O2": [
        ended(0.625, 0.75, 5.0, 8),
        {"diverged": "the loss is nan"},
        ended(0.375, 1.0, 10.0, 6),
    ],
}
ONE = 12.706204736174694
"""Student's bound with one degree of freedom; the median of |t| there is 1."""
TWO = 4.302652729749462


def test_table() -> None:
    """Law: differences are of one seed; who diverged is counted, named, and left out.

    Of fp32 the standard deviation is 25 points; of the differences in loss, -1/4 and
    -1/2, it is sqrt(1/32), their standard error 1/8.
    """
    table = accuracy.table(FOUND, ["more"])
    fp32, o2 = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert fp32 == {
        "contender": "fp32",
        "accuracy %": 50.0,
        "+-": pytest.approx(TWO * 25 / math.sqrt(3)),
        "to fp32": None,
        "+- to fp32": None,
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


def test_table_without_a_baseline() -> None:
    """Law: without fp32 nothing is compared with it; of no run nothing is told."""
    lost = [{"diverged": "the loss is nan"}] * 3
    table = accuracy.table({"O2": FOUND["O2"], "O3": lost}, [])
    o2, o3 = table.rows
    half = pytest.approx(ONE * 12.5)
    assert o2 == ("O2", 50.0, half, None, None, 0.875, None, None, None, 7.0, 1)
    assert o3 == ("O3", *[None] * 9, 3)


# Runs


def texts(folder: Path) -> str:
    """Write texts whose characters tell their class; return where they are."""
    place = folder / "letters.json"
    place.write_text(json.dumps(letters(40, "de", "ab", lengths=(3, 9))))
    return str(place)


def test_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a seed meets all contenders before the next does, there and back.

    Runs differ in nothing but what the contender is and the seed.
    """
    tasks: list[dict[str, Any]] = []

    def apart(module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.accuracy"
        tasks.append(task)
        return FOUND["O2"][task["seed"]]

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    data = texts(tmp_path)
    words = f"--data {data} --limit 30 --share 0.5 --epochs 2 --seeds 2"
    names = ["O2-split", "fp32"]
    given = flags(f"{words} --contenders {','.join(names)} --device cpu")
    (table,) = accuracy.tables(given)
    shared = {"data": data, "limit": 30, "dev_share": 0.5, "model": "tiny", "epochs": 2}
    assert tasks == [
        shared | accuracy.CONTENDERS[name] | {"seed": seed, "device": "cpu"}
        for seed, name in [(0, names[0]), (0, names[1]), (1, names[1]), (1, names[0])]
    ]
    assert capsys.readouterr().err.splitlines() == [
        "seed 1/2 O2-split: accuracy 0.6250, dev loss 0.7500, 5.0 s, 8 MiB",
        "seed 1/2 fp32: accuracy 0.6250, dev loss 0.7500, 5.0 s, 8 MiB",
        "seed 2/2 fp32: the loss is nan",
        "seed 2/2 O2-split: the loss is nan",
    ]
    assert [row[0] for row in table.rows] == names
    (judged,) = [note for note in table.notes if note.startswith("accuracy:")]
    assert " of 15 dev texts" in judged
    assert judged.endswith("trained on 15")
    (command,) = [n for n in table.notes if n.startswith("halfstep bench quality ")]
    assert flags(command.removeprefix("halfstep bench quality ")) == given


def test_a_test_split_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the data has a test split, accuracy is of that."""
    for split, count in {"train": 20, "dev": 8, "test": 6}.items():
        rows = letters(count, "de", "ab", lengths=(3, 9))
        (tmp_path / f"{split}.json").write_text(json.dumps(rows))
    monkeypatch.setattr(measure, "run_in_subprocess", lambda *_: FOUND["fp32"][0])
    (table,) = accuracy.tables(flags(f"--data {tmp_path} --seeds 1 --device cpu"))
    (judged,) = [note for note in table.notes if note.startswith("accuracy:")]
    assert " of 6 test texts" in judged


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the task of a run that takes a moment."""
    monkeypatch.setattr(result.html_report, "page", lambda _: "<html></html>")
    return {"data": texts(tmp_path), "model": "mini", "epochs": 1, "device": "cpu"}


@pytest.mark.parametrize("name", accuracy.CONTENDERS)
def test_one_run(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Law: a run has the contender's settings; only its end is judged, and is told."""
    seen = []

    def run(task: dict[str, Any]) -> Any:
        done = result_of(task)
        seen.append((done.summary, done.folder.records()))
        return done

    result_of = accuracy.run
    monkeypatch.setattr(accuracy, "run", run)
    settings = accuracy.CONTENDERS[name]
    with one_thread():
        came_to = accuracy.train_once(small | settings | {"seed": 3})
    ((summary, records),) = seen
    assert summary | settings == summary
    assert [r["step"] for r in records if "event" in r] == [summary["steps"]]
    assert came_to == {
        "accuracy": summary["dev"]["accuracy"],
        "scores": {k: summary["dev"][k] for k in SCORES},
        "dev_loss": summary["dev"]["loss"],
        "skipped": summary["skipped"],
        "seconds": summary["train_seconds"],
        "peak_bytes": summary["peak_memory_bytes"],
    }
    assert came_to["seconds"] > 0
    assert came_to["peak_bytes"] > 100 * MIB  # torch alone takes more


@pytest.mark.parametrize("error", [Diverged, LossScaleCollapse])
def test_a_run_that_diverges(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Law: a run that comes to nothing is an outcome, in one line."""

    def run(_task: dict[str, Any]) -> None:
        message = "training\n  has diverged"
        raise error(message)

    monkeypatch.setattr(accuracy, "run", run)
    came_to = accuracy.train_once(small)
    assert came_to == {"diverged": "training has diverged"}


def test_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run in a process of its own comes to what it comes to here, to the bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on it
    data = texts(tmp_path)
    words = f"--data {data} --contenders O2-kahan --epochs 1 --seeds 1 --device cpu"
    (table,) = accuracy.tables(flags(words))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seed 1/1 O2-kahan: accuracy ")
    task = {"data": data, "dev_share": 0.2, "epochs": 1, "device": "cpu", "seed": 0}
    with one_thread():
        here = accuracy.train_once(task | accuracy.CONTENDERS["O2-kahan"])
    (row,) = table.rows
    assert row[1] == 100 * here["accuracy"]
    assert row[5] == here["dev_loss"]


REFUSALS = {
    "--contenders O4": "argument --contenders: 'O4' must be all or of fp32, O1,",
    "--seeds 0": "argument --seeds: '0' must be a whole number of at least 1",
    "--share 1": "argument --share: '1' must be a number from 0 to below 1",
    "--share 0 --data letters.json": "--dev-share 0.0 must be above 0 and below 1.",
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
        status: Any = cli.run(["bench", "quality", *words.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: error: {REFUSALS[words]}")

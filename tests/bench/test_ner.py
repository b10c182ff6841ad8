"""`halfstep bench ner`: the table, what is run, and what is refused."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from small_corpora import marked
from small_training import one_thread, small_and_measured, without_figures

from halfstep import cli
from halfstep.bench import accuracy, commands, measure, ner
from halfstep.bench.flags import NERS
from halfstep.machine import fp16_emulation, hardware

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

MIB = 2**20


def flags(*words: str) -> Namespace:
    """Return settings as the command line reads them."""
    parser = ArgumentParser()
    commands.BENCHES["ner"].add_flags(parser)
    return parser.parse_args(words)


def test_words() -> None:
    """Law: what can be typed can be run, in the order told; all by default."""
    assert tuple(ner.CONTENDERS) == NERS
    assert ner.BASELINE in ner.CONTENDERS
    assert flags().contenders == list(NERS)
    assert flags("--contenders", "all").contenders == list(NERS)
    given = flags("--contenders", "O1-bf16,O1-fp16-unscaled", "--lr", "1e-3")
    assert given.contenders == ["O1-bf16", "O1-fp16-unscaled"]
    assert given.lr == ["1e-3"]
    assert (flags().lr, flags().mask_tokens, flags().epochs) == (None, None, None)


# The table


def ended(f1: float, seconds: float, mib: int, skipped: int = 0) -> dict[str, Any]:
    """Return what a run came to, its precision half of F1, its recall a quarter."""
    return {
        "scores": {"f1": f1, "precision": f1 / 2, "recall": f1 / 4},
        "seconds": seconds,
        "peak_bytes": mib * MIB,
        "skipped": skipped,
    }


FOUND = {
    "fp32": [ended(0.50, 10.0, 30), ended(0.75, 20.0, 10), ended(0.25, 40.0, 20)],
    "O1-fp16": [
        ended(0.75, 5.0, 8, 2),
        {"diverged": "the loss is nan"},
        ended(0.375, 160.0, 6, 3),
    ],
}
ONE = 12.706204736174694
"""Student's bound with one degree of freedom."""
TWO = 4.302652729749462


def rows(found: accuracy.Runs) -> list[dict[str, Any]]:
    """Return the rows of the table, by column."""
    table = ner.table(found, [])
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_table() -> None:
    """Law: differences are of one seed; who diverged is counted, named, and left out.

    Of fp32 the standard deviation is 25 points. Of the others, 75 and 37.5 points,
    half the distance is their standard error; of the differences, 25 and 12.5, too.
    """
    fp32, fp16 = rows(FOUND)
    assert fp32 == {
        "contender": "fp32",
        "F1 %": 50.0,
        "+-": pytest.approx(TWO * 25 / math.sqrt(3)),
        "to fp32": None,
        "+- to fp32": None,
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
    table = ner.table(FOUND, ["more"])
    assert "O1-fp16, seed 2: the loss is nan" in table.notes
    assert table.notes[-1] == "more"


def test_table_without_a_baseline() -> None:
    """Law: without fp32 nothing is compared with it; of no run nothing is told."""
    lost = [{"diverged": "the loss is nan"}] * 3
    one, none = ner.table({"x": FOUND["O1-fp16"], "y": lost}, []).rows
    half = pytest.approx(ONE * 18.75)
    assert one == ("x", 56.25, half, None, None, 28.125, 14.0625, None, 7.0, 5, 1)
    assert none == ("y", *[None] * 9, 3)


def test_one_seed() -> None:
    """Law: one seed has a difference, and no spread."""
    _, fp16 = rows({name: runs[:1] for name, runs in FOUND.items()})
    assert (fp16["F1 %"], fp16["+-"]) == (75.0, None)
    assert (fp16["to fp32"], fp16["+- to fp32"]) == (25.0, None)
    assert fp16["speed x fp32"] == 2.0


# Runs


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write texts with names in them; return where they are."""
    told = [(f"{'ab' * (n % 3)}xyz{'ba' * (n % 2)}", 2 * (n % 3)) for n in range(40)]
    marks = [(text, [(start, start + 3, "PER")]) for text, start in told]
    marked(tmp_path / "names.jsonl", marks, ["PER"])
    return str(tmp_path / "names.jsonl")


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("low", ["O1-bf16", "O1-fp16-unscaled"])
def test_turns(
    *,
    texts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    low: str,
    slow: bool,
) -> None:
    """Law: a seed meets all contenders, there and back; settings differ by contender.

    That products were emulated is said where fp16 ran on what has none, only there.
    """
    small_and_measured(monkeypatch)
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: slow)
    tasks: list[dict[str, Any]] = []

    def apart(module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.accuracy"
        tasks.append(task)
        return FOUND["O1-fp16"][task["seed"]]

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    words = f"--data {texts} --limit 30 --epochs 2 --seeds 2 --device cpu".split()
    (table,) = ner.tables(flags(*words, "--contenders", f"{low},fp32"))
    shared: dict[str, Any] = {"lr": None, "mask_tokens": None}
    shared |= {"task": "ner", "data": texts, "limit": 30, "model": "tiny", "epochs": 2}
    shared |= {"batch_size": 32, "max_length": 192}
    assert tasks == [
        shared | ner.CONTENDERS[name] | {"seed": seed, "device": "cpu"}
        for seed, name in [(0, low), (0, "fp32"), (1, "fp32"), (1, low)]
    ]
    assert capsys.readouterr().err.splitlines() == [
        f"seed 1/2 {low}: F1 0.7500",
        "seed 1/2 fp32: F1 0.7500",
        "seed 2/2 fp32: the loss is nan",
        f"seed 2/2 {low}: the loss is nan",
    ]
    assert any(note.startswith("F1: of 2 dev texts") for note in table.notes)
    said = [note for note in table.notes if "fp16 products" in note]
    assert len(said) == (slow and "fp16" in low)
    for note in said:
        assert "its speed is that of the emulation" in note
        assert "its peak MiB holds the fp32 copies" in note


def test_for_real(
    texts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run has what the table needs, with fp16 products emulated too."""
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: None)
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: True)

    def apart(_: str, task: dict[str, Any]) -> dict[str, Any]:
        came_to = accuracy.train_once(json.loads(json.dumps(task)))
        return cast("dict[str, Any]", json.loads(json.dumps(came_to)))

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    words = f"--data {texts} --model mini --epochs 1 --seeds 1 --device cpu".split()
    with one_thread():
        (table,) = ner.tables(flags(*words, "--contenders", "fp32,O1-fp16"))
    for row in table.rows:
        found: dict[str, Any] = dict(zip(table.columns, row, strict=True))
        assert found["diverged"] == 0
        assert 0 <= found["F1 %"] <= 100
        assert found["peak MiB"] > 100  # torch alone takes more
    assert "seed 1/1 O1-fp16: F1 " in capsys.readouterr().err


def test_learning_rates() -> None:
    """Law: a rate is a contender's own, that of all others, or training's default."""
    names = ["fp32", "O1-bf16", "O1-fp16"]
    words = flags("--lr", "O1-fp16=5e-4,1e-3,fp32=0.25").lr
    found = ner.learning_rates(words, names)
    assert found == {"fp32": 0.25, "O1-bf16": 1e-3, "O1-fp16": 5e-4}
    alone = ner.learning_rates(flags("--lr", "O1-fp16=2").lr, names)
    assert alone == {"fp32": None, "O1-bf16": None, "O1-fp16": 2.0}
    assert ner.learning_rates([], names) == dict.fromkeys(names)


def test_learning_rates_reach_their_runs(
    texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: each run trains with its contender's rate; the command in the notes too."""
    small_and_measured(monkeypatch)
    monkeypatch.setattr(fp16_emulation, "is_needed", lambda _: False)
    rates: list[float | None] = []

    def apart(_: str, task: dict[str, Any]) -> dict[str, Any]:
        rates.append(task["lr"])
        return FOUND["fp32"][0]

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    words = f"--data {texts} --epochs 2 --seeds 1 --device cpu".split()
    given = flags(*words, "--contenders", "fp32,O1-bf16", "--lr", "1e-3,O1-bf16=5e-4")
    (table,) = ner.tables(given)
    assert rates == [1e-3, 5e-4]
    assert any("--lr 1e-3,O1-bf16=5e-4" in note for note in table.notes)


REFUSALS = {
    "--lr O4=1e-3": "argument --lr: 'O4=1e-3' must be a number above 0, or NAME=number",
    "--lr 0": "argument --lr: '0' must be a number above 0",
    "--lr O1-bf16=quick": "argument --lr: 'O1-bf16=quick' must be a number above 0",
    "--lr 1,2": "argument --lr: '2' is the second rate of all others",
    "--contenders fp32 --lr O1-bf16=1e-3": "--lr O1-bf16=0.001: O1-bf16 is not among ",
    "--contenders O4": "argument --contenders: 'O4' must be all or of fp32, ",
    "--seeds 0": "argument --seeds: '0' must be a whole number of at least 1",
    "--data nothing.jsonl": "nothing.jsonl",
    "--limit 1 --data names.jsonl": "--limit 1 must be from 2 ",
    "--max-length 2": "--max-length 2 must be ",
}


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    """Law: what cannot be used is refused in one line, before anything runs."""
    small_and_measured(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure, "run_in_subprocess", lambda *_: pytest.fail("it ran"))
    try:
        status: Any = cli.run(["bench", "ner", *words.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: error: {REFUSALS[words]}")

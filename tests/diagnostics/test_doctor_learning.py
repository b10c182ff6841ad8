"""The doctor on runs of `halfstep train` that go wrong, and on some that do not."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from sick_run import counted, step, tally, write
from small_training import (
    KINDS,
    letters,
    one_thread,
    small_and_measured,
    without_figures,
    write_marked,
)

from halfstep import cli
from halfstep.diagnostics.doctor import examination, examine, rules_speed, run_reader
from halfstep.diagnostics.doctor.run_record import Config, RunFacts, Step
from halfstep.train.data.corpus import load
from halfstep.train.data_checks import count_repeats

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.reporting.finding import Finding

Rows = list[tuple[str, int]]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
OF_TIME = {rule.name for rule in rules_speed.RULES}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_measured(monkeypatch)
    without_figures(monkeypatch)


def trained(folder: Path, train: Rows, dev: Rows, *words: str) -> dict[str, Finding]:
    """Train for a moment on these texts; return what the doctor finds, by rule."""
    data = folder / "data"
    data.mkdir()
    for name, rows in (("train", train), ("dev", dev)):
        (data / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    return judged(folder, "--data", str(data), *words)


def judged(folder: Path, *words: str) -> dict[str, Finding]:
    """Train for a moment; return what the doctor finds of it, by rule."""
    out = str(folder / "run")
    with one_thread():
        assert cli.run(["train", "--model", "mini", "--out", out, *words]) == 0
    facts = run_reader.read(folder / "run")
    assert facts.problems == ()
    return {each.rule: each for each in examine(facts)}


def alphabets(count: int, *words: str) -> Rows:
    """Return texts of classes that have no letter in common."""
    return letters(count, *(words or ("abc", "def")), lengths=(3, 12))


def test_divergence(tmp_path: Path) -> None:
    """Law: a loss that runs away is an error, and the learning rate is named."""
    words = ("--level", "O2", "--dtype", "bf16", "--lr", "5", "--epochs", "6")
    found = trained(tmp_path, alphabets(160), alphabets(20), *words)
    assert found["divergence"].severity == "error"
    assert "Lower --lr, which reaches 5, to a tenth" in found["divergence"].advice
    assert "loss does not fall" not in found


def test_a_fixed_scale_that_skips_every_step(tmp_path: Path) -> None:
    """Law: where the scale does not fall, an overflow is not called normal."""
    words = ("--level", "O2", "--dtype", "fp16", "--loss-scale", "1e9")
    found = trained(tmp_path, alphabets(160), alphabets(20), *words, "--epochs", "2")
    assert found["bad op"].severity == found["skipped steps"].severity == "error"
    for each in (found["bad op"], found["skipped steps"]):
        assert "halved" not in str(each)
        assert "--loss-scale dynamic" in each.advice
        assert "stands at 1e+09 and never falls" in each.advice
        assert "--dtype bf16" in each.advice
        assert "module:NAME=fp32" in each.advice
        assert "find_nonfinite" in each.advice


def test_a_class_that_is_never_predicted(tmp_path: Path) -> None:
    """Law: a class too rare to be learned is named, with how often dev holds it."""
    rare = [("abc" * 3, 2)]
    train = alphabets(200) + rare
    found = trained(
        tmp_path, train, alphabets(30) + rare * 6, "--lr", "5e-3", "--epochs", "4"
    )
    told = found["class never predicted"]
    assert told.severity == "warning"
    assert ": 2 (6); 17% of 36 in all" in told.measured


def test_texts_that_come_more_than_once(tmp_path: Path) -> None:
    """Law: texts repeated, contradicting, and in train and dev are counted."""
    base = [(f"{word}{i:03d}", label) for i in range(60) for word, label in AB]
    train = base + base[:12] + [(text, 1 - label) for text, label in base[20:25]]
    dev = [
        *base[50:54],
        *((f"{word}x{i}", label) for i in range(8) for word, label in AB),
    ]
    found = trained(tmp_path, train, dev, "--lr", "5e-3", "--epochs", "1")
    assert found["repeated texts"].measured.startswith("12 of 137 texts, 8.8%,")
    # Both the five and those whose label they contradict.
    assert found["contradicting labels"].measured.startswith("10 of 137 texts, 7.3%,")
    assert found["contradicting labels"].severity == "warning"
    assert found["leak"].measured.startswith("4 of 20 texts, 20%, are in train too")
    assert found["leak"].severity == "error"


AB = (("ab", 0), ("cd", 1))


def test_marked_texts_that_contradict(tmp_path: Path) -> None:
    """Law: of texts with entities, other entities in the same text contradict."""
    one = {"text": "uabv", "entities": [(1, 3, "PER")]}
    other = {"text": " uabv", "entities": []}
    path = write_marked(tmp_path, 40)
    more = "".join(json.dumps(each) + "\n" for each in (one, one, other))
    path.write_text(path.read_text() + more)
    corpus = load(
        path, task="ner", label_names=None, limit=None, dev_share=0.001, seed=1
    )
    plain = {(corpus.train.text(i)) for i in range(len(corpus.train))}
    told = count_repeats(corpus)
    assert "uabv" in plain
    assert told["train"]["texts"] == 42
    assert told["train"]["contradicting"] == 3
    assert told["train"]["repeated"] >= 1
    assert count_repeats(corpus, max_texts=42) == {}
    assert set(KINDS) == {"LOC", "PER"}


def test_healthy_entities(tmp_path: Path) -> None:
    """Law: the built-in texts with entities, as anybody tries them, raise no alarm."""
    words = ("--task", "ner", "--level", "O0", "--epochs", "3", "--lr", "3e-3")
    found = judged(tmp_path, *words)
    loud = [f for f in found.values() if f.severity != "note" and f.rule not in OF_TIME]
    assert loud == []


def test_one_run_has_one_loss_scale() -> None:
    """Law: whatever is found of gradients, one scale is advised, or bf16."""
    settings = Config("O2", "fp16", loss_scale="1024")
    for low in (2000, 20):
        facts = RunFacts(config=settings, **underflowing(low))
        found = [each for each in examine(facts) if "scale" in each.advice]
        assert found
        named = {
            word
            for each in found
            for word in re.findall(r"--loss-scale ([\d.]+)", each.advice)
        }
        assert len(named) == 1


def underflowing(low: int) -> dict[str, Any]:
    """Return a run with two tensors whose gradients are lost to unlike degrees."""
    from halfstep.numerics.tensor_summary import Sample, TensorSummary

    told = {
        "a:grad": counted({-24: low, 0: 7000}, zeros=low),
        "b:grad": counted({-24: 9000, -20: 500, -9: 900}, zeros=9000),
    }
    stats = {
        n: (Sample(1, TensorSummary.from_data(one), 1024.0),) for n, one in told.items()
    }
    return {"stats": stats, "steps": (Step.from_data(step(1)),)}


@pytest.mark.parametrize("mode", ["flags", "sampled", "full"])
def test_a_probe_that_is_on_is_not_suggested(tmp_path: Path, mode: str) -> None:
    """Law: nobody is told to switch on what is on; "flags" judges what it can."""
    settings = {"level": "O2", "dtype": "fp16", "loss_scale": "dynamic", "probe": mode}
    facts = run_reader.read(write(tmp_path / mode, [step(1)], settings=settings))
    blind = examination(facts)
    said = " ".join(each.why for each in blind.not_evaluated)
    rules = {name for each in blind.not_evaluated for name in each.rules}
    assert "halfstep.Probe(" not in said
    assert "not finite forward" not in rules  # it saw none
    assert "coarse" in rules
    stats = {"step": 1, "event": "stats", "tensors": {"a:output": tally(0)}}
    facts = run_reader.read(
        write(tmp_path / f"{mode}2", [step(1), stats], settings=settings)
    )
    rules = {name for each in examination(facts).not_evaluated for name in each.rules}
    assert "coarse" not in rules

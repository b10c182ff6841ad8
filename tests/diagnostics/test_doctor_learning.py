"""The doctor on runs of `halfstep train` that go wrong, and on some that do not."""

from __future__ import annotations

import json
import re
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sick_run import counted, step, tally, write
from small_training import (
    KINDS,
    letters,
    one_thread,
    small_and_measured,
    without_figures,
    write_letters,
    write_marked,
)

from halfstep import cli
from halfstep.diagnostics.doctor import (
    environment,
    examination,
    examine,
    rules_speed,
    run_reader,
)
from halfstep.diagnostics.doctor.run_record import Config, RunFacts, Step
from halfstep.reporting.table import format_count
from halfstep.train.data.corpus import load
from halfstep.train.data_checks import count_repeats
from halfstep.train.loop import Trainer
from halfstep.train.output import html_report

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.reporting.finding import Finding
    from halfstep.train.step_dataset import StepBatch

Rows = list[tuple[str, int]]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
OF_TIME = {rule.name for rule in rules_speed.RULES}


@pytest.fixture(autouse=True)
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_measured(monkeypatch)
    if "report" not in request.node.name:
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


# The doctor and `halfstep train`: sound runs are found sound; its page tells.


LEVELS = [("O0", "fp32"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")]


def stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Ask a run to stop after a step, as a signal does."""
    step = Trainer.train_step

    def stopping(self: Trainer, work: StepBatch, *rest: Any) -> dict[str, Any]:
        if work.number == number:
            self.stop.signal = signal.SIGTERM
        return step(self, work, *rest)

    patch.setattr(Trainer, "train_step", stopping)


def train(folder: Path, *words: str) -> Path:
    """Run `halfstep train` for a moment; return the run's folder."""
    data, out = write_letters(folder, 200), folder / "run"
    told = ["train", "--data", str(data), "--model", "mini", "--epochs", "4"]
    told += [] if "--lr" in words else ["--lr", "5e-3"]
    assert cli.run([*told, "--out", str(out), *words]) == 0
    return out


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_sound_run_has_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str
) -> None:
    """Law: no error and no warning; what needs a probe is not judged.

    Time apart: a model of this size spends its steps in Python.
    """
    monkeypatch.setattr(html_report, "page", lambda *_: "<html></html>")
    with one_thread():
        out = train(tmp_path, "--level", level, "--dtype", dtype)
    facts = run_reader.read(out)
    assert facts.problems == ()
    assert (facts.config.level, facts.config.dtype) == (level, dtype)
    assert facts.machine is not None
    assert set(facts.weights.values()) == {"fp32"}
    found = examination(facts)
    worse = [each for each in found.findings if each.severity != "note"]
    of_time = {rule.name for rule in rules_speed.RULES}
    assert [each for each in worse if each.rule not in of_time] == []
    blind = {name for each in found.not_evaluated for name in each.rules}
    assert not blind & {"skipped steps", "emulated", "loss not finite"}
    assert "overhead" not in blind


def test_the_report_shows_what_the_doctor_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a fault is on the run's page, once; the worst three are printed in a line.

    Without masters most updates of bf16 weights are lost at such a rate.
    """
    words = ("--level", "O2", "--dtype", "bf16", "--master", "none", "--lr", "1e-5")
    with one_thread():
        out = train(tmp_path, *words)
    findings = examination(run_reader.read(out)).findings
    assert "swamped updates" in [each.rule for each in findings]
    *lines, _, report = capsys.readouterr().out.splitlines()[-6:]
    starts = [f"{each.severity}: {each.rule}: {each.where}: " for each in findings[:3]]
    starts.append(f"{format_count(len(findings), 'finding')} and what to do: halfstep ")
    for line, start in zip(lines[-len(starts) :], starts, strict=True):
        assert line.startswith(start)
    assert report == f"report: {out / 'report.html'}"
    html = (out / "report.html").read_text(encoding="utf-8")
    assert len(re.findall("swamped updates", html)) >= 1
    assert "rounded away" in html
    assert html.count("<h2>Findings</h2>") == 1
    lines = (out / "metrics.jsonl").read_text().splitlines()
    events = [r for r in map(json.loads, lines) if r.get("event") == "lost_updates"]
    assert events
    assert all(0 <= g["share"] <= 1 for event in events for g in event["groups"])


def test_a_resumed_run_counts_where_another_would(tmp_path: Path) -> None:
    """Law: a run cut short between two counts goes on with the same counts."""
    words = ("--level", "O3", "--dtype", "bf16", "--lr", "1e-5")
    counts = {}
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        with one_thread(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(html_report, "page", lambda *_: "<html></html>")
            if name == "cut":
                stop_at(patch, 10)
                with pytest.raises(AssertionError):
                    train(folder, *words)
                patch.undo()
                patch.setattr(html_report, "page", lambda *_: "<html></html>")
                out = train(folder, *words, "--resume")
            else:
                out = train(folder, *words)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        found = map(json.loads, lines)
        counts[name] = [r for r in found if r.get("event") == "lost_updates"]
    assert len(counts["whole"]) == 4
    assert counts["cut"] == counts["whole"]


def test_the_machine_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is written of machine and weights is what torch says."""
    told = json.loads(environment.text("cpu", {"a": "fp32"}))
    assert told["weights"] == {"a": "fp32"}
    assert told["machine"]["rates"] == {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    low = SimpleNamespace(allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", low)
    assert environment.machine_data("cpu")["fp16_accumulation"] is True
    net = torch.nn.Linear(2, 2).bfloat16()
    net.register_parameter("n", torch.nn.Parameter(torch.ones(1)))
    assert environment.weight_formats(net) == {
        "weight": "bf16",
        "bias": "bf16",
        "n": "fp32",
    }

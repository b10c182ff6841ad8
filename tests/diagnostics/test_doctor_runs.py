"""The doctor on runs of `halfstep train` that go wrong, and on some that do not."""

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sick_run import counted, step
from small_training import (
    interrupt_before,
    small_and_measured,
    without_figures,
    write_letters,
)

from halfstep import cli
from halfstep.diagnostics.doctor import (
    examination,
    examine,
    rules_speed,
    run_reader,
    run_record,
)
from halfstep.diagnostics.doctor.run_record import Config, RunFacts, Step
from halfstep.numerics.tensor_summary import Sample, TensorSummary
from halfstep.reporting.finding import Finding
from halfstep.reporting.table import format_count
from halfstep.train import loop
from halfstep.train.loop import is_profile_step

LOW_WITHOUT_MASTERS = ("--level", "O3", "--dtype", "bf16", "--lr", "1e-5")


@pytest.fixture(autouse=True)
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_measured(monkeypatch)
    if "report" not in request.node.name:
        without_figures(monkeypatch)
    if "sound" in request.node.name:
        monkeypatch.setattr(loop, "is_profile_step", is_profile_step)


def train(folder: Path, *words: str) -> Path:
    """Train for a moment on texts of two classes; return the run."""
    data, out = folder / "data", folder / "run"
    data.mkdir(parents=True, exist_ok=True)
    data = write_letters(data, 200)
    words = ("--epochs", "4", "--lr", "5e-3", *words)
    if "ner" not in words:
        words = ("--data", str(data), *words)
    assert cli.run(["train", "--model", "mini", "--out", str(out), *words]) == 0
    return out


def by_rule(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {each.rule: each for each in findings}


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r.get("event") == kind]


@pytest.mark.parametrize("low", [2000, 20])
def test_one_run_has_one_loss_scale(low: int) -> None:
    """Law: whatever is found of gradients, one scale is advised."""
    tallies = {
        "a:grad": counted({-24: low, 0: 7000}, zeros=low),
        "b:grad": counted({-24: 9000, -20: 500, -9: 900}, zeros=9000),
    }
    stats = {
        name: (Sample(1, TensorSummary.from_data(one), 1024.0),)
        for name, one in tallies.items()
    }
    config = Config("O2", "fp16", loss_scale="1024")
    found = examine(
        RunFacts(config=config, stats=stats, steps=(Step.from_data(step(1)),))
    )
    advice = " ".join(each.advice for each in found)
    assert len(set(re.findall(r"--loss-scale ([\d.]+)", advice))) == 1


# The doctor and `halfstep train`: sound runs are found sound; its page tells.


@pytest.mark.parametrize(
    "words", ["O1 bf16", "O2 fp16", "O0 fp32 --task ner --lr 3e-3"]
)
def test_a_sound_run_has_nothing_wrong(tmp_path: Path, words: str) -> None:
    """Law: no error and no warning; what needs a probe is not judged.

    Time apart: a model of this size spends its steps in Python.
    """
    level, dtype, *more = words.split()
    out = train(tmp_path, "--level", level, "--dtype", dtype, *more)
    facts = run_reader.read(out)
    assert (facts.config.level, facts.config.dtype) == (level, dtype)
    assert facts.machine is not None
    assert set(facts.weights.values()) == {"fp32"}
    found = examination(facts)
    of_time = {rule.name for rule in rules_speed.RULES}
    loud = {each.rule for each in found.findings if each.severity != "note"}
    assert loud <= of_time
    blind = set(chain.from_iterable(found.not_evaluated.values()))
    assert not blind & {"skipped steps", "emulated", "loss not finite", "overhead"}


def test_the_report_shows_what_the_doctor_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a fault is on the run's page, once; the worst three are printed in a line.

    Without masters most updates of bf16 weights are lost at such a rate.
    """
    out = train(tmp_path, *LOW_WITHOUT_MASTERS)
    findings = examination(run_reader.read(out)).findings
    assert "swamped updates" in by_rule(findings)
    *lines, _, report = capsys.readouterr().out.splitlines()[-6:]
    starts = [f"{each.severity}: {each.rule}: {each.where}: " for each in findings[:3]]
    starts.append(f"{format_count(len(findings), 'finding')} and what to do: halfstep ")
    for line, start in zip(lines[-len(starts) :], starts, strict=True):
        assert line.startswith(start)
    assert report == f"report: {out / 'report.html'}"
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "swamped updates" in html
    assert "rounded away" in html
    assert html.count("<h2>Findings</h2>") == 1


def test_a_resumed_run_counts_where_another_would(tmp_path: Path) -> None:
    """Law: a run cut short between two counts goes on with the same counts."""
    whole = train(tmp_path / "whole", *LOW_WITHOUT_MASTERS)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_before(patch, 10)
        with pytest.raises((AssertionError, SystemExit, KeyboardInterrupt)):
            train(tmp_path / "cut", *LOW_WITHOUT_MASTERS)
    cut = train(tmp_path / "cut", *LOW_WITHOUT_MASTERS, "--resume")
    lost = events(whole, "lost_updates")
    assert len(lost) == 4
    assert all(0 <= g["share"] <= 1 for event in lost for g in event["groups"])
    assert events(cut, "lost_updates") == lost


def test_the_machine_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is written of machine and weights is what torch says."""
    told = json.loads(json.dumps(run_record.machine_data("cpu")))
    assert told["rates"] == {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    low = SimpleNamespace(allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", low)
    assert run_record.machine_data("cpu")["fp16_accumulation"] is True
    net = torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2))
    net[1].requires_grad_(requires_grad=False)  # what is not trained loses no updates
    net.register_parameter("n", torch.nn.Parameter(torch.ones(1)))
    formats = {"n": "fp32", "0.weight": "bf16", "0.bias": "bf16"}
    assert run_record.weight_formats(net) == formats

"""The doctor and `halfstep train`: sound runs are found sound; its page tells."""

from __future__ import annotations

import json
import re
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_training import one_thread, small_and_measured, write_letters

from halfstep import cli
from halfstep.diagnostics.doctor import (
    environment,
    examination,
    rules_speed,
    run_reader,
)
from halfstep.reporting.table import format_count
from halfstep.train.loop import Trainer
from halfstep.train.output import html_report

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.train.step_dataset import StepBatch

LEVELS = [("O0", "fp32"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")]


def stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Ask a run to stop after a step, as a signal does."""
    step = Trainer.train_step

    def stopping(self: Trainer, work: StepBatch, *rest: Any) -> dict[str, Any]:
        if work.number == number:
            self.stop.signal = signal.SIGTERM
        return step(self, work, *rest)

    patch.setattr(Trainer, "train_step", stopping)


def trained(folder: Path, *words: str) -> Path:
    """Run `halfstep train` for a moment; return the run's folder."""
    data, out = write_letters(folder, 200), folder / "run"
    told = ["train", "--data", str(data), "--model", "mini", "--epochs", "4"]
    told += [] if "--lr" in words else ["--lr", "5e-3"]
    assert cli.run([*told, "--out", str(out), *words]) == 0
    return out


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_measured(monkeypatch)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_sound_run_has_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, dtype: str
) -> None:
    """Law: no error and no warning; what needs a probe is not judged.

    Time apart: a model of this size spends its steps in Python.
    """
    monkeypatch.setattr(html_report, "page", lambda *_: "<html></html>")
    with one_thread():
        out = trained(tmp_path, "--level", level, "--dtype", dtype)
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
        out = trained(tmp_path, *words)
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
                    trained(folder, *words)
                patch.undo()
                patch.setattr(html_report, "page", lambda *_: "<html></html>")
                out = trained(folder, *words, "--resume")
            else:
                out = trained(folder, *words)
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

"""What must not pass in silence: lost files, foreign files, weights gone bad."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from small_training import (
    seal_again,
)
from torch import nn

import halfstep as hs
from halfstep import cli
from halfstep.machine import hardware

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_runs")

TRAIN = ("train", "--data", "letters.json", "--model", "mini", "--out", "run")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds nothing but `letters.json`, on a fast machine."""
    monkeypatch.chdir(tmp_path)
    rows = [["ab" * (1 + number % 4), number % 2] for number in range(40)]
    (tmp_path / "letters.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


def plant(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Let the machine measure this rate for 16-bit formats, against 1 for fp32."""
    rates = {"fp32": 1.0, "bf16": rate, "fp16": rate}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)


def test_a_run_goes_on_at_the_level_it_began(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: "auto" is decided once; a resumed run does not measure anew."""
    assert cli.run([*TRAIN, "--epochs", "1"]) == 0
    first = json.loads((here / "run" / "summary.json").read_text())
    plant(monkeypatch, 1.0)
    assert cli.run(["train", "--resume", "--out", "run"]) == 0
    again = json.loads((here / "run" / "summary.json").read_text())
    assert (first["level"], first["dtype"]) == ("O2", "bf16")
    for key in ("level", "dtype", "reason", "test", "dev"):
        assert first.get(key) == again.get(key)


def test_predict_refuses_random_weights(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a model that lacks a weight, or its vocabulary, predicts nothing."""
    from safetensors.torch import load_file, save_file

    assert cli.run([*TRAIN, "--epochs", "1"]) == 0
    path = here / "run" / "model" / "model.safetensors"
    weights = load_file(path)
    whole = path.read_bytes()
    weights.pop("classifier.weight")
    save_file(weights, path, {"format": "pt"})
    seal_again(path.parent)
    assert cli.run(["predict", "run", "abab"]) == 2
    assert "it lacks weights classifier.weight" in capsys.readouterr().err
    path.write_bytes(whole)
    (here / "run" / "model" / "tokenizer.json").unlink()
    seal_again(path.parent)
    assert cli.run(["predict", "run", "abab"]) == 2
    assert "backend tokenizer" in capsys.readouterr().err  # transformers' words


def test_a_diverged_run_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: weights that give NaN end the run with status 1, and are never the best."""
    huge = ("--epochs", "2", "--lr", "1e38", "--clip", "1e30", "--warmup", "0")
    assert cli.run([*TRAIN, *huge]) == 1
    assert "training has diverged" in capsys.readouterr().err
    assert not (here / "run" / "model").exists()
    for line in (here / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_labels_named_like_columns(here: Path) -> None:
    """Law: any label can be shown, "text" and "label" too."""
    assert cli.run([*TRAIN, "--epochs", "1", "--labels", "text, label"]) == 0
    assert cli.run(["predict", "run", "abab", "--json", "found.json"]) == 0
    row = json.loads((here / "found.json").read_text())
    assert row["text"] == "abab"
    assert row["probabilities"].keys() == {"text", "label"}
    assert cli.run(["predict", "run", "abab"]) == 0


def test_loading_ends_what_was_under_way() -> None:
    """Law: a loaded session holds no half-accumulated gradient of before."""

    def build() -> hs.Session:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hs.prepare(model, optimizer, "O2", dtype="bf16", accumulate=2)

    def half(session: hs.Session) -> None:
        with session.autocast():
            loss = session.model(torch.ones(2, 3)).float().mean()
        session.backward(loss)
        session.step()

    used, fresh = build(), build()
    state = fresh.state_dict()
    half(used)
    used.load_state_dict(state)
    for session in (used, fresh):
        half(session)
        half(session)
    for mine, other in zip(
        used.weights().values(), fresh.weights().values(), strict=True
    ):
        assert torch.equal(mine, other)

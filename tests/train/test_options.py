"""What single settings do to a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import (
    small_settings,
    steps_of,
    write_letters,
)

from halfstep.train.config_file import read_file
from halfstep.train.loop import Trainer
from halfstep.train.param_groups import LR_FACTOR
from halfstep.train.run import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_runs")

QUIET = {"dropout": 0.0, "mask_tokens": 0.0}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a run of 12 steps; draw no figures."""
    source = write_letters(tmp_path, 100)
    return small_settings(tmp_path, source, level="O0", lr=5e-3, epochs=2)


def records(settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Train; return the records of the steps."""
    return steps_of(run(settings | more, overwrite=True).folder.records())


def test_patience(settings: dict[str, Any]) -> None:
    """Law: a score that stands still for so many evaluations ends the run."""
    more = {"lr": 1e-12, "eval_every": 1, "patience": 3, "best_by": "accuracy"}
    result = run(settings | more)
    found = result.folder.records()
    evals = [record for record in found if record.get("event") == "eval"]
    # The weights stand still: the first evaluation is the best, three do not better it.
    assert len({record["dev_accuracy"] for record in evals}) == 1
    assert [record["step"] for record in evals] == [1, 2, 3, 4]
    assert (result.summary["steps"], result.summary["best_step"]) == (4, 1)
    assert result.summary["planned_steps"] == 12
    again = run({"out": settings["out"]}, resume=True)
    assert again.summary["steps"] == 4


def test_label_smoothing(settings: dict[str, Any]) -> None:
    """Law: smoothing shows in the loss of training, and not in that of evaluation."""
    still = settings | QUIET | {"lr": 1e-12, "epochs": 1}
    found = [
        run(still | more, overwrite=True).folder.records()
        for more in ({}, {"label_smoothing": 0.2})
    ]
    plain, smooth = ([r["loss"] for r in steps_of(each)] for each in found)
    assert plain != pytest.approx(smooth, rel=1e-6)
    assert found[0][-1]["dev_loss"] == pytest.approx(found[1][-1]["dev_loss"], rel=1e-6)


def test_freeze(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is frozen is exported as it began, to the bit; all else has moved."""
    begun: dict[str, torch.Tensor] = {}
    fit = Trainer.fit

    def noting(self: Trainer, *rest: Any) -> None:
        named = self.session.model.named_parameters()
        begun.update({n: p.detach().float().clone() for n, p in named})
        fit(self, *rest)

    monkeypatch.setattr(Trainer, "fit", noting)
    result = run(settings | {"freeze": "bert.embeddings,*.attention.*"})
    weights = load_file(result.folder.model / "model.safetensors")
    for name, before in begun.items():
        frozen = name.startswith("bert.embeddings") or ".attention." in name
        assert torch.equal(weights[name], before) == frozen, name


def test_frozen_weights_keep_what_16_bits_would_round(
    settings: dict[str, Any],
) -> None:
    """Law: of a frozen parameter the model holds fp32, though training stored bf16."""
    more = {"level": "O2", "dtype": "bf16", "freeze": "bert.embeddings"}
    result = run(settings | more)
    weights = load_file(result.folder.model / "model.safetensors")
    table = weights["bert.embeddings.word_embeddings.weight"]
    assert table.dtype == torch.float32
    assert not torch.equal(table, table.bfloat16().float())


def test_layer_decay(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each layer below the head has the share of the rate that its depth gives."""
    rates: dict[str, float] = {}
    step = Trainer.train_step

    def noting(self: Trainer, *rest: Any) -> dict[str, Any]:
        record = step(self, *rest)
        named = {id(p): n for n, p in self.session.model.named_parameters()}
        for group in self.session.optimizer.param_groups:
            assert group["lr"] == record["lr"] * group[LR_FACTOR]
            for param in group["params"]:
                rates[named[id(param)]] = group["lr"] / record["lr"]
        return record

    monkeypatch.setattr(Trainer, "train_step", noting)
    run(settings | {"layer_decay": 0.5, "epochs": 1})
    assert rates["classifier.weight"] == 1.0
    assert rates["bert.encoder.layer.0.output.dense.weight"] == 0.5
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.25


@pytest.mark.parametrize("kind", ["O0 auto", "O1 bf16", "O2 fp16"])
def test_recompute(settings: dict[str, Any], kind: str) -> None:
    """Law: recomputing activations costs time and changes not a bit, dropout too."""
    level, dtype = kind.split()
    more = {"level": level, "dtype": dtype}
    assert records(settings, **more, recompute=True) == records(settings, **more)


def test_resolved_settings_make_the_same_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Law: resolved.toml, with another --out, is the same run to the bit."""
    first = run(settings | {"level": "auto"})
    assert first.summary["level"] == "O2"
    found = read_file(first.folder.path / "resolved.toml")
    assert found["level"] == "O2"
    assert found["lr"] == settings["lr"]
    again = run(found | {"out": str(tmp_path / "again")})
    resolved = read_file(again.folder.path / "resolved.toml")
    assert resolved | {"out": ""} == found | {"out": ""}
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        paths = (first.folder.path / name, again.folder.path / name)
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert steps_of(first.folder.records()) == steps_of(again.folder.records())

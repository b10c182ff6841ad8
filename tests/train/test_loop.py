"""Whole runs: what one step does and says, what is written, what settings change."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import small_settings, steps_of, timeless, write_letters

from halfstep.machine import hardware
from halfstep.train.config import read_file
from halfstep.train.loop import Trainer
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run
from halfstep.train.signals import Diverged

pytestmark = pytest.mark.usefixtures("small_runs")

KINDS = ("O0 auto", "O1 fp16", "O2 bf16", "O3 bf16")
QUIET = {"dropout": 0.0, "mask_tokens": 0.0}
STILL = QUIET | {"lr": 1e-12}
RECORD = {
    *("step", "epoch", "loss", "lr", "scale", "skipped", "skipped_total"),
    *("found_inf_in", "grad_norm", "examples_per_s", "seconds"),
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of 12 steps on texts whose characters tell their class."""
    source = write_letters(tmp_path, 100, "defxy", "abcxy")
    return small_settings(tmp_path, source, level="O0", lr=5e-3, epochs=2)


def of(kind: str) -> dict[str, str]:
    return dict(zip(("level", "dtype"), kind.split(), strict=True))


def records(settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return run(settings | more, overwrite=True).folder.records()


def evals_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == "eval"]


@pytest.mark.parametrize("kind", KINDS)
def test_learns(settings: dict[str, Any], kind: str) -> None:
    """Law: at every level the loss falls and separable texts are told apart."""
    # Masked tokens and dropout would keep the loss up, however good the model.
    result = run(settings | QUIET | of(kind) | {"epochs": 4})
    losses = [r["loss"] for r in steps_of(result.folder.records())]
    assert losses[0] == pytest.approx(math.log(2), rel=0.1)
    assert losses[-1] < losses[0] / 2
    assert result.summary["dev"]["accuracy"] == 1.0
    assert result.summary["level"] == kind[:2]


def test_what_is_written(settings: dict[str, Any]) -> None:
    """Law: metrics hold each step and evaluation once; the summary agrees with them.

    Seconds by part add up to what the rate of examples says a step took. A label may be
    named as columns of tables are.
    """
    more = {"eval_every": 5, "loss_scale": "8", "labels": "text, label"}
    result = run(settings | more)
    found = result.folder.records()
    steps = [record for record in found if "event" not in record]
    assert [record["step"] for record in steps] == list(range(1, 13))  # 2 x 90 / 16
    assert [record["epoch"] for record in steps] == [0] * 6 + [1] * 6
    sizes = []
    for record in steps:
        assert record.keys() == RECORD
        assert (record["scale"], record["skipped"], record["found_inf_in"]) == (
            (8.0, False, [])
        )
        assert record["grad_norm"] > 0
        parts = record["seconds"]
        assert parts.keys() == {"input", "forward", "backward", "update", "rest"}
        assert min(parts.values()) >= 0
        sizes.append(round(record["examples_per_s"] * sum(parts.values())))
    assert sorted(sizes) == [10] * 2 + [16] * 10
    evals = evals_of(found)
    assert [record["step"] for record in evals] == [5, 10, 12]
    written = json.loads((result.folder.path / "summary.json").read_text())
    assert written == json.loads(json.dumps(result.summary))
    assert (written["steps"], written["applied"], written["skipped"]) == (12, 12, 0)
    best = max(evals, key=lambda record: float(record["dev_macro_f1"]))
    assert written["best_step"] == best["step"]
    assert written["dev"]["macro_f1"] == best["dev_macro_f1"]


def test_accumulation_changes_nothing(settings: dict[str, Any]) -> None:
    """Law: micro-batches, even or not, more than texts even, are one batch in fp32."""
    whole, *others = (
        steps_of(records(settings, **QUIET, accumulate=each)) for each in (1, 3, 16)
    )
    for parts in others:
        for key, bound in (("loss", 1e-4), ("grad_norm", 1e-3)):
            expected = pytest.approx([r[key] for r in whole], rel=bound)
            assert [r[key] for r in parts] == expected


def test_a_seed_is_a_run(settings: dict[str, Any], tmp_path: Path) -> None:
    """Law: a seed, as in resolved.toml, is a run to the bit; another is another."""
    first = run(settings | {"level": "auto"})
    found = read_file(first.folder.path / "resolved.toml")
    assert (found["level"], found["lr"]) == ("O2", settings["lr"])
    again = run(found | {"out": str(tmp_path / "again")})
    resolved = read_file(again.folder.path / "resolved.toml")
    assert resolved | {"out": ""} == found | {"out": ""}
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        paths = (first.folder.path / name, again.folder.path / name)
        assert paths[0].read_bytes() == paths[1].read_bytes()
    one, other = (timeless(each.folder.records()) for each in (first, again))
    assert one == other
    assert one[0]["loss"] != records(settings, level="auto", seed=1)[0]["loss"]


def test_a_run_goes_on_at_the_level_it_began(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: "auto" is decided once; a resumed run does not measure anew."""
    first = run(settings | {"level": "auto", "epochs": 1}).summary
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1.0)
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
    again = run({"out": settings["out"]}, resume=True).summary
    assert (first["level"], first["dtype"]) == ("O2", "bf16")
    for key in ("level", "dtype", "reason", "dev"):
        assert first[key] == again[key]


def test_a_diverged_run_fails(settings: dict[str, Any]) -> None:
    """Law: weights that give NaN end the run, and are never the best."""
    with pytest.raises(Diverged, match=r"training has diverged\. Lower --lr"):
        run(settings | {"lr": 1e38, "clip": 1e30, "warmup": 0.0})
    folder = RunFolder(Path(settings["out"]))
    assert not folder.model.exists()
    for line in folder.metrics.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_only_training_masks_and_smooths(settings: dict[str, Any]) -> None:
    """Law: masked tokens and smoothed labels show in the training loss alone."""
    losses, dev_losses = [], []
    for more in ({}, {"label_smoothing": 0.2}, {"mask_tokens": 0.99}):
        found = records(settings | STILL | more)
        losses.append(steps_of(found)[0]["loss"])
        dev_losses += [record["dev_loss"] for record in evals_of(found)]
    assert len({round(loss, 6) for loss in losses}) == 3
    # The weights stand still.
    assert dev_losses == pytest.approx(dev_losses[:1] * 6, rel=1e-6)


def test_patience(settings: dict[str, Any]) -> None:
    """Law: a score that stands still for so many evaluations ends the run."""
    more = {"lr": 1e-12, "eval_every": 1, "patience": 3, "best_by": "accuracy"}
    result = run(settings | more)
    evals = evals_of(result.folder.records())
    # The weights stand still: the first evaluation is the best, three do not better it.
    assert len({record["dev_accuracy"] for record in evals}) == 1
    assert [record["step"] for record in evals] == [1, 2, 3, 4]
    assert (result.summary["steps"], result.summary["best_step"]) == (4, 1)
    assert result.summary["planned_steps"] == 12
    assert run({"out": settings["out"]}, resume=True).summary["steps"] == 4


def test_freeze(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is frozen is exported as it began, to the bit; all else has moved.

    Of a frozen parameter the model holds fp32, though training stored bf16.
    """
    begun: dict[str, torch.Tensor] = {}
    fit = Trainer.fit

    def noting(self: Trainer, *rest: Any) -> None:
        named = self.session.model.named_parameters()
        begun.update({n: p.detach().float().clone() for n, p in named})
        fit(self, *rest)

    monkeypatch.setattr(Trainer, "fit", noting)
    for level in ("O0", "O2"):
        more = {"level": level, "freeze": "bert.embeddings,*.attention.*"}
        result = run(settings | more, overwrite=True)
        weights = load_file(result.folder.model / "model.safetensors")
        for name, before in begun.items():
            frozen = name.startswith("bert.embeddings") or ".attention." in name
            if level == "O0":
                assert torch.equal(weights[name], before) == frozen, name
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
            for param in group["params"]:
                share = rates.setdefault(named[id(param)], group["lr"] / record["lr"])
                assert group["lr"] == share * record["lr"]
        return record

    monkeypatch.setattr(Trainer, "train_step", noting)
    run(settings | {"layer_decay": 0.5, "epochs": 1})
    assert rates["classifier.weight"] == 1.0
    assert rates["bert.encoder.layer.0.output.dense.weight"] == 0.5
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.25


def test_recompute(settings: dict[str, Any]) -> None:
    """Law: recomputing activations costs time and changes not a bit, dropout too."""
    plain, again = (
        timeless(records(settings, **of("O2 fp16"), recompute=each))
        for each in (False, True)
    )
    assert plain == again

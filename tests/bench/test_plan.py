"""`halfstep bench plan`: its candidates train the same model, and its table."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from bench_runs import Candidate, flags, rows, tables
from torch import nn

from halfstep.bench import plan, training
from halfstep.bench.floor import Floor

SMALL = {"inputs": torch.randn(6, 8), "labels": torch.randint(0, 4, (6,))}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def work(model: str) -> Namespace:
    settings = flags("plan", "--device cpu")
    vars(settings).update(model=model, steps=1, accumulate=1)
    return settings


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of = plan.MODELS["mlp"][2]
    monkeypatch.setitem(plan.MODELS, "mlp", (small, lambda: SMALL, loss_of))
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(Floor, "measure", lambda _device: Floor(rates, 1.0))
    monkeypatch.setattr(training.hardware, "gemm_rates", lambda *_: rates)


def test_casts_are_counted() -> None:
    """Law: the input, two weights and two biases are cast, and the scores back."""
    inputs = SMALL["inputs"]
    assert plan.count_autocast_casts(small(), (inputs,), "bf16") == 5
    model = plan.make_model(work("mlp"))
    assert plan.count_autocast_casts(model, plan.make_inputs(work("mlp")), "bf16") == 6


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a row for each candidate; plans predict their passes.

    All begin with the same weights, and learn alike but for rounding.
    """
    losses: dict[str, list[float]] = {}

    class Watched(Candidate):
        def request(self, question: Any = None) -> Any:
            answer = super().request(question)
            losses.setdefault(self.name, []).extend(answer.get("losses", ()))
            return answer

    monkeypatch.setattr(training, "WorkerProcess", Watched)
    (table,) = tables("plan", "--models mlp --rounds 2 --device cpu")
    by_name = {row["candidate"]: row for row in rows(table)}
    planned = ["painting", "min-cut", "painting O2", "min-cut O2"]
    assert list(by_name) == ["fp32", "torch.autocast", "lean", "O1", "O2", *planned]
    assert by_name["torch.autocast"]["x torch.autocast"] == 1
    first, last = losses["fp32"]
    assert last < first
    for name, row in by_name.items():
        assert 0 < row["ms of passes"] < row["ms a step"]  # type: ignore[operator]
        assert (row["predicted"] is not None) == (name in planned)
        assert losses[str(name)] == pytest.approx([first, last], rel=2**-6), name


@pytest.mark.parametrize("name", plan.MODELS)
def test_models_give_a_loss(name: str) -> None:
    """Law: each model runs on its inputs and gives one number with a gradient."""
    settings = work(name)
    inputs = plan.make_inputs(settings)
    loss = plan.make_model(settings)(*(each[:1] for each in inputs))
    assert loss.shape == ()
    assert loss.requires_grad

"""`halfstep bench plan`: its contenders train the same model, and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from bench_runs import flags, rows
from torch import nn

from halfstep.bench import plan

if TYPE_CHECKING:
    from halfstep.bench.plan import ModelAndBatch


LABELS = ["painting", "min-cut", "painting O2", "min-cut O2"]


def small() -> ModelAndBatch:
    """Return two layers, and a batch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(6, 8), torch.randint(0, 4, (6,)))


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.MODELS, "mlp", small)


def test_contenders_train_alike() -> None:
    """Law: the same weights at first, the same losses but for rounding, own copies."""
    contenders, inputs = plan.make_contenders("mlp", "cpu", torch.bfloat16)
    losses = {name: [] for name in contenders}
    for _ in range(3):
        for name, each in contenders.items():
            losses[name].append(each.forward_backward(inputs).item())
            each.update()
    for name, own in losses.items():
        assert own == pytest.approx(losses["fp32"], rel=2**-6), name
    assert losses["fp32"][0] != losses["fp32"][-1]


def test_casts_are_counted() -> None:
    """Law: the input, two weights and two biases are cast, and the scores back."""
    contenders, inputs = plan.make_contenders("mlp", "cpu", torch.bfloat16)
    copies = plan.count_copies(contenders["torch.autocast"], inputs)
    assert copies - plan.count_copies(contenders["fp32"], inputs) == {
        **dict.fromkeys([(6, 8), (16, 8), (16,), (4, 16), (4,), (6, 4)], 1)
    }
    cut = contenders["min-cut"]
    assert cut.plan is not None
    casts = plan.count_copies(cut, inputs) - plan.count_copies(
        contenders["fp32"], inputs
    )
    assert casts.total() == len(cut.plan.casts)


def test_tables() -> None:
    """Law: a row for each contender, verdicts for both kinds of weights."""
    times, verdicts = plan.tables(flags("plan", "--models mlp --rounds 2"))
    by_name = {row["contender"]: row for row in rows(times)}
    assert list(by_name) == ["fp32", "torch.autocast", "lean", "O1", "O2", *LABELS]
    assert by_name["torch.autocast"]["x torch.autocast"] == 1
    assert by_name["fp32"]["predicted"] is None
    assert isinstance(by_name["min-cut"]["x measured"], float)
    assert [row["contender"] for row in rows(verdicts)] == ["min-cut", "min-cut O2"]
    targets = {row["target"] for row in rows(verdicts)}
    assert targets <= {plan.MAX_RATIO, plan.MAX_RATIO_OF_FEW_CASTS}


@pytest.mark.parametrize("name", ["bert", "resnet", "gpt", "t5"])
def test_models_give_a_loss(name: str) -> None:
    """Law: each model runs on its inputs and gives one number with a gradient."""
    model, inputs = plan.MODELS[name]()
    loss = plan.WithLoss(model)(*(each[:1] for each in inputs))
    assert loss.shape == ()
    assert loss.requires_grad

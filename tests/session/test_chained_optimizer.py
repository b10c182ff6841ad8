"""Several models and optimizers in one session."""

import copy
from typing import Any

import pytest
import torch
from small_training import same
from torch import Tensor, nn

import halfstep as hs
from halfstep.testing import assert_unchanged, overflow_in_backward


def make() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    adam = torch.optim.AdamW(first.parameters(), 0.01)
    sgd = torch.optim.SGD(second.parameters(), 0.01, momentum=0.9)
    return [first, second], [adam, sgd]


def loss_of(models: list[nn.Module], x: Tensor) -> Tensor:
    one, two = models[0](x), models[1](x)
    return (2 * one + 3 * two - x.sum(1, keepdim=True)).square().mean()


def train(session: hs.Session, models: list[nn.Module], batches: Tensor) -> list[Any]:
    reports = []
    for x in batches:
        with session.autocast():
            loss = loss_of(models, x)
        session.backward(loss)
        reports.append(session.step())
    return reports


def batches(number: int, seed: int = 1) -> Tensor:
    return torch.randn(number, 16, 4, generator=torch.Generator().manual_seed(seed))


def test_fp32_is_the_plain_loop() -> None:
    """Law: at O0 the weights are, to the bit, those of a loop with both optimizers."""
    models, optimizers = make()
    twins, own = make()
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for optimizer in (optimizers[1], own[1])
    ]
    session = hs.prepare(models, optimizers, "O0", scheduler=schedules[0])
    for x in batches(5):
        loss_of(twins, x).backward()
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
        schedules[1].step()
    train(session, models, batches(5))
    assert same(*(dict(nn.ModuleList(m).state_dict()) for m in (models, twins)))
    assert optimizers[1].param_groups[0]["lr"] == own[1].param_groups[0]["lr"]


@pytest.mark.parametrize("master", ["fp32", "split"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_resumed_to_the_bit(level: str, master: str) -> None:
    """Law: a state brings back masters, moments and counters of all optimizers."""
    if level != "O2" and master != "fp32":
        pytest.skip("masters at O2 alone")
    keys: dict[str, Any] = {"level": level, "dtype": "bf16", "master": master}
    models, optimizers = make()
    session = hs.prepare(models, optimizers, **keys)
    train(session, models, batches(3))
    state = copy.deepcopy(session.state_dict())
    train(session, models, batches(3, seed=2))
    others, other_optimizers = make()
    resumed = hs.prepare(others, other_optimizers, **keys)
    resumed.load_state_dict(state)
    train(resumed, others, batches(3, seed=2))
    assert same(resumed.weights(), session.weights())
    assert "1.2.weight" in resumed.weights()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_each_model_is_called_by_itself(level: str) -> None:
    """Law: what a model of the list returns is fp32, whatever it stores."""
    models, optimizers = make()
    session = hs.prepare(models, optimizers, level, dtype="bf16")
    with session.autocast():
        outputs = [model(batches(1)[0]) for model in models]
    assert [model[0].weight.dtype for model in models] == [torch.bfloat16] * 2
    assert [output.dtype for output in outputs] == [torch.float32] * 2


def test_a_bad_step_changes_none() -> None:
    """Law: an inf in one model's gradients skips the step of all optimizers."""
    models, optimizers = make()
    session = hs.prepare(models, optimizers, "O2", dtype="bf16", clip_grad_norm=1.0)
    train(session, models, batches(2))
    with assert_unchanged(session), overflow_in_backward(models[1]):
        (report,) = train(session, models, batches(1))
    assert report.skipped
    assert report.found_inf_in == ("1.0.weight",)


def test_a_step_by_hand() -> None:
    """Law: one optimizer of the list stepped by hand is refused, as a single one is."""
    models, optimizers = make()
    session = hs.prepare(models, optimizers, "O2", dtype="bf16")
    with session.autocast():
        loss = loss_of(models, batches(1)[0])
    session.backward(loss)
    with pytest.raises(hs.UserError, match=r"call session\.step\(\)"):
        optimizers[1].step()


def test_one_model_and_two_optimizers() -> None:
    """Law: parts of one model may have optimizers of their own."""
    model, _ = make()[0]
    assert isinstance(model, nn.Sequential)
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    session = hs.prepare(model, optimizers, "O1", dtype="bf16")
    before = copy.deepcopy(model.state_dict())
    with session.autocast():
        loss = model(batches(1)[0]).square().mean()
    session.backward(loss)
    assert session.step().applied
    changed = [n for n, p in model.named_parameters() if not p.equal(before[n])]
    assert changed == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_prepared_once() -> None:
    """Law: a model or an optimizer of a list is prepared, too."""
    models, optimizers = make()
    hs.prepare(models, optimizers, "O1", dtype="bf16")
    with pytest.raises(hs.UserError, match="was prepared before"):
        hs.prepare(models[0], torch.optim.SGD(models[0].parameters(), 0.1), "O1")
    with pytest.raises(hs.UserError, match="the optimizer was prepared before"):
        hs.prepare(make()[0][0], optimizers[0], "O1")


def test_a_group_that_came_later() -> None:
    """Law: gradients that nobody unscaled are not applied."""
    models, optimizers = make()
    session = hs.prepare(models, optimizers, "O1", dtype="bf16")
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(hs.UserError, match="given a parameter group after prepare"):
        train(session, models, batches(1))

"""Ways in which a scaler could fail in silence, and does not."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from processes import group_of_one
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import ScaleRule


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def spoil(
    scaler: hs.GradScaler, optimizer: torch.optim.Optimizer, w: Tensor, steps: int
) -> None:
    for _ in range(steps):
        scaler.scale((w * math.nan).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_guard_ends_too() -> None:
    """Law: without a scale, fifty skips in a row end the run."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = hs.GradScaler("cpu", strategy="none")
    with pytest.raises(hs.LossScaleCollapse, match=r"^50 steps in a row were skipped"):
        spoil(scaler, optimizer, w, 60)
    assert (w.item(), scaler.get_scale()) == (1.0, 1.0)


def test_a_guard_stays_at_one() -> None:
    """Law: no state that is loaded gives a guard a scale."""
    scaler = hs.GradScaler("cpu", strategy="none")
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(()))
    for state in (other.state_dict(), hs.GradScaler("cpu").state_dict()):
        scaler.load_state_dict(state)
        assert scaler.scale(torch.ones(())).item() == 1.0


@pytest.mark.parametrize("scale", [0.001, 2.0**-10])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_made_by_unscaling(fused: bool, scale: float) -> None:
    """Law: 1e38 divided by a scale below 1 is inf, and skips, fused or not."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1, fused=fused)
    scaler = hs.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    w.grad = torch.tensor([1e38])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.skipped
    assert w.item() == 1.0


@pytest.mark.parametrize("kind", ["scaler", "session"])
def test_dropping_for_ever_ends(kind: str) -> None:
    """Law: a bad micro-batch in every step does not walk the scale down in silence."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.0)
    model = nn.ParameterList([w])
    rule = ScaleRule(init_scale=4.0)
    session = hs.prepare(
        *(model, torch.optim.SGD(model.parameters(), lr=0.0), "O0"),
        loss_scale=rule,
        on_overflow="drop_microbatch",
        accumulate=2,
    )
    scaler = hs.GradScaler(
        "cpu", init_scale=4.0, min_scale=1.0, on_overflow="drop_microbatch"
    )

    def backward(loss: Tensor) -> None:
        if kind == "session":
            session.backward(loss)
            session.step()
        else:
            scaler.backward(loss, optimizer)

    def step() -> None:
        backward(w.sum())
        backward((w * math.nan).sum())
        if kind == "scaler":
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    for _ in range(9):
        step()
    # 4, 2, then 1: it is the tenth in a row, and at the floor.
    with pytest.raises(hs.LossScaleCollapse, match=r"^10 steps in a row lost a "):
        step()


def test_the_scale_of_a_named_loss_is_told() -> None:
    """Law: `last_step.scale` is that of the pass, not of losses without a name."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = hs.GradScaler("cpu", init_scale=8.0)
    for value in (math.inf, 1.0):
        scaler.backward((w * value).sum(), optimizer, name="g")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.last_step.scale == 4.0
    assert scaler.get_scale() == 8.0


def test_an_optimizer_may_go() -> None:
    """Law: a scaler keeps neither the optimizer nor the parameters of the last step."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = hs.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(w), weakref.ref(optimizer)
    del w, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert scaler.last_step.grad_norm is None


def test_a_graph_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: if the graph cannot be examined, the run still ends with what is known."""

    def fail(*_: object) -> Any:
        message = "no such layout"
        raise NotImplementedError(message)

    monkeypatch.setattr("halfstep.scaling.collapse.find_in_graph", fail)
    w = weight()
    optimizer = torch.optim.SGD([("w", w)], lr=0.1)
    scaler = hs.GradScaler("cpu", max_consecutive_skips=3)
    with pytest.raises(hs.LossScaleCollapse) as caught:
        spoil(scaler, optimizer, w, 3)
    end = "(graph not read: NotImplementedError: no such layout)"
    assert str(caught.value).endswith(end)
    assert caught.value.nan_in == ("w",)


def test_retries_are_refused_under_ddp() -> None:
    """Law: a second try that DDP would not average is refused before it runs."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, "O0", on_overflow=hs.Retry(1))
    with group_of_one():
        session.model = DistributedDataParallel(model)
        loss = session.model(torch.ones(1, 2)).sum()
        with pytest.raises(
            UserError, match=r"^halfstep\.Retry runs a backward pass again"
        ):
            session.backward(loss)
        session.model = model


@pytest.mark.parametrize("strategy", ["measured", "logmax"])
def test_strategies_begin_at_a_power_of_two(strategy: str) -> None:
    """Law: a first scale that unscaling would round is refused by name."""
    with pytest.raises(UserError) as caught:
        hs.GradScaler("cpu", init_scale=1000.0, strategy=strategy)
    assert str(caught.value) == (
        f"init_scale=1000.0 must be a power of two for {strategy}."
    )


def test_two_ways_in_one_sum_are_refused() -> None:
    """Law: a loss scaled after `backward` is refused where it meets its gradients."""
    w, other = weight(), weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = hs.GradScaler("cpu")
    scaler.backward(w.sum(), optimizer)
    with pytest.raises(RuntimeError) as caught:
        scaler.scale((w * other).sum())
    assert str(caught.value).startswith("scaler.scale() was given a loss that reaches")
    assert scaler.scale(other.sum()).item() == 2.0**16
    scaler.step(optimizer)
    scaler.update()
    assert scaler.scale(w.sum()).item() > 0


def test_a_refused_update_changes_nothing() -> None:
    """Law: after an `update` that torch refuses too, gradients stay unscaled once."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = hs.GradScaler("cpu", init_scale=8.0)
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError):
        scaler.update(torch.ones(2))
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(optimizer)
    assert w.grad is not None
    assert w.grad.item() == 1.0


def test_a_room_of_the_face() -> None:
    """Law: `halfstep.scaler` is there without an import of its own."""
    assert hs.scaler.advance.__module__ == "halfstep.scaling.loss_scaler"

"""Backward passes looked at one by one: left out, run again, or at their own scale."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from session_cases import (
    KINDS,
    SGD,
    build,
    everything,
    network,
    same,
)
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import ScaleRule

INF, NAN = math.inf, math.nan

EPS = {"O3 bf16": 2.0**-7, "O3 fp16": 2.0**-9}
"""Two roundings of what the optimizer updates, relative; fp32 otherwise."""

kinds = pytest.mark.parametrize("kind", KINDS)


def loss_of(model: Any, seed: int, spoilt: float = 0.0) -> Any:
    """Return a loss; `spoilt` is inf or NaN, and then the gradient of one bias."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    out = model(inputs).float()
    loss = nn.functional.mse_loss(out, inputs[:, :3] * inputs[:, 3:] + 0.5)
    return loss + model[0].bias[1].float() * spoilt if spoilt else loss


def go(session: Any, seed: int, spoilt: float = 0.0, name: str = "") -> Any:
    with session.autocast():
        loss = loss_of(session.model, seed, spoilt)
    session.backward(loss, name=name)
    return session.step()


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *zip([*KINDS, "O2 bf16"], [(0,), (3,), (0, 2), (1, 2, 3)] * 2, strict=True),
        *((kind, ()) for kind in KINDS),
    ],
)
def test_the_mean_of_the_good_ones(kind: str, bad: tuple[int, ...]) -> None:
    """Law: the good ones make the step, multiplied by how many they stand for."""
    session = build(kind, accumulate=4, on_overflow="drop_microbatch")
    share = 4 / (4 - len(bad))
    other = build(kind, functools.partial(SGD, lr=0.05 * share), accumulate=4)
    for k in range(4):
        report = go(session, k, (INF, NAN)[k % 2] if k in bad else 0.0)
        with other.autocast():
            loss = loss_of(other.model, k) * (k not in bad)
        other.backward(loss)
        other.step()
    assert (report.applied, report.skipped) == (True, False)
    assert report.microbatches_dropped == len(bad)
    assert report.found_inf_in == ()
    # Powers of two change no bit, but where fp16 sums are unscaled one by one.
    slack = 0.0 if share in {1, 2, 4} and kind != "O3 fp16" else EPS.get(kind, 2.0**-22)
    close = functools.partial(torch.testing.assert_close, rtol=slack, atol=slack)
    close(session.weights(), other.weights())
    scale = 2.0 ** (15 if bad else 16) if kind.endswith("fp16") else 1.0
    assert session.scaler.state.scale.item() == scale


@kinds
def test_all_bad(kind: str) -> None:
    """Law: with nothing left the step is skipped, and nothing has changed."""
    make = functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
    session = build(kind, make, accumulate=3, on_overflow="drop_microbatch")
    for seed in range(3):
        go(session, seed)
    before = everything(session)
    for value in (INF, NAN, -INF):
        report = go(session, 0, value)
    assert (report.applied, report.skipped) == (False, True)
    assert (report.microbatches_dropped, session.steps_skipped) == (3, 1)
    same(everything(session), before)
    scale = 2.0**15 if kind.endswith("fp16") else 1.0
    assert session.scaler.state.scale.item() == scale
    assert [go(session, seed).applied for seed in range(3)] == [False, False, True]


@pytest.mark.parametrize("clip", [0.01, INF])
def test_clipped_once(clip: float) -> None:
    """Law: the norm is that of the mean over the good ones, and it is cut once."""
    session = build(accumulate=4, on_overflow="drop_microbatch", clip_grad_norm=clip)
    model = network()
    (sum(loss_of(model, seed) for seed in (0, 3)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    for seed in range(4):
        report = go(session, seed, INF if seed in {1, 2} else 0.0)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, param in zip(session.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, param - 0.05 * param.grad)


def test_a_bad_micro_batch_is_no_skip() -> None:
    """Law: steps that were applied are never counted, or told, as skipped in a row."""
    rule = ScaleRule(max_consecutive_skips=3)
    session = build(
        "O1 fp16", accumulate=2, on_overflow="drop_microbatch", loss_scale=rule
    )
    for seed in range(6):
        go(session, seed, NAN)
        assert go(session, seed).applied
    assert (session.steps_applied, session.steps_skipped) == (6, 0)


# The same, with a scaler in a loop of one's own


class Loop:
    def __init__(self, **numbers: Any) -> None:
        self.model = network()
        self.optimizer: Any = SGD(self.model.named_parameters())
        self.scaler: Any = hs.GradScaler("cpu", **numbers)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def mean_of(seeds: list[int]) -> list[Tensor]:
    model = network().double()

    class Wide:
        def __getitem__(self, index: int) -> nn.Module:
            return model[index]

        def __call__(self, inputs: Tensor) -> Tensor:
            return model(inputs.double())

    (sum(loss_of(Wide(), seed) for seed in seeds) / len(seeds)).backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bad", [(), (0,), (1,), (3,), (0, 2), (1, 2, 3)])
def test_scaler_leaves_out(bad: tuple[int, ...]) -> None:
    """Law: `.grad` holds the unscaled mean over the good ones; the scale backs off."""
    loop = Loop(on_overflow="drop_microbatch", init_scale=1024.0)
    for k in range(4):
        loss = loss_of(loop.model, k, INF if k in bad else 0.0) / 4
        loop.scaler.backward(loss, loop.optimizer)
    good = [k for k in range(4) if k not in bad]
    torch.testing.assert_close(loop.gradients(), mean_of(good), rtol=1e-5, atol=1e-7)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    report = loop.scaler.last_step
    assert (report.applied, report.scale) == (True, 1024.0)
    assert loop.scaler.get_scale() == (512.0 if bad else 1024.0)
    assert report.microbatches_dropped == len(bad)


@pytest.mark.parametrize("on_overflow", ["skip", "drop_microbatch"])
def test_clearing_forgets(on_overflow: str) -> None:
    """Law: what `zero_grad` has cleared does not come back with the next pass.

    What two optimizers share is unscaled once.
    """
    loop = Loop(on_overflow=on_overflow)
    loop.scaler.backward(loss_of(loop.model, 0), loop.optimizer)
    loop.optimizer.zero_grad()
    other = SGD(loop.model.parameters())
    loop.scaler.backward(loss_of(loop.model, 1), loop.optimizer, other)
    torch.testing.assert_close(loop.gradients(), mean_of([1]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("on_overflow", ["skip", "drop_microbatch"])
@pytest.mark.parametrize("bad", [0, 1])
def test_two_models_take_turns(on_overflow: str, bad: int) -> None:
    """Law: of two models with a step each, one's overflow leaves the other alone.

    Nor does a pass of one bring back gradients of the other, which were cleared.
    """
    scaler: Any = hs.GradScaler("cpu", on_overflow=on_overflow)
    models = [network(), network()]
    optimizers: list[Any] = [SGD(model.parameters()) for model in models]
    for turn in range(2):
        before = [copy.deepcopy(model.state_dict()) for model in models]
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            spoilt = INF if k == bad else 0.0
            scaler.backward(loss_of(model, turn, spoilt), optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        assert all(p.grad is None for model in models for p in model.parameters())
        scaler.update()
        same(models[bad].state_dict(), before[bad])
        alone = network()
        alone.load_state_dict(before[1 - bad])
        torch.autograd.backward(loss_of(alone, turn))
        SGD(alone.parameters()).step()
        torch.testing.assert_close(models[1 - bad].state_dict(), alone.state_dict())


def test_optimizers_of_one_pass_skip_together() -> None:
    """Law: all that an overflowed pass reaches skip; those of another pass step."""
    scaler: Any = hs.GradScaler("cpu")
    models = [network() for _ in range(3)]
    optimizers: list[Any] = [SGD(model.parameters()) for model in models]
    before = copy.deepcopy([model.state_dict() for model in models])
    joint = loss_of(models[0], 0, INF) + loss_of(models[1], 1)
    scaler.backward(joint, *optimizers[:2])
    scaler.backward(loss_of(models[2], 2), optimizers[2])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    same([model.state_dict() for model in models[:2]], before[:2])
    assert not torch.equal(models[2][0].weight, before[2]["0.weight"])


def test_fp16_gradients_are_refused() -> None:
    """Law: gradients that unscaling would flush to zero are refused here as well."""
    model: Any = nn.Linear(2, 2).half()
    optimizer = SGD(model.named_parameters())
    scaler: Any = hs.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\. "):
        scaler.backward(model(torch.ones(1, 2).half()).float().sum(), optimizer)


@pytest.mark.parametrize("twice", [False, True])
def test_sparse_gradients(twice: bool) -> None:
    """Law: rows of an embedding add up as they do dense; a dense use may follow."""

    def run(*, sparse: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=sparse)
        optimizer: Any = SGD(table.parameters())
        scaler: Any = hs.GradScaler("cpu", init_scale=256.0)
        rows = torch.tensor([1, 3, 3])
        scaler.backward(table(rows).square().sum(), optimizer, name="a")
        more = table.weight.sum() if twice else table(rows).sum()
        scaler.backward(more, optimizer, name="b")
        scaler.step(optimizer)
        return table.weight.detach()

    torch.testing.assert_close(run(sparse=True), run(sparse=False))


@pytest.mark.parametrize(
    "numbers", [{"on_overflow": "drop_microbatch"}, {"on_overflow": hs.Retry(1)}, {}]
)
def test_no_optimizer_is_refused(numbers: dict[str, Any]) -> None:
    """Law: a pass that nobody can look at is refused, not left at a scale unknown."""
    loop = Loop(**numbers)
    with pytest.raises((UserError, TypeError), match="optimizer"):
        loop.scaler.backward(loss_of(loop.model, 0), name="" if numbers else "a")


@pytest.mark.parametrize("kind", ["scaler", "session"])
def test_dropping_for_ever_ends(kind: str) -> None:
    """Law: a bad micro-batch in every step does not walk the scale down in silence."""
    drop: dict[str, Any] = {"on_overflow": "drop_microbatch"}
    loop = Loop(init_scale=4.0, min_scale=1.0, **drop)
    rule = ScaleRule(init_scale=4.0)
    session = build("O0 fp32", loss_scale=rule, accumulate=2, **drop)

    def step() -> None:
        for value in (0.0, NAN):
            if kind == "session":
                go(session, 0, value)
            else:
                loop.scaler.backward(loss_of(loop.model, 0, value), loop.optimizer)
        if kind == "scaler":
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.optimizer.zero_grad()

    for _ in range(9):
        step()
    # 4, 2, then 1: it is the tenth in a row, and at the floor.
    with pytest.raises(hs.LossScaleCollapse, match=r"^10 steps in a row lost a "):
        step()


def test_two_ways_in_one_sum_are_refused() -> None:
    """Law: a loss scaled after `backward` is refused where it meets its gradients."""
    loop, other = Loop(), nn.Parameter(torch.ones(1))
    loop.scaler.backward(loss_of(loop.model, 0), loop.optimizer)
    with pytest.raises(RuntimeError) as caught:
        loop.scaler.scale((loss_of(loop.model, 0) * other).sum())
    assert str(caught.value).startswith("scaler.scale() was given a loss that reaches")
    assert loop.scaler.scale(other.sum()).item() == 2.0**16
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.scale(loss_of(loop.model, 0)).item() > 0

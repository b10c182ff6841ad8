"""Losses with loss scales of their own, and backward passes that are run again."""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import session_cases
import torch
from processes import group_of_one
from session_cases import same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import ScaleRule

INF = math.inf
SGD = functools.partial(torch.optim.SGD, lr=0.5)
KINDS = ["O0 fp32", "O1 fp16", "O2 fp16", "O3 fp16", "O2 bf16"]
START = ScaleRule(init_scale=4096.0)

kinds = pytest.mark.parametrize("kind", KINDS)


class Loop:
    def __init__(self, **numbers: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(8))
        self.optimizer: Any = SGD([("weight", self.weight)])
        self.scaler: Any = hs.GradScaler("cpu", **numbers)

    def loss(self, factor: Any, power: int = 0) -> Tensor:
        return (self.weight.half() * factor).float().sum() * 2.0**power

    def step(self) -> Any:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.last_step

    @property
    def grad(self) -> Tensor:
        return self.weight.grad


def scale_of(scaler: Any, name: str) -> Any:
    return scaler.state_dict()["_halfstep"][name]["scale"]


def test_scales_far_apart() -> None:
    """Law: gradients 2**44 apart pass fp16, each at its scale; their sum is fp64's."""
    loop = Loop(init_scale=2.0**24, growth_interval=1000)
    half = torch.arange(8) < 4
    numbers = (torch.rand(8) / 2 + 0.5).half()
    large, small = numbers * half, numbers * ~half
    # 2**10 * scale fits fp16 below 2**6: the scale has to be halved 19 times.
    for number in range(19):
        for name, factor, power in (("large", large, 10), ("small", small, -34)):
            loop.scaler.backward(loop.loss(factor, power), loop.optimizer, name=name)
        assert loop.step().skipped
        assert scale_of(loop.scaler, "large") == 2.0 ** (23 - number)
        assert scale_of(loop.scaler, "small") == 2.0**24
        same(loop.weight.detach(), torch.zeros(8))
    loop.scaler.backward(loop.loss(large, 10), loop.optimizer, name="large")
    loop.scaler.backward(loop.loss(small, -34), loop.optimizer, name="small")
    exact = large.double() * 2.0**10 + small.double() * 2.0**-34
    same(loop.grad.double(), exact)
    assert loop.step().applied
    same(loop.weight.detach().double(), -0.5 * exact)


def test_each_scale_grows_and_falls_by_itself() -> None:
    """Law: a scale that was not used in a step stays; the others move by their own."""
    loop = Loop(init_scale=8.0, growth_interval=2)
    seen, reports = [], []
    for bad, used in (("", "ab"), ("a", "ab"), ("b", "b"), ("", "a"), ("", "ab")):
        for name in used:
            loss = loop.weight.sum() * (INF if name == bad else 1.0)
            loop.scaler.backward(loss, loop.optimizer, name=name)
        reports.append(loop.step())
        assert reports[-1].skipped == bool(bad)
        seen.append(scale_of(loop.scaler, "a"))
    # a: clean 1, overflow, unused, clean 1, clean 2 and growth.
    assert seen == [8.0, 4.0, 4.0, 4.0, 8.0]
    # b: clean 1, clean 2 and growth, overflow, unused, clean 1.
    assert scale_of(loop.scaler, "b") == 8.0
    assert loop.scaler.get_scale() == 8.0
    # The scale of the pass is told, not that of losses without a name.
    assert reports[3].scale == 4.0


def test_the_usual_scale_beside_a_named_one() -> None:
    """Law: `scale` and `backward` in one iteration each move their own scale."""
    loop, other = Loop(init_scale=8.0), nn.Parameter(torch.zeros(3))
    optimizer = SGD([other])
    for number in range(1, 4):
        loop.scaler.backward(loop.weight.sum(), loop.optimizer, name="a")
        loop.scaler.scale(other.sum() * INF).backward()
        loop.scaler.step(optimizer)
        loop.step()
        optimizer.zero_grad()
        assert loop.scaler.get_scale() == 8.0 / 2**number
    assert scale_of(loop.scaler, "a") == 8.0


def test_a_scale_that_never_moves() -> None:
    """Law: strategy "none" leaves the scale of a named loss at 1, and its gradients."""
    loop = Loop(strategy="none", growth_interval=1)
    for _ in range(3):
        loop.scaler.backward(loop.weight.sum(), loop.optimizer, name="a")
        assert bool((loop.grad == 1).all())
        assert loop.step().scale == 1.0


@kinds
@pytest.mark.parametrize("on_overflow", ["skip", "drop_microbatch"])
def test_a_scale_that_only_grows(kind: str, on_overflow: str) -> None:
    """Law: gradients are divided by what their loss was multiplied by."""
    rule = ScaleRule(init_scale=1.0, backoff_factor=1.0, growth_interval=1)
    session = build(kind, loss_scale=rule, on_overflow=on_overflow, accumulate=1)
    session.optimizer.param_groups[0]["lr"] = 0.0
    norms = []
    for _ in range(3):
        with session.autocast():
            loss = loss_of(session.model, 0)
        session.backward(loss)
        norms.append(session.grad_norm().item())
        session.step()
    assert session.scaler.state.scale.item() == 8.0
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2)


def test_names_and_dropping_are_refused() -> None:
    """Law: nobody can count micro-batches of losses that differ: it is said."""
    loop = Loop(on_overflow="drop_microbatch")
    with pytest.raises(UserError) as caught:
        loop.scaler.backward(loop.weight.sum(), loop.optimizer, name="a")
    assert str(caught.value) == (
        "the loss 'a' has a scale of its own, but 'drop_microbatch' counts "
        "micro-batches of one loss; use one of the two."
    )
    session = build(on_overflow="drop_microbatch")
    with pytest.raises(UserError) as again:
        session.backward(loss_of(session.model, 0), name="a")
    assert str(again.value) == str(caught.value)


def test_foreign_gradients_are_refused() -> None:
    """Law: gradients of unknown scale, there before the first pass, are refused."""
    loop = Loop()
    torch.autograd.backward(loop.weight.sum())
    with pytest.raises(RuntimeError) as caught:
        loop.scaler.backward(loop.weight.sum(), loop.optimizer)
    assert str(caught.value) == (
        "scaler.backward() found a gradient in weight that it did not make: call "
        "optimizer.zero_grad() first, and use scaler.backward() for every loss."
    )
    same(loop.grad, torch.ones(8))


@pytest.mark.parametrize("on_overflow", ["skip", "drop_microbatch"])
@pytest.mark.parametrize("bad", [False, True])
def test_sums_may_be_changed_between_passes(on_overflow: str, bad: bool) -> None:
    """Law: what was added to `.grad`, or cut there, since the last pass counts."""
    loop = Loop(on_overflow=on_overflow)
    loop.scaler.backward(loop.weight.sum() * 4, loop.optimizer)
    nn.utils.clip_grad_value_([loop.weight], 3.0)
    torch.autograd.backward(loop.weight.sum() * (INF if bad else 1.0))
    loop.scaler.backward(loop.weight.sum() * 2, loop.optimizer)
    if not bad:
        same(loop.grad, torch.full((8,), 6.0))
    assert loop.step().skipped == bad


def test_backward_after_step_is_refused() -> None:
    """Law: an optimizer that was stepped takes in nothing more before `update`."""
    loop = Loop()
    loop.scaler.backward(loop.weight.sum(), loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        loop.scaler.backward(loop.weight.sum(), loop.optimizer)


def test_a_sum_that_overflows_is_seen() -> None:
    """Law: two finite gradients whose sum is not finite are not applied."""
    loop = Loop(init_scale=1.0)
    for name in "ab":
        loop.scaler.backward(loop.weight.sum() * 3e38, loop.optimizer, name=name)
    assert loop.step().skipped
    same(loop.weight.detach(), torch.zeros(8))


def test_disabled() -> None:
    """Law: disabled, `backward` is the loss's own, whatever the words."""
    loop = Loop(enabled=False, on_overflow=hs.Retry(2, "drop_microbatch"))
    for _ in range(2):
        loop.scaler.backward(loop.weight.sum(), loop.optimizer, name="a")
    same(loop.grad, torch.full((8,), 2.0))
    loss = loop.weight.sum().square()
    loop.scaler.backward(loss, retain_graph=True)
    loop.scaler.backward(loss)


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_a_batch_is_not_lost(retries: int) -> None:
    """Law: a pass is run again at half the scale until it fits, or tries are used up.

    40 * 4096 and 40 * 2048 are above 65504, the largest number of fp16.
    """
    loop = Loop(init_scale=4096.0, on_overflow=hs.Retry(retries))
    loop.scaler.backward(loop.loss(40.0), loop.optimizer)
    tried = min(retries, 2)
    report = loop.step()
    assert report.applied == (retries >= 2)
    assert report.scale == 4096.0 / 2**tried
    assert loop.scaler.get_scale() == max(4096.0 / 2 ** (tried + 1), 1024.0)
    expected = -20.0 if retries >= 2 else 0.0
    same(loop.weight.detach(), torch.full((8,), expected))


def test_a_static_scale_is_not_tried_for_ever() -> None:
    """Law: hopeless tries end; the floor holds."""
    loop = Loop(init_scale=4.0, min_scale=2.0, on_overflow=hs.Retry(5))
    loop.scaler.backward(loop.weight.sum() * INF, loop.optimizer)
    assert loop.step().skipped
    assert loop.scaler.get_scale() == 2.0


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(("retries", "factor"), [(0, 1.0), (2, 1.0), (2, 40.0)])
def test_saved_tensors_are_freed(retries: int, factor: float) -> None:
    """Law: after the pass nothing of the graph is held, though the loss is."""
    loop = Loop(init_scale=4096.0, on_overflow=hs.Retry(retries))
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        loss = loop.loss(torch.full((8,), factor).half())
    assert boxes
    assert all(box() is not None for box in boxes)
    loop.scaler.backward(loss, loop.optimizer)
    assert all(box() is None for box in boxes)
    assert loss.isfinite()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """Law: recomputed blocks can be run again, with the same random numbers."""
    grads = []
    for retries, scale in ((2, 4096.0), (0, 1024.0)):
        torch.manual_seed(0)
        loop = Loop(init_scale=scale, on_overflow=hs.Retry(retries))

        def block(weight: Tensor) -> Tensor:
            return nn.functional.dropout(weight.half() * 15.0, 0.5)

        # 15 / (1 - 0.5) = 30: above 65504 at 4096, and not at 2048 or 1024.
        found = checkpoint(block, loop.weight, use_reentrant=reentrant)
        loop.scaler.backward(found.float().sum(), loop.optimizer)
        grads.append(loop.grad)
        assert loop.step().applied
    same(grads[0], grads[1])
    assert set(grads[0].tolist()) == {0.0, 30.0}


build = functools.partial(session_cases.build, make=SGD)


def loss_of(model: Any, seed: int, limit: Callable[[], bool] | None = None) -> Any:
    """Return a loss; its gradients overflow as long as `limit` says so."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    out = model(inputs)
    if limit is not None:
        out.register_hook(lambda grad: grad * INF if limit() else grad)
    return nn.functional.mse_loss(out.float(), inputs[:, :3] * inputs[:, 3:] + 0.5)


@kinds
@pytest.mark.parametrize("accumulate", [1, 2])
def test_session_runs_again(kind: str, accumulate: int) -> None:
    """Law: what is run again gives the bits of a scale that fitted at once."""
    session = build(
        kind, loss_scale=START, on_overflow=hs.Retry(2), accumulate=accumulate
    )
    other = build(
        kind,
        loss_scale=ScaleRule(1024.0),
        accumulate=accumulate,
        on_overflow=hs.Retry(1),
    )
    for seed in range(2 * accumulate):
        for each in (session, other):
            scaler = each.scaler

            def too_high(scaler: Any = scaler) -> bool:
                return float(scaler.state.scale) > 1024.0

            with each.autocast():
                loss = loss_of(each.model, seed, too_high)
            each.backward(loss)
            report = each.step()
    assert (report.applied, report.scale) == (True, 1024.0)
    assert (session.steps_applied, session.steps_skipped) == (2, 0)
    same(session.weights(), other.weights())
    same(session.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"])


@kinds
def test_a_named_loss_that_overflows(kind: str) -> None:
    """Law: inf in the pass of one loss skips the step; only its own scale falls."""
    session = build(kind, loss_scale=START)
    before = session_cases.everything(session)
    with session.autocast():
        good = loss_of(session.model, 0)
        bad = loss_of(session.model, 1, limit=lambda: True)
    session.backward(good, name="good")
    session.backward(bad, name="bad")
    assert session.step().skipped
    same(session_cases.everything(session), before)
    scales = session.state_dict()["scales"]
    assert [scales[name]["scale"] for name in ("good", "bad")] == [4096.0, 2048.0]


@kinds
def test_a_second_name_in_the_middle_of_a_window(kind: str) -> None:
    """Law: what was added up before the second loss came is not lost, nor rescaled."""
    session, plain = build(kind, accumulate=3), build(kind, accumulate=3)
    for seed in range(3):
        for each in (session, plain):
            with each.autocast():
                first, more = loss_of(each.model, seed), loss_of(each.model, 9)
            if seed < 2:
                each.backward(first)
            elif each is session:
                each.backward(first)
                each.backward(more, name="aux")
            else:
                each.backward(first + more)
            each.step()
    slack = {"O0": 1e-6, "O3": 2e-3}.get(kind[:2], 1e-2 if "bf16" in kind else 1e-3)
    torch.testing.assert_close(
        session.weights(), plain.weights(), rtol=slack, atol=slack
    )


def test_retries_are_refused_under_ddp() -> None:
    """Law: a second try that DDP would not average is refused before it runs."""
    session = build(on_overflow=hs.Retry(1))
    with group_of_one():
        session.model = DistributedDataParallel(session.model)
        loss = loss_of(session.model, 0)
        with pytest.raises(UserError, match=r"^halfstep\.Retry runs a backward pass a"):
            session.backward(loss)

"""Updates inside the backward pass, beside the ordinary step."""

import math
from functools import partial
from typing import Any
from unittest.mock import Mock

import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import UserError
from halfstep.masters import cpu_kernels
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

RMSPROP: Make = partial(torch.optim.RMSprop, lr=0.01, momentum=0.5)
MAKES = {
    "sgd": cases.SGD,
    "momentum": cases.MOMENTUM,
    "adamw": cases.ADAMW,
    "rmsprop": RMSPROP,
}
every_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


class Chain(nn.Module):
    """Layers in a row; the middle ones share a weight, and may be checkpointed.

    Args:
        segments: None; or whether checkpoints are reentrant.
        tied: The middle layers share a weight.
    """

    def __init__(self, *, segments: bool | None = None, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        if tied:
            self.layers[2].weight = self.layers[1].weight
        self.norm = nn.LayerNorm(6)
        self.segments = segments

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            run = nn.Sequential(layer, nn.Tanh())
            if self.segments is None:
                x = run(x)
            else:
                x = checkpoint(run, x, use_reentrant=self.segments)
        return self.norm(x)  # type: ignore[no-any-return]


def batch(seed: int, fill: float | None = None) -> Tensor:
    """Return inputs; they need gradients, for checkpoints that are reentrant."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    if fill is not None:
        x.fill_(fill)
    return x.requires_grad_()


def go(session: Session, seed: int) -> StepReport:
    with session.autocast():
        out = session.model(batch(seed)).float()
        loss = (out - torch.linspace(-1, 1, 6)).square().mean()
    session.backward(loss)
    return session.step()


def pair(make: Make, form: str, **more: Any) -> list[Session]:
    return [
        cases.start(make, form, Chain(**more), optimizer_in_backward=release)
        for release in (True, False)
    ]


@cases.every_form
@every_make
@pytest.mark.parametrize("segments", [None, False])
def test_equals_the_ordinary_step(
    form: str, make: Make, *, segments: bool | None
) -> None:
    """Law: weights, moments, counters and clock are the ordinary step's, to the bit."""
    released, plain = pair(make, form, segments=segments)
    kernel = cases.masters_of(released).kernel is not None
    assert kernel == (make is not RMSPROP and cpu_kernels.available())
    for seed in range(4):
        assert go(released, seed).applied
        assert go(plain, seed).applied
        assert same(cases.everything(released), cases.everything(plain))
    assert released.steps_applied == plain.steps_applied == 4


@cases.every_form
def test_reentrant_checkpoints(form: str) -> None:
    """Law: reentrant segments that share no weight make no difference either.

    A second gradient of one weight in one step is refused, not applied.
    """
    released, plain = pair(cases.ADAMW, form, segments=True, tied=False)
    for seed in range(3):
        go(released, seed)
        go(plain, seed)
    assert same(cases.everything(released), cases.everything(plain))
    released, _ = pair(cases.SGD, form, segments=True)
    with pytest.raises(UserError, match="second gradient after its update") as raised:
        go(released, 0)
    assert "use_reentrant=False" in str(raised.value)


@pytest.mark.parametrize("release", [True, False])
@every_make
def test_gradients_are_gone(make: Make, *, release: bool) -> None:
    """Law: after each parameter's update not one gradient is held, in any dtype."""
    session = cases.start(make, "split", Chain(), optimizer_in_backward=release)
    go(session, 0)
    held: list[int] = []

    def count(_: Tensor) -> None:
        params = [*session.model.parameters(), *cases.adopted(session.optimizer)]
        held.append(len({id(p) for p in params if p.grad is not None}))

    for param in session.model.parameters():
        param.register_post_accumulate_grad_hook(count)
    go(session, 1)
    params = len([*session.model.parameters()])
    assert len(held) == params
    # Without release they pile up: that is what the count can see.
    assert max(held) == (0 if release else params)


@cases.every_form
@pytest.mark.parametrize(
    ("make", "value"),
    [*zip(MAKES.values(), [math.inf, math.nan] * 2, strict=True)],
)
def test_a_bad_gradient_leaves_its_parameter_alone(
    form: str, make: Make, value: float
) -> None:
    """Law: it alone stays, with state and counter; others move; the report names it."""
    released, plain = pair(make, form)
    for session in (released, plain):
        go(session, 0)
    names = [name for name, _ in released.model.named_parameters()]
    before = cases.everything(released)
    bad = names.index("layers.0.weight")
    hook = dict(released.model.named_parameters())[names[bad]].register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([1]), value)
    )
    report = go(released, 1)
    hook.remove()
    go(plain, 1)
    assert report.left_out == (names[bad],)
    assert report.applied
    weights, extras, states, clock = cases.everything(released)
    right = cases.everything(plain)
    for index, name in enumerate(names):
        source = before if index == bad else right
        assert same(weights[index], source[0][index]), name
        assert same(states[name], source[2][name]), name
    low = [n for n in names if "norm" not in n]
    for index, name in enumerate(low):
        source = before if name == names[bad] else right
        assert same([extras[index]], [source[1][index]])
    assert clock == right[3]
    assert go(released, 2).left_out == ()


def test_an_infinite_imaginary_part() -> None:
    """Law: it leaves its parameter alone, as an infinite real part does."""
    model = nn.ParameterList([torch.ones(1, dtype=torch.complex64)])
    session = cases.start(cases.SGD, "fp32", model, optimizer_in_backward=True)
    part = torch.full((1,), math.inf)
    model[0].register_hook(lambda gradient: torch.complex(gradient.real, part))
    with session.autocast():
        loss = model[0].real.sum()
    session.backward(loss)
    assert session.step().left_out == ("0",)
    assert model[0].item() == 1


def test_fifty_in_a_row_end_the_run() -> None:
    """Law: a run ends after 50 steps in a row whose gradients are not all finite."""
    session = cases.start(cases.SGD, "split", Chain(), optimizer_in_backward=True)
    weight = session.model.layers[3].bias
    for number in range(20 + 49):
        hook = weight.register_hook(lambda gradient: gradient * math.inf)
        if number == 19:  # a good step begins a new count
            hook.remove()
        left_out = go(session, 0).left_out
        assert left_out == (() if number == 19 else ("layers.3.bias",))
        hook.remove()
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(hs.LossScaleCollapse, match=r"layers\.3\.bias"):
        go(session, 0)


@cases.every_form
@every_make
def test_norm(form: str, make: Make) -> None:
    """Law: with `clip_grad_norm=math.inf` the norm is the ordinary step's.

    Both add fp64 sums of squares, in another order: one rounding of each parameter.
    The optimizer that steps itself has torch's norm in fp32 beside it: one of each
    number.
    """
    released, plain = (
        cases.start(
            make,
            form,
            Chain(),
            optimizer_in_backward=release,
            clip_grad_norm=math.inf,
        )
        for release in (True, False)
    )
    count = sum(p.numel() for p in plain.model.parameters())
    for seed in range(2):
        ours, right = go(released, seed).grad_norm, go(plain, seed).grad_norm
        assert ours == pytest.approx(right, rel=(count + 4) * 2.0**-24)
    silent = cases.start(make, form, Chain(), optimizer_in_backward=True)
    assert go(silent, 0).grad_norm is None


EXCLUDED: dict[str, dict[str, Any]] = {
    "a loss scale: use dtype='bf16'": {"loss_scale": 8.0},
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "accumulate=2": {"accumulate": 2},
    "process_group": {"process_group": Mock(spec=torch.distributed.ProcessGroup)},
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_exclusions(why: str) -> None:
    """Law: what needs all gradients at once is refused, and named."""
    with pytest.raises(UserError, match=why) as raised:
        cases.start(
            cases.SGD, "split", Chain(), optimizer_in_backward=True, **EXCLUDED[why]
        )
    assert str(raised.value).startswith("optimizer_in_backward=True")
    assert len(str(raised.value).split()) <= 35


class Own(torch.optim.SGD):
    """An optimizer of somebody's."""


@pytest.mark.parametrize("late", [True, False])
def test_optimizers_that_count_steps(*, late: bool) -> None:
    """Law: one that is not torch's, or is watched, is refused; later hooks too."""
    model = Chain()
    with pytest.raises(UserError, match="Own might count each as a step"):
        cases.start(partial(Own, lr=0.1), "fp32", model, optimizer_in_backward=True)
    model = Chain()
    optimizer = cases.SGD(model.parameters())
    calls: list[int] = []
    if late:
        session = cases.prepare(model, optimizer, optimizer_in_backward=True)
        go(session, 0)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    act = partial(cases.prepare, model, optimizer, optimizer_in_backward=True)
    if late:
        act = partial(go, session, 1)
    with pytest.raises(UserError, match="has step hooks"):
        act()
    assert not calls


def test_a_second_backward_is_refused() -> None:
    """Law: weights have moved; another backward pass would see both old and new."""
    session = cases.start(cases.SGD, "split", Chain(), optimizer_in_backward=True)
    with session.autocast():
        losses = [session.model(batch(seed)).float().mean() for seed in (0, 1)]
    session.backward(losses[0])
    before = cases.everything(session)
    with pytest.raises(UserError, match=r"session\.step\(\) before the next"):
        session.backward(losses[1])
    assert same(cases.everything(session), before)
    assert session.step().applied


def test_without_a_gradient() -> None:
    """Law: a loss that reaches no parameter is refused, as in the ordinary step."""
    session = cases.start(cases.SGD, "split", Chain(), optimizer_in_backward=True)
    with session.autocast():
        loss = batch(0).sum()
    session.backward(loss)
    with pytest.raises(RuntimeError, match="no parameter of the optimizer"):
        session.step()


@cases.every_form
def test_groups_frozen_and_unused(form: str) -> None:
    """Law: groups added later are released too; frozen and unused weights stay."""
    sessions = []
    for release in (True, False):
        model = Chain()
        model.layers[0].weight.requires_grad_(requires_grad=False)
        later = [*model.layers[3].parameters()]
        first = [p for p in model.parameters() if not any(p is q for q in later)]
        optimizer = cases.ADAMW(first)
        session = cases.prepare(
            model, optimizer, master=form, optimizer_in_backward=release
        )
        go(session, 0)
        model.zero_grad()
        optimizer.add_param_group({"params": later, "lr": 0.5})
        for seed in (1, 2):
            go(session, seed)
        assert all(param.grad is None for param in model.parameters())
        sessions.append(session)
    assert same(*(cases.everything(session) for session in sessions))


@cases.both_ways
def test_rates_after_loading(*, kernel: bool) -> None:
    """Law: a state that was loaded brings new groups; their rates are what counts."""
    more = {"kernel": kernel, "optimizer_in_backward": True}
    session = cases.start(cases.ADAMW, "split", Chain(), **more)
    go(session, 0)
    session.load_state_dict(session.state_dict())
    before = {name: t.clone() for name, t in session.weights().items()}
    for group in session.optimizer.param_groups:
        group["lr"] = 0.0
    go(session, 1)
    assert same(session.weights(), before)
    session.optimizer.param_groups[0]["lr"] = 0.5
    go(session, 2)
    assert not same(session.weights(), before)

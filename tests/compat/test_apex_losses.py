"""`amp.scale_loss`: several models, losses and optimizers, and steps left out.

The oracle is the same program in float64 without amp, which leaves out the same steps.
Its numbers have few digits, so that every level must agree to the bit.
"""

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from apex_programs.process import LEVELS
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.compat.apex.state import STATE


class Two(nn.Module):
    def __init__(self, unique: int, *, exact: bool) -> None:
        super().__init__()
        dtypes = [torch.float64] * 2 if exact else [torch.float32, torch.float16]
        self.wide = nn.Parameter(unique + torch.arange(2, dtype=dtypes[0]))
        self.low = nn.Parameter(1 + unique + torch.arange(2, dtype=dtypes[1]))

    def forward(self) -> Tensor:
        kind = self.wide.dtype
        return (self.wide * self.low.to(kind)).sum()


@dataclass(frozen=True)
class Shape:
    optimizers: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each: the models in it, the optimizers it is scaled for."""

    @property
    def models(self) -> int:
        return sum(map(len, self.optimizers))


SHAPES = {
    "2 models 1 optimizer": Shape(((0, 1),), (((0,), (0,)), ((1,), (0,)))),
    "2 models 2 optimizers": Shape(((0,), (1,)), (((0,), (0,)), ((1,), (1,)))),
    "3 models 1 optimizer": Shape(((0, 1, 2),), (((0, 2), (0,)), ((1, 2), (0,)))),
    "3 models 2 optimizers": Shape(((0,), (1, 2)), (((0, 2), (0, 1)), ((1, 2), (1,)))),
}
RATES = (0.25, 0.5, 0.125)
MOMENTUM = 0.125


@dataclass(frozen=True)
class Plant:
    iteration: int
    loss: int
    model: int
    where: str


def group_of(models: list[Two], number: int) -> dict[str, Any]:
    return {"params": models[number].parameters(), "lr": RATES[number]}


def build(
    shape: Shape, *, exact: bool, late: bool = False
) -> tuple[list[Two], list[Any]]:
    """Return models and optimizers; `late`: those without the group of model 1."""
    models = [Two(number + 1, exact=exact) for number in range(shape.models)]
    optimizers: list[Any] = [
        torch.optim.SGD(
            [group_of(models, n) for n in numbers if not (late and n == 1)],
            momentum=MOMENTUM,
        )
        for numbers in shape.optimizers
    ]
    return models, optimizers


def reference(
    shape: Shape, plant: Plant | None, iterations: int, *, late: bool
) -> list[list[Tensor]]:
    models, optimizers = build(shape, exact=True, late=late)
    for iteration in range(iterations):
        if late and iteration == 1:
            optimizers[0].add_param_group(group_of(models, 1))
        bad = set()
        if plant is not None and plant.iteration == iteration:
            bad = set(shape.losses[plant.loss][1])
        for model in models:
            model.zero_grad()
        for inside, _ in shape.losses:
            loss: Any = sum(models[n]() for n in inside) * 2**iteration
            loss.backward()
        for number, optimizer in enumerate(optimizers):
            if number not in bad:
                optimizer.step()
    return [[p.detach() for p in model.parameters()] for model in models]


def clear(how: str, models: list[Two], optimizers: list[Any]) -> None:
    for each in optimizers if how == "optimizer" else models:
        if how == "none":
            for param in each.parameters():
                param.grad = None
        else:
            each.zero_grad()


def plants(shape: Shape) -> Iterator[Plant]:
    for iteration, loss in itertools.product(range(2), range(2)):
        for model, where in itertools.product(shape.losses[loss][0], ("wide", "low")):
            yield Plant(iteration, loss, model, where)


def check(
    shape: Shape,
    level: str,
    how: str,
    own_scalers: bool,
    plant: Plant | None,
    *,
    late: bool = False,
) -> None:
    iterations = 2 if plant is None else 3
    models, optimizers = build(shape, exact=False, late=late)
    STATE.allow_incoming_model_not_fp32 = True
    amp.initialize(
        models,
        optimizers,
        opt_level=level,
        verbosity=0,
        cast_model_type=False,
        num_losses=2 if own_scalers else 1,
    )
    for scaler, scale in zip(STATE.loss_scalers, (4.0, 16.0), strict=False):
        scaler.set_state(scale, 0)
    for iteration in range(iterations):
        if late and iteration == 1:
            optimizers[0].add_param_group(group_of(models, 1))
        clear(how, models, optimizers)
        for number, (inside, whose) in enumerate(shape.losses):
            loss = sum(models[n]() for n in inside) * 2**iteration
            steppers = [optimizers[n] for n in whose]
            with amp.scale_loss(
                loss, steppers, loss_id=number if own_scalers else 0
            ) as scaled:
                scaled.backward()
                if plant and (plant.iteration, plant.loss) == (iteration, number):
                    getattr(models[plant.model], plant.where).grad[0] = torch.inf
        for optimizer in optimizers:
            optimizer.step()
    expected = reference(shape, plant, iterations, late=late)
    masters = [p for o in optimizers for p in amp.master_params(o)]
    held = [p for numbers in shape.optimizers for n in numbers for p in two(models[n])]
    right = [p for numbers in shape.optimizers for n in numbers for p in expected[n]]
    for master, param, value in zip(masters, held, right, strict=True):
        torch.testing.assert_close(master.double(), value, rtol=0, atol=0)
        torch.testing.assert_close(param, master.to(param.dtype), rtol=0, atol=0)


def two(model: Two) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_skips_what_it_must(shape: str, level: str) -> None:
    """Law: wherever an inf is, just the optimizers of that loss leave out that step.

    Whichever way gradients are cleared, with one scaler and with two, in turn.
    """
    ways = itertools.product((False, True), ("none", "model", "optimizer"))
    planted = [None, *plants(SHAPES[shape])]
    for plant, (own_scalers, how) in zip(planted, itertools.cycle(ways), strict=False):
        check(SHAPES[shape], level, how, own_scalers, plant)


@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_later(level: str, how: str) -> None:
    """Law: a group added after the first step trains from the second on."""
    for own_scalers in (False, True):
        check(SHAPES["2 models 1 optimizer"], level, how, own_scalers, None, late=True)


def start(level: str, **kwargs: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    kwargs = {"opt_level": level, "verbosity": 0, "loss_scale": "dynamic"} | kwargs
    return amp.initialize(net, optimizer, **kwargs)


def loss_of(net: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 4, generator=draw), torch.randn(5, 3, generator=draw)
    return nn.functional.mse_loss(net(x).float(), y)


def backward(net: nn.Module, optimizer: Any, seed: int, **kwargs: Any) -> None:
    with amp.scale_loss(loss_of(net, seed), optimizer, **kwargs) as scaled:
        scaled.backward()


def gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_passes(level: str) -> None:
    """Law: delayed passes are unscaled together, sums from before them kept apart.

    The scale counts passes that were looked at, not those that waited.
    """
    net, optimizer = start(level)
    STATE.loss_scalers[0].set_state(16.0, 0)
    for seed, delay in enumerate((False, True, True, False)):
        backward(net, optimizer, seed, delay_unscale=delay)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2
    found = gradients(optimizer)
    twin, plain = start("O0", loss_scale=1.0)
    for seed in range(4):
        backward(twin, plain, seed)
    # Up to four passes through fp16 products of size 1, summed in fp16.
    bound = 4 * 2.0**-23 if level == "O0" else 4 * 4 * 2.0**-10
    for one, other in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=bound)


@pytest.mark.parametrize("level", LEVELS)
def test_step_with_scaled_gradients_is_refused(level: str) -> None:
    """Law: gradients that nobody unscaled never reach the weights.

    A sum of gradients with two scales has none, and is refused.
    """
    net, optimizer = start(level, num_losses=2)
    STATE.loss_scalers[1].set_state(8.0, 0)
    backward(net, optimizer, 0, delay_unscale=True)
    with pytest.raises(amp.AmpError, match="still scaled by 65536"):
        optimizer.step()
    with (
        pytest.raises(amp.AmpError, match="this loss is scaled by 8: leave"),
        amp.scale_loss(loss_of(net, 1), optimizer, loss_id=1),
    ):
        pass
    optimizer.zero_grad()
    optimizer.step()
    backward(net, optimizer, 1, loss_id=1)


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_check(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a check that is put off is made before the step, and skips it."""
    net, optimizer = start(level, verbosity=1)
    before = [p.clone() for p in net.parameters()]
    with amp.scale_loss(
        loss_of(net, 0), optimizer, delay_overflow_check=True
    ) as scaled:
        scaled.backward()
        net.bias.grad[0] = torch.nan
    assert STATE.loss_scalers[0].loss_scale() == 65536
    optimizer.step()
    assert STATE.loss_scalers[0].loss_scale() == 32768
    assert "Gradient overflow." in capsys.readouterr().out
    for param, was in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, was)


@pytest.mark.parametrize(
    ("level", "scale", "words"),
    [
        *((level, "dynamic", "reducing loss scale to 32768.0") for level in LEVELS),
        ("O2", 128.0, "has a static loss scale of 128.0"),
    ],
)
def test_message_of_a_skipped_step(
    level: str, scale: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a skipped step is reported in apex's words, once; the next one is taken."""
    net, optimizer = start(level, verbosity=1, loss_scale=scale)
    capsys.readouterr()
    with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
        scaled.backward()
        net.bias.grad[0] = torch.inf
    assert capsys.readouterr().out == ""
    before = [p.clone() for p in net.parameters()]
    optimizer.step()
    text = "Gradient overflow.  Skipping step, loss scaler 0"
    assert capsys.readouterr().out == f"{text} {words}\n"
    assert all(map(torch.equal, net.parameters(), before))
    optimizer.zero_grad()
    backward(net, optimizer, 0)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert not all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("first", ["scheduler", "amp"])
@pytest.mark.parametrize("level", LEVELS)
def test_schedules(level: str, first: str) -> None:
    """Law: a schedule works, made before or after, with the first step skipped."""
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if first == "amp":
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if first == "scheduler":
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in range(3):
            with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
                scaled.backward()
                if iteration == 0:
                    net.bias.grad[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_closures() -> None:
    """Law: a closure is refused where losses are scaled, and runs where none is."""
    _, optimizer = start("O1")
    with pytest.raises(amp.AmpError, match=r"SGD.step was given a closure"):
        optimizer.step(lambda: None)
    _, optimizer = start("O0", loss_scale=1.0)
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("level", LEVELS)
def test_failed_pass(level: str) -> None:
    """Law: a pass that fails leaves the gradients from before it."""
    net, optimizer = start(level)
    backward(net, optimizer, 0)
    before = gradients(optimizer)

    def fail() -> None:
        with amp.scale_loss(loss_of(net, 1), optimizer) as scaled:
            scaled.backward()
            message = "out of memory"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert all(map(torch.equal, gradients(optimizer), before))
    assert STATE.handle is None or STATE.handle.is_active()


@pytest.mark.parametrize(
    ("kwargs", "first", "floor", "ceiling"),
    [
        ({}, 2.0**16, 1.0, 2.0**24),
        ({"min_loss_scale": 4096.0}, 2.0**16, 4096.0, 2.0**24),
        ({"min_loss_scale": 2.0**17}, 2.0**17, 2.0**17, 2.0**24),
        ({"max_loss_scale": 8.0}, 8.0, 1.0, 8.0),
        ({"max_loss_scale": 0.5}, 0.5, 0.5, 0.5),
    ],
)
def test_bounds_of_the_scale(
    kwargs: dict[str, float], first: float, floor: float, ceiling: float
) -> None:
    """Law: the first scale is 2**16, between the bounds; apex's had no floor."""
    start("O2", **kwargs)
    rule = STATE.loss_scalers[0].scaler.rule
    assert (rule.init_scale, rule.min_scale, rule.max_scale) == (first, floor, ceiling)


def test_collapse_is_loud() -> None:
    """Law: a scale that cannot help ends the run, where apex fell to 0 in silence."""
    net, optimizer = start("O2", max_loss_scale=8.0)

    def overflow() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(net, 0), optimizer) as scaled:
            scaled.backward()
            net.bias.grad[0] = torch.inf

    for _ in range(9):
        overflow()
        optimizer.step()
    with pytest.raises(hs.LossScaleCollapse) as caught:
        overflow()
    assert caught.value.inf_in == ("bias",)


def test_names_that_programs_set() -> None:
    """Law: apex's names of the scale and of its clean steps read and set both."""
    start("O1")
    (scaler,) = STATE.loss_scalers
    for name, value in (("_loss_scale", 64.0), ("_unskipped", 5)):
        setattr(scaler, name, value)
        assert getattr(scaler, name) == value
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 5}}


def test_a_pass_outside_scale_loss() -> None:
    """Law: masters that no gradient reached refuse to step; a proper pass mends it."""
    net, optimizer = start("O2")
    before = net.weight.detach().clone()
    loss_of(net, 0).backward()
    with pytest.raises(amp.AmpError, match="never went through amp"):
        optimizer.step()
    assert torch.equal(net.weight, before)
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient: nothing to refuse
    backward(net, optimizer, 0)
    optimizer.step()
    assert not torch.equal(net.weight, before)
    optimizer.zero_grad()
    backward(net, optimizer, 0)
    # Another optimizer's pass may leave its own; this one's are there.
    loss_of(net, 1).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_twice_in_its_group(level: str) -> None:
    """Law: it is unscaled once; torch updates it twice."""
    model: Any = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.SGD([model.weight] * 2, 0.25)
    more: Any = {"loss_scale": 64.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, level, **more)
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((2, 2), 0.5))

"""The drop-in scaler: what it reports and bounds beyond torch's own."""

import copy
import functools
import gc
import io
import math
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling import LossScaler, ScaleRule

Make = Callable[[Any], torch.optim.Optimizer]

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


class Setup:
    def __init__(self, make: Make = SGD, named: bool = True, **numbers: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        given = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer = make(given)
        self.scaler = hs.GradScaler("cpu", **numbers)

    def state(self) -> tuple[dict[str, Tensor], Any]:
        return self.model.state_dict(), self.optimizer.state_dict()["state"]

    def iterate(self, value: float = 0.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(1, 3)).square().sum()).backward()
        self.model.bias.grad += value
        self.scaler.step(self.optimizer)
        self.scaler.update()


same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)

MAKES: list[Make] = [
    SGD,
    ADAMW,
    functools.partial(SGD, fused=True),
    functools.partial(ADAMW, fused=True),
]


@pytest.mark.parametrize("make", MAKES)
def test_last_step_tells_the_truth(make: Make) -> None:
    """Law: skipped exactly where weights, state and counters stayed, fused or not.

    A report keeps its names although gradients are cleared after it.
    """
    setup = Setup(make, init_scale=8.0)
    assert not setup.scaler.last_step.complete
    reports = []
    values = (0.0, math.inf, 0.0, math.nan, math.nan, 0.0)
    for number, value in enumerate(values):
        before = copy.deepcopy(setup.state())
        scale = setup.scaler.get_scale()
        setup.iterate(value)
        report = setup.scaler.last_step
        reports.append(report)
        assert report.skipped == (value != 0)
        assert report.applied == (value == 0)
        assert (report.step, report.scale) == (number + 1, scale)
        if value:
            same(setup.state(), before)
        else:
            assert not torch.equal(setup.model.weight, before[0]["weight"])
    names = [report.found_inf_in for report in reports]
    assert names == [("bias",) if value else () for value in values]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_may_skip_its_first_step(momentum: float) -> None:
    """Law: a skipped first step leaves no junk in the momentum, as torch's does."""
    fused = Setup(functools.partial(SGD, momentum=momentum, fused=True))
    plain = Setup(functools.partial(SGD, momentum=momentum))
    torch.full((2, 3), 1e30)  # Freed at once: what the momentum would be made of.
    for value in (math.inf, 0.0, 0.0):
        fused.iterate(value)
        plain.iterate(value)
    torch.testing.assert_close(fused.state(), plain.state())
    assert fused.scaler.get_scale() == plain.scaler.get_scale()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@pytest.mark.parametrize("way", ["unscale_", "step"])
def test_a_parameter_twice_in_its_group(way: str) -> None:
    """Law: it is unscaled once, where torch.amp divides twice; torch updates twice."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight] * 2, 0.25)
    scaler = hs.GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight.sum()).backward()
    if way == "unscale_":
        scaler.unscale_(optimizer)
        same(weight.grad, torch.ones(2))
    scaler.step(optimizer)
    same(weight.detach(), torch.full((2,), 0.5))


def test_disabled() -> None:
    """Law: disabled, it reports no step, and no setting or state matters.

    For the rest, `test_same_as_torch` compares it with torch's.
    """
    scaler = Setup(enabled=False, hysteresis=0).scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.scale(loss := torch.ones(())) is loss
    scaler.load_state_dict({"loss_scaler0": 3})
    scaler.update(7)
    assert scaler.state_dict() == {}
    assert not scaler.last_step.complete
    with pytest.raises(UserError, match=r"^hysteresis=0 must be at least 1\.$"):
        hs.GradScaler("cpu", hysteresis=0)


def test_update_takes_an_int() -> None:
    """Law: `update(7)` sets the scale, where torch raises AttributeError."""
    setup = Setup()
    setup.iterate()
    setup.scaler.update(7)
    assert setup.scaler.get_scale() == 7.0
    setup.scaler.update(torch.tensor(3.0))
    assert setup.scaler.get_scale() == 3.0


def test_never_walks_to_zero() -> None:
    """Law: overflow for ever raises at the floor; torch goes to 0 and writes NaN."""
    setup = Setup()
    before = copy.deepcopy(setup.state())
    raised = 0
    for _ in range(200):
        try:
            setup.iterate(math.inf)
        except hs.LossScaleCollapse as error:
            raised += 1
            skipped = 40 + raised
            head = f"{skipped} steps in a row were skipped, at loss scale "
            assert str(error).startswith(head)  # noqa: PT017
            assert error.history[-1] == 2.0**-24  # noqa: PT017
            assert len(error.history) == min(skipped, 64)  # noqa: PT017
            assert (error.inf_in, error.nan_in) == (("bias",), ())  # noqa: PT017
    # 40 halvings lead from 2**16 to 2**-24; the floor itself is tried before raising.
    assert raised == 160
    assert setup.scaler.get_scale() == 2.0**-24
    same(setup.state(), before)
    setup.iterate()
    assert setup.scaler.last_step.applied
    assert all(bool(p.isfinite().all()) for p in setup.model.parameters())


def test_max_consecutive_skips() -> None:
    """Law: the n-th skip in a row raises; a step between starts the count anew."""
    setup = Setup(max_consecutive_skips=3, init_scale=64.0)
    for value in (math.inf, math.inf, 0.0, math.inf, math.inf):
        setup.iterate(value)
    with pytest.raises(hs.LossScaleCollapse) as caught:
        setup.iterate(math.nan)
    # 64 -> 32 -> 16 -> 16 -> 8 -> 4: the step that raised was run at 4.
    assert caught.value.history == (16.0, 8.0, 4.0)
    assert str(caught.value).startswith(
        "3 steps in a row were skipped, at loss scale 16 to 4. Cause: "
    )
    assert str(caught.value).endswith(" Observed: NaN in gradients of bias.")
    assert (caught.value.inf_in, caught.value.nan_in) == ((), ("bias",))
    assert setup.scaler.last_step.found_inf_in == ("bias",)


def test_bounds_and_hysteresis() -> None:
    """Law: floor, ceiling and hysteresis are those given."""
    setup = Setup(
        init_scale=8.0, growth_interval=1, min_scale=4.0, max_scale=16.0, hysteresis=2
    )
    seen = []
    for value in (0.0, 0.0, math.inf, math.inf, math.inf, math.inf, 0.0, math.inf):
        setup.iterate(value)
        seen.append(setup.scaler.get_scale())
    assert seen == [16, 16, 16, 8, 4, 4, 8, 8]


def test_scale_under_functional_transforms() -> None:
    """Law: `scale` takes losses without a number: of `vmap`, and of fake tensors.

    d/dw of 2 * sum(w**2) is 4w.
    """
    scaler = hs.GradScaler("cpu", init_scale=2.0)
    weights = torch.arange(12.0).view(4, 3)
    slopes = vmap(grad(lambda row: scaler.scale(row.square().sum())))(weights)
    assert torch.equal(slopes, 4 * weights)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert scaler.scale(torch.ones(())).shape == ()


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def test_a_guard() -> None:
    """Law: without a scale, fifty skips in a row end the run; no state gives it one."""
    setup = Setup(strategy="none")
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(()))
    before = copy.deepcopy(setup.state())
    for state in (other.state_dict(), hs.GradScaler("cpu").state_dict()):
        setup.scaler.load_state_dict(state)
        assert setup.scaler.scale(torch.ones(())).item() == 1.0
    for _ in range(49):
        setup.iterate(math.nan)
    with pytest.raises(hs.LossScaleCollapse, match=r"^50 steps in a row were skipped"):
        setup.iterate(math.nan)
    same(setup.state(), before)
    assert setup.scaler.get_scale() == 1.0


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

    def train() -> None:
        for _ in range(3):
            scaler.scale((w * math.nan).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(hs.LossScaleCollapse) as caught:
        train()
    end = "(graph not read: NotImplementedError: no such layout)"
    assert str(caught.value).endswith(end)
    assert caught.value.nan_in == ("w",)


# Saved states: of our own, of torch's and of apex's, and broken ones


INF = math.inf
HALVING = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)


class Loop:
    def __init__(self, scaler: Any) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.optimizer: Any = HALVING([("weight", self.weight)])
        self.scaler = scaler

    def step(self, factor: float) -> None:
        self.optimizer.zero_grad()
        loss = (self.weight.square() * factor).half().float().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(**numbers: Any) -> Any:
    given: dict[str, Any] = {"init_scale": 64.0, "growth_factor": 4.0}
    given |= {"backoff_factor": 0.25, "growth_interval": 5, "hysteresis": 3}
    return hs.GradScaler("cpu", **(given | numbers))


# A state with every counter away from its beginning: 64 -> (2 overflows borne) 64 ->
# (third) 16 -> 2 clean steps -> 2 overflows in a row, for none are left to bear: 1.
TRACE = [INF, INF, INF, 1.0, 1.0, INF, INF]


@pytest.mark.parametrize("way", ["state", "file", "pickle", "deepcopy"])
def test_resumed_is_uninterrupted(way: str) -> None:
    """Law: after any trace of overflows a run that resumed is the run that did not."""
    for seed in range(3):
        rng = random.Random(f"{way} {seed}")  # noqa: S311
        numbers: Any = {"refill": rng.choice(["growth", "clean"])}
        straight, broken = (Loop(ours(**numbers)) for _ in range(2))
        for _ in range(24):
            value = rng.choice([1.0, 1.0, 2.0**-6, 2.0**6, 1e4, INF])
            for each in (straight, broken):
                each.step(value)
            assert broken.scaler.state_dict() == straight.scaler.state_dict()
            same(broken.weight, straight.weight)
            if rng.random() < 0.5:
                continue
            if way in {"state", "file"}:
                state = broken.scaler.state_dict()
                broken.scaler = ours(**numbers)
                broken.scaler.load_state_dict(
                    through_file(state) if way == "file" else state
                )
            elif way == "pickle":
                broken.scaler = pickle.loads(pickle.dumps(broken.scaler))  # noqa: S301
            else:
                broken.scaler = copy.deepcopy(broken.scaler)
            if way in {"pickle", "deepcopy"}:
                kept = broken.scaler.last_step, straight.scaler.last_step
                assert len({(str(report), report.found_inf_in) for report in kept}) == 1


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_from_apex(used: bool, whole: bool) -> None:
    """Law: apex's scale and clean steps go on; what it does not save stays ours."""
    entry = {"loss_scale": 32.0, "unskipped": 3}
    other = {"loss_scale": 8.0, "unskipped": 1}
    state: Any = {"loss_scaler0": entry, "loss_scaler1": other} if whole else entry
    loop = Loop(ours())
    if used:
        loop.step(1.0)
    loop.scaler.load_state_dict(through_file(state))
    seen = [loop.scaler.get_scale()]
    for _ in range(2):
        loop.step(1.0)
        seen.append(loop.scaler.get_scale())
    # Two more clean steps make five, and the scale grows fourfold.
    assert seen == [32.0, 32.0, 128.0]


@pytest.mark.parametrize("make", [HALVING, functools.partial(HALVING, fused=True)])
@pytest.mark.parametrize("kind", ["made", "torch", "apex"])
@pytest.mark.parametrize("used", [False, True])
def test_a_scale_below_one(kind: str, used: bool, make: Any) -> None:
    """Law: unscaling that makes 1e38 * 1024 of 1e38 is seen in the first step, too.

    Whether the scaler was made with that scale or has loaded it.
    """
    states: dict[str, Any] = {"apex": {"loss_scale": 2.0**-10, "unskipped": 0}}
    states["torch"] = torch.amp.GradScaler("cpu", 2.0**-10).state_dict()
    loop = Loop(hs.GradScaler("cpu", **{"init_scale": 0.001} if kind == "made" else {}))
    loop.optimizer = make([loop.weight])
    if used:
        loop.step(1.0)
    before = loop.weight.detach().clone()
    if kind != "made":
        loop.scaler.load_state_dict(states[kind])
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.weight.sum()).backward()
    loop.weight.grad = torch.full((4,), 1e38)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.skipped
    same(loop.weight.detach(), before)


@pytest.mark.parametrize("field", ["hysteresis_left", "skips_in_a_row"])
@pytest.mark.parametrize("used", [False, True])
def test_a_missing_field(field: str, used: bool) -> None:
    """Law: it is refused by name, and nothing of the state is taken in."""
    loop, fresh = Loop(ours()), Loop(ours())
    for value in TRACE:
        loop.step(value)
    if used:
        fresh.step(1.0)
    before, state = fresh.scaler.state_dict(), loop.scaler.state_dict()
    del state["_halfstep"][field]
    with pytest.raises(UserError, match=f"^loss-scale state has no '{field}'; it ho"):
        fresh.scaler.load_state_dict(state)
    assert fresh.scaler.state_dict() == before


def test_what_is_no_state_of_ours() -> None:
    """Law: our entry is a dict, or refused; torch's scale loads as torch loads it."""
    scaler, torchs = ours(), torch.amp.GradScaler("cpu")
    state = scaler.state_dict()
    with pytest.raises(UserError, match="_halfstep is of type NoneType; "):
        scaler.load_state_dict(state | {"_halfstep": None})
    assert scaler.state_dict() == state
    for scale in (0.0, -1.0):
        for each in (scaler, torchs):
            each.load_state_dict(state | {"scale": scale})
        assert scaler.get_scale() == torchs.get_scale() == scale


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, "missing") for field in ("applied", "begun", "history")),
        *(("applied", -1), ("applied", 1.5), ("begun", None)),
        *(("history", 3), ("history", [0.0]), ("history", [INF])),
    ],
)
def test_a_broken_memory(field: str, value: object) -> None:
    """Law: what is remembered of the steps is whole and of its type, or refused."""
    scaler = LossScaler(ScaleRule())
    before, state = scaler.state_dict(), scaler.state_dict()
    state["watch"] |= {"applied": 2, "begun": True, "history": [8.0]}
    words = rf"^watch\['{field}'\]="
    if value == "missing":
        del state["watch"][field]
        words = f"^loss-scale state's 'watch' .* {field!r};"
    else:
        state["watch"][field] = value
    with pytest.raises(UserError, match=words) as caught:
        scaler.load_state_dict(state)
    assert len(str(caught.value).split()) <= 35
    assert scaler.state_dict() == before

"""Optimizers that evaluate the model inside their step, under the drop-in scaler."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

Make = Callable[[Any], torch.optim.Optimizer]
INF = math.inf

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.02)
LBFGS = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=6, history_size=3)
WOLFE = functools.partial(LBFGS, line_search_fn="strong_wolfe")
MAKES: dict[str, Make] = {
    "lbfgs": LBFGS,
    "strong wolfe": WOLFE,
    "sgd": SGD,
    "adam": ADAM,
    "fused sgd": functools.partial(SGD, fused=True),
    "fused adam": functools.partial(ADAM, fused=True),
}
SCALE = 2.0**12

makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class SAM(torch.optim.Optimizer):
    def __init__(self, params: Any, base: Make, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    def parts(self) -> list[Tensor]:
        every = [p for group in self.param_groups for p in group["params"]]
        return [param for param in every if param.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = torch.stack([p.grad.norm() for p in self.parts() if p.grad is not None])
        for param in self.parts():
            self.state[param]["old"] = param.clone()
            param.add_(param.grad * (self.param_groups[0]["rho"] / norm.norm()))
            param.grad = None
        loss = torch.enable_grad()(closure)()
        for param in self.parts():
            param.copy_(self.state[param]["old"])
        self.base.step()
        return loss


class Extragradient(torch.optim.Optimizer):
    def __init__(self, params: Any, base: Make) -> None:
        super().__init__(params, {})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _ in range(3):
            loss = torch.enable_grad()(closure)()
            self.base.step()
            self.param_groups[0]["lr"] *= 0.5
            self.param_groups[0]["cooled"] = True
        return loss


class Problem:
    def __init__(self, make: Make, scaler: Any = None) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        self.model = nn.Sequential(*layers)
        self.inputs, self.targets = torch.randn(8, 3), torch.randn(8, 2)
        self.optimizer: Any = make(self.model.parameters())
        self.scaler = scaler
        self.clip = 0.0
        self.evaluations = 0
        self.bad: tuple[int, ...] = ()

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward()
        if self.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss

    def forward(self) -> Tensor:
        """Evaluate, fill in gradients, and spoil one if its turn has come."""
        self.evaluations += 1
        loss: Tensor = (self.model(self.inputs) - self.targets).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.evaluations in self.bad:
            next(self.model.parameters()).grad[1, 1] = INF
        return loss

    def step(self, *bad: int, update: bool = True, keyword: bool = False) -> Any:
        """Run one step whose evaluations `bad`, counted from 1, overflow."""
        self.evaluations, self.bad = 0, bad
        if isinstance(self.optimizer, SAM):
            self.optimizer.zero_grad()
            self.forward()
        if self.scaler is None:
            return self.optimizer.step(self.closure)
        args, more = (
            ((), {"closure": self.closure}) if keyword else ((self.closure,), {})
        )
        result = self.scaler.step(self.optimizer, *args, **more)
        if update:
            self.scaler.update()
        return result

    def everything(self) -> Any:
        parts = [self.model.state_dict(), self.optimizer.state_dict()]
        if isinstance(self.optimizer, SAM | Extragradient):
            parts.append(self.optimizer.base.state_dict())
        whole = copy.deepcopy(parts)
        for group in (group for part in whole[1:] for group in part["param_groups"]):
            group.pop("line_search_fn", None)  # a word, which nothing changes
        return whole


def scaler_of(**numbers: Any) -> hs.GradScaler:
    return hs.GradScaler("cpu", **({"init_scale": SCALE} | numbers))


@makes
@pytest.mark.parametrize("enabled", [True, False])
def test_same_as_without_a_scaler(make: Make, enabled: bool) -> None:
    """Law: a scale that is a power of two changes no bit, however it is passed."""
    plain, scaled = Problem(make), Problem(make, scaler_of(enabled=enabled))
    for number in range(5):
        same(scaled.step(keyword=number % 2 == 1), plain.step())
        same(scaled.everything(), plain.everything())
        assert scaled.scaler.last_step.applied == enabled
    assert scaled.scaler.get_scale() == (SCALE if enabled else 1.0)


@makes
def test_unscaled_and_clipped_inside(make: Make) -> None:
    """Law: a closure may unscale and clip by itself."""
    plain, scaled = Problem(make), Problem(make, scaler_of())
    plain.clip = scaled.clip = 0.1
    for _ in range(4):
        same(scaled.step(), plain.step())
    same(scaled.everything(), plain.everything())
    before = scaled.everything()
    assert scaled.step(1) is None
    same(scaled.everything(), before)


@pytest.mark.parametrize("base", [SGD, MAKES["fused adam"]])
def test_sam(base: Make) -> None:
    """Law: SAM, whose first pass comes before the step, sees unscaled gradients."""
    make = functools.partial(SAM, base=base)
    plain, scaled = Problem(make), Problem(make, scaler_of())
    for bad in (0, 0, 1, 2, 0):
        before = scaled.everything()
        if bad:
            assert scaled.step(bad) is None
            assert scaled.evaluations == bad
            same(scaled.everything(), before)
            assert scaled.scaler.last_step.skipped
        else:
            same(scaled.step(), plain.step())
            same(scaled.everything(), plain.everything())
    assert scaled.scaler.get_scale() == SCALE / 4


@pytest.mark.parametrize(
    ("make", "bad", "after"),
    [
        *((make, 1, 0) for make in MAKES.values()),
        *((make, *at) for make in (LBFGS, WOLFE) for at in ((1, 2), (2, 0), (4, 2))),
    ],
)
def test_overflow_takes_the_step_back(make: Make, bad: int, after: int) -> None:
    """Law: an overflow in any evaluation leaves all as if there had been no step."""
    plain, scaled = Problem(make), Problem(make, scaler_of())
    for _ in range(after):
        plain.step()
        scaled.step()
    before = scaled.everything()
    assert scaled.step(bad) is None
    assert scaled.evaluations == bad
    same(scaled.everything(), before)
    report = scaled.scaler.last_step
    assert (report.skipped, report.applied, report.step) == (True, False, after + 1)
    assert report.found_inf_in == ("group 0 parameter 0 (4, 3)",)
    assert (report.scale, scaled.scaler.get_scale()) == (SCALE, SCALE / 2)
    for _ in range(3):  # inf left in `.grad` concerns no later step
        same(scaled.step(), plain.step())
        same(scaled.everything(), plain.everything())
    assert scaled.scaler.last_step.applied


@pytest.mark.parametrize("other", [SGD, LBFGS], ids=["sgd", "lbfgs"])
def test_stale_gradients_beside_another_optimizer(other: Make) -> None:
    """Law: nor where another optimizer has scaled its loss before in the iteration."""
    scaler = scaler_of()
    first, second = Problem(other, scaler), Problem(LBFGS, scaler)
    applied = []
    for bad in ((1,), (), ()):
        first.step(update=False)
        applied.append(second.step(*bad) is not None)
    assert applied == [False, True, True]


def test_twice_is_refused() -> None:
    """Law: a second step of an iteration is refused, the first taken or not."""
    for bad in ((), (1,), (2,)):
        scaled = Problem(LBFGS, scaler_of())
        scaled.step(*bad, update=False)
        before = scaled.everything()
        with pytest.raises(RuntimeError, match="has already been called since"):
            scaled.step(update=False)
        same(scaled.everything(), before)


def test_errors_of_a_closure_pass() -> None:
    """Law: an error inside a closure is the user's, and the scaler goes on after it."""
    plain, scaled = Problem(SGD), Problem(SGD, scaler_of())

    def closure() -> Tensor:
        message = "no batch left"
        raise LookupError(message)

    with pytest.raises(LookupError, match="no batch left"):
        scaled.scaler.step(scaled.optimizer, closure)
    for _ in range(2):
        same(scaled.step(), plain.step())
    same(scaled.everything(), plain.everything())


def test_without_a_scale() -> None:
    """Law: without a scale no bit changes."""
    plain = Problem(WOLFE)
    scaled = Problem(WOLFE, hs.GradScaler("cpu", strategy="none"))
    for _ in range(4):
        same(scaled.step(), plain.step())
        same(scaled.everything(), plain.everything())
        assert scaled.scaler.get_scale() == 1.0


def test_a_schedule_does_not_warn() -> None:
    """Law: a schedule beside a step taken back sees that the optimizer was called."""
    scaled = Problem(LBFGS, scaler_of())
    schedule = torch.optim.lr_scheduler.StepLR(scaled.optimizer, 1)
    assert scaled.step(1) is None
    schedule.step()
    assert scaled.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("make", [SGD, ADAM, MAKES["fused sgd"], MAKES["fused adam"]])
def test_without_a_closure(make: Make) -> None:
    """Law: `closure=None`, as frameworks pass it on, is no closure."""
    plain, scaled = Problem(make), Problem(make, scaler_of())
    for args, given in (((), {"closure": None}), ((None,), {})):
        plain.closure()
        plain.optimizer.step()
        scaled.closure()
        scaled.scaler.step(scaled.optimizer, *args, **given)
        scaled.scaler.update()
        same(scaled.everything(), plain.everything())


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_what_is_inside_an_optimizer_is_taken_back(bad: int) -> None:
    """Law: so is what an inner optimizer did, and values and keys of groups."""
    scaled = Problem(functools.partial(Extragradient, base=SGD), scaler_of())
    before = scaled.everything()
    assert scaled.step(bad) is None
    same(scaled.everything(), before)
    assert scaled.step() is not None
    before = scaled.everything()
    assert scaled.step(bad) is None
    same(scaled.everything(), before)

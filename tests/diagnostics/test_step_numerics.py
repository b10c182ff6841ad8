"""Numbers come first in `hs.diagnose`: what is not finite is told, and where from."""

import json
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.diagnostics.doctor import rules_speed
from halfstep.diagnostics.step_diagnosis import Diagnosis
from halfstep.scaling import ScaleRule

pytestmark = pytest.mark.filterwarnings("ignore:level O. with dtype fp16")
RULE = "non-finite numbers"
SPEED = {rule.name for rule in rules_speed.RULES}
FP16 = torch.float16
RULE_OF_SCALE = ScaleRule(init_scale=2.0**8)
"""At which the healthy net has finite gradients in float16."""


class Net(nn.Module):
    """Two layers, dropout, and a norm whose statistics move with each pass."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.wide = nn.Dropout(0.5), nn.Linear(8, 8)
        self.last, self.outer = nn.LayerNorm(8), nn.Linear(8, 1)
        with torch.no_grad():
            self.wide.weight.copy_(torch.eye(8) * factor)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.inner(x)))
        return self.outer(self.last(self.wide(hidden * 10)))


def batches(bad: int = 99, count: int = 9) -> list[Tensor]:
    """Return batches of which one and those after it hold NaN."""
    torch.manual_seed(1)
    found = [torch.randn(16, 8) for _ in range(count)]
    for batch in found[bad - 1 :]:
        batch[0, 0] = math.nan
    return found


Parts: TypeAlias = "tuple[Callable[[Tensor], object], dict[str, Any], nn.Module]"


def plain(model: nn.Module) -> Parts:
    """Return a loop in float32, its parts and its model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, {"model": model, "optimizer": optimizer}, model


def nobody(model: nn.Module) -> Parts:
    return plain(model)[0], {}, model


def scaled(model: nn.Module, scale: float = 2.0**8, *, drop_in: bool = False) -> Parts:
    """Return a loop with torch's classes, or ours."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp: Any = hs if drop_in else torch.amp
    scaler = amp.GradScaler("cpu", init_scale=scale)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with amp.autocast("cpu", FP16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, {"model": model, "optimizer": optimizer, "scaler": scaler}, model


def ours(model: nn.Module, **options: Any) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"level": "O1", "dtype": "fp16", "loss_scale": RULE_OF_SCALE} | options
    session = hs.prepare(model, optimizer, **options)

    def step(x: Tensor) -> None:
        with session.autocast():
            loss = session.model(x).float().square().mean()
        session.backward(loss)
        session.step()

    return step, {"session": session}, model


LOOPS: dict[str, Callable[[nn.Module], Parts]] = {
    "plain": plain,
    "nobody": nobody,
    "scaled": scaled,
    "drop_in": partial(scaled, drop_in=True),
    "ours": ours,
}


def first(found: Diagnosis) -> tuple[Any, Any]:
    """Return the first two findings, which must be of numbers."""
    what, why = found.findings[:2]
    assert (what.rule, why.rule) == (RULE, "bad op")
    assert "find_nonfinite ran step" in what.advice
    return what, why


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_of_nan_is_told_first(loop: str) -> None:
    """Law: whatever runs the loop, the loss, the skips and the argument are named."""
    step, parts, _ = LOOPS[loop](Net())
    found = hs.diagnose(step, batches=batches(bad=1), **parts)
    what, why = first(found)
    assert what.severity == why.severity == "error"
    assert (what.where, why.where) == ("step 1", "inner (linear)")
    assert "the loss is not finite in 9 of 9 steps" in what.measured
    assert "argument 'x' of the model holds NaN" in why.measured
    skips = loop in {"scaled", "drop_in", "ours"}
    counted = "9 of 9" if loop == "ours" else "3 of 9"
    assert (f"{counted} steps were skipped" in what.measured) == skips
    assert ("parameters that hold inf or NaN now: 10" in what.measured) != skips
    assert found.numerics.losses == tuple(range(1, 10))
    assert str(found).count("nothing found") == 0
    assert json.loads(json.dumps(found.data()))["numerics"]["bad_op"]["cause"] == "data"


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_is_changed_by_the_replay(loop: str) -> None:
    """Law: a program that is diagnosed takes the very steps it takes otherwise.

    Dropout draws from the same numbers, and the norm sees each batch once. The third
    batch fails, and is run again.
    """
    held = []
    for watched in (False, True):
        step, parts, model = LOOPS[loop](Net())
        torch.manual_seed(5)
        data = batches(bad=3, count=6)
        if watched:
            found = hs.diagnose(step, batches=data, steps=2, profiled=1, **parts)
            assert first(found)[0].where == "step 3"
        else:
            for x in data:
                step(x)
        held.append([*model.state_dict().values(), torch.rand(3)])
    for one, other in zip(*held, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("loop", [scaled, ours])
def test_a_scale_that_settles_is_no_fault(loop: Callable[..., Parts]) -> None:
    """Law: skips that a smaller scale ends are a note, behind what is wrong."""
    options: dict[str, Any] = {"scale": 2.0**17}
    if loop is ours:
        options = {"loss_scale": ScaleRule(init_scale=2.0**17)}

    class Steep(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float() * 1.5

    step, parts, _ = loop(Steep(), **options)
    found = hs.diagnose(step, batches=batches(), **parts)
    (what,) = (each for each in found.findings if each.rule == RULE)
    assert what.severity == "note"
    assert "loss scale 131072 to " in what.measured
    assert found.numerics.bad_op is not None
    assert found.numerics.bad_op.normal


def settling(loop: Callable[..., Parts]) -> Parts:
    """Return a loop whose first steps are skipped, for its loss scale is too large."""
    if loop is ours:
        return ours(Net(), loss_scale=ScaleRule(init_scale=2.0**24))
    return scaled(Net(), scale=2.0**24)


@pytest.mark.parametrize("loop", [scaled, ours])
def test_the_first_loss_that_fails_is_run_again(loop: Callable[..., Parts]) -> None:
    """Law: not a step before it, which fails while the loss scale settles."""
    step, parts, _ = settling(loop)
    found = hs.diagnose(step, batches=batches(bad=3), **parts)
    what, why = first(found)
    assert found.numerics.gradients == (1, 2, 3)
    assert (what.where, why.where) == ("step 3", "inner (linear)")
    assert (what.severity, why.severity) == ("error", "error")
    assert "ran step 3 again" in what.advice
    assert found.numerics.bad_op is not None
    assert found.numerics.bad_op.cause == "data"


def test_a_later_step_needs_a_larger_warmup() -> None:
    """Law: a loss that fails in a timed step is named, not replayed, nor explained.

    The note on the steps before it, while the scale settles, is no explanation.
    """
    for step, parts, _ in (scaled(Net()), settling(scaled)):
        found = hs.diagnose(step, batches=batches(bad=6), **parts)
        what = found.findings[0]
        assert (what.rule, what.where, what.severity) == (RULE, "step 6", "error")
        assert "larger warmup" in what.advice
        assert "see the finding" not in str(found)
    data = batches(bad=6)
    found = hs.diagnose(step, batches=data, warmup=6, steps=2, profiled=1, **parts)
    assert first(found)[0].where == "step 6"


@pytest.mark.parametrize("bad", [1, 99])
def test_of_a_small_program_only_numbers_are_judged(bad: int) -> None:
    """Law: a wrong number is not followed by the speed of the program, nor is a toy."""
    step, parts, _ = scaled(Net())
    found = hs.diagnose(step, batches=batches(bad=bad), **parts)
    rules = {each.rule for each in found.findings}
    assert not rules & {"overhead", "small products", "casts", "fp32 operations"}
    assert (RULE in rules) == (bad == 1)
    assert ("speed is judged once the errors above" in str(found)) == (bad == 1)
    if bad == 1:
        assert not rules & SPEED


def test_a_session_is_as_it_was() -> None:
    """Law: its methods are its own again, also if a step raises."""
    step, parts, _ = ours(Net())
    names = vars(parts["session"]).keys()

    def fail(x: Tensor) -> None:
        step(x)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        hs.diagnose(fail, batches=batches(bad=1), **parts)
    assert vars(parts["session"]).keys() == names


def test_another_thread_is_left_alone() -> None:
    """Law: a backward pass elsewhere is not taken for the program's."""
    step, parts, _ = plain(Net())

    def both(x: Tensor) -> None:
        def other() -> None:
            (torch.ones(1, requires_grad=True) * math.nan).sum().backward()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        step(x)

    found = hs.diagnose(both, batches=batches(), **parts)
    assert found.numerics.failed == ()


def micro_batches(model: nn.Module, x: Tensor) -> None:
    fine = torch.ones_like(x)
    for y in (fine, x, fine):
        (model(y).square().mean() / 3).backward()


def beside_another(model: nn.Module, x: Tensor) -> None:
    other = Net()
    (other(torch.ones_like(x)).mean() + model(x).mean()).backward()


def once(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def compiled(model: nn.Module, x: Tensor) -> None:
    torch.compile(model, backend="eager")(x).square().mean().backward()


@pytest.mark.parametrize(
    ("run", "where", "kind"),
    [
        (micro_batches, "inner (linear)", torch.optim.SGD),
        (once, "inner (linear)", torch.optim.LBFGS),
        (compiled, "inner (linear)", torch.optim.SGD),
        (beside_another, "1.inner (linear)", torch.optim.SGD),
    ],
)
def test_what_failed_is_run_again(run: Any, where: str, kind: Any) -> None:
    """Law: that of several passes, in a closure, a compiled model, one of several."""
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)

    def closure(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        run(model, x)
        return torch.zeros(())

    def step(x: Tensor) -> None:
        if kind is torch.optim.SGD:
            closure(x)
            optimizer.step()
        else:
            optimizer.step(lambda: closure(x))

    given = {} if run is beside_another else {"model": model}
    why = first(hs.diagnose(step, batches=batches(bad=1), **given))[1]
    assert why.where == where
    assert "holds NaN" in why.measured


def test_a_step_with_a_batch_of_its_own() -> None:
    """Law: where the replay has another batch, no hardware is blamed."""
    step, parts, _ = plain(Net())
    data = iter([*batches(bad=2, count=2), *batches(count=20)])
    found = hs.diagnose(lambda: step(next(data)), **parts)
    (what,) = (each for each in found.findings if each.rule == RULE)
    assert "did not run it again" not in what.advice or "batches=" in what.advice
    assert "hardware" not in str(found)


def test_why_it_could_not_be_run_again() -> None:
    """Law: a step that cannot be replayed is told, with the reason."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def late(x: Tensor) -> None:
        optimizer.step()  # of the step before
        optimizer.zero_grad()
        model(x).square().mean().backward()

    found = hs.diagnose(late, model=model, batches=batches(bad=1))
    what = found.findings[0]
    assert (what.rule, what.severity) == (RULE, "error")
    assert "updates weights before a backward pass" in what.advice


def test_a_collapse_is_told_with_the_replay() -> None:
    """Law: where the step itself ends the run, the error holds what was found."""
    step, parts, _ = ours(Net(), loss_scale=ScaleRule(max_consecutive_skips=2))
    with pytest.raises(hs.LossScaleCollapse) as caught:
        hs.diagnose(step, batches=batches(bad=1), **parts)
    assert caught.value.bad_op is not None
    assert caught.value.bad_op.reproduced
    assert caught.value.bad_op.cause == "data"


def test_a_fixed_scale_is_an_error() -> None:
    """Law: a scale that never falls is told to be too large; a lower one ends it."""
    for scale, sick in ((2.0**20, True), (2.0**8, False)):
        step, parts, _ = ours(Net(), loss_scale=scale)
        found = hs.diagnose(step, batches=batches(), **parts)
        assert (RULE in {each.rule for each in found.findings}) == sick
        if sick:
            what, why = found.findings[:2]
            assert (what.severity, why.severity) == ("error", "error")
            assert "9 of 9 steps were skipped; loss scale 1.04858e+06" in what.measured
            assert what.advice == why.advice
            assert what.advice.startswith("Lower the loss scale")

"""A check of odd arguments, models, losses and batches: told, or done right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checked_nets import Net, batch, loss
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.errors import UserError

if TYPE_CHECKING:
    from halfstep.diagnostics.preflight import CheckReport


def checked(model: nn.Module, loss_fn: Any = loss, **more: Any) -> CheckReport:
    """Check at O1 in bf16, without timing."""
    given = {"batch": batch(), "level": "O1", "dtype": "bf16", "steps": 0} | more
    return hs.check(model, loss_fn, **given)


ARGUMENTS = [
    ("steps", "3", "steps='3' must be 0 or more steps to time, a whole number."),
    ("steps", 1.5, "steps=1.5 must be 0 or more steps to time, a whole number."),
    ("steps", True, "steps=True must be 0 or more steps to time, a whole number."),
    ("margin", "1", "margin='1' must be 0 or more powers of two, 40 at most."),
    ("steps", -1, "steps=-1 must be 0 or more steps to time, a whole number."),
    ("margin", -1, "margin=-1 must be 0 or more powers of two, 40 at most."),
    ("margin", 41, "margin=41 must be 0 or more powers of two, 40 at most."),
    ("level", 2, "level=2 must be 'O0', 'O1', 'O2', 'O3', 'auto' or a Choice."),
    ("dtype", 16, "dtype=16 must be 'bf16', 'fp16', 'auto' or a torch.dtype."),
    (
        "policy",
        ["lean"],
        "policy=<list> must be 'lean', 'torch', either with rules, or a Policy.",
    ),
    (
        "policy",
        "",
        "policy='' is not known; the named policies are 'torch' and 'lean'.",
    ),
    (
        "optimizer",
        torch.optim.SGD,
        (
            "optimizer=<class SGD> must be a torch.optim.Optimizer over the "
            "model's parameters, or None."
        ),
    ),
    (
        "master",
        "foo",
        (
            "master='foo' is not a form of master weights; choose fp32, split, kahan, "
            "stochastic, none."
        ),
    ),
    ("master", 3, "master=3 must be the name of a form of master weights."),
    ("more", torch.ones(3), "more=<Tensor> must be a list of batches."),
    ("more", None, "more=None must be a list of batches."),
    (
        "loss_fn",
        None,
        "loss_fn=None must be a function loss_fn(model, batch) of the loss.",
    ),
    (
        "loss_fn",
        nn.MSELoss,
        (
            "loss_fn=<class MSELoss> must be a function loss_fn(model, batch) "
            "of the loss."
        ),
    ),
]


@pytest.mark.parametrize(("name", "value", "words"), ARGUMENTS)
def test_arguments(name: str, value: Any, words: str) -> None:
    """Law: what is of the wrong kind or out of range is named, with what is right."""
    with pytest.raises(UserError) as caught:
        checked(Net(), **{name: value})
    assert str(caught.value) == words


def test_a_loss_that_raises() -> None:
    """Law: what a loss raises in fp32 is told in one line, with its batch and type."""

    def picky(model: nn.Module, given: Any) -> Tensor:
        if len(given[0]) < 32:
            message = "many\nwords " * 50
            raise KeyError(message)
        return loss(model, given)

    with pytest.raises(
        UserError, match=r"loss_fn\(model, more\[1\]\) raised KeyE"
    ) as it:
        checked(Net(), picky, more=[batch(), batch(8)])
    assert type(it.value.__cause__) is KeyError
    words = str(it.value)
    assert "\n" not in words
    assert len(words.split()) <= 35
    assert checked(Net(), picky).verdict == "good"  # nobody asked it to take halves


def test_batches_stay_as_they_are() -> None:
    """Law: a loss that takes a batch apart, or works in place, finds it whole again."""

    def taking(model: nn.Module, given: Any) -> Tensor:
        target = given.pop("y")
        return functional.mse_loss(model(given["x"].mul_(2)), target)

    x, y = batch()
    given = {"x": x.clone(), "y": y}
    report = checked(Net(), taking, batch=given, steps=1)
    assert not report.facts.failed
    assert report.facts.gradients is not None
    assert report.facts.gradients.cosine > 0.99
    assert list(given) == ["x", "y"]
    assert torch.equal(given["x"], x)


class Sealed(dict[str, Tensor]):
    """Cannot be written to."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Refuse."""
        message = "sealed"
        raise TypeError(message)


def test_batches_that_cannot_be_copied() -> None:
    """Law: they are given as they are, and that is said."""
    x, y = batch()
    report = checked(
        Net(), lambda m, b: loss(m, (b["x"], b["y"])), batch=Sealed(x=x, y=y)
    )
    assert report.verdict == "good"
    assert "the batch is not copied (sealed)" in str(report)


REGIONS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: hs.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions_around_do_not_count(name: str) -> None:
    """Law: a check says the same inside regions of autocast and without gradients."""
    right = checked(Net()).facts
    with REGIONS[name]():
        inside = checked(Net()).facts
    assert (inside.loss_fp32, inside.loss) == (right.loss_fp32, right.loss)
    assert inside.gradients == right.gradients


def test_the_batch_at_fault_is_named() -> None:
    """Law: the batch that is bad in fp32 is named; so is an empty one."""
    x, y = batch()
    report = checked(Net().eval(), more=[(x, y), (x[:0], y[:0])])
    assert "loss nan of more[1], or its gradients" in str(report.findings[0])
    assert "the batch holds a tensor of shape (0, 16)" in str(report)


class Moving(nn.Module):
    """Puts another tensor in the place of its buffer, as running averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute; what it gives depends on what it has seen."""
        out: Tensor = self.body(x)
        self.seen = self.seen + 1 + out.detach().float().mean(0)
        return out + self.seen


def test_buffers_that_are_replaced() -> None:
    """Law: every pass begins with the same buffers, be they replaced by a module."""
    model = Moving()
    before = model.seen
    first = checked(model, more=[batch()]).facts
    assert first.noise is not None
    assert first.noise.cosine == pytest.approx(1.0)  # the same batch twice
    assert first.loss_error == pytest.approx(0.0, abs=0.02)
    own = Moving()
    kept = own.seen
    with pytest.raises(UserError, match="not the copy"):
        checked(own, lambda _, b: loss(own, b))
    assert own.seen is kept
    assert not kept.any()
    assert model.seen is before


def test_steps_that_fail() -> None:
    """Law: an optimizer that cannot step is named, in fp32 and at the level."""

    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            """Refuse 16 bits."""
            group = self.param_groups[0]
            if group["lr"] == 1.0 or group["params"][0].dtype == torch.bfloat16:
                message = "not so"
                raise RuntimeError(message)
            return super().step(closure)

    model = Net()
    with pytest.raises(UserError) as caught:
        checked(model, steps=1, optimizer=Picky(model.parameters(), lr=1.0))
    assert str(caught.value) == (
        "a step of Picky, lr=1, raised RuntimeError in fp32: not so. Give check the "
        "optimizer that will train."
    )
    picky = Picky(model.parameters(), lr=0.1)
    report = checked(model, steps=1, optimizer=picky, level="O3")
    assert report.verdict == "fails: O3 bf16: raises not so"


def test_models_that_are_odd() -> None:
    """Law: complex weights, copies without weights and buffers that are not there."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 8)
            self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            """Compute."""
            return (self.body(x) * self.turn).abs()

    assert not checked(Complex(), steps=1).facts.failed
    empty = nn.BatchNorm1d(16)
    empty.running_mean = torch.zeros(16, device="meta")
    with pytest.raises(UserError, match="'running_mean' is on the meta device"):
        checked(empty)

    class Without(nn.Linear):
        def __deepcopy__(self, memo: object) -> Without:
            copied = Without(16, 8)
            del copied.weight
            copied.weight = nn.Parameter(self.weight.detach() * 1)
            copied._parameters["weight"] = self.weight * 1  # type: ignore[assignment]
            return copied

    with pytest.raises(UserError, match="a copy of Without has no weights of its own"):
        checked(Without(16, 8))

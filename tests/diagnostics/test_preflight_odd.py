"""A check of odd arguments, models, losses and batches: told, or done right."""

import math
from typing import Any

import pytest
import torch
from checked_nets import LOUD, Net, batch, loss
from tests.diagnostics.test_replay_model_snapshot import state
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.diagnostics.preflight import CheckReport, model_check
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.numerics.formats import tensors_in


def checked(model: nn.Module, loss_fn: Any = loss, **more: Any) -> CheckReport:
    given = {"batch": batch(), "level": "O1", "dtype": "bf16", "steps": 0} | more
    return hs.check(model, loss_fn, **given)


ARGUMENTS = [
    ("steps", 1.5, "steps=1.5"),
    ("margin", -1, "margin=-1"),
    ("margin", 41, "margin=41"),
    ("level", 2, "level=2"),
    ("dtype", 16, "dtype=16"),
    ("policy", ["lean"], "policy=<list>"),
    ("optimizer", torch.optim.SGD, "optimizer=<class SGD>"),
    ("optimizer", torch.optim.SGD(Net().parameters()), "optimizer=SGD"),
    ("master", "foo", "master='foo'"),
    ("more", torch.ones(3), "more=<Tensor>"),
    ("loss_fn", None, "loss_fn=None"),
    ("loss_fn", nn.MSELoss, "loss_fn=<class MSELoss>"),
    ("loss_fn", nn.CrossEntropyLoss(), r"loss_fn=CrossEntropyLoss\(\) takes no model"),
    ("model", batch, "model is of type function"),
]


@pytest.mark.parametrize(("name", "value", "said"), ARGUMENTS)
def test_arguments(name: str, value: Any, said: str) -> None:
    """Law: what is of the wrong kind or out of range is named."""
    with pytest.raises(UserError, match=f"^{said}"):
        checked(**{"model": Net(), name: value})


def test_a_loss_that_raises() -> None:
    """Law: what a loss raises in fp32 is told in one line, with its batch and type."""

    def picky(model: nn.Module, given: Any) -> Tensor:
        if len(given[0]) < 32:
            raise KeyError("many\nwords " * 50)
        return loss(model, given)

    said = r"loss_fn\(model, more\[1\]\) raised KeyError"
    with pytest.raises(UserError, match=said) as it:
        checked(Net(), picky, more=[batch(), batch(8)])
    assert type(it.value.__cause__) is KeyError
    assert "\n" not in str(it.value)
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
    def __setitem__(self, key: str, value: Tensor) -> None:
        raise TypeError("sealed")


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
            group = self.param_groups[0]
            if group["lr"] == 1.0 or group["params"][0].dtype == torch.bfloat16:
                raise RuntimeError("not so")
            return super().step(closure)

    model = Net()
    with pytest.raises(UserError) as caught:
        checked(model, steps=1, optimizer=Picky(model.parameters(), lr=1.0))
    assert "Picky, lr=1, raised RuntimeError in fp32: not so." in str(caught.value)
    picky = Picky(model.parameters(), lr=0.1)
    report = checked(model, steps=1, optimizer=picky, level="O3")
    assert report.verdict == "fails: O3 bf16: raises not so"


def test_models_that_are_odd() -> None:
    """Law: complex weights, and buffers that are not there."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 8)
            self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) * self.turn).abs()

    assert not checked(Complex(), steps=1).facts.failed
    empty = nn.BatchNorm1d(16)
    empty.running_mean = torch.zeros(16, device="meta")
    with pytest.raises(UserError, match="'running_mean' is on the meta device"):
        checked(empty)


# `hs.check` compares what each module gives with what it gives in fp32.


def test_code_of_the_model_itself() -> None:
    """Law: where no rule helps none is proposed, and fp32 by hand is well."""

    class Turned(nn.Linear):
        dtype: torch.dtype | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            angles = torch.arange(len(x), dtype=self.dtype or y.dtype)
            return y * angles.cos()[:, None].to(y.dtype)

    model = Turned(16, 8)
    report = checked(model, batch=batch(2000))
    (found,) = (each for each in report.findings if each.rule == "output")
    assert found.where == "model (Turned)"
    assert found.advice.startswith("No rule helps")
    model.dtype = torch.float32
    assert checked(model, batch=batch(2000)).good


def test_modules_that_write_in_place() -> None:
    """Law: what a later module overwrites is compared as it was given."""
    net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    assert checked(net).good


# A check whose steps are slow, or spoil weights.


def notes_of(report: CheckReport) -> list[str]:
    return [one.measured for one in report.findings if one.rule == "note"]


def test_steps_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: there are then fewer, and a note says so."""
    monkeypatch.setattr(model_check, "_MAX_SECONDS", 0.0)
    report = checked(Net(), dtype="fp16", steps=5)
    assert notes_of(report)[0].startswith("1 of 5 steps were timed")
    assert len(report.facts.ratios) <= 4
    monkeypatch.setattr(model_check, "_MAX_SECONDS", math.inf)
    report = checked(Net(), dtype="fp16", steps=3)
    assert not notes_of(report)
    assert 3 <= len(report.facts.ratios) <= 12


def test_steps_that_spoil_weights() -> None:
    """Law: weights that only the level's steps make infinite are an error."""
    model = nn.Linear(16, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=6e4)
    given = {"level": "O3", "dtype": "fp16", "optimizer": sgd, "steps": 1}
    report = checked(model, lambda model, given: 99 * model(given[0]).mean(), **given)
    assert "weights" in {one.rule for one in report.findings}
    assert not report.good


def test_no_steps_without_fp16_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where fp16 matmuls are slow, no step is timed, and a note says so."""
    monkeypatch.setattr(hardware, "lacks", lambda *_: True)
    report = checked(Net(), dtype="fp16", steps=1)
    assert notes_of(report)[-1].startswith("no steps were timed")


# A check before training leaves everything alone, and says what it cannot check.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that a check might change, as plain values."""
    held = [one.tolist() for one in tensors_in(optimizer.state_dict())]
    return [state(model), held, [p._backward_hooks for p in model.parameters()]]


@pytest.mark.parametrize(("level", "gain"), [("O1", LOUD), ("O2", 1.0), ("O3", LOUD)])
def test_nothing_changes(level: str, gain: float) -> None:
    """Law: weights, gradients, buffers, state, hooks and generators stay to the bit."""
    model = Net(gain)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch()).backward()
    optimizer.step()
    before = state_of(model, optimizer)
    for dtype in ("bf16", "fp16"):
        hs.check(
            model, loss, batch(), level=level, dtype=dtype, optimizer=optimizer, steps=1
        )
    assert state_of(model, optimizer) == before


LOSSES: list[tuple[Any, str]] = [
    (lambda m, b: m(b[0]), r"a tensor of shape \(32, 8\) and torch\.float32"),
    (lambda m, b: loss(m, b).detach(), "a loss without a graph"),
    (lambda m, b: loss(m, b).item(), "loss_fn returned a float"),
    (lambda _m, _b: torch.ones((), requires_grad=True) * 2, "no gradient reaches"),
]


@pytest.mark.parametrize(("loss_fn", "said"), LOSSES)
def test_losses_that_are_none(loss_fn: Any, said: str) -> None:
    """Law: a loss that cannot be trained with is rejected."""
    with pytest.raises(UserError, match=said):
        checked(Net(), loss_fn)


def test_errors_of_the_model_are_kept() -> None:
    """Law: what the model raises in fp32 is named, and kept as the cause."""
    x, y = batch()
    with pytest.raises(UserError, match="cannot be multiplied") as caught:
        checked(Net(), batch=(x[:, :3], y))
    assert type(caught.value.__cause__) is RuntimeError


class Owner(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("it holds a file")


MODELS: list[tuple[Any, str]] = [
    (lambda: Owner(16, 8), "Owner cannot be copied, .* it holds a file"),
    (lambda: Net().bfloat16(), r"'inner\.0\.weight' is stored in torch\.bfloat16"),
    (lambda: Net().requires_grad_(requires_grad=False), "Net has no parameter that"),
    (lambda: nn.DataParallel(Net()), "DataParallel"),
    (lambda: nn.LazyLinear(8), "'weight' of the model has no shape yet"),
    (lambda: nn.Linear(16, 8, device="meta"), "'weight' is on the meta device"),
]


@pytest.mark.parametrize(("make", "said"), MODELS)
def test_models_that_cannot_be_checked(make: Any, said: str) -> None:
    """Law: models of which no fp32 copy can be made are rejected, in one line."""
    with pytest.raises(UserError, match=said):
        checked(make())


@pytest.mark.parametrize(
    ("make", "size", "words"),
    [
        (lambda: Net().eval(), 32, "evaluation mode"),
        (lambda: nn.Linear(16, 8), 1, "cannot be halved"),
        (Net, 2, "half the batch does not run"),
        (lambda: torch.compile(Net(), backend="eager"), 32, "torch.compile"),
    ],
)
def test_what_is_noted(make: Any, size: int, words: str) -> None:
    """Law: what a check leaves out, and an odd model, are told in a note."""
    model = make()
    training = model.training
    report = checked(model, batch=batch(size))
    assert words in str(report.findings[0])
    assert report.findings[0].severity == "note"
    assert report.verdict == "good"
    assert model.training == training
    assert (report.facts.noise is None) == (size < 32)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: a healthy network is good on a GPU, whose generator stays as it was."""
    model = Net().cuda()
    given = tuple(one.cuda() for one in batch())
    before = torch.cuda.get_rng_state()
    for dtype in ("bf16", "fp16"):
        report = hs.check(model, loss, given, level="O2", dtype=dtype, steps=0)
        assert report.verdict == "good"
        assert report.facts.dropout_off
    assert torch.equal(torch.cuda.get_rng_state(), before)

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
from halfstep.numerics.formats import tensors_in


def checked(model: nn.Module, loss_fn: Any = loss, **more: Any) -> CheckReport:
    given = {"batch": batch(), "level": "O1", "dtype": "bf16", "steps": 0} | more
    return hs.check(model, loss_fn, **given)


WHOLE = "must be a whole number of at least 0."
ARGUMENTS = [
    ("steps", 1.5, f"steps=1.5 {WHOLE}"),
    ("margin", -1, f"margin=-1 {WHOLE}"),
    (
        *("margin", 41),
        "margin=41 must be 40 powers of two at most: fp16 has no more.",
    ),
    ("level", 2, "level=2 is not a level; choose auto, O0, O1, O2, O3."),
    ("dtype", 16, "dtype=16 is not a format; choose one of fp32, bf16, fp16."),
    (
        "policy",
        ["lean"],
        "policy=<list> must be 'lean', 'torch', either with rules, or a Policy.",
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
    ("more", torch.ones(3), "more=<Tensor> must be a list of batches."),
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
            raise KeyError("many\nwords " * 50)
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
            return (self.body(x) * self.turn).abs()

    assert not checked(Complex(), steps=1).facts.failed
    empty = nn.BatchNorm1d(16)
    empty.running_mean = torch.zeros(16, device="meta")
    with pytest.raises(UserError, match="'running_mean' is on the meta device"):
        checked(empty)

    class Without(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            copied = Without(16, 8)
            del copied.weight
            copied.weight = nn.Parameter(self.weight.detach() * 1)
            copied._parameters["weight"] = self.weight * 1
            return copied

    with pytest.raises(UserError, match="a copy of Without has no weights of its own"):
        checked(Without(16, 8))


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


# A check before training leaves everything alone, and says what it cannot check.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that a check might change, as plain values."""
    held = [one.tolist() for one in tensors_in(optimizer.state_dict())]
    return [state(model), held, [p._backward_hooks for p in model.parameters()]]


def test_arguments_are_refused() -> None:
    """Law: no module, one of torch's losses, another's optimizer: each is named."""
    model, other = Net(), torch.optim.SGD(Net().parameters())
    with pytest.raises(
        UserError, match=r"^model is of type function; it must be a torch"
    ):
        hs.check(batch, loss, batch())
    with pytest.raises(UserError, match=r"CrossEntropyLoss\(\) takes no model"):
        hs.check(model, nn.CrossEntropyLoss(), batch())
    with pytest.raises(UserError, match="SGD holds no parameter of the model"):
        hs.check(model, loss, batch(), optimizer=other)


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


def refusal(model: nn.Module, loss_fn: Any = loss, given: Any = None) -> str:
    """Return the words of a refusal, which are one line."""
    with pytest.raises(UserError) as caught:
        hs.check(model, loss_fn, given or batch(), level="O2", dtype="bf16", steps=0)
    words = str(caught.value)
    assert "\n" not in words
    assert len(words.split()) <= 35
    return words


def test_losses_that_are_none() -> None:
    """Law: a loss that cannot be trained with is refused, with what would be right."""
    model = Net()
    assert refusal(model, lambda m, b: m(b[0])) == (
        "loss_fn returned a tensor of shape (32, 8) and torch.float32: return the "
        "loss, one floating-point number, such as loss_fn(model(x), y).mean()."
    )
    assert refusal(model, lambda m, b: loss(m, b).detach()) == (
        "loss_fn returned a loss without a graph, so that there are no gradients: "
        "compute it from the model's output, without detach(), item() or "
        "torch.no_grad()."
    )
    assert refusal(model, lambda m, b: loss(m, b).item()) == (
        "loss_fn returned a float: return the loss, one floating-point number, such as "
        "loss_fn(model(x), y).mean()."
    )
    before = state(model)
    assert refusal(model, lambda _, b: loss(model, b)) == (
        "loss_fn uses the model that was given to check, not the copy it is called "
        "with: write loss_fn(model, batch) with its own argument."
    )
    assert state(model) == before
    constant = torch.ones((), requires_grad=True)
    assert "no gradient reaches" in refusal(model, lambda _m, _b: constant * 2)


def test_a_batch_elsewhere() -> None:
    """Law: a batch on another device is named, with how to move it."""
    x, y = batch()
    assert refusal(Net(), given=(x.to("meta"), y)) == (
        "the batch holds a tensor on meta, the model is on cpu: move it, as in "
        "batch.to('cpu')."
    )
    # Where it is on the right one, what the model raises is named, and kept as cause.
    with pytest.raises(UserError, match="cannot be multiplied") as caught:
        hs.check(Net(), loss, (x[:, :3], y), level="O2", dtype="bf16", steps=0)
    assert type(caught.value.__cause__) is RuntimeError


class Owner(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("it holds a file")


def test_models_that_cannot_be_checked() -> None:
    """Law: models of which no fp32 copy can be made are refused."""
    assert refusal(Owner(16, 8)) == (
        "Owner cannot be copied, and check works on copies: it holds a file"
    )
    assert refusal(Net().bfloat16()) == (
        "parameter 'inner.0.weight' is stored in torch.bfloat16: check compares with "
        "fp32, and needs the fp32 weights; load the model in fp32."
    )
    assert refusal(Net().requires_grad_(requires_grad=False)) == (
        "Net has no parameter that learns: there is nothing to check."
    )
    assert refusal(nn.DataParallel(Net())) == (
        "check(model=...) got a DataParallel: give the bare model, model.module."
    )
    assert refusal(nn.LazyLinear(8)) == (
        "'weight' of the model has no shape yet, as its module is lazy and has not "
        "run: call the model once first."
    )
    with torch.device("meta"):
        empty = nn.Linear(16, 8)
    assert refusal(empty) == (
        "'weight' is on the meta device: check needs a whole model."
    )


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

"""Runs that no loss scale can save: what the error says of five causes, and when."""

import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fp16_training import SGD, by_scaler, by_session
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep as hs
from halfstep.nonfinite.origin import BadOp
from halfstep.scaling import LossScaler, ScaleRule
from halfstep.scaling.collapse import LossHistory, find_cause

LIMIT = 6
"""Skips in a row that end these runs."""


class Net(nn.Module):
    """Two layers, in which something may go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return torch.sigmoid(out.float())


class Wide(Net):
    """Activations leave float16, though weights and data are small."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x) * 1e5)
        return torch.sigmoid(out.float())


class Straight(Net):
    """Nothing holds the activations back: they grow with the weights."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x))
        return out.float()


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def logarithm(out: Tensor) -> Tensor:
    return -torch.log(out - out.detach()).mean()


def enormous(out: Tensor) -> Tensor:
    return out.sum() * 1e9


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator)


def broken(step: int) -> Tensor:
    batch = data(step)
    batch[1, 2] = math.nan if step > 2 else 0.0
    return batch


@dataclass(frozen=True)
class Run:
    word: str = ""
    at: tuple[str, str] | None = None
    """Phase and place of the value, where chance does not decide."""
    net: Callable[[], nn.Module] = Net
    loss_of: Callable[[Tensor], Tensor] = mean
    batches: Callable[[int], Tensor] = data
    lr: float = 0.01


CAUSES = {
    "data": Run("NaN", ("input", "model"), batches=broken),
    "zero": Run("log", ("forward", "model"), loss_of=logarithm),
    "learning rate": Run("Lower the learning rate", net=Straight, lr=50.0),
    "forward range": Run("float16 holds 65504", ("forward", "model"), net=Wide),
    "loss function": Run("not a sum", ("backward", "loss"), loss_of=enormous),
}


@pytest.mark.filterwarnings("ignore:level O1 with dtype fp16")
@pytest.mark.parametrize("train", [by_scaler, by_session])
@pytest.mark.parametrize("cause", CAUSES)
def test_the_error_names_the_cause(cause: str, train: Callable[..., None]) -> None:
    """Law: a run lost for one of five causes ends with that cause and a remedy."""
    run = CAUSES[cause]
    settings = {"lr": run.lr, "max_consecutive_skips": LIMIT, "min_scale": 1.0}
    with pytest.raises(hs.LossScaleCollapse) as caught:
        train(run.net, run.loss_of, run.batches, 200, **settings)
    error, text = caught.value, str(caught.value)
    assert error.cause == cause, text
    assert run.word in text
    assert error.advice in text
    assert f"Cause: {cause} (" in text
    assert "_" not in text.partition("(")[2].partition(")")[0]
    assert len(error.history) == LIMIT
    assert list(error.history) == sorted(error.history, reverse=True)
    assert error.loss_finite == (cause in {"loss function", "learning rate"}), text
    names = {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    assert set() < {*error.inf_in, *error.nan_in} <= names
    bad = error.bad_op
    # What the graph showed is a value too, which claims no replay.
    assert (bad.cause, bad.advice, bad.reproduced) == (cause, error.advice, False)
    assert run.at in {None, (bad.phase, bad.place)}
    assert bad.evidence.rpartition(": ")[2] in text
    assert bad.scale == error.history[-1]
    # A collapse that crosses processes keeps all it holds.
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    assert (str(again), vars(again)) == (text, vars(error))


MADE: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("log of 0", lambda x: (x * 0).log().mean(), "inf"),
    ("log of less", lambda x: (x - 2).log().exp().mean(), "NaN"),
    ("mean of nothing", lambda x: x[:0].mean() * x.mean(), "NaN"),
    ("slope of a root", lambda x: (x * 0).sqrt().mean(), ""),
    ("0 over 0", lambda x: (x * 0 / (x * 0)).mean(), ""),
    ("1 over 0", lambda x: (1 / (x * 0)).mean(), "inf"),
    ("a cast", lambda x: (x * RANGE).half().float().square().mean(), "inf"),
    ("loss", lambda x: x.mean() * 1e38, ""),
]


@pytest.mark.parametrize(
    ("loss_of", "made"), [case[1:] for case in MADE], ids=[case[0] for case in MADE]
)
def test_which_of_the_two_was_made(
    loss_of: Callable[[Tensor], Tensor], made: str
) -> None:
    """Law: inf or NaN is named where it is known; a slope may be either."""
    scaler = hs.GradScaler("cpu", max_consecutive_skips=3)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.0)

    def train() -> None:
        for _ in range(3):
            scaler.scale(loss_of(weight)).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(hs.LossScaleCollapse) as caught:
        train()
    bad = caught.value.bad_op
    assert bad.nonfinite_kind == made, str(caught.value)


def square(out: Tensor) -> Tensor:
    return (out.half() * 1e6).float().square().mean()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("faulty", "applied", "word"),
    [
        (logarithm, 0, "Add a small number inside log()"),
        (logarithm, 3, "Add a small number inside log()"),
        (square, 0, "float16 holds 65504"),
        (square, 3, "float16 holds 65504"),
        (enormous, 0, "e+09, yet its gradients overflow"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*in a row")
def test_two_losses_through_one_scaler(
    faulty: Callable[[Tensor], Tensor], applied: int, word: str, order: int
) -> None:
    """Law: the faulty loss is blamed, wherever it comes; warning and error agree."""
    torch.manual_seed(0)
    model, healthy = Net(), nn.Linear(8, 1)
    named = nn.ModuleDict({"model": model, "healthy": healthy}).named_parameters()
    optimizer = SGD(named, lr=0.1)
    scaler = hs.GradScaler("cpu", max_consecutive_skips=LIMIT, min_scale=1.0)

    def train() -> None:
        for step in range(applied + LIMIT):
            x = data(step)
            of_model = faulty if step >= applied else mean
            with hs.autocast("cpu", torch.float16):
                losses = [of_model(model(x)), healthy(x).float().square().mean()]
            for loss in losses[::order]:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(hs.LossScaleCollapse) as error:
            train()
    assert word in str(error.value)
    assert "healthy" not in str(error.value)
    assert error.value.loss_finite == (faulty is enormous)
    first = next((str(w.message) for w in caught if "loss is" in str(w.message)), "")
    assert first or faulty is enormous
    assert f"Cause: {error.value.cause} " in first or faulty is enormous


def test_the_first_failing_step_decides() -> None:
    """Law: what an overflow leaves behind, as in running statistics, is not blamed."""
    torch.manual_seed(0)
    inner, norm, outer = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    optimizer = SGD(nn.Sequential(inner, norm, outer).parameters(), lr=0.1)
    scaler = hs.GradScaler("cpu", 1024.0, max_consecutive_skips=LIMIT)

    def train() -> None:
        for step in range(LIMIT):
            with hs.autocast("cpu", torch.float16):
                hidden = inner(data(step)) * (1e6 if step == 0 else 1.0)
                loss = outer(norm(hidden)).float().square().mean()
            norm.eval()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with (
        pytest.warns(UserWarning, match="Cause: forward range"),
        pytest.raises(hs.LossScaleCollapse, match="float16 holds 65504") as caught,
    ):
        train()
    assert caught.value.cause == "forward range"


FOUND = BadOp(
    phase="forward",
    scale=1.0,
    cause="forward range",
    evidence="its result reaches inf",
    advice="Use bf16.",
    reproduced=False,
)


@pytest.mark.parametrize(
    ("losses", "now", "cause"),
    [
        (LossHistory(), math.inf, "forward range"),  # it never worked: the format
        (LossHistory(1.0, 1.0, 1), math.inf, "learning rate"),  # for one step
        (LossHistory(1.0, 0.9, 2), math.inf, "forward range"),  # it learned
        (LossHistory(1.0, 1.0, 500), math.inf, "forward range"),  # it did, for long
        (LossHistory(1.0, 2.0, 500), math.nan, "learning rate"),  # it had diverged
        (LossHistory(1.0, 1.0, 500), 1.9, "forward range"),
        (LossHistory(1.0, 1.0, 500), -2.0, "learning rate"),  # it diverges now
    ],
)
def test_range_or_learning_rate(losses: LossHistory, now: float, cause: str) -> None:
    """Law: overflow in a forward pass that worked before is the learning rate's.

    What the graph showed is said too, with its remedy if the loss has not diverged.
    """
    finite = math.isfinite(now)
    found = replace(FOUND, rule="op:mm=fp32")
    verdict = find_cause(found, losses, torch.tensor(now), finite=finite)
    assert verdict.cause == cause
    assert found.evidence in verdict.evidence
    # A rule does not help a run that diverges.
    diverged = losses.has_diverged(now)
    assert verdict.advice.endswith(found.advice) != diverged
    assert verdict.rule == ("" if diverged else found.rule)
    if losses.applied == 1:
        assert verdict.evidence.endswith("the forward pass worked for 1 step only")


RANGE = 1e5
"""What float16 cannot hold."""


def short() -> Any:
    return hs.GradScaler("cpu", 1024.0, max_consecutive_skips=3)


def steps(scaler: Any, weight: Tensor, factors: list[float]) -> None:
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.0)
    for factor in factors:
        loss = ((weight.half() * factor).float() / factor).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_run_that_went_on_is_not_young(kind: str) -> None:
    """Law: what is said of the steps before a state was saved is known, or not said."""
    weight = nn.Parameter(torch.ones(1))
    before, after = short(), short()
    steps(before, weight, [2.0] * 40)
    state = before.state_dict()
    if kind == "torch":
        del state["_halfstep"]
    after.load_state_dict(state)
    with pytest.raises(hs.LossScaleCollapse) as caught:
        steps(after, weight, [2.0] * 3 + [RANGE] * 3)
    assert caught.value.cause == "forward range", str(caught.value)


@pytest.mark.parametrize("halt", [3, 4, 5])
def test_a_collapse_across_a_state(halt: int) -> None:
    """Law: a run saved amid its last skips ends with the error it would have."""
    factors = [2.0] * 3 + [RANGE] * 3
    with pytest.raises(hs.LossScaleCollapse) as straight:
        steps(short(), nn.Parameter(torch.ones(1)), factors)
    before, after, weight = short(), short(), nn.Parameter(torch.ones(1))
    steps(before, weight, factors[:halt])
    after.load_state_dict(before.state_dict())
    with pytest.raises(hs.LossScaleCollapse) as caught:
        steps(after, weight, factors[halt:])
    # Before its first step a scaler knows no names.
    said = str(caught.value).replace("a parameter of shape (1,)", "weight")
    assert said == str(straight.value)
    assert caught.value.history == straight.value.history == (1024.0, 512.0, 256.0)
    assert "the forward pass worked for 3 steps only" in str(caught.value)


def test_data_is_never_the_learning_rates() -> None:
    """Law: NaN in the data is that, however the loss went before."""
    found = replace(FOUND, phase="input", cause="data", evidence="it holds NaN")
    for losses in (LossHistory(), LossHistory(1.0, 9.0, 3)):
        assert find_cause(found, losses, None, finite=None) is found


@pytest.mark.filterwarnings("ignore")
def test_adams_eps_in_pure_fp16() -> None:
    """Law: weights that Adam ruins in float16 are told with its eps, and what helps."""

    def train(eps: float) -> hs.LossScaleCollapse | None:
        torch.manual_seed(0)
        model = Net()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
        rule = ScaleRule(max_consecutive_skips=LIMIT)
        session = hs.prepare(model, adam, "O3", dtype="fp16", loss_scale=rule)

        def loss() -> Tensor:
            with session.autocast():
                return mean(session.model(data(0)))

        try:
            for _ in range(4 * LIMIT):
                session.backward(loss())
                session.step()
        except hs.LossScaleCollapse as error:
            bad = hs.find_nonfinite(session.model, loss)
            assert bad.cause == "weight"
            assert "use eps=6.1e-05" in bad.advice
            return error
        return None

    error = train(1e-8)
    assert error.cause == "weight"
    assert "use eps=6.1e-05" in error.advice
    assert train(6.1e-5) is None


def test_a_loss_that_another_thread_reports_in_between() -> None:
    """Law: two threads may report losses to one scaler at the same time."""
    scaler = LossScaler(ScaleRule())
    with FakeTensorMode():
        other = torch.ones(())  # has no value, so that the scaler holds no loss

    class Interrupted(Tensor):
        def numel(self) -> int:
            scaler.observe_loss(other)
            return super().numel()

    scaler.observe_loss(torch.tensor(2.0).as_subclass(Interrupted))

"""First bad operation: what is a loss function, told by where it stands."""

import math
from collections.abc import Callable

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.casting import convert_model
from halfstep.nonfinite.origin import BadOp

X = torch.ones(4, 8)


class PathLoss(nn.Module):
    """What radio waves lose on their way: a layer like another."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * 0 + 300) * 300


class Level(nn.Module):
    """One number for a whole batch, which layers then use."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x.half() * 0 + 300) * 300).mean()


class Objective(nn.Module):
    """A loss that is not called so, with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PathLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum()


class BalanceLoss(Level):
    """A loss on the way, as experts have it."""


class Squares(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return (input.half() * 0 + 300) * 300 + 0 * target


class Model(nn.Module):
    """A layer, then what is asked about, then perhaps a layer."""

    def __init__(self, middle: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.middle = middle
        if last:
            self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        given = (hidden, X) if isinstance(self.middle, nn.MSELoss) else (hidden,)
        made: Tensor = self.middle(*given)
        if hasattr(self, "outer"):
            return self.outer(hidden * made)
        return made


class TrainingLoss(Model):
    """A model with a name that says something else."""


def told(model: nn.Module) -> BadOp:
    def step() -> Tensor:
        with hs.autocast("cpu", torch.float16):
            return model(X).float().mean()

    return required(hs.find_nonfinite(model, step))


@pytest.mark.parametrize("kind", [Model, TrainingLoss])
@pytest.mark.parametrize(
    ("middle", "last", "module", "cause"),
    [
        (PathLoss, True, "middle", "forward range"),
        (PathLoss, False, "middle", "forward range"),
        (Level, True, "middle", "forward range"),
        (Level, False, "middle", "loss function"),
        (Objective, False, "middle.first", "loss function"),
        (BalanceLoss, True, "middle", "loss function"),
        (BalanceLoss, False, "middle", "loss function"),
        (Squares, False, "middle", "loss function"),
    ],
)
def test_a_loss_is_told_by_where_it_stands(
    kind: type[Model], middle: type[nn.Module], module: str, cause: str, *, last: bool
) -> None:
    """Law: what gives one number, on which no weights work, is one; a layer is none."""
    bad = told(kind(middle(), last=last))
    assert (bad.module, bad.cause) == (module, cause), str(bad)
    # It is cast by hand there, which no rule undoes.
    assert not bad.rule
    assert ("The code itself casts" in bad.advice) == (cause == "forward range")


def test_a_loss_made_anew_in_the_model_is_one() -> None:
    """Law: so is a loss that no module holds, as models with labels make it."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return BalanceLoss()(self.inner(x))

    bad = told(Labelled())
    assert (bad.module, bad.kind, bad.cause) == (
        *("model", "BalanceLoss"),
        "loss function",
    )


def test_checkpoints_change_no_verdict() -> None:
    """Law: weights that run once more in the backward pass do not work on the loss."""
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.end = Steep()

        def forward(self, x: Tensor) -> Tensor:
            return self.end(checkpoint(self.inner, x, use_reentrant=False))

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 1e9).sum() * 1e-9 * 1e9

    bad = told(Recomputed())
    assert (bad.module, bad.cause, bad.phase) == ("end", "loss function", "backward")


def probability(out: Tensor) -> Tensor:
    return functional.binary_cross_entropy(out.sigmoid(), torch.full_like(out, 2.0))


def refused(out: Tensor) -> Tensor:
    """Return a loss that raises for NaN, which a logarithm made."""
    odd = torch.log(out * 0 - 1)
    return functional.binary_cross_entropy(torch.sigmoid(odd), out * 0)


def weighted(out: Tensor) -> Tensor:
    """Return a loss with class weights that are not finite."""
    weight = torch.tensor([1.0, math.inf, 1.0])
    return functional.cross_entropy(out, torch.tensor([0, 1, 2, 0]), weight=weight)


def masked(out: Tensor) -> Tensor:
    """Return a loss with a class masked that a target names."""
    logits = out.masked_fill(torch.tensor([True, False, False]), -math.inf)
    return functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("loss_of", "op", "cause", "evidence"),
    [
        (
            *(probability, "binary_cross_entropy", "label"),
            "12 of 12 targets are not inside 0 to 1",
        ),
        (refused, "log", "zero", "its argument is negative"),
        (
            *(weighted, "nll_loss", "loss function"),
            "the class weights hold inf at 1 of 3 places",
        ),
        (masked, "masked_fill", "label", "a target names a masked class"),
    ],
)
def test_targets_and_weights_of_a_loss(
    loss_of: Callable[[Tensor], Tensor], op: str, cause: str, evidence: str
) -> None:
    """Law: what a loss cannot use is reported as that, also if torch raises for it."""
    model = nn.Linear(8, 3)
    bad = required(hs.find_nonfinite(model, lambda: loss_of(model(X))))
    assert (bad.module, bad.op, bad.cause) == ("loss", op, cause), str(bad)
    assert evidence in bad.evidence


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_penalty_on_scaled_gradients(*, unscaled: bool) -> None:
    """Law: where gradients in a loss are scaled, the cure is to divide them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    scaler = hs.GradScaler("cpu", init_scale=2.0**12)

    def step() -> Tensor:
        x = X.clone().requires_grad_()
        with hs.autocast("cpu", torch.float16):
            scores = model(x)
        scaled = scaler.scale(scores.sum())
        (slope,) = torch.autograd.grad(scaled, x, create_graph=True)
        slope = slope / scaler.get_scale() if unscaled else slope
        return (slope.norm(dim=1) - 1).square().mean()

    bad = hs.find_nonfinite(model, step, scale=2.0**12)
    assert (not bad) == unscaled
    if bad:
        assert bad.cause == "loss function"
        assert "of a loss times its scale 4096 are part" in bad.evidence
        assert "grads / scaler.get_scale()" in bad.advice


# First bad operation: what a program calls and casts itself, and the rule for it.


FP16, BF16 = torch.float16, torch.bfloat16


class Root(nn.Module):
    """A weight of the model's own, which no rule on modules speaks of."""

    def __init__(self, shape: tuple[int, ...], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 200.0))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """Return eight products of 100 and 200 a place: 1.6e5, beyond float16."""
        return self.call(x, self.weight)


def loss(model: nn.Module, x: Tensor, dtype: torch.dtype, rule: str = "") -> Tensor:
    policy = "torch" + f" + {rule}" * bool(rule)
    with hs.autocast("cpu", dtype, policy=policy, model=model):
        out: Tensor = model(x)
        return out.float().mean()


def found(model: nn.Module, x: Tensor) -> BadOp:
    return required(hs.find_nonfinite(model, lambda: loss(model, x, FP16)))


SQUARE, ROWS = (8, 8), torch.full((4, 8), 100.0)
IMAGE, LINE = torch.full((1, 8, 2, 2), 100.0), torch.full((1, 8, 2), 100.0)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = {
    "matmul": (lambda x, w: x @ w, SQUARE, ROWS),
    "linear": (functional.linear, SQUARE, ROWS),
    "mm": (torch.mm, SQUARE, ROWS),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), SQUARE, ROWS),
    "einsum": (lambda x, w: torch.einsum("ij,jk->ik", x, w), SQUARE, ROWS),
    "bmm": (lambda x, w: torch.bmm(x[None], w[None]), SQUARE, ROWS),
    "linalg_multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w, w]), SQUARE, ROWS),
    "conv2d": (functional.conv2d, (8, 8, 1, 1), IMAGE),
    "conv_transpose2d": (functional.conv_transpose2d, (8, 8, 1, 1), IMAGE),
    "conv_transpose1d": (functional.conv_transpose1d, (8, 8, 1), LINE),
}
TURNED: Callable[..., Tensor] = lambda x, w: x @ w.t()  # noqa: E731


@pytest.mark.parametrize("called", [*CALLS, "matmul, turned"])
def test_the_rule_matches_what_was_called(called: str) -> None:
    """Law: a product is named as the program calls it, and that rule ends it."""
    call, shape, x = CALLS.get(called, (TURNED, SQUARE, ROWS))
    model = Root(shape, call)
    bad = found(model, x)
    op = called.partition(",")[0]
    assert (bad.module, bad.op, bad.rule) == ("model", op, f"op:{op}=fp32")
    assert not loss(model, x, FP16).isfinite()
    assert loss(model, x, FP16, bad.rule).isfinite()


def test_what_autocast_casts_is_the_callers() -> None:
    """Law: an operand too large for float16 is told of the operation that took it."""

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        value = x * weight[:4] * 1e4
        return functional.scaled_dot_product_attention(x, x, value)

    model = Root(SQUARE, attend)
    bad = found(model, ROWS)
    assert bad.rule == "op:scaled_dot_product_attention=fp32"
    assert loss(model, ROWS, FP16, bad.rule).isfinite()


class Inner(nn.Module):
    """A module whose code casts what it computed."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        return self.cast(self.before(x))


def net(cast: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Inner(cast), nn.Linear(8, 2))


def filled(y: Tensor) -> Tensor:
    buffer = torch.zeros(y.shape, dtype=FP16)
    buffer[:] = y.float() * 0 + 1e5
    return buffer


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda y: y.half(),
    "to": lambda y: y.to(FP16),
    "type": lambda y: y.type(torch.float16),
}
WORK: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cast": (lambda y, cast: cast(y.float() * 0 + 1e5) / 1e5, "to"),
    "square": (lambda y, cast: cast(y * 0 + 300).square() / 1e5, "pow"),
    "product": (lambda y, cast: cast(y * 0 + 300) * cast(y * 0 + 300) / 1e5, "mul"),
}
"""What leaves float16 only because of a cast, and the operation that does."""


@pytest.mark.parametrize("word", CASTS)
@pytest.mark.parametrize("name", WORK)
def test_a_cast_in_the_code_is_told_as_such(name: str, word: str) -> None:
    """Law: no rule and no format helps there; to leave the cast out does."""
    (work, op), cast = WORK[name], CASTS[word]
    model, x = net(lambda y: work(y, cast)), torch.ones(4, 8)
    bad = found(model, x)
    assert (bad.module, bad.op, bad.rule) == ("1", op, "")
    assert bad.cause == "forward range"
    assert "test_replay_losses.py:" in bad.advice
    assert "nor does bfloat16" in bad.advice
    assert not loss(model, x, FP16, "module:1=fp32").isfinite()
    assert not loss(model, x, BF16).isfinite()
    model[1].cast = lambda y: work(y.float(), lambda wide: wide)
    assert loss(model, x, FP16).isfinite()


def test_a_cast_before_a_product() -> None:
    """Law: autocast casts what a product takes, so there bfloat16 is advised."""
    model = net(lambda y: (y * 0 + 300).half() @ (y * 0 + 300).half().t() @ y)
    x = torch.ones(4, 8)
    bad = found(model, x)
    assert (bad.op, bad.rule) == ("matmul", "")
    assert "or train in bfloat16" in bad.advice
    assert loss(model, x, BF16).isfinite()


@pytest.mark.parametrize("cast", [lambda y: (y + 1e5).to(y.dtype), filled])
def test_a_cast_whose_format_may_follow(cast: Callable[[Tensor], Tensor]) -> None:
    """Law: where the format may follow another, rule and line are both told."""
    bad = found(net(lambda y: cast(y.float() * 0)), torch.ones(4, 8))
    if cast is filled:
        assert bad.rule == "module:1=fp32"
        assert "the code casts at test_replay_losses.py:" in bad.advice
    else:
        assert bad.rule == "module:2=fp32"


def test_a_cast_outside_of_the_module() -> None:
    """Law: what comes into a module is cast by the rule, so the rule is advised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1))
    with torch.no_grad():
        model[1].weight.fill_(200.0)
    forward = model[0].forward
    model[0].forward = lambda x: (forward(x) * 0 + 100).half()
    x = torch.ones(4, 8)
    bad = found(model, x)
    assert (bad.module, bad.rule) == ("1", "module:1=fp32")
    assert loss(model, x, FP16, bad.rule).isfinite()


def test_an_argument_that_the_code_casts() -> None:
    """Law: of data that the model itself casts, no format is said to hold it."""
    model = Root((8,), lambda x, w: x.half() + w)
    bad = required(
        hs.find_nonfinite(model, lambda: model(torch.full((4, 8), 1e5)).mean())
    )
    assert bad.cause == "data"
    assert bad.advice.startswith("Normalise the data, or leave out the cast at test_")


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_became_inf_in_a_conversion() -> None:
    """Law: the rule that is advised keeps such a weight, and the step is finite."""
    for rule in ("", "module:1=fp32"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Softmax(-1))
        with torch.no_grad():
            model[1].weight[0, 0] = 1e5
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = "lean" + f" + {rule}" * bool(rule)
        # Without it such a weight is rejected at once.
        with convert_model.allow_overflow():
            session = hs.prepare(model, optimizer, "O2", dtype="fp16", policy=policy)

        def step(session: hs.Session = session) -> Tensor:
            with session.autocast():
                out: Tensor = session.model(torch.ones(4, 8))
                return out.float().square().mean()

        bad = hs.find_nonfinite(session.model, step)
        if rule:
            assert not bad
        else:
            assert bad
            assert (bad.cause, bad.rule) == ("weight", "module:1=fp32")
            assert "cast to float16 makes that" in bad.advice


def test_a_weight_of_nan_is_no_conversion() -> None:
    """Law: a cast makes no NaN, so that one is the checkpoint's."""
    model = nn.Linear(4, 4).half()
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    bad = required(
        hs.find_nonfinite(model, lambda: model(torch.ones(2, 4).half()).float().mean())
    )
    assert (bad.cause, bad.rule) == ("weight", "")
    assert bad.advice.startswith("Go back to the last good checkpoint")

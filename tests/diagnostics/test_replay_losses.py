"""First bad operation: what is a loss function, told by where it stands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.nonfinite.origin import BadOp

X = torch.ones(4, 8)


class PathLoss(nn.Module):
    """What radio waves lose on their way: a layer like another."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape, too large for fp16."""
        return (x.half() * 0 + 300) * 300


class Level(nn.Module):
    """One number for a whole batch, which layers then use."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what fp16 does not hold."""
        return ((x.half() * 0 + 300) * 300).mean()


class Objective(nn.Module):
    """A loss that is not called so, with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = PathLoss()

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for the batch."""
        return self.first(x).sum()  # type: ignore[no-any-return]


class BalanceLoss(Level):
    """A loss on the way, as experts have it."""


class Squares(nn.MSELoss):
    """Torch's own, for each row."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        """Return a number for each place."""
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
        """Return what comes of it."""
        hidden = self.inner(x)
        given = (hidden, X) if isinstance(self.middle, nn.MSELoss) else (hidden,)
        made: Tensor = self.middle(*given)
        if hasattr(self, "outer"):
            return self.outer(hidden * made)  # type: ignore[no-any-return]
        return made


class TrainingLoss(Model):
    """A model with a name that says something else."""


def told(model: nn.Module) -> BadOp:
    """Return what is said of a model."""

    def step() -> Tensor:
        with hs.autocast("cpu", torch.float16):
            return model(X).float().mean()  # type: ignore[no-any-return]

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
            return BalanceLoss()(self.inner(x))  # type: ignore[no-any-return]

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
            return self.end(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 1e9).sum() * 1e-9 * 1e9

    bad = told(Recomputed())
    assert (bad.module, bad.cause, bad.phase) == ("end", "loss function", "backward")


def probability(out: Tensor) -> Tensor:
    """Return a loss whose targets are not probabilities."""
    return functional.binary_cross_entropy(out.sigmoid(), torch.full_like(out, 2.0))


def refused(out: Tensor) -> Tensor:
    """Return a loss that raises for NaN, which a logarithm made."""
    odd = torch.log(out * 0 - 1)
    return functional.binary_cross_entropy(torch.sigmoid(odd), out * 0)


def too_long(out: Tensor) -> Tensor:
    """Return a loss whose target no path leads to."""
    logs = out[:3, None].log_softmax(-1)
    return functional.ctc_loss(logs, torch.tensor([[1, 1, 2, 2]]), (3,), (4,))


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
        (too_long, "ctc_loss", "label", "too short for its target"),
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
    assert (bad is None) == unscaled
    if bad is not None:
        assert bad.cause == "loss function"
        assert "of a loss times its scale 4096 are part" in bad.evidence
        assert "grads / scaler.get_scale()" in bad.advice

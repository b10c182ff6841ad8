"""First bad operation: what is a loss function, told by where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

if TYPE_CHECKING:
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

    bad = hs.find_nonfinite(model, step)
    assert bad is not None
    return bad


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


def test_the_models_own_pass_is_no_loss() -> None:
    """Law: the class name of the whole model tells nothing of the operations in it."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner((x.half() * 300) * 300)  # type: ignore[no-any-return]

    assert told(WithLoss()).cause == "forward range"


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


def test_a_masked_class_is_told_in_the_loss_too() -> None:
    """Law: a mask that takes a target's class is the label's fault, wherever it is."""
    model, x, y = nn.Linear(4, 3), torch.ones(2, 4), torch.tensor([0, 1])
    gone = torch.tensor([True, False, False])

    def step() -> Tensor:
        logits = model(x).masked_fill(gone, float("-inf"))
        return nn.functional.cross_entropy(logits, y)

    bad = hs.find_nonfinite(model, step)
    assert bad is not None
    assert (bad.module, bad.op, bad.cause) == ("loss", "masked_fill", "label")
    assert "a target names a masked class" in bad.evidence

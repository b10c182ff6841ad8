"""First bad operation: what cannot be run again is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs

MODEL = nn.Linear(2, 2)
X = torch.ones(3, 2)


def shape() -> Any:
    """Return what a model gives, and no loss."""
    return MODEL(X)


def nothing() -> Any:
    """Forget to return the loss."""
    MODEL(X).sum()


def with_backward() -> Any:
    """Return a loss whose backward pass has run."""
    loss = MODEL(X).square().sum()
    loss.backward()
    return loss


CALLED = "it must be a function that computes the loss"
RETURNED = "return the loss, one floating-point number, such as loss_fn"


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (None, f"step is of type NoneType; {CALLED}"),
        (MODEL(X).sum(), f"step is of type Tensor; {CALLED}"),
        ([], f"step is of type list; {CALLED}"),
        ([shape, "loss"], f"step is of type str; {CALLED}"),
        (with_backward, "step ran the backward pass itself, which find_nonfinite does"),
        (nothing, f"step 'nothing' returned a NoneType: {RETURNED}"),
        (
            shape,
            rf"'shape' .* a tensor of shape \(3, 2\) and torch.float32: {RETURNED}",
        ),
        (lambda: X.sum().long(), rf"shape \(\) and torch.int64: {RETURNED}"),
        (
            [lambda: MODEL(X).sum(), nothing],
            f"'nothing' returned a NoneType: {RETURNED}",
        ),
    ],
)
def test_a_bad_step_is_refused(step: Any, says: str) -> None:
    """Law: the message holds the value, and what would be right."""
    with pytest.raises(hs.UserError, match=says) as caught:
        hs.find_nonfinite(MODEL, step)
    assert len(str(caught.value).split()) <= 35


def test_a_model_that_is_none_is_refused() -> None:
    """Law: the message says what was given in the model's place."""
    with pytest.raises(hs.UserError, match=r"^model is of type function; it must"):
        hs.find_nonfinite(shape, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LazyLinear, lambda _: nn.LazyBatchNorm1d()])
def test_a_model_without_shapes_is_refused(kind: Any) -> None:
    """Law: a lazy module that has not run is named, with what to do."""
    model = nn.Sequential(MODEL, kind(2))
    with pytest.raises(
        hs.UserError, match=r"'1.weight' of the model .* call the model once"
    ):
        hs.find_nonfinite(model, lambda: model(X).sum())
    model(X)
    assert hs.find_nonfinite(model, lambda: model(X).sum()) is None


def test_one_number_of_any_shape_is_a_loss() -> None:
    """Law: torch's own backward pass takes it, and so does a replay."""
    assert hs.find_nonfinite(MODEL, lambda: MODEL(X).sum()[None]) is None


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("summed_in", torch.int32, "a floating dtype"),
        ("summed_in", "fp32", "a floating dtype"),
        ("scale", 0.0, "a finite number above 0"),
        ("scale", float("nan"), "a finite number above 0"),
        ("scale", "big", "a finite number above 0"),
    ],
)
def test_an_odd_argument_is_refused(name: str, value: Any, right: str) -> None:
    """Law: what would find nothing, or find a fault of its own, is refused."""
    step = [lambda: MODEL(X).sum()] * 2
    with pytest.raises(hs.UserError, match=f"{name}={value!r} .* {right}") as caught:
        hs.find_nonfinite(MODEL, step, **{name: value})
    assert len(str(caught.value).split()) <= 35


def test_a_loss_without_a_graph() -> None:
    """Law: a finite loss whose gradients cannot be looked at is refused, not cleared.

    Nor is its failure laid to the hardware. A fault of the forward pass is told.
    """

    def evaluated() -> torch.Tensor:
        with torch.no_grad():
            return MODEL(X).sum()

    says = "'.*evaluated' returned a loss without a graph"
    for failed in (False, True):
        with pytest.raises(hs.UserError, match=says) as caught:
            hs.find_nonfinite(MODEL, evaluated, failed=failed)
        assert len(str(caught.value).split()) <= 35
    with torch.no_grad():
        bad = hs.find_nonfinite(MODEL, lambda: MODEL(X).log().sum().sqrt() * 0 / 0)
    assert bad is not None


def test_inference_mode_is_left() -> None:
    """Law: inside torch.inference_mode, gradients are looked at all the same."""

    def step() -> torch.Tensor:
        return (MODEL(X) * 0).sqrt().sum()

    with torch.inference_mode():
        bad = hs.find_nonfinite(MODEL, step)
    assert bad is not None
    assert (bad.op, bad.phase) == ("sqrt", "backward")

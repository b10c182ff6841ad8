"""Passes of a copy: the same again and again, and known in full."""

from __future__ import annotations

import math

import pytest
import torch
from checked_nets import Net, batch, loss
from torch import nn
from torch.nn.utils import parametrizations

from halfstep._torch.rng_state import RandomState
from halfstep.diagnostics.preflight.model_copy import ModelCopy
from halfstep.machine.recommendation import resolve
from halfstep.numerics.exponents import count_exponents
from halfstep.policy import LEAN


def twin(level: str, dtype: str) -> ModelCopy:
    """Return a copy with dropout, batch statistics and a power iteration."""
    model = Net()
    parametrizations.spectral_norm(model.head)
    choice = resolve(level, dtype, "cpu")
    return ModelCopy(model, None, choice, LEAN, "fp32", RandomState([]))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_passes_are_repeatable(level: str) -> None:
    """Law: masks, buffers and gradients of a pass are those of the pass before."""
    one = twin(level, "fp32" if level == "O0" else "fp16")
    first, again = (one.run(loss, batch(), 2.0**8) for _ in range(2))
    assert first.loss == again.loss
    assert first.gradients.keys() == again.gradients.keys()
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, again.gradients[name]), name
    assert torch.equal(first.histogram, again.histogram)
    assert first.saved_bytes == again.saved_bytes > 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scales_leave_gradients_alone(level: str) -> None:
    """Law: gradients and exponents are unscaled, in fp32; inf is seen and named."""
    one = twin(level, "fp16")
    low, high = (one.run(loss, batch(), 2.0**power) for power in (6, 10))
    assert low.finite
    assert high.finite
    for name, gradient in low.gradients.items():
        assert gradient.dtype == torch.float32
        wide = high.gradients[name]
        # What is subnormal at the lower scale has fewer bits.
        torch.testing.assert_close(gradient, wide, rtol=2**-9, atol=2.0**-29)
    tops = [int(each.histogram[1:-1].nonzero().max()) for each in (low, high)]
    assert tops[0] == tops[1]
    broken = one.run(loss, batch(), 2.0**30)
    assert not broken.finite
    assert not broken.gradients_finite
    assert broken.histogram[-1] > 0
    assert math.isfinite(broken.loss)


def test_what_is_counted() -> None:
    """Law: of a product and a mean, its gradients are counted, each where it comes."""
    model = nn.Linear(4, 2, bias=False)
    choice = resolve("O0", "fp32", "cpu")
    one = ModelCopy(model, None, choice, LEAN, "fp32", RandomState([]))
    x = torch.full((2, 4), 3.0)
    seen = one.run(lambda m, b: m(b).mean(), x, probed=True)
    output = torch.full((2, 2), 0.25)
    weight = output.T @ x
    # The weight's gradient comes to the product's transpose, and is kept.
    expected = count_exponents(
        torch.cat([output.flatten(), weight.flatten(), weight.flatten()])
    )
    assert torch.equal(seen.histogram, expected)
    assert seen.peaks["model:grad"] == 0.25
    # The product keeps its input; the weight is not counted.
    assert seen.saved_bytes == x.nbytes

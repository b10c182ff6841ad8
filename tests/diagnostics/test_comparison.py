"""Gradients beside gradients, at the edges; test_preflight has numpy beside them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from halfstep.diagnostics.preflight.comparison import (
    GradientSimilarity,
    compare_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor


def owner(name: str) -> str:
    """Return the part before the last dot."""
    return name.rpartition(".")[0]


def only(x: list[float] | None, q: list[float] | None) -> GradientSimilarity:
    """Compare one gradient with another, either of which may be missing."""

    def named(values: list[float] | None) -> dict[str, Tensor]:
        return {} if values is None else {"a.w": torch.tensor(values)}

    whole, layers = compare_gradients(named(x), named(q), owner)
    assert (layers[0].cosine, layers[0].sqnr) == pytest.approx(
        (whole.cosine, whole.sqnr), nan_ok=True
    )
    return whole


def test_edges() -> None:
    """Law: zeros equal zeros; what is missing is zero; inf and NaN make NaN."""
    assert (only([0.0], [0.0]).cosine, only([0.0], [0.0]).sqnr) == (1.0, math.inf)
    assert (only([2.0], [0.0]).cosine, only([2.0], [0.0]).sqnr) == (0.0, 0.0)
    assert (only([0.0], [2.0]).cosine, only([0.0], [2.0]).sqnr) == (0.0, -math.inf)
    assert only([2.0, 0.0], None).flushed == 1.0
    assert only(None, [2.0]).cosine == 0.0
    assert math.isnan(only([1.0], [math.inf]).cosine)
    assert math.isnan(only([1.0, 1.0], [math.nan, 1.0]).sqnr)
    assert compare_gradients({}, {}, owner)[0].cosine == 1.0

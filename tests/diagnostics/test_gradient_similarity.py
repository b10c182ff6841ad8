"""Gradients beside gradients, against numpy in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.diagnostics.preflight.gradient_similarity import (
    GradientSimilarity,
    compare,
)

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = st.floats(-1e4, 1e4, width=16)


def twin(x: np.ndarray, q: np.ndarray) -> tuple[float, float, float]:
    """Return cosine, SQNR and the share lost, the slow way."""
    cosine = np.dot(x, q) / np.linalg.norm(x) / np.linalg.norm(q)
    noise = np.sum((x - q) ** 2)
    sqnr = 10 * np.log10(np.sum(x**2) / noise) if noise else math.inf
    return cosine, sqnr, np.mean(q[x != 0] == 0)


def owner(name: str) -> str:
    """Return the part before the last dot."""
    return name.rpartition(".")[0]


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=2, max_size=30))
def test_like_numpy(pairs: list[tuple[float, float]]) -> None:
    """Law: cosine, SQNR and share lost are numpy's in float64, whole and by group."""
    x, q = (np.array(side) for side in zip(*pairs, strict=True))
    if not x.any() or not q.any():
        return
    cut = len(x) // 2
    one = {"a.w": torch.tensor(x[:cut]), "a.b": torch.tensor(x[cut:])}
    two = {"a.w": torch.tensor(q[:cut]), "a.b": torch.tensor(q[cut:])}
    whole, layers = compare(one, two, owner)
    cosine, sqnr, lost = twin(x, q)
    assert whole.cosine == pytest.approx(cosine, abs=1e-12)
    assert whole.sqnr == pytest.approx(sqnr, abs=1e-9)
    assert whole.flushed == pytest.approx(lost)
    assert whole.norm == pytest.approx(np.linalg.norm(x))
    assert [one.where for one in layers] == ["a"]
    assert layers[0].cosine == whole.cosine
    assert layers[0].numbers == len(x)


def only(x: list[float] | None, q: list[float] | None) -> GradientSimilarity:
    """Compare one gradient with another, either of which may be missing."""

    def named(values: list[float] | None) -> dict[str, Tensor]:
        return {} if values is None else {"a.w": torch.tensor(values)}

    whole, layers = compare(named(x), named(q), owner)
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
    assert compare({}, {}, owner)[0].cosine == 1.0

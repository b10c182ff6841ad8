"""Halves of a batch, for the noise of gradients."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from halfstep.diagnostics.preflight.scale_search import halves
from halfstep.numerics.formats import tensors_in

X, Y = torch.arange(10.0).view(5, 2), torch.arange(5)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Batch:
    x: Any
    y: Any


MAKERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, {"y": y}],
    "named": Pair,
    "dataclass": Batch,
    "mapping": lambda x, y: OrderedDict(x=x, y=y, name="text", scale=3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_halves(kind: str) -> None:
    """Law: both halves have the batch's type and as many examples; it stays whole."""
    batch = MAKERS[kind](X, Y)
    cut = halves(batch)
    assert cut is not None
    for part, rows in zip(cut, (slice(0, 2), slice(2, 4)), strict=True):
        assert type(part) is type(batch)
        x, y = tensors_in(part)
        assert torch.equal(x, X[rows])
        assert torch.equal(y, Y[rows])
    assert all(a is b for a, b in zip(tensors_in(batch), (X, Y), strict=True))


def test_what_has_no_examples_goes_into_both() -> None:
    """Law: tensors of another length, and numbers, are not cut."""
    table, scale = torch.ones(3, 2), torch.tensor(2.0)
    cut = halves((X, Y, table, scale, 7))
    assert cut is not None
    for part in cut:
        assert part[2] is table
        assert part[3] is scale
        assert part[4] == 7


@pytest.mark.parametrize("batch", [7, (), torch.tensor(1.0), torch.ones(1, 4)])
def test_nothing_to_halve(batch: Any) -> None:
    """Law: without two examples there are no halves."""
    assert halves(batch) is None

"""Grids of parameters of which a part is tried each time, and the rest on demand."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def thinned(
    rows: Mapping[str, tuple[Any, ...]],
    columns: Mapping[str, tuple[Any, ...]],
    every: int,
) -> list[ParameterSet]:
    """Return each row with each column; all but one in `every` of each are slow.

    Those left are diagonals, so each row and each column is among them.

    Args:
        rows: Name -> values.
        columns: Likewise; at least `every`.
        every: Of so many columns a row is tried with one, and the other way round.
    """
    assert every <= min(len(rows), len(columns))
    pairs = product(enumerate(rows.items()), enumerate(columns.items()))
    return [
        pytest.param(
            *row,
            *column,
            id=f"{one}-{other}",
            marks=() if (i - j) % every == 0 else pytest.mark.slow,
        )
        for (i, (one, row)), (j, (other, column)) in pairs
    ]

"""Rows of settings in which each two values of two settings meet.

In: the values of each setting, and which go together. Out: few rows with all pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering_rows(
    choices: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]
) -> list[Row]:
    """Return rows that hold each pair of values which is allowed, by a greedy search.

    Args:
        choices: The values of each setting.
        allowed: Whether the settings of a row, or of a part of one, go together.

    Raises:
        ValueError: If a pair is allowed and no whole row with it is.
    """
    pairs = [
        dict(zip(names, values, strict=True))
        for names in combinations(choices, 2)
        for values in product(*(choices[name] for name in names))
    ]
    missing = [pair for pair in pairs if allowed(pair)]
    rows: list[Row] = []
    while missing:
        row = dict(missing[0])
        for name, values in choices.items():
            if name in row:
                continue
            fitting = [value for value in values if allowed(row | {name: value})]
            if not fitting:
                raise ValueError(f"no value of {name} goes with {row}")
            longer = [(row | {name: value}).items() for value in fitting]
            # What meets for the first time, by value.
            gains = [sum(p.items() <= each for p in missing) for each in longer]
            row[name] = fitting[gains.index(max(gains))]
        rows.append({name: row[name] for name in choices})
        missing = [pair for pair in missing if not pair.items() <= row.items()]
    return rows

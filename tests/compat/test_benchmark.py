"""The script that times the adapters, at a size at which nothing is fast."""

from __future__ import annotations

import pytest
from benchmarks import adapters


@pytest.mark.parametrize("library", adapters.RUNS)
@pytest.mark.parametrize("ours", [False, True])
def test_steps_of_each_library_are_timed(library: str, ours: bool) -> None:
    """Law: each library trains, alone and with halfstep, and its steps are timed."""
    answer = adapters.worker(library, ours, "O2", width=4, batch=2, steps=2)
    assert 0 < answer(None)["seconds"] < 60


def test_row_compares_within_a_round() -> None:
    """Law: a row holds both medians, and the median of the ratios of each round."""
    seconds = {("Accelerate", False): [0.1, 0.2, 0.4]}
    seconds["Accelerate", True] = [0.1, 0.1, 0.1]
    assert adapters.row("Accelerate", seconds) == (
        "| Accelerate | 200.0 | 100.0 | 0.50 | 0.19 |"
    )

"""The script that times the adapters, at a size at which nothing is fast."""

import pytest
from benchmarks import adapters


@pytest.mark.parametrize("library", adapters.RUNS)
def test_steps_of_each_library_are_timed(library: str) -> None:
    """Law: each library trains, alone and with halfstep, and its steps are timed."""
    for ours in (False, True):
        answer = adapters.worker(library, ours, "O2", width=4, batch=1, steps=1)
        assert 0 < answer(None)["seconds"] < 60


def test_row_compares_within_a_round() -> None:
    """Law: a row holds both medians, and the median of the ratios of each round."""
    seconds = {("Accelerate", False): [0.1, 0.2, 0.4]}
    seconds["Accelerate", True] = [0.1, 0.1, 0.1]
    assert adapters.row("Accelerate", seconds) == (
        "| Accelerate | 200.0 | 100.0 | 0.50 | 0.19 |"
    )

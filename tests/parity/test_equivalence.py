"""The verdict of an equivalence test, and the seeds that it asks for."""

import math
import random

import pytest
from scipy import stats

from halfstep.parity.equivalence import (
    equivalence_test,
    mean_interval,
    seeds_needed,
)


def test_interval_is_scipys() -> None:
    """Law: the ends are scipy's; one value has no spread, and none has no mean."""
    assert mean_interval([0.5], 0.975) == (0.5, None)
    assert mean_interval([], 0.975) == (None, None)
    values = [3.0, -1.0, 0.5, 8.0]
    mean, half = mean_interval(values, 0.975)
    ends = stats.t.interval(0.95, len(values) - 1, mean, stats.sem(values))
    assert (mean, half) == (2.625, pytest.approx(ends[1] - 2.625, rel=1e-12))


@pytest.mark.parametrize("shift", [-0.03, -0.011, 0.0, 0.004, 0.02])
def test_equivalent_is_two_one_sided_tests(shift: float) -> None:
    """Law: "equivalent" is what scipy's two one-sided paired t tests at 5 % say."""
    draw, margin = random.Random(0), 0.01  # noqa: S311 -- no secret
    for spread in (1e-4, 1e-3, 5e-3, 2e-2):
        values = [draw.gauss(shift, spread) for _ in range(5)]
        tests = (
            stats.ttest_1samp(values, -margin, alternative="greater"),
            stats.ttest_1samp(values, margin, alternative="less"),
        )
        expected = all(bool(test.pvalue < 0.05) for test in tests)
        assert (equivalence_test(values, margin).kind == "equivalent") is expected


def test_no_difference_is_not_equivalence() -> None:
    """Law: two seeds that differ widely say nothing, though their mean is 0."""
    verdict = equivalence_test([-0.1, 0.1], margin=0.01)
    assert verdict.kind == "unknown"
    assert str(verdict) == (
        "cannot tell (90 % CI -0.631 to 0.631): needs more than 1000 seeds"
    )


@pytest.mark.parametrize(
    ("lower_is_better", "words"),
    [
        (False, "better by 0.05 (90 % CI 0.0331 to 0.0669)"),
        (True, "worse by 0.05 (90 % CI 0.0331 to 0.0669)"),
    ],
)
def test_direction(lower_is_better: bool, words: str) -> None:
    """Law: more of a loss is worse, more of anything else is better."""
    verdict = equivalence_test(
        [0.05, 0.06, 0.04], 0.01, lower_is_better=lower_is_better
    )
    assert str(verdict) == words


def test_worse_below_the_margin() -> None:
    """Law: a difference below the margin that may exceed it does not pass, and why."""
    assert str(equivalence_test([-0.006, -0.010, -0.008], 0.01)) == (
        "worse by 0.008, perhaps by more than 0.01 (90 % CI -0.0114 to -0.00463)"
    )


def test_diverged_runs_are_worse() -> None:
    """Law: a run that diverged makes a level worse, however close the others are."""
    assert (
        str(equivalence_test([0.0, 0.0], 0.01, num_diverged=1))
        == "worse: 1 run diverged"
    )
    assert equivalence_test([], 0.01, num_diverged=2).kind == "worse"
    assert str(equivalence_test([], 0.01)) == "no verdict: fp32 diverged"
    assert (
        str(equivalence_test([0.0], 0.01))
        == "no verdict: fewer than 2 pairs of runs ended"
    )


def test_needed_seeds_suffice() -> None:
    """Law: the seeds asked for decide most repetitions, a third of them few."""
    draw, spread, margin = random.Random(1), 0.01, 0.01  # noqa: S311 -- no secret
    count = seeds_needed(0.0, spread, margin)
    assert count == 13  # 2 * t(0.95, 12) * 0.01 / sqrt(13) = 0.0099

    def decided(size: int) -> float:
        samples = ([draw.gauss(0, spread) for _ in range(size)] for _ in range(200))
        kinds = [equivalence_test(sample, margin).kind for sample in samples]
        return kinds.count("equivalent") / len(kinds)

    assert decided(count) > 0.9
    assert decided(count // 3) < 0.5
    assert seeds_needed(0.0, 1.0, margin) is None
    assert seeds_needed(margin / 2, 0.0, margin) == 2


def test_rate_of_false_equivalence() -> None:
    """Law: of levels that are worse by just the margin, at most 5 % pass."""
    draw = random.Random(2)  # noqa: S311 -- no secret
    samples = ([draw.gauss(-0.01, 0.004) for _ in range(5)] for _ in range(2000))
    passed = sum(
        equivalence_test(sample, 0.01).kind == "equivalent" for sample in samples
    )
    assert passed / 2000 == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 2000))

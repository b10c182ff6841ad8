"""Tests whether paired results are equivalent: TOST, and the seeds that it needs."""

from __future__ import annotations

import bisect
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.reporting.table import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95
"""Of each of the two one-sided tests; so the interval has 90 %."""
FEWEST_PAIRS = 2
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Verdict:
    """Whether a level is as good as fp32, and the numbers behind it."""

    kind: str
    """"equivalent", "worse", "better", or "unknown" if the seeds do not suffice."""
    margin: float
    """Largest difference that counts as none, > 0."""
    difference: float | None = None
    """Mean over seeds of the level's metric minus fp32's; None without a pair."""
    half_width: float | None = None
    """Half of Student's 90 % interval of the difference; None below two pairs."""
    seeds_needed: int | None = None
    """Seeds that are likely to suffice, if `kind` is "unknown"; None: over 1000."""
    num_diverged: int = 0
    """Runs of the level that diverged where fp32 did not."""

    def __str__(self) -> str:
        """Return the verdict in words."""
        if self.num_diverged:
            return f"worse: {format_count(self.num_diverged, 'run')} diverged"
        if self.difference is None or self.half_width is None:
            has_pair = self.difference is not None
            reason = "fewer than 2 pairs of runs ended" if has_pair else "fp32 diverged"
            return f"no verdict: {reason}"
        if self.kind == "equivalent":
            return f"equivalent within {self.margin:.3g}"
        if not self.half_width and self.kind == "unknown":
            return "no verdict: the metric is the same in all runs"
        low, high = (self.difference + s * self.half_width for s in (-1, 1))
        interval = f"90 % CI {low:.3g} to {high:.3g}"
        if self.kind == "unknown":
            number = f"more than {_MOST_SEEDS}"
            number = f"about {self.seeds_needed}" if self.seeds_needed else number
            return f"cannot tell ({interval}): needs {number} seeds"
        size = abs(self.difference)
        above = f", perhaps by more than {self.margin:.3g}"
        return f"{self.kind} by {size:.3g}{above * (size < self.margin)} ({interval})"


def equivalence_test(
    differences: Sequence[float],
    margin: float,
    *,
    lower_is_better: bool = False,
    num_diverged: int = 0,
) -> Verdict:
    """Return the verdict on a level from its differences to fp32, one for each seed.

    Two one-sided t tests (TOST) at 5 %: equivalent if the 90 % interval of the mean
    difference lies within the margin. Not "no significant difference": that is also
    what too few seeds show. Otherwise worse or better if the interval excludes 0.

    Args:
        differences: Metric of the level minus metric of fp32, same seed; finite.
        margin: > 0.
        lower_is_better: Whether the metric is a loss.
        num_diverged: Runs that diverged where fp32 did not: one makes a level worse.

    Example:
        >>> print(equivalence_test([0.001, -0.002, 0.0], margin=0.01))
        equivalent within 0.01
        >>> print(equivalence_test([-0.05, -0.06, -0.04], margin=0.01))
        worse by 0.05 (90 % CI -0.0669 to -0.0331)
        >>> print(equivalence_test([0.02, -0.02, 0.01], margin=0.01))
        cannot tell (90 % CI -0.0318 to 0.0384): needs about 108 seeds
    """
    mean, half = mean_interval(differences, CONFIDENCE)
    if mean is None or half is None:
        kind = "worse" if num_diverged else "unknown"
        return Verdict(kind, margin, mean, num_diverged=num_diverged)
    needed = None
    if num_diverged:
        kind = "worse"
    elif abs(mean) + half < margin:
        kind = "equivalent"
    elif abs(mean) > half:
        kind = "better" if (mean < 0) == lower_is_better else "worse"
    else:
        std = statistics.stdev(differences)
        kind, needed = "unknown", seeds_needed(mean, std, margin)
    return Verdict(kind, margin, mean, half, needed, num_diverged)


def mean_interval(
    values: Sequence[float], probability: float
) -> tuple[float | None, float | None]:
    """Return the mean of independent values, and half of its interval by Student's t.

    `probability` is that of either side: 0.975 for an interval of 95 %. The interval is
    None for fewer than two values, the mean for none.
    """
    if not values:
        return None, None
    mean, pairs = statistics.fmean(values), len(values)
    if pairs < FEWEST_PAIRS:
        return mean, None
    std = statistics.stdev(values)
    return mean, t_quantile(probability, pairs - 1) * std / math.sqrt(pairs)


def seeds_needed(mean: float, std: float, margin: float) -> int | None:
    """Return the number of seeds with which a verdict is likely, 95 % or so.

    If the true difference is `mean`, it must be told from the margin, or from 0 if that
    is farther away. `std` is the standard deviation of the differences. None: more
    than 1000 seeds.
    """
    distance = max(margin - abs(mean), abs(mean))

    def suffices(pairs: int) -> bool:
        half = t_quantile(CONFIDENCE, pairs - 1) * std / math.sqrt(pairs)
        return 2 * half <= distance

    counts = range(FEWEST_PAIRS, _MOST_SEEDS + 1)
    index = bisect.bisect_left(counts, True, key=suffices)  # noqa: FBT003
    return counts[index] if index < len(counts) else None


def t_quantile(probability: float, freedom: int) -> float:
    """Return the value that Student's t does not exceed with a probability.

    Raises:
        UserError: scipy is not installed.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise UserError(
            "compare needs scipy: pip install 'halfstep[train]', or pip install scipy."
        ) from error
    return float(stats.t.ppf(probability, freedom))

"""How well predictions agree with the truth, whatever the task.

In: scores that have been computed. Out: the same as a table to read and as data
for `summary.json`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Counts = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True)
class EvalMetrics:
    """The metrics of one split."""

    loss: float
    """Mean cross-entropy in nats."""
    scores: Mapping[str, float]
    """Name to value, the greater the better, in the order to show."""
    per_class: tuple[tuple[str, float, float, float, int], ...]
    """(label or kind of entity, precision, recall, F1, how many are true)."""
    confusion: Table | None = None
    """Counts: the first column names the truth, the others are guesses."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """Label or kind of entity -> how often it is guessed."""

    def table(self, title: str) -> Table:
        """Return what was found of each label as a table; averages come last."""
        rows: tuple[tuple[Cell, ...], ...] = self.per_class
        if self.per_class:
            support = sum(row[-1] for row in self.per_class)
            rows = (
                *rows,
                ("macro average", *self._macro(), support),
                ("weighted average", *self.weighted(), support),
            )
        columns = ("label", "precision", "recall", "F1", "support")
        scores = {**self.scores, "loss": self.loss}
        words = (f"{score_title(name)} {value:.4f}" for name, value in scores.items())
        return Table(title, columns, rows, (", ".join(words),))

    def classes(self) -> dict[str, dict[str, int]]:
        """Return of each label how often it is there, and how often it is guessed."""
        return {
            label: {"true": true, "predicted": self.predicted.get(label, 0)}
            for label, *_, true in self.per_class
        }

    def _macro(self) -> tuple[float, ...]:
        _, *shares, _ = zip(*self.per_class, strict=True)
        return tuple(map(statistics.fmean, shares))

    def weighted(self) -> tuple[float, ...]:
        """Return precision, recall and F1, each label weighted by how many are true.

        Where none is true at all, all weigh the same.
        """
        _, *shares, support = zip(*self.per_class, strict=True)
        weights = support if any(support) else [1] * len(support)
        return tuple(statistics.fmean(share, weights) for share in shares)

    def data(self) -> dict[str, object]:
        """Return all but the confusion, for `json.dumps`; scores by their names."""
        return {
            "loss": self.loss,
            **self.scores,
            "weighted_average": list(self.weighted()) if self.per_class else None,
            "per_class": [list(row) for row in self.per_class],
        }


def score_title(score: str) -> str:
    """Return the name of a score as people write it: `macro_f1` is "macro F1"."""
    words = score.split("_")
    return " ".join({"f1": "F1", "mcc": "MCC"}.get(word, word) for word in words)


def unique_name(name: str, names: tuple[str, ...]) -> str:
    """Return a name that none of `names` is, with a prime for each that was.

    Why: columns of a table differ, and a label may be any word.
    """
    while name in names:
        name += "'"
    return name


def most_confused(
    counts: Counts, names: tuple[str, ...], limit: int
) -> tuple[Counts, tuple[str, ...]]:
    """Return a confusion with a row less than `limit` and one for all the others.

    Why: a table of a hundred labels is not read, and the mistakes stand in few.

    Args:
        counts: Shape (R, R): truth by guess. Rows and columns beyond those of the names
            stand for nothing at all, and stay as they are.
        names: Of the first rows, more than `limit`.
        limit: How many rows the names may have, 2 or more.

    Returns:
        The counts, those of the names with the most mistakes first, in their order;
        the names of these, and one for the others.
    """
    wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    selected = np.sort(np.argsort(-wrong[: len(names)], kind="stable")[: limit - 1])
    beyond = len(counts) - len(names)
    position = np.full(len(counts), len(selected))
    position[selected] = range(len(selected))
    position[len(names) :] = range(limit, limit + beyond)
    merged = np.zeros((limit + beyond,) * 2, counts.dtype)
    np.add.at(merged, (position[:, None], position[None, :]), counts)
    named = tuple(names[i] for i in selected)
    return merged, (*named, unique_name("others", named))

"""Metrics of predictions, whatever the task."""

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


_MAX_CHARACTERS = 200  # of a text in a table of mistakes
_BEFORE = 40  # of them before the first mistake


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
            _, *shares, counts = zip(*self.per_class, strict=True)
            support = sum(counts)
            rows = (
                *rows,
                ("macro average", *map(statistics.fmean, shares), support),
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


def shares(correct: int, predicted: int, true: int) -> tuple[float, float, float, int]:
    """Return precision, recall, F1 and how many are true; a share of nothing is 0."""
    precision, recall = correct / (predicted or 1), correct / (true or 1)
    f1 = 2 * (precision * recall) / (precision + recall) if correct else 0.0
    return precision, recall, f1, true


def excerpt(text: str, place: int = 0) -> str:
    """Return a text, or the part of a long one that begins a little before a place."""
    begin = max(0, min(place - _BEFORE, len(text) - _MAX_CHARACTERS))
    end = begin + _MAX_CHARACTERS
    before, after = "..." if begin else "", "..." if end < len(text) else ""
    return f"{before}{text[begin:end]}{after}"


def unique_name(name: str, names: tuple[str, ...]) -> str:
    """Return a name that none of `names` is, with a prime for each that was.

    Why: columns of a table differ, and a label may be any word.
    """
    while name in names:
        name += "'"
    return name


def confusion_table(
    counts: Counts, names: tuple[str, ...], limit: int, *, notes: tuple[str, ...] = ()
) -> Table:
    """Return a confusion as a table; of many names those with the most errors.

    Why: a table of a hundred labels is not read, and the errors are in few of them.

    Args:
        counts: Truth by prediction, shape (R, R) for R names. With one row and one
            column more, these are for predictions without a true entity, and for
            entities without a prediction.
        names: Of labels or entity types.
        limit: How many rows the names may have, 2 or more; one is for all the others.
        notes: What else is to be said below the table.
    """
    beyond = len(counts) - len(names)
    if len(names) > limit:
        wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        worst = np.argsort(-wrong[: len(names)], kind="stable")[: limit - 1]
        position = np.full(len(counts), limit - 1)
        position[np.sort(worst)] = range(limit - 1)
        position[len(names) :] = range(limit, limit + beyond)
        merged = np.zeros((limit + beyond,) * 2, counts.dtype)
        np.add.at(merged, (position[:, None], position[None, :]), counts)
        rest = len(names) - limit + 1
        note = f"The {limit - 1} with the most mistakes, and the other {rest} as one."
        notes = (*notes, note)
        named = tuple(names[i] for i in np.sort(worst))
        counts, names = merged, (*named, unique_name("others", named))
    cells: list[list[Cell]] = [list(row) for row in counts.tolist()]
    rows = columns = names
    if beyond:
        rows = (*names, unique_name("not there", names))
        columns = (*names, unique_name("missed", names))
        cells[-1][-1] = None
    return Table(
        "Confusion",
        (unique_name("truth", columns), *columns),
        tuple((name, *row) for name, row in zip(rows, cells, strict=True)),
        notes,
    )

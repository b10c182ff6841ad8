"""Evaluation metrics as tables and JSON, for any task."""

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
_BEFORE = 40  # context shown before the first mistake


@dataclass(frozen=True)
class EvalMetrics:
    """The metrics of one split."""

    loss: float
    """Mean cross-entropy in nats."""
    scores: Mapping[str, float]
    """Name -> value, higher is better, in display order."""
    per_class: tuple[tuple[str, float, float, float, int], ...]
    """(label or entity type, precision, recall, F1, number of true ones)."""
    confusion: Table | None = None
    """Counts: rows are true, columns are predicted."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """Label or entity type -> number of predictions."""

    def table(self, title: str) -> Table:
        """Return the metrics of each label as a table; averages come last."""
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
        """Return how often each label is true and how often it is predicted."""
        return {
            label: {"true": true, "predicted": self.predicted.get(label, 0)}
            for label, *_, true in self.per_class
        }

    def weighted(self) -> tuple[float, ...]:
        """Return precision, recall and F1, weighted by each label's true count.

        Unweighted if all true counts are 0.
        """
        _, *shares, support = zip(*self.per_class, strict=True)
        weights = support if any(support) else [1] * len(support)
        return tuple(statistics.fmean(share, weights) for share in shares)

    def data(self) -> dict[str, object]:
        """Return the metrics without the confusion matrix, for `json.dumps`."""
        return {
            "loss": self.loss,
            **self.scores,
            "weighted_average": list(self.weighted()) if self.per_class else None,
            "per_class": [list(row) for row in self.per_class],
        }


def score_title(score: str) -> str:
    """Return the display name of a score: "macro F1" for `macro_f1`."""
    words = score.split("_")
    return " ".join({"f1": "F1", "mcc": "MCC"}.get(word, word) for word in words)


def shares(correct: int, predicted: int, true: int) -> tuple[float, float, float, int]:
    """Return precision, recall, F1 and the true count; a ratio of 0 to 0 is 0."""
    precision, recall = correct / (predicted or 1), correct / (true or 1)
    f1 = 2 * (precision * recall) / (precision + recall) if correct else 0.0
    return precision, recall, f1, true


def excerpt(text: str, place: int = 0) -> str:
    """Return a text, or of a long one an excerpt that starts shortly before `place`."""
    begin = max(0, min(place - _BEFORE, len(text) - _MAX_CHARACTERS))
    end = begin + _MAX_CHARACTERS
    before, after = "..." if begin else "", "..." if end < len(text) else ""
    return f"{before}{text[begin:end]}{after}"


def unique_name(name: str, names: tuple[str, ...]) -> str:
    """Append primes to a name until it is not in `names`.

    Table columns need distinct names, and a label can be any word.
    """
    while name in names:
        name += "'"
    return name


def confusion_table(
    counts: Counts, names: tuple[str, ...], limit: int, *, notes: tuple[str, ...] = ()
) -> Table:
    """Return a confusion matrix as a table, with at most `limit` labels.

    Of more labels, those with the fewest errors are merged: a table of a hundred
    labels is unreadable, and most errors are in few of them. `counts` are true by
    predicted, for each name; a further row and column are for predictions without a
    true entity, and for entities without a prediction.
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
        note = f"The {limit - 1} with the most errors; the other {rest} are merged."
        notes = (*notes, note)
        named = tuple(names[i] for i in np.sort(worst))
        counts, names = merged, (*named, unique_name("others", named))
    cells: list[list[Cell]] = [list(row) for row in counts.tolist()]
    rows = columns = names
    if beyond:
        rows = (*names, unique_name("spurious", names))
        columns = (*names, unique_name("missed", names))
        cells[-1][-1] = None
    return Table(
        "Confusion",
        (unique_name("true", columns), *columns),
        tuple((name, *row) for name, row in zip(rows, cells, strict=True)),
        notes,
    )

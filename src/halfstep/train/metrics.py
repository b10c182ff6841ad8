"""Computes metrics of classes and entities, their confusion, and the worst examples."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from torch import Tensor

    Counts = np.ndarray[Any, np.dtype[np.integer[Any]]]

Entity = tuple[int, int, int]
"""(start, end, index of the entity type); character offsets, end exclusive."""

_MAX_CHARACTERS = 200  # of a text in a table of mistakes
_BEFORE = 40  # context shown before the first mistake
_MAX_CLASSES = 25  # rows of a confusion matrix
_MAX_KINDS = 30  # rows of a confusion matrix
_MAX_ENTITY_CHARACTERS = 40  # characters of an entity in a table
_MAX_ENTITIES = 6  # entities of one text in a table


@dataclass(frozen=True)
class EvalMetrics:
    """The metrics of one split."""

    loss: float
    """Mean cross-entropy in nats."""
    scores: Mapping[str, float]
    """Name -> value, higher is better, in display order."""
    per_class: tuple[tuple[str, float, float, float, int], ...]
    """(label or entity type, precision, recall, F1, number of true ones)."""
    confusion: Table
    """Counts: rows are true, columns are predicted."""
    predicted: Mapping[str, int]
    """Label or entity type -> number of predictions."""

    def table(self, title: str) -> Table:
        """Return the metrics of each label as a table; averages come last."""
        _, *shares, counts = zip(*self.per_class, strict=True)
        rows: tuple[tuple[Cell, ...], ...] = (
            *self.per_class,
            ("macro average", *map(statistics.fmean, shares), sum(counts)),
            ("weighted average", *self.weighted(), sum(counts)),
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
            "weighted_average": list(self.weighted()),
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


def label_metrics(
    logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> EvalMetrics:
    """Compute the metrics of the predictions, which are the largest logits.

    Means over classes are unweighted, so that rare classes count; a class that is
    neither true nor predicted counts as 0. `logits` are float32 of shape (N, C),
    `targets` int64 of shape (N,), both on the CPU.
    """
    from sklearn import metrics

    true, predictions = targets.numpy(), logits.argmax(-1).numpy()
    every = range(len(labels))  # also classes that do not occur
    counts: Counts = metrics.confusion_matrix(true, predictions, labels=every)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        true, predictions, labels=every, zero_division=0
    )
    mcc = 0.0
    if counts.max() < len(true):  # scikit-learn warns of a single class
        mcc = float(metrics.matthews_corrcoef(true, predictions))
    scores = {
        "accuracy": float(metrics.accuracy_score(true, predictions)),
        "macro_f1": statistics.fmean(f1),
        "macro_precision": statistics.fmean(precision),
        "macro_recall": statistics.fmean(recall),
        "mcc": mcc,
    }
    loss = float(torch.nn.functional.cross_entropy(logits, targets))
    columns = (precision, recall, f1, counts.sum(1))
    per = tuple(zip(labels, *(column.tolist() for column in columns), strict=True))
    predicted = dict(zip(labels, counts.sum(0).tolist(), strict=True))
    table = confusion_table(counts, tuple(labels), _MAX_CLASSES)
    return EvalMetrics(loss, scores, per, table, predicted)


def worst_labels(
    texts: Callable[[int], str],
    logits: Tensor,
    targets: Tensor,
    labels: Sequence[str],
    limit: int = 20,
) -> Table:
    """Return the wrong predictions with the highest probability.

    They show wrong labels in the data, and what the model has not learned, better than
    wrong predictions with a low probability.
    """
    predictions = logits.argmax(-1)
    wrong = (predictions != targets).nonzero().squeeze(-1)
    probabilities = logits[wrong].softmax(-1).amax(-1)
    order = probabilities.sort(descending=True, stable=True).indices[:limit]
    rows = tuple(
        (
            excerpt(texts(int(wrong[i]))),
            labels[int(targets[wrong[i]])],
            labels[int(predictions[wrong[i]])],
            float(probabilities[i]),
        )
        for i in order
    )
    note = f"{len(wrong):,} of {len(targets):,} predictions are wrong"
    if len(rows) < len(wrong):
        note += f"; the {len(rows)} most confident are shown"
    columns = ("text", "true", "predicted", "probability")
    return Table("Most confident mistakes", columns, rows, (f"{note}.",))


def entity_metrics(
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    loss: float,
) -> EvalMetrics:
    """Compute exact-match precision, recall and F1 of predicted entities.

    A predicted entity is correct if a true one has the same type and offsets;
    duplicates count once. A ratio with a zero denominator is 0, and so is the F1 of a
    type with neither true nor predicted entities, which counts in the macro mean.
    """
    true_sets = list(map(set, true_entities))
    predicted_sets = list(map(set, predicted_entities))
    pairs = list(zip(true_sets, predicted_sets, strict=True))
    true = _counts_by_kind(true_sets)
    predicted = _counts_by_kind(predicted_sets)
    correct = _counts_by_kind([one & two for one, two in pairs])
    precision, recall, f1, _ = shares(correct.total(), predicted.total(), true.total())
    per = tuple(
        (name, *shares(correct[kind], predicted[kind], true[kind]))
        for kind, name in enumerate(kinds)
    )
    scores = {
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "macro_f1": statistics.fmean(row[3] for row in per),
        "accuracy": sum(one == two for one, two in pairs) / max(1, len(pairs)),
    }
    table = _confusion(true_sets, predicted_sets, tuple(kinds))
    num_predicted = {kinds[kind]: count for kind, count in predicted.items()}
    return EvalMetrics(loss, scores, per, table, num_predicted)


def _counts_by_kind(texts: Iterable[set[Entity]]) -> Counter[int]:
    return Counter(kind for entities in texts for _, _, kind in entities)


def worst_entities(
    texts: Callable[[int], str],
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    limit: int = 20,
) -> Table:
    """Return the texts with the most errors, and the missed and spurious entities.

    They show wrong labels in the data, and what the model has not learned.
    """
    num_errors = [
        len(set(true) ^ set(guessed))
        for true, guessed in zip(true_entities, predicted_entities, strict=True)
    ]
    worst = sorted(
        filter(num_errors.__getitem__, range(len(num_errors))),
        key=lambda i: -num_errors[i],
    )
    rows = []
    for i in worst[:limit]:
        text, true, guessed = (
            texts(i),
            set(true_entities[i]),
            set(predicted_entities[i]),
        )
        first = min(true ^ guessed)[0]
        missed = _named(text, true - guessed, kinds)
        rows.append((excerpt(text, first), missed, _named(text, guessed - true, kinds)))
    note = f"{len(worst):,} of {len(num_errors):,} texts have mistakes"
    if len(rows) < len(worst):
        note += f"; the {len(rows)} with the most are shown"
    columns = ("text", "missed", "spurious")
    return Table("Texts with the most mistakes", columns, tuple(rows), (f"{note}.",))


def _confusion(
    true_entities: Sequence[set[Entity]],
    predicted_entities: Sequence[set[Entity]],
    kinds: tuple[str, ...],
) -> Table:
    """Return the confusion matrix of entity types, matched by identical offsets."""
    # Last row: predictions without a true entity; last column: the reverse.
    nothing = len(kinds)
    counts: Counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for true, guessed in zip(true_entities, predicted_entities, strict=True):
        for _, _, kind in true & guessed:
            counts[kind, kind] += 1
        unmatched: dict[tuple[int, int], tuple[list[int], list[int]]]
        unmatched = defaultdict(lambda: ([], []))
        for side, entities in enumerate((true - guessed, guessed - true)):
            for start, end, kind in sorted(entities):
                unmatched[start, end][side].append(kind)
        for both in unmatched.values():
            for row, column in zip_longest(*both, fillvalue=nothing):
                counts[row, column] += 1
    note = "An entity predicted with wrong edges counts as missed and as spurious."
    return confusion_table(counts, kinds, _MAX_KINDS, notes=(note,))


def _named(text: str, entities: set[Entity], kinds: Sequence[str]) -> str:
    """Format entities as type, text and offset."""
    words = []
    for start, end, kind in sorted(entities)[:_MAX_ENTITIES]:
        letters = text[start:end]
        if len(letters) > _MAX_ENTITY_CHARACTERS:
            letters = f"{letters[: _MAX_ENTITY_CHARACTERS - 3]}..."
        words.append(f"{kinds[kind]} {letters} at {start}")
    if len(entities) > _MAX_ENTITIES:
        words.append(f"and {len(entities) - _MAX_ENTITIES} more")
    return "; ".join(words)

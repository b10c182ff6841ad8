"""Computes the scores of each kind of target, their tables, and the worst examples.

Shapes: N examples, K labels.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from torch import Tensor

    Counts = np.ndarray[Any, np.dtype[np.integer[Any]]]

Entity = tuple[int, int, int]
"""(start, end, index of the entity type); character offsets, end exclusive."""
ClassScores = tuple[str, float, float, float, int]
"""(label or entity type, precision, recall, F1, number of true ones)."""

_MAX_CHARACTERS = 200  # of a text in a table of mistakes
_BEFORE = 40  # context shown before the first mistake
_MAX_CLASSES = 25  # rows of a confusion matrix
_MAX_WORST = 20  # rows of a table of mistakes
_MISTAKES = ("Texts with the most mistakes", ("text", "missed", "spurious"))
_MOST_MISTAKES = ("texts have mistakes", "with the most")
_DEFAULT_THRESHOLD = 0.5  # of a label that no text of dev has
_FEWEST_WRONG = 3  # texts: that a model misses fewer may be chance
_IN_LABEL_UNIT = ("rmse", "mean_absolute_error")  # scores of regression
_FLAT = 0.01  # spread of predicted values, as a share of the true ones': constant


@dataclass(frozen=True)
class EvalMetrics:
    """The metrics of one split."""

    loss: float
    """Mean loss of all targets, without weights and label smoothing."""
    scores: Mapping[str, float]
    """Name -> value, in display order."""
    per_class: tuple[ClassScores, ...] = ()
    """Empty for regression."""
    confusion: Table | None = None
    """Counts: rows are true, columns are predicted. None if labels do not exclude each
    other."""
    constant: str = ""
    """What every prediction is, if they are all the same although the truth is not.

    Not if fewer than three texts contradict it, except for regression.
    """

    def table(self, title: str) -> Table:
        """Return the metrics of each label as a table; averages come last."""
        scores = {
            score_title(name): score_value(name, value)
            for name, value in {**self.scores, "loss": self.loss}.items()
        }
        if not self.per_class:
            return Table(title, ("score", "value"), tuple(scores.items()))
        _, *shares, counts = zip(*self.per_class, strict=True)
        rows: tuple[tuple[Cell, ...], ...] = (
            *self.per_class,
            ("macro average", *map(statistics.fmean, shares), sum(counts)),
            ("weighted average", *self.weighted(), sum(counts)),
        )
        columns = ("label", "precision", "recall", "F1", "support")
        words = (f"{name} {value}" for name, value in scores.items())
        return Table(title, columns, rows, (", ".join(words),))

    def weighted(self) -> tuple[float, ...]:
        """Return precision, recall and F1, weighted by each label's true count.

        Unweighted if all true counts are 0.
        """
        _, *shares, support = zip(*self.per_class, strict=True)
        weights = support if any(support) else [1] * len(support)
        return tuple(statistics.fmean(share, weights) for share in shares)

    def data(self) -> dict[str, object]:
        """Return the metrics without the confusion matrix, for `json.dumps`."""
        own: dict[str, object] = {"loss": self.loss, **self.scores}
        if self.per_class:
            own["weighted_average"] = list(self.weighted())
            own["per_class"] = [list(row) for row in self.per_class]
        return own


def score_title(score: str) -> str:
    """Return the display name of a score: "macro F1" for `macro_f1`."""
    words = score.split("_")
    capitals = {"f1": "F1", "mcc": "MCC", "rmse": "RMSE"}
    return " ".join(capitals.get(word, word) for word in words)


def score_value(score: str, value: float) -> str:
    """Return a value for display; errors in the label's unit may be tiny or huge."""
    return f"{value:.5g}" if score in _IN_LABEL_UNIT else f"{value:.4f}"


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
    counts: Counts,
    names: tuple[str, ...],
    limit: int = _MAX_CLASSES,
    *,
    notes: tuple[str, ...] = (),
) -> Table:
    """Return a confusion matrix as a table, with at most `limit` labels.

    Of more labels, those with the most errors: a table of a hundred labels is
    unreadable, and most errors are in few of them. `counts` are true by predicted, for
    each name; a further row and column are for predictions without a true entity, and
    for entities without a prediction.
    """
    beyond = len(counts) - len(names)
    if len(names) > limit:
        notes = (*notes, f"Of {len(names)} labels, the {limit} with the most errors.")
        wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        worst = np.sort(np.argsort(-wrong[: len(names)], kind="stable")[:limit])
        kept = [*worst, *range(len(names), len(counts))]
        names, counts = tuple(names[i] for i in worst), counts[np.ix_(kept, kept)]
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


def class_scores(
    names: Sequence[str], correct: Counts, predicted: Counts, true: Counts
) -> tuple[ClassScores, ...]:
    """Return the scores of each label from its counts, shape (K,) each.

    A ratio of 0 to 0 is 0, and so is the F1 of a label that is neither true nor
    predicted.
    """
    precision = correct / np.maximum(predicted, 1)
    recall = correct / np.maximum(true, 1)
    f1 = 2 * correct / np.maximum(predicted + true, 1)
    columns = (column.tolist() for column in (precision, recall, f1, true))
    return tuple(zip(names, *columns, strict=True))


def _micro(correct: Counts, predicted: Counts, true: Counts) -> tuple[float, ...]:
    """Return precision, recall and F1 of all labels together."""
    sums = (counts.sum(keepdims=True) for counts in (correct, predicted, true))
    return class_scores(("",), *sums)[0][1:4]


def class_metrics(
    logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> EvalMetrics:
    """Compute the metrics of the predictions, which are the largest logits.

    Means over classes are unweighted, so that rare classes count. `logits` are float32
    of shape (N, K), `targets` int64 of shape (N,), both on the CPU.
    """
    from sklearn import metrics

    true, predictions = targets.numpy(), logits.argmax(-1).numpy()
    every = range(len(labels))  # also classes that do not occur
    counts: Counts = metrics.confusion_matrix(true, predictions, labels=every)
    correct, predicted, support = counts.diagonal(), counts.sum(0), counts.sum(1)
    rows = class_scores(labels, correct, predicted, support)
    _, *columns, _ = zip(*rows, strict=True)
    precision, recall, f1 = map(statistics.fmean, columns)
    mcc, constant = 0.0, ""
    if counts.max() < len(true):  # scikit-learn warns of a single class
        mcc = float(metrics.matthews_corrcoef(true, predictions))
    is_one = np.count_nonzero(predicted) == 1 < np.count_nonzero(support)
    if is_one and len(true) - correct.sum() >= _FEWEST_WRONG:
        constant = f"class {labels[int(predicted.argmax())]!r}"
    scores = {
        "accuracy": correct.sum() / len(true),
        "macro_f1": f1,
        "macro_precision": precision,
        "macro_recall": recall,
        "mcc": mcc,
    }
    loss = float(torch.nn.functional.cross_entropy(logits, targets))
    confusion = confusion_table(counts, tuple(labels))
    return EvalMetrics(loss, scores, rows, confusion, constant)


def best_thresholds(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return for each label the threshold with the highest F1; float64, shape (K,).

    It is in the middle between two probabilities, and 0.5 for a label that no text has.
    Both arguments have the shape (N, K); targets are 0 or 1.
    """
    ranked, order = probabilities.double().sort(dim=0, descending=True, stable=True)
    below = torch.cat([ranked[1:], torch.zeros_like(ranked[:1])])
    hits = targets.double().gather(0, order).cumsum(0)
    above = torch.arange(1, len(ranked) + 1)[:, None]
    f1 = 2 * hits / (above + hits[-1])
    f1[ranked == below] = -1.0  # no threshold parts equal probabilities
    place = f1.argmax(0, keepdim=True)
    middle = (ranked.gather(0, place) + below.gather(0, place)).squeeze(0) / 2
    return torch.where(hits[-1] > 0, middle, _DEFAULT_THRESHOLD)


def label_set_metrics(
    predicted: Tensor, targets: Tensor, labels: Sequence[str], loss: float
) -> EvalMetrics:
    """Compute the metrics of sets of labels; both tensors are bool, shape (N, K)."""
    guessed, true = predicted.numpy(), targets.numpy()
    counts = (guessed & true).sum(0), guessed.sum(0), true.sum(0)
    rows = class_scores(labels, *counts)
    precision, recall, f1 = _micro(*counts)
    scores = {
        "micro_f1": f1,
        "macro_f1": statistics.fmean(row[3] for row in rows),
        "micro_precision": precision,
        "micro_recall": recall,
        "exact_match": float((guessed == true).all(1).mean()),
    }
    constant = ""
    is_varied = not (true == true[0]).all()
    wrong = (guessed != true).any(1).sum()
    if is_varied and (guessed == guessed[0]).all() and wrong >= _FEWEST_WRONG:
        names = [labels[i] for i in np.flatnonzero(guessed[0]).tolist()]
        constant = f"labels {', '.join(map(repr, names))}" if names else "no label"
    return EvalMetrics(loss, scores, rows, constant=constant)


def regression_metrics(values: Tensor, targets: Tensor, loss: float) -> EvalMetrics:
    """Compute rank and linear correlation, and errors in the label's unit.

    Both tensors are float32 of shape (N,). A correlation with a constant is 0.
    """
    from scipy import stats

    guessed, true = values.double().numpy(), targets.double().numpy()
    errors = guessed - true
    varies = np.ptp(true) > 0
    is_defined = varies and np.ptp(guessed) > 0
    scores = {
        "spearman": float(stats.spearmanr(guessed, true)[0]) if is_defined else 0.0,
        "pearson": float(stats.pearsonr(guessed, true)[0]) if is_defined else 0.0,
        "rmse": float(np.sqrt(np.square(errors).mean())),
        "mean_absolute_error": float(np.abs(errors).mean()),
    }
    is_constant = varies and guessed.std() < _FLAT * true.std()
    constant = f"about {guessed.mean():.4g}" if is_constant else ""
    return EvalMetrics(loss, scores, constant=constant)


def entity_metrics(
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    loss: float,
) -> EvalMetrics:
    """Compute exact-match precision, recall and F1 of predicted entities.

    A predicted entity is correct if a true one has the same type and offsets;
    duplicates count once. The F1 of a type with neither true nor predicted entities
    is 0 and counts in the macro mean.
    """
    pairs = [
        (set(true), set(guessed))
        for true, guessed in zip(true_entities, predicted_entities, strict=True)
    ]
    # Last row: predictions without a true entity; last column: the reverse.
    matrix = _entity_confusion(pairs, len(kinds))
    counts = matrix.diagonal()[:-1], matrix.sum(0)[:-1], matrix.sum(1)[:-1]
    rows = class_scores(kinds, *counts)
    precision, recall, f1 = _micro(*counts)
    scores = {
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "macro_f1": statistics.fmean(row[3] for row in rows),
        "accuracy": sum(one == two for one, two in pairs) / max(1, len(pairs)),
    }
    note = "An entity predicted with wrong edges counts as missed and as spurious."
    confusion = confusion_table(matrix, tuple(kinds), notes=(note,))
    wrong, predicted = sum(map(bool, true_entities)), counts[1].sum()
    constant = "no entity" if wrong >= _FEWEST_WRONG and not predicted else ""
    return EvalMetrics(loss, scores, rows, confusion, constant)


def _entity_confusion(
    pairs: Sequence[tuple[set[Entity], set[Entity]]], nothing: int
) -> Counts:
    """Return the confusion of entity types, matched by identical offsets."""
    counts: Counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for true, guessed in pairs:
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
    return counts


def _worst_table(
    title: str,
    columns: tuple[str, ...],
    severity: np.ndarray,
    words: tuple[str, str],
    row: Callable[[int], tuple[Cell, ...]],
) -> Table:
    """Return the examples with the highest severity above 0, and how many there are.

    They show wrong labels in the data, and what the model has not learned. `words` are
    what is counted, and which of them are shown.
    """
    worst = np.argsort(-severity, kind="stable")[:_MAX_WORST]
    count = int(np.count_nonzero(severity > 0))
    note = f"{count:,} of {len(severity):,} {words[0]}"
    if count > _MAX_WORST:
        note += f"; the {_MAX_WORST} {words[1]} are shown"
    rows = tuple(row(i) for i in worst[:count].tolist())
    return Table(title, columns, rows, (f"{note}.",))


def worst_classes(
    texts: Callable[[int], str],
    logits: Tensor,
    targets: Tensor,
    labels: Sequence[str],
) -> Table:
    """Return the wrong predictions with the highest probability.

    They tell more than wrong predictions with a low probability.
    """
    probabilities, predicted = logits.softmax(-1).max(-1)
    severity = probabilities.where(predicted != targets, 0.0).numpy()

    def row(i: int) -> tuple[Cell, ...]:
        true, guess = labels[int(targets[i])], labels[int(predicted[i])]
        return excerpt(texts(i)), true, guess, float(severity[i])

    columns = ("text", "true", "predicted", "probability")
    words = ("predictions are wrong", "most confident")
    return _worst_table("Most confident mistakes", columns, severity, words, row)


def worst_label_sets(
    texts: Callable[[int], str],
    predicted: Tensor,
    targets: Tensor,
    labels: Sequence[str],
) -> Table:
    """Return the texts with the most wrong labels; both tensors are bool, (N, K)."""
    severity = (predicted != targets).sum(1).numpy()

    def named(chosen: Tensor) -> str:
        return ", ".join(labels[i] for i in chosen.nonzero().squeeze(-1).tolist())

    def row(i: int) -> tuple[Cell, ...]:
        missed, spurious = targets[i] & ~predicted[i], predicted[i] & ~targets[i]
        return excerpt(texts(i)), named(missed), named(spurious)

    return _worst_table(*_MISTAKES, severity, _MOST_MISTAKES, row)


def worst_values(texts: Callable[[int], str], values: Tensor, targets: Tensor) -> Table:
    """Return the predictions that are farthest from the label; both shape (N,)."""
    severity = (values - targets).abs().numpy()

    def row(i: int) -> tuple[Cell, ...]:
        return excerpt(texts(i)), f"{targets[i]:.5g}", f"{values[i]:.5g}"

    columns = ("text", "true", "predicted")
    words = ("predictions differ from their labels", "farthest")
    return _worst_table("Largest errors", columns, severity, words, row)


def worst_entities(
    texts: Callable[[int], str],
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
) -> Table:
    """Return the texts with the most errors, and the missed and spurious entities."""
    pairs = list(zip(true_entities, predicted_entities, strict=True))
    severity = np.array([len(set(true) ^ set(guessed)) for true, guessed in pairs])

    def row(i: int) -> tuple[Cell, ...]:
        text, (true, guessed) = texts(i), map(set, pairs[i])
        missed, spurious = (
            _named(text, each, kinds) for each in (true - guessed, guessed - true)
        )
        return excerpt(text, min(true ^ guessed)[0]), missed, spurious

    return _worst_table(*_MISTAKES, severity, _MOST_MISTAKES, row)


def _named(text: str, entities: set[Entity], kinds: Sequence[str]) -> str:
    """Format entities as type, text and offset; cut what is longer than an excerpt."""
    return excerpt(
        "; ".join(
            f"{kinds[kind]} {text[start:end]} at {start}"
            for start, end, kind in sorted(entities)
        )
    )

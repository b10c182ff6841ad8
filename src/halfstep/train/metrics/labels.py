"""Metrics of a classifier: scores, confusion matrix, and the worst examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.reporting.table import Table
from halfstep.train.metrics.result import EvalMetrics, confusion_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_MAX_CLASSES = 25  # of a confusion matrix that a person can read
_MAX_CHARACTERS = 400  # of a text in a table of mistakes


def compute_metrics(
    logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> EvalMetrics:
    """Return how well guesses, the largest logits, agree with the truth.

    Means over classes are unweighted, so that rare classes count; a class that is
    neither there nor guessed counts as zero.

    Args:
        logits: float32, shape (N, C), on the CPU, N at least 1.
        targets: int64, shape (N,), on the CPU.
        labels: Names of the C classes, 2 or more, each once.
    """
    from sklearn.metrics import (
        confusion_matrix,
        matthews_corrcoef,
        precision_recall_fscore_support,
    )

    true, predictions = targets.numpy(), logits.argmax(-1).numpy()
    classes = range(len(labels))
    precision, recall, f1, support = precision_recall_fscore_support(
        true, predictions, labels=classes, zero_division=0.0
    )
    counts = confusion_matrix(true, predictions, labels=classes)
    several = ((counts.sum(0) + counts.sum(1)) > 0).sum() > 1
    scores = {
        "accuracy": float((true == predictions).mean()),
        "macro_f1": float(f1.mean()),
        "macro_precision": float(precision.mean()),
        "macro_recall": float(recall.mean()),
        # Of a single class scikit-learn says 0, and warns.
        "mcc": float(matthews_corrcoef(true, predictions)) if several else 0.0,
    }
    per = tuple(
        (label, float(precision[i]), float(recall[i]), float(f1[i]), int(support[i]))
        for i, label in enumerate(labels)
    )
    loss = float(torch.nn.functional.cross_entropy(logits, targets))
    predicted = dict(zip(labels, map(int, counts.sum(0)), strict=True))
    table = confusion_table(counts, tuple(labels), _MAX_CLASSES)
    return EvalMetrics(loss, scores, per, table, predicted)


def worst_examples(
    texts: Callable[[int], str],
    logits: Tensor,
    targets: Tensor,
    labels: Sequence[str],
    limit: int = 20,
) -> Table:
    """Return the wrong guesses that were made with the most confidence.

    Why: these show wrong labels in the data, and what the model has not understood,
    sooner than guesses that were close.

    Args:
        texts: The text of an example; asked only for those shown.
        logits: float32, shape (N, C), on the CPU.
        targets: int64, shape (N,), on the CPU.
        labels: Names of the C classes.
        limit: How many to show.
    """
    predictions = logits.argmax(-1)
    wrong = (predictions != targets).nonzero().squeeze(-1)
    probabilities = logits[wrong].softmax(-1).amax(-1)
    order = probabilities.sort(descending=True, stable=True).indices[:limit]
    rows = tuple(
        (
            _shortened(texts(int(wrong[i]))),
            labels[int(targets[wrong[i]])],
            labels[int(predictions[wrong[i]])],
            float(probabilities[i]),
        )
        for i in order
    )
    note = f"{len(wrong):,} of {len(targets):,} guesses are wrong"
    if len(rows) < len(wrong):
        note += f"; the {len(rows)} most confident are shown"
    columns = ("text", "truth", "guess", "probability")
    return Table("Most confident mistakes", columns, rows, (f"{note}.",))


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return text[: _MAX_CHARACTERS - 3] + "..."

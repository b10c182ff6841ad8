"""Computes metrics of a classifier, its confusion matrix, and the worst examples."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import numpy as np
import torch

from halfstep.reporting.table import Table
from halfstep.train.metrics.result import EvalMetrics, confusion_table, excerpt, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_MAX_CLASSES = 25  # rows of a confusion matrix


def compute_metrics(
    logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> EvalMetrics:
    """Compute the metrics of the predictions, which are the largest logits.

    Means over classes are unweighted, so that rare classes count; a class that is
    neither true nor predicted counts as 0. `logits` are float32 of shape (N, C),
    `targets` int64 of shape (N,), both on the CPU.
    """
    true, predictions = targets.numpy(), logits.argmax(-1).numpy()
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (true, predictions), 1)
    rows, columns = counts.sum(1), counts.sum(0)
    per = tuple(
        (label, *shares(int(counts[i, i]), int(columns[i]), int(rows[i])))
        for i, label in enumerate(labels)
    )
    _, precision, recall, f1, _ = zip(*per, strict=True)
    # Gorodkin's multiclass MCC: correlation of true and predicted one-hot vectors.
    total, correct = len(true), int(counts.trace())
    spread = float(total**2 - rows @ rows) * float(total**2 - columns @ columns)
    both = float(total * correct - rows @ columns)
    scores = {
        "accuracy": correct / total,
        "macro_f1": statistics.fmean(f1),
        "macro_precision": statistics.fmean(precision),
        "macro_recall": statistics.fmean(recall),
        "mcc": both / math.sqrt(spread) if spread else 0.0,
    }
    loss = float(torch.nn.functional.cross_entropy(logits, targets))
    predicted = dict(zip(labels, map(int, columns), strict=True))
    table = confusion_table(counts, tuple(labels), _MAX_CLASSES)
    return EvalMetrics(loss, scores, per, table, predicted)


def worst_examples(
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

"""How good is the model: predictions over all processes, and tables of quality.

In: a model and encoded examples. Out: predictions (each example once, whatever the
number of processes), a `Quality`, and the score of a plain baseline.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep import distributed
from halfstep.report import Cell, Table
from halfstep.train.batches import Encoded, ordered_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.distributed import World
    from halfstep.session import Session
    from halfstep.train.data import Example

EVAL_BATCH = 128
"""Texts in a batch without gradients: about what four training batches hold."""


@dataclass(frozen=True)
class Quality:
    """How well predictions agree with labels."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    macro_f1: float
    """Unweighted mean over classes, so that rare classes count."""
    per_class: tuple[tuple[str, float, float, float, int], ...]
    """(label, precision, recall, F1, examples) of each class."""

    def table(self, title: str) -> Table:
        """Return the classes and their mean as a table."""
        count = sum(row[4] for row in self.per_class)
        means = [
            statistics.fmean(column)
            for column in list(zip(*self.per_class, strict=True))[1:4]
        ]
        rows: tuple[tuple[Cell, ...], ...] = (
            *self.per_class,
            ("mean of classes", *means, count),
        )
        columns = ("label", "precision", "recall", "F1", "examples")
        note = f"accuracy {self.accuracy:.4f}, loss {self.loss:.4f}"
        return Table(title, columns, rows, (note,))


@torch.no_grad()
def predict(
    session: Session, encoded: Encoded, world: World, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of every example, on every process, and their labels.

    Each example is computed by one process and counted once: ranks take batches in
    turn, write them to their places among zeros, and the places are summed.

    Returns:
        logits: float32, shape (N, C).
        labels: int64, shape (N,).
    """
    model = session.model
    bare: Any = getattr(model, "module", model)
    bare.eval()
    logits = torch.zeros(
        len(encoded.labels), bare.config.num_labels, device=world.device
    )
    batches = ordered_batches(encoded.lengths, EVAL_BATCH)
    for batch in batches[world.rank :: world.size]:
        inputs = encoded.collate(batch, pad_id)
        inputs.pop("labels")
        moved = {name: tensor.to(world.device) for name, tensor in inputs.items()}
        with session.autocast():
            logits[batch] = bare(**moved).logits.float()
    bare.train()
    return distributed.total(logits).cpu(), encoded.labels


def judge(logits: torch.Tensor, truth: torch.Tensor, labels: Sequence[str]) -> Quality:
    """Return the quality of predictions.

    Args:
        logits: float32, shape (N, C).
        truth: int64, shape (N,).
        labels: Names of the C classes.
    """
    from sklearn.metrics import precision_recall_fscore_support

    guesses = logits.argmax(-1)
    precision, recall, f1, support = precision_recall_fscore_support(
        truth.numpy(),
        guesses.numpy(),
        labels=range(len(labels)),
        zero_division=0.0,
    )
    rows = tuple(
        (label, float(precision[i]), float(recall[i]), float(f1[i]), int(support[i]))
        for i, label in enumerate(labels)
    )
    return Quality(
        loss=float(torch.nn.functional.cross_entropy(logits, truth)),
        accuracy=float((guesses == truth).float().mean()),
        macro_f1=float(f1.mean()),
        per_class=rows,
    )


def baseline_accuracy(train: Sequence[Example], test: Sequence[Example]) -> float:
    """Return the accuracy of a logistic regression on character 1- and 2-grams.

    A yardstick that anybody can check: scikit-learn's defaults on counts.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(
        CountVectorizer(analyzer="char", ngram_range=(1, 2)),
        LogisticRegression(max_iter=1000),
    )
    pipeline.fit([e.text for e in train], [e.label for e in train])
    return float(pipeline.score([e.text for e in test], [e.label for e in test]))

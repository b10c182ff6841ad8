"""What sets one kind of training apart from another: outputs, loss, and judgement.

In: the name of a task. Out: a `Task`, which the loop asks where it would otherwise
have to know what is trained.

Shapes: B examples, T positions, K outputs, N examples of a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from halfstep.errors import UserError
from halfstep.reporting.table import format_count
from halfstep.train.data import entity_tags
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.metrics import entities
from halfstep.train.metrics import labels as metrics_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from halfstep.reporting.table import Table
    from halfstep.train.data.corpus import Split
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.metrics.result import EvalMetrics


class Task(Protocol):
    """A kind of training."""

    @property
    def name(self) -> str:
        """The word of --task."""

    @property
    def head(self) -> str:
        """End of the class name of its models in transformers."""

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return what each output of the model stands for."""

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        """Return zeros for `write_outputs`; the sum over ranks is complete."""

    def write_outputs(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        indices: np.ndarray,
        logits: Tensor,
    ) -> None:
        """Store the outputs of a batch at the places of its examples."""

    def compute_metrics(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
        loss: float,
    ) -> EvalMetrics:
        """Return the metrics of the stored outputs."""

    def worst_examples(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
    ) -> Table:
        """Return the errors that are worth reading."""


@dataclass(frozen=True)
class Classify:
    """One label a text."""

    name: str = "classify"
    head: str = "SequenceClassification"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the classes."""
        return tuple(labels)

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        """Return a place for the logits of each example. float32, shape (N, K)."""
        return torch.zeros(len(encoded), num_outputs)

    def write_outputs(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        indices: np.ndarray,
        logits: Tensor,
    ) -> None:
        """Write down logits of shape (B, K)."""
        del encoded
        outputs[torch.from_numpy(indices)] = logits.to(outputs)

    def compute_metrics(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
        loss: float,
    ) -> EvalMetrics:
        """Return accuracy, precision, recall, F1 and correlation."""
        del split, loss  # the logits tell it, without the rounding of a running sum
        return metrics_labels.compute_metrics(outputs, _targets(encoded), labels)

    def worst_examples(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
    ) -> Table:
        """Return the wrong guesses that the model was surest of."""
        return metrics_labels.worst_examples(
            split.text, outputs, _targets(encoded), labels
        )


def _targets(encoded: EncodedTexts) -> Tensor:
    assert encoded.labels is not None  # noqa: S101 - a corpus of this task has them
    return torch.from_numpy(encoded.labels)


@dataclass(frozen=True)
class Entities:
    """Named entities: a tag for each token, spans of characters for people."""

    name: str = "ner"
    head: str = "TokenClassification"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the tags of the kinds."""
        return entity_tags.tag_names(labels)

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        """Return a place for the tag of each token. int32, shape (tokens,)."""
        del num_outputs
        return torch.zeros(int(encoded.lengths.sum()), dtype=torch.int32)

    def write_outputs(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        indices: np.ndarray,
        logits: Tensor,
    ) -> None:
        """Write down the best valid tags, from logits of shape (B, T, K)."""
        tags = best_tags(encoded, indices, logits)
        begins = encoded.begins
        for index, row in zip(indices, tags, strict=True):
            length = int(encoded.lengths[index])
            begin = int(begins[index])
            outputs[begin : begin + length] = torch.from_numpy(row[:length])

    def compute_metrics(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
        loss: float,
    ) -> EvalMetrics:
        """Return precision, recall and F1 of whole entities."""
        true_entities, predicted_entities = _true_and_predicted(outputs, encoded, split)
        return entities.compute_metrics(true_entities, predicted_entities, labels, loss)

    def worst_examples(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        split: Split,
        labels: Sequence[str],
    ) -> Table:
        """Return texts whose entities were missed, invented or confused."""
        true_entities, predicted_entities = _true_and_predicted(outputs, encoded, split)
        return entities.worst_examples(
            split.text, true_entities, predicted_entities, labels
        )


def best_tags(encoded: EncodedTexts, indices: np.ndarray, logits: Tensor) -> np.ndarray:
    """Return the best valid tags of a batch. int16, shape (B, T), T tokens at most."""
    places, real = encoded.token_indices(indices)
    if encoded.offsets is not None:
        # Special tokens stand for no characters, and cannot be part of an entity.
        offsets = encoded.offsets[places[real]]
        real[real] = offsets[:, 0] < offsets[:, 1]
    scores = logits.float().cpu().numpy()[:, : real.shape[1]]
    return entity_tags.decode(scores, real)


Spans = list[list[tuple[int, int, int]]]


def _true_and_predicted(
    outputs: Tensor, encoded: EncodedTexts, split: Split
) -> tuple[Spans, Spans]:
    """Return the true and the predicted entities of each text."""
    begins, tags = encoded.begins, outputs.numpy()
    predicted = [
        entity_tags.spans_of(tags[begins[i] : begins[i + 1]], encoded.token_offsets(i))
        for i in range(len(encoded))
    ]
    return [split.spans(i) for i in range(len(encoded))], predicted


TASKS: dict[str, Task] = {task.name: task for task in (Classify(), Entities())}
"""Name -> task."""


@dataclass(frozen=True)
class Objective:
    """The loss of training: cross-entropy, weighted and smoothed as asked for.

    The loss of a step is the weighted mean over the targets of the whole batch, over
    all processes and micro-batches, as `torch.nn.CrossEntropyLoss` takes it over one.
    """

    weights: Tensor | None
    """Of each output, shape (K,); None weighs all alike."""
    smoothing: float

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all targets, in fp32, shape ()."""
        weights = None if self.weights is None else self.weights.to(logits.device)
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, -2),
            targets.flatten(),
            weight=weights,
            label_smoothing=self.smoothing,
            ignore_index=IGNORED,
            reduction="sum",
        )

    def weight(self, encoded: EncodedTexts, indices: np.ndarray) -> float:
        """Return the sum of the weights of a batch's targets; what to divide by."""
        if self.weights is None or encoded.labels is None:
            # A batch of texts without any token has nothing to divide.
            return float(max(1, encoded.counts[indices].sum()))
        return float(self.weights[torch.from_numpy(encoded.labels[indices])].sum())


def balanced_weights(labels: Sequence[str], encoded: EncodedTexts) -> Tensor:
    """Return weights of classes by which all classes count alike, shape (K,).

    Formula: N / (K * examples of the class), as in scikit-learn.

    Raises:
        UserError: If a class has no example.
    """
    counts = torch.bincount(_targets(encoded), minlength=len(labels))
    if not counts.all():
        missing = labels[int(counts.argmin())]
        message = (
            f"--class-weights balanced: train holds no example of {missing!r}; give "
            "the weights as numbers."
        )
        raise UserError(message)
    return len(encoded) / (len(labels) * counts.float())


def check_class_weights(weights: Sequence[float], labels: Sequence[str]) -> Tensor:
    """Return the weights of classes that the user gave, shape (K,).

    Raises:
        UserError: If there are not as many as classes.
    """
    if len(weights) != len(labels):
        message = (
            f"--class-weights holds {format_count(len(weights), 'number')} "
            f"for {len(labels)} "
            f"classes; give one each, in the order {', '.join(labels)}."
        )
        raise UserError(message)
    return torch.tensor(weights)

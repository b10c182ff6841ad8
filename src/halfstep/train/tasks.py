"""The training tasks, classification and NER: outputs, weights, metrics, evaluation.

Shapes: B examples, T positions, K outputs, N examples of a split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.distributed import ddp, process_group
from halfstep.errors import UserError
from halfstep.reporting.table import format_count
from halfstep.train import metrics
from halfstep.train.data import entity_tags
from halfstep.train.data.length_batches import ordered
from halfstep.train.step_dataset import Objective
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from halfstep.reporting.table import Table
    from halfstep.session.session import Session
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.metrics import EvalMetrics
    from halfstep.train.plan import TrainJob


EVAL_BATCH = 128
"""Texts per batch: without gradients, about the memory of a training batch of 32."""


class _Classification:
    """Each text has one label: outputs are fp32 logits, shape (N, K)."""

    name, head = "classify", "SequenceClassification"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        return tuple(labels)

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        return torch.zeros(len(encoded), num_outputs)

    def write_outputs(
        self, outputs: Tensor, _: EncodedTexts, indices: np.ndarray, logits: Tensor
    ) -> None:
        outputs[torch.from_numpy(indices)] = logits.to(outputs)

    def compute_metrics(
        self, job: TrainJob, split: str, outputs: Tensor, loss: float
    ) -> EvalMetrics:
        del loss  # recomputed, without the rounding of a running sum
        targets = _targets(job.encoded[split])
        return metrics.label_metrics(outputs, targets, job.corpus.labels)

    def worst_examples(self, job: TrainJob, split: str, outputs: Tensor) -> Table:
        texts, targets = getattr(job.corpus, split).text, _targets(job.encoded[split])
        return metrics.worst_labels(texts, outputs, targets, job.corpus.labels)


class _EntityRecognition:
    """Each text has entities: outputs are int32 tags, shape (tokens,)."""

    name, head = "ner", "TokenClassification"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        return entity_tags.tag_names(labels)

    def empty_outputs(self, encoded: EncodedTexts, _: int) -> Tensor:
        return torch.zeros(int(encoded.lengths.sum()), dtype=torch.int32)

    def write_outputs(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        indices: np.ndarray,
        logits: Tensor,
    ) -> None:
        """Store the best valid tags for logits of shape (B, T, K)."""
        tags = best_tags(encoded, indices, logits)
        for index, row in zip(indices, tags, strict=True):
            begin, length = encoded.begins[index], encoded.lengths[index]
            outputs[begin : begin + length] = torch.from_numpy(row[:length])

    def compute_metrics(
        self, job: TrainJob, split: str, outputs: Tensor, loss: float
    ) -> EvalMetrics:
        pair = _true_and_predicted(job, split, outputs)
        return metrics.entity_metrics(*pair, job.corpus.labels, loss)

    def worst_examples(self, job: TrainJob, split: str, outputs: Tensor) -> Table:
        pair = _true_and_predicted(job, split, outputs)
        texts = getattr(job.corpus, split).text
        return metrics.worst_entities(texts, *pair, job.corpus.labels)


Task = _Classification | _EntityRecognition
"""What differs between tasks: the model's outputs and how they are scored.

`name` is the value of --task, `head` the suffix of the model's class in transformers.
`write_outputs` writes a batch to its rows of `empty_outputs`; ranks sum theirs.
"""

TASKS: dict[str, Task] = {
    task.name: task for task in (_Classification(), _EntityRecognition())
}


def _targets(encoded: EncodedTexts) -> Tensor:
    assert encoded.labels is not None  # noqa: S101 - a corpus of this task has them
    return torch.from_numpy(encoded.labels)


def best_tags(encoded: EncodedTexts, indices: np.ndarray, logits: Tensor) -> np.ndarray:
    """Return the best valid tags of a batch: int16, shape (B, T), at most T tokens."""
    places, real = encoded.token_indices(indices)
    if encoded.offsets is not None:
        # Special tokens have no characters and cannot belong to an entity.
        offsets = encoded.offsets[places[real]]
        real[real] = offsets[:, 0] < offsets[:, 1]
    scores = logits.float().cpu().numpy()[:, : real.shape[1]]
    return entity_tags.decode(scores, real)


_Spans = list[list[tuple[int, int, int]]]


def _true_and_predicted(
    job: TrainJob, split: str, outputs: Tensor
) -> tuple[_Spans, _Spans]:
    encoded, tags = job.encoded[split], outputs.numpy()
    texts, begins = getattr(job.corpus, split), encoded.begins
    predicted = [
        entity_tags.spans_of(tags[begins[i] : begins[i + 1]], encoded.token_offsets(i))
        for i in range(len(encoded))
    ]
    return [texts.spans(i) for i in range(len(encoded))], predicted


def balanced_weights(labels: Sequence[str], encoded: EncodedTexts) -> Tensor:
    """Return class weights inverse to class frequency, shape (K,).

    N / (K * examples of the class), as scikit-learn's "balanced".
    """
    counts = torch.bincount(_targets(encoded), minlength=len(labels))
    if not counts.all():
        missing = labels[int(counts.argmin())]
        raise UserError(
            f"--class-weights balanced: train holds no example of {missing!r}; give "
            "the weights as numbers."
        )
    return len(encoded) / (len(labels) * counts.float())


def check_class_weights(weights: Sequence[float], labels: Sequence[str]) -> Tensor:
    """Return user-given class weights as a tensor, shape (K,)."""
    if len(weights) != len(labels):
        raise UserError(
            f"--class-weights holds {format_count(len(weights), 'number')} "
            f"for {len(labels)} "
            f"classes; give one each, in the order {', '.join(labels)}."
        )
    return torch.tensor(weights)


@torch.no_grad()
def collect_outputs(
    session: Session, job: TrainJob, encoded: EncodedTexts
) -> tuple[torch.Tensor, float]:
    """Return the outputs of every example, and the mean loss, on each rank.

    Ranks take batches in turn and fill their rows of `Task.empty_outputs`, which are
    summed. The loss is the mean cross-entropy of all targets, without class weights
    and label smoothing.
    """
    model: Any = ddp.unwrap(session.model)
    task, world = TASKS[job.corpus.task], job.steps.world
    outputs = task.empty_outputs(encoded, model.config.num_labels)
    unweighted = Objective(None, 0.0)
    sums = torch.zeros(2, dtype=torch.float64)
    batches = ordered(encoded.lengths, EVAL_BATCH)
    model.eval()
    # FSDP gathers the weights collectively, so all ranks run equally many batches.
    rounds = [
        batches[start : start + world.size]
        for start in range(0, len(batches), world.size)
    ]
    for round_ in track(rounds, "evaluating", "batches", len(batches)):
        counts = world.rank < len(round_)
        indices = round_[world.rank] if counts else batches[0]
        inputs = encoded.collate(indices, job.steps.pad_id, job.steps.multiple)
        moved = {name: tensor.to(world.device) for name, tensor in inputs.items()}
        targets = moved.pop("labels")
        with session.autocast():
            logits = model(**moved).logits.float()
        if counts:
            loss = unweighted.loss_sum(logits, targets)
            num_targets = float(encoded.counts[indices].sum())
            sums += torch.tensor([float(loss), num_targets], dtype=torch.float64)
            task.write_outputs(outputs, encoded, indices, logits)
    model.train()
    all_outputs = process_group.all_reduce_sum(outputs.to(world.device)).cpu()
    summed, count = process_group.all_reduce_sum(sums.to(world.device)).tolist()
    return all_outputs, summed / max(1.0, count)  # texts may have no tokens

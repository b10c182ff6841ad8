"""What differs between kinds of targets: outputs, loss, scores, predictions.

Shapes: B examples, T positions, K outputs, N examples of a split.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfstep.distributed import ddp, process_group
from halfstep.errors import UserError
from halfstep.reporting.table import format_count
from halfstep.train import baseline, metrics
from halfstep.train.data import entity_tags
from halfstep.train.data.length_batches import ordered
from halfstep.train.objective import BinaryCrossEntropy, CrossEntropy, SquaredError
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halfstep.reporting.table import Table
    from halfstep.session.session import Session
    from halfstep.train.baseline import Baseline
    from halfstep.train.config import TrainConfig
    from halfstep.train.data.corpus import Corpus, Split
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.metrics import Entity, EvalMetrics
    from halfstep.train.objective import Objective
    from halfstep.train.plan import TrainJob

    ModelConfig = Any


_DIGITS = 6  # of a predicted probability: fp32 holds no more

EVAL_BATCH = 128
"""Texts per batch: without gradients, about the memory of a training batch of 32."""


@dataclass(frozen=True)
class SplitOutputs:
    """What a model predicts for a split."""

    split: Split
    encoded: EncodedTexts
    labels: tuple[str, ...]
    """Those of the corpus."""
    config: ModelConfig
    """The model's."""
    outputs: Tensor
    """As `Task.empty_outputs`, filled; on the CPU."""
    loss: float
    """Mean over all targets, without weights and label smoothing."""
    thresholds: Tensor | None = None
    """Probability above which each label is predicted, shape (K,). None: labels
    exclude each other, or the thresholds are chosen on this split."""

    @property
    def targets(self) -> Tensor:
        """The targets of the texts, shape (N,) or (N, K); not of entities."""
        labels: Any = self.encoded.labels  # a sparse matrix where texts have several
        is_dense = isinstance(labels, np.ndarray)
        return torch.from_numpy(labels if is_dense else labels.toarray())


class Task(ABC):
    """What differs between kinds of targets; one object each in `TASKS`."""

    head = "SequenceClassification"
    """Suffix of the model's class in transformers."""
    problem_type: str | None = None
    """Of the model's config; None where transformers has none."""
    loss_unit = "cross-entropy, nats"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the name of each of the model's outputs."""
        return tuple(labels)

    @abstractmethod
    def description(self, corpus: Corpus) -> str:
        """Return what there is to predict in a corpus, for display."""

    def config_entries(self, train: Split) -> dict[str, Any]:
        """Return entries of the model's config, which `predictions` reads."""
        del train
        return {} if self.problem_type is None else {"problem_type": self.problem_type}

    @abstractmethod
    def objective(self, config: TrainConfig, corpus: Corpus) -> Objective:
        """Return the training loss; raise UserError if settings and data disagree."""

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        """Return zeros for what is stored of all examples; here shape (N, K)."""
        return torch.zeros(len(encoded), num_outputs)

    def write_outputs(
        self, outputs: Tensor, _: EncodedTexts, indices: np.ndarray, logits: Tensor, /
    ) -> None:
        """Store a batch's part of `empty_outputs`; here its logits, in fp32."""
        outputs[torch.from_numpy(indices)] = logits.to(outputs)

    def thresholds(self, outputs: SplitOutputs) -> Tensor | None:
        """Return thresholds chosen on a split; None if labels exclude each other."""
        del outputs
        return None

    @abstractmethod
    def compute_metrics(self, outputs: SplitOutputs) -> EvalMetrics:
        """Return the metrics of a split."""

    @abstractmethod
    def worst_examples(self, outputs: SplitOutputs) -> Table:
        """Return the worst mistakes in a split, with their texts."""

    @abstractmethod
    def predictions(
        self,
        logits: Tensor,
        config: ModelConfig,
        encoded: EncodedTexts,
        indices: np.ndarray,
        /,
    ) -> list[dict[str, Any]]:
        """Return the prediction for each text of a batch, as plain values.

        Args:
            logits: The model's outputs, shape (B, K), or (B, T, K) for entities.
            config: The model's config, as `train` saved it.
            encoded: The tokens of the texts; only entities need them.
            indices: The examples of the batch in `encoded`, shape (B,).
        """

    def baseline(self, corpus: Corpus, split: str) -> Baseline | None:
        """Return what a simple model scores on a split; None if none is known."""
        del corpus, split
        return None


class _Classes(Task):
    """Each text has one class: {"label": name, "p(name)": probability, ...}."""

    problem_type = "single_label_classification"

    def description(self, corpus: Corpus) -> str:
        return f"in {format_count(len(corpus.labels), 'class', 'classes')}"

    def objective(self, config: TrainConfig, corpus: Corpus) -> Objective:
        counts = torch.from_numpy(corpus.train.label_counts())
        rarity = counts.sum() / (len(counts) * counts.double())
        weights = _label_weights(config, corpus.labels, counts, rarity)
        return CrossEntropy(weights, config.label_smoothing)

    def compute_metrics(self, outputs: SplitOutputs) -> EvalMetrics:
        return metrics.class_metrics(outputs.outputs, outputs.targets, outputs.labels)

    def worst_examples(self, outputs: SplitOutputs) -> Table:
        pair = outputs.outputs, outputs.targets
        return metrics.worst_classes(outputs.split.text, *pair, outputs.labels)

    def baseline(self, corpus: Corpus, split: str) -> Baseline | None:
        return baseline.text_baseline(
            corpus.train, corpus.dev, getattr(corpus, split), corpus.labels
        )

    def predictions(
        self, logits: Tensor, config: ModelConfig, /, *_: object
    ) -> list[dict[str, Any]]:
        names, rows = _columns(logits.float().softmax(-1), config)
        best = logits.argmax(-1).tolist()
        return [{"label": names[i], **row} for i, row in zip(best, rows, strict=True)]


class _LabelSets(Task):
    """Each text has any number of labels, also none.

    {"labels": [name, ...], "p(name)": probability, ...}, with the labels whose
    probability is above their threshold in the model's config.
    """

    problem_type = "multi_label_classification"
    loss_unit = "binary cross-entropy, nats"

    def description(self, corpus: Corpus) -> str:
        counts = corpus.train.label_counts()
        number = format_count(len(counts), "label")
        return f"with {number}, {counts.sum() / len(corpus.train):.2f} a text"

    def objective(self, config: TrainConfig, corpus: Corpus) -> Objective:
        counts = torch.from_numpy(corpus.train.label_counts())
        # One more: a label that every text has keeps a weight.
        rarity = (1 + len(corpus.train) - counts).double() / counts
        weights = _label_weights(config, corpus.labels, counts, rarity)
        return BinaryCrossEntropy(weights)

    def thresholds(self, outputs: SplitOutputs) -> Tensor:
        return metrics.best_thresholds(outputs.outputs.sigmoid(), outputs.targets)

    def _predicted_and_true(self, outputs: SplitOutputs) -> tuple[Tensor, Tensor]:
        """Return both as bool, shape (N, K)."""
        thresholds = outputs.thresholds
        if thresholds is None:
            thresholds = self.thresholds(outputs)
        return outputs.outputs.sigmoid() > thresholds, outputs.targets > 0

    def compute_metrics(self, outputs: SplitOutputs) -> EvalMetrics:
        pair = self._predicted_and_true(outputs)
        return metrics.label_set_metrics(*pair, outputs.labels, outputs.loss)

    def worst_examples(self, outputs: SplitOutputs) -> Table:
        pair = self._predicted_and_true(outputs)
        return metrics.worst_label_sets(outputs.split.text, *pair, outputs.labels)

    def predictions(
        self, logits: Tensor, config: ModelConfig, /, *_: object
    ) -> list[dict[str, Any]]:
        probabilities = logits.float().sigmoid().cpu()
        names, rows = _columns(probabilities, config)
        chosen = probabilities > torch.tensor(config.thresholds, dtype=torch.float64)
        return [
            {"labels": list(itertools.compress(names, mask)), **row}
            for mask, row in zip(chosen.tolist(), rows, strict=True)
        ]


class _Values(Task):
    """Each text has a number: {"value": number}, in the label's unit.

    The model's output is standardised, by the mean and scale in its config.
    """

    problem_type = "regression"
    loss_unit = "squared error, in variances of train"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        del labels
        return ("value",)

    def description(self, corpus: Corpus) -> str:
        labels = corpus.train.labels()
        ends = f"{labels.min():g} to {labels.max():g}"
        return f"with labels from {ends}, {labels.mean():.4g} on average"

    def config_entries(self, train: Split) -> dict[str, Any]:
        mean, scale = _mean_and_scale(train)
        own = super().config_entries(train)
        return {**own, "label_mean": mean, "label_scale": scale}

    def objective(self, config: TrainConfig, corpus: Corpus) -> Objective:
        del config
        return SquaredError(*_mean_and_scale(corpus.train))

    def compute_metrics(self, outputs: SplitOutputs) -> EvalMetrics:
        values = _in_label_unit(outputs.outputs, outputs.config)
        return metrics.regression_metrics(values, outputs.targets, outputs.loss)

    def worst_examples(self, outputs: SplitOutputs) -> Table:
        values = _in_label_unit(outputs.outputs, outputs.config)
        return metrics.worst_values(outputs.split.text, values, outputs.targets)

    def predictions(
        self, logits: Tensor, config: ModelConfig, /, *_: object
    ) -> list[dict[str, Any]]:
        values = _in_label_unit(logits, config).tolist()
        # Nine digits tell any two numbers of fp32 apart.
        return [{"value": float(f"{value:.9g}")} for value in values]


class _Entities(Task):
    """Each text has entities: {"entities": [{"start": i, "end": j, "label": type}]}.

    `end` is the offset after the entity. Stored are int32 tags, shape (tokens,).
    """

    head = "TokenClassification"

    def output_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        return entity_tags.tag_names(labels)

    def description(self, corpus: Corpus) -> str:
        things = "entity type", "entity types"
        return f"in {format_count(len(corpus.labels), *things)}"

    def objective(self, config: TrainConfig, corpus: Corpus) -> Objective:
        del corpus
        return CrossEntropy(None, config.label_smoothing)

    def empty_outputs(self, encoded: EncodedTexts, num_outputs: int) -> Tensor:
        del num_outputs
        return torch.zeros(int(encoded.lengths.sum()), dtype=torch.int32)

    def write_outputs(
        self,
        outputs: Tensor,
        encoded: EncodedTexts,
        indices: np.ndarray,
        logits: Tensor,
        /,
    ) -> None:
        tags = best_tags(encoded, indices, logits)
        for index, row in zip(indices, tags, strict=True):
            begin, length = encoded.begins[index], encoded.lengths[index]
            outputs[begin : begin + length] = torch.from_numpy(row[:length])

    def _true_and_predicted(
        self, outputs: SplitOutputs
    ) -> tuple[list[list[Entity]], list[list[Entity]]]:
        encoded, tags = outputs.encoded, outputs.outputs.numpy()
        begins, texts = encoded.begins, range(len(encoded))
        predicted = [
            entity_tags.spans_of(
                tags[begins[i] : begins[i + 1]], encoded.token_offsets(i)
            )
            for i in texts
        ]
        return [outputs.split.spans(i) for i in texts], predicted

    def compute_metrics(self, outputs: SplitOutputs) -> EvalMetrics:
        pair = self._true_and_predicted(outputs)
        return metrics.entity_metrics(*pair, outputs.labels, outputs.loss)

    def worst_examples(self, outputs: SplitOutputs) -> Table:
        pair = self._true_and_predicted(outputs)
        return metrics.worst_entities(outputs.split.text, *pair, outputs.labels)

    def baseline(self, corpus: Corpus, split: str) -> Baseline | None:
        return baseline.entity_baseline(
            corpus.train, getattr(corpus, split), corpus.labels
        )

    def predictions(
        self,
        logits: Tensor,
        config: ModelConfig,
        encoded: EncodedTexts,
        indices: np.ndarray,
        /,
    ) -> list[dict[str, Any]]:
        names = list(config.id2label.values())
        kinds = [name.removeprefix("B-") for name in names[1::2]]
        predictions = []
        for index, tags in zip(
            indices.tolist(), best_tags(encoded, indices, logits), strict=True
        ):
            offsets = encoded.token_offsets(index)
            entities = [
                {"start": start, "end": end, "label": kinds[kind]}
                for start, end, kind in entity_tags.spans_of(
                    tags[: len(offsets)], offsets
                )
            ]
            predictions.append({"entities": entities})
        return predictions


TASKS: dict[str, Task] = {
    "class": _Classes(),
    "multi_label": _LabelSets(),
    "regression": _Values(),
    "ner": _Entities(),
}
"""`TrainConfig.problem` -> what differs."""


def best_tags(encoded: EncodedTexts, indices: np.ndarray, logits: Tensor) -> np.ndarray:
    """Return the best valid tags of a batch: int16, shape (B, T), at most T tokens."""
    # Special tokens have no characters and cannot belong to an entity.
    real = encoded.tagged(indices)
    scores = logits.float().cpu().numpy()[:, : real.shape[1]]
    return entity_tags.decode(scores, real)


def _columns(
    probabilities: Tensor, config: ModelConfig
) -> tuple[list[str], list[dict[str, float]]]:
    """Return the names of labels, and for each text their p(NAME)."""
    names = list(config.id2label.values())
    columns = [f"p({name})" for name in names]
    rows = probabilities.double().round(decimals=_DIGITS).tolist()
    return names, [dict(zip(columns, row, strict=True)) for row in rows]


def _in_label_unit(logits: Tensor, config: ModelConfig) -> Tensor:
    mean, scale = float(config.label_mean), float(config.label_scale)
    return logits.float().squeeze(-1) * scale + mean


def _mean_and_scale(train: Split) -> tuple[float, float]:
    """Return the mean and the standard deviation of the labels of train."""
    labels = train.labels().astype("float64")
    if labels.min() == labels.max():
        raise UserError(
            f"--regression: each label of train is {labels[0]:g}; there is nothing to "
            "learn from equal labels: add texts with others."
        )
    return float(labels.mean()), float(labels.std())


def _label_weights(
    config: TrainConfig, labels: Sequence[str], counts: Tensor, rarity: Tensor
) -> Tensor | None:
    """Return the weights of --class-weights, shape (K,); None: equal weights.

    `counts` are the texts of each label, `rarity` what scikit-learn calls "balanced".
    """
    if config.weights is not None:
        return check_class_weights(config.weights, labels)
    if not config.balanced:
        return None
    if not counts.all():
        missing = labels[int(counts.argmin())]
        raise UserError(
            f"--class-weights balanced: train holds no example of {missing!r}; give "
            "the weights as numbers."
        )
    return rarity.float()


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
def collect_outputs(session: Session, job: TrainJob, split: str) -> SplitOutputs:
    """Return the outputs of every example, and the mean loss, on each rank.

    Ranks take batches in turn and fill their rows of `Task.empty_outputs`, which are
    summed.
    """
    model: Any = ddp.unwrap(session.model)
    task, world = TASKS[job.plan.config.problem], job.steps.world
    encoded, corpus = job.encoded[split], job.corpus
    outputs = task.empty_outputs(encoded, model.config.num_labels)
    unweighted = job.steps.objective.unweighted()
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
    mean_loss = summed / max(1.0, count)  # texts may have no tokens
    parts = getattr(corpus, split), encoded, corpus.labels, model.config
    return SplitOutputs(*parts, all_outputs, mean_loss)

"""Kinds of labels: outputs, weights by hand, predictions, and a run of each."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_files import refused
from transformers import BertConfig

from halfstep.train.config import BEST_BY, TrainConfig
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.objective import CrossEntropy, SquaredError
from halfstep.train.tasks import TASKS, check_class_weights

LABELS = ("a", "b", "c")
CLOSE = 1e-6


class Texts:
    """What tasks ask of a split: uses of labels, or numbers, and how many texts."""

    def __init__(
        self, counts: list[int], texts: int, numbers: list[float] | None = None
    ) -> None:
        self.counts, self.texts, self.numbers = counts, texts, numbers

    def __len__(self) -> int:
        return self.texts

    def label_counts(self) -> Any:
        return np.array(self.counts)

    def labels(self) -> Any:
        return np.array(self.numbers, np.float32)


def corpus_of(*given: Any) -> Any:
    return SimpleNamespace(labels=LABELS, train=Texts(*given))


def config_of(problem: str, **more: Any) -> TrainConfig:
    return TrainConfig(
        data="posts.csv",
        task="ner" if problem == "ner" else "classify",
        multi_label=problem == "multi_label",
        regression=problem == "regression",
        **more,
    )


def test_each_problem_has_a_task() -> None:
    """Law: settings and tasks know the same kinds of labels."""
    assert TASKS.keys() == BEST_BY.keys()


def test_outputs() -> None:
    """Law: labels are outputs as they are; types have tags, O before them."""
    for problem in ("class", "multi_label"):
        assert TASKS[problem].output_names(LABELS) == LABELS
    assert TASKS["regression"].output_names(()) == ("value",)
    assert TASKS["ner"].output_names(("PER",)) == ("O", "B-PER", "I-PER")


def test_balanced() -> None:
    """Law: the weights are scikit-learn's, by which all classes weigh alike."""
    from sklearn.utils.class_weight import compute_class_weight

    counts = [320, 60, 20]
    config = config_of("class", class_weights="balanced")
    objective = TASKS["class"].objective(config, corpus_of(counts, 400))
    assert isinstance(objective, CrossEntropy)
    assert objective.weights is not None
    truth = np.repeat([0, 1, 2], counts)
    oracle = compute_class_weight("balanced", classes=np.arange(3), y=truth)
    assert objective.weights.tolist() == pytest.approx(oracle, rel=CLOSE)
    shares = np.array(counts) * objective.weights.numpy()
    assert shares == pytest.approx(400 / 3, rel=CLOSE)


def test_balanced_labels() -> None:
    """Law: a label weighs where it is true, by the ratio of false to true texts."""
    config = config_of("multi_label", class_weights="balanced")
    objective: Any = TASKS["multi_label"].objective(
        config, corpus_of([1, 50, 100], 100)
    )
    wanted = [100, 51 / 50, 1 / 100]
    assert objective.positive_weights.tolist() == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize("problem", ["class", "multi_label"])
def test_weights_that_are_refused(problem: str) -> None:
    """Law: weights are as given, one for each label.

    A label without an example has no balanced weight, and is named.
    """
    wanted = torch.tensor([0.5, 1.0, 4.0])
    assert torch.equal(check_class_weights([0.5, 1.0, 4.0], LABELS), wanted)
    message = refused(check_class_weights, [1.0, 2.0], LABELS)
    assert message.startswith("--class-weights holds 2 numbers for 3 classes; give one")
    config = config_of(problem, class_weights="balanced")
    message = refused(TASKS[problem].objective, config, corpus_of([1, 0, 2], 3))
    assert message.startswith("--class-weights balanced: train holds no example of 'b'")


def test_numbers_are_standardised() -> None:
    """Law: mean and scale are those of train, in the loss and the model's config."""
    corpus = corpus_of([], 4, [1.0, 2.0, 3.0, 6.0])
    scale = float(np.std([1, 2, 3, 6]))
    found = TASKS["regression"].objective(config_of("regression"), corpus)
    assert found == SquaredError(3.0, pytest.approx(scale))
    assert TASKS["regression"].config_entries(corpus.train) == {
        "problem_type": "regression",
        "label_mean": 3.0,
        "label_scale": pytest.approx(scale),
    }
    equal = corpus_of([], 2, [4.0, 4.0])
    message = refused(TASKS["regression"].objective, config_of("regression"), equal)
    assert "each label of train is 4;" in message


def predictions(problem: str, logits: list[list[float]], **entries: Any) -> Any:
    config = BertConfig(id2label=dict(enumerate(LABELS)), **entries)
    nothing = EncodedTexts.build([])
    return TASKS[problem].predictions(
        torch.tensor(logits), config, nothing, np.arange(0)
    )


def test_predictions() -> None:
    """Law: a class is the likeliest; labels are those above thresholds of their own.

    A number is in the label's unit.
    """
    (first,) = predictions("class", [[0.0, 2.0, 1.0]])
    shares = torch.tensor([0.0, 2.0, 1.0]).softmax(0).tolist()
    assert first.pop("label") == "b"
    columns = [f"p({name})" for name in LABELS]
    assert first == pytest.approx(dict(zip(columns, shares, strict=True)), abs=1e-6)
    limits = [0.4, 0.6, 0.5]
    rows = [[0.0, 0.0, 0.0], [-9.0, 0.5, -9.0], [-9.0] * 3]
    found = predictions("multi_label", rows, thresholds=limits)
    assert [each["labels"] for each in found] == [["a"], ["b"], []]
    assert found[0] == {"labels": ["a"], **dict.fromkeys(columns, 0.5)}
    values = predictions("regression", [[0.0], [-2.0]], label_mean=3.0, label_scale=0.5)
    assert values == [{"value": 3.0}, {"value": 2.0}]


def test_predicted_entities() -> None:
    """Law: entities have a type and characters; special tokens have none."""
    offsets = [[(0, 0), (0, 3), (4, 6), (6, 9), (0, 0)]]
    encoded = EncodedTexts.build([[5] * 5], offsets=offsets)
    tags = torch.tensor([[1, 0, 1, 2, 1]])  # O B-PER I-PER
    config = BertConfig(id2label=dict(enumerate(TASKS["ner"].output_names(("PER",)))))
    logits = torch.nn.functional.one_hot(tags, 3)
    found = TASKS["ner"].predictions(logits, config, encoded, np.array([0]))
    assert found == [{"entities": [{"start": 4, "end": 9, "label": "PER"}]}]

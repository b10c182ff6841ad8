"""Tasks: the loss against torch's own, weights by hand, the best valid tags."""

import numpy as np
import pytest
import torch
from data_files import refused
from torch import nn

from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.step_dataset import Objective
from halfstep.train.tasks import TASKS, balanced_weights, check_class_weights

LABELS = ("a", "b", "c")
WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
COUNT = 12
# A sum of some 36 terms of fp32, in whatever order it is taken.
CLOSE = 36 * torch.finfo(torch.float32).eps


def labelled(*labels: int) -> EncodedTexts:
    return EncodedTexts.build([[5]] * len(labels), labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_loss_of_a_batch(weights: torch.Tensor | None, smoothing: float) -> None:
    """Law: parts of a batch, summed and divided, are torch's weighted mean."""
    targets = torch.tensor([0, 1, 2, 2] * (COUNT // 4))
    logits = torch.randn(COUNT, len(LABELS))
    encoded, objective = labelled(*targets.tolist()), Objective(weights, smoothing)
    # Uneven parts, as of processes and micro-batches.
    parts = [np.arange(0, 1), np.arange(1, 4), np.arange(4, COUNT)]
    summed = sum(objective.loss_sum(logits[part], targets[part]) for part in parts)
    weight = sum(objective.weight(encoded, part) for part in parts)
    oracle = nn.CrossEntropyLoss(weight=weights, label_smoothing=smoothing)
    assert float(summed / weight) == pytest.approx(
        float(oracle(logits, targets)), rel=CLOSE
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_tokens(smoothing: float) -> None:
    """Law: of tokens those that have no target count for nothing."""
    targets = torch.tensor([[IGNORED, 1, 0, IGNORED], [IGNORED, 2, IGNORED, IGNORED]])
    logits = torch.randn(2, 4, 3)
    found = Objective(None, smoothing).loss_sum(logits, targets)
    kept = targets != IGNORED
    oracle = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    wanted = float(oracle(logits[kept], targets[kept]))
    assert float(found) == pytest.approx(wanted, rel=CLOSE)


def test_what_to_divide_by() -> None:
    """Law: without weights it is the number of targets, and one if there is none."""
    encoded = EncodedTexts(
        ids=np.arange(4, dtype=np.int32),
        starts=np.array([0, 2, 4]),
        rows=np.array([1, 0]),
        stored_counts=np.array([3, 0], dtype=np.int32),
    )
    plain = Objective(None, 0.0)
    assert plain.weight(encoded, np.array([0, 1])) == 3.0
    assert plain.weight(encoded, np.array([0])) == 1.0
    assert plain.weight(labelled(0, 1, 2), np.array([0, 2])) == 2.0
    weighted = Objective(WEIGHTS, 0.0)
    assert weighted.weight(labelled(0, 1, 2), np.array([0, 2])) == 4.5


def test_balanced() -> None:
    """Law: the weights are scikit-learn's, by which all classes weigh alike."""
    from sklearn.utils.class_weight import compute_class_weight

    truth = [0, 0, 0, 1, 2, 2]
    encoded = labelled(*truth)
    found = balanced_weights(LABELS, encoded)
    oracle = compute_class_weight("balanced", classes=np.arange(3), y=truth)
    assert found.tolist() == pytest.approx(oracle.tolist(), rel=CLOSE)
    objective = Objective(found, 0.0)
    for label in range(3):
        (own,) = np.nonzero(np.array(truth) == label)
        assert objective.weight(encoded, own) == pytest.approx(2.0, rel=CLOSE)


def test_weights_that_are_refused() -> None:
    """Law: weights are as given, one for each class.

    A class without an example has no balanced weight, and is named.
    """
    assert torch.equal(check_class_weights([0.5, 1.0, 4.0], LABELS), WEIGHTS)
    told = refused(check_class_weights, [1.0, 2.0], LABELS)
    assert told.startswith("--class-weights holds 2 numbers for 3 classes; give one")
    told = refused(balanced_weights, LABELS, labelled(0, 2, 2))
    assert told.startswith("--class-weights balanced: train holds no example of 'b'")


def test_outputs() -> None:
    """Law: classes are outputs as they are; kinds have tags, O before them."""
    assert TASKS["classify"].output_names(LABELS) == LABELS
    assert TASKS["ner"].output_names(("PER",)) == ("O", "B-PER", "I-PER")


def test_loss_is_in_fp32() -> None:
    """Law: 16-bit logits are summed in fp32."""
    logits = torch.randn(COUNT, len(LABELS)).bfloat16()
    targets = torch.arange(COUNT) % len(LABELS)
    found = Objective(None, 0.0).loss_sum(logits, targets)
    assert found.dtype == torch.float32
    wanted = Objective(None, 0.0).loss_sum(logits.float(), targets)
    assert torch.equal(found, wanted)

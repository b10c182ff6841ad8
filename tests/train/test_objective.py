"""The training losses: against torch's own, and what a batch is divided by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.objective import (
    BinaryCrossEntropy,
    CrossEntropy,
    Objective,
    SquaredError,
)

WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
COUNT = 12
# A sum of some 36 terms of fp32, in whatever order it is taken.
CLOSE = 36 * torch.finfo(torch.float32).eps
CLASSES = torch.tensor([0, 1, 2, 2] * (COUNT // 4))
SETS = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]] * (COUNT // 3))
NUMBERS = torch.linspace(90.0, 110.0, COUNT)

CASES: list[tuple[Objective, torch.Tensor, nn.Module, torch.Tensor]] = [
    (CrossEntropy(weights, smoothing), CLASSES, oracle, CLASSES)
    for weights in (None, WEIGHTS)
    for smoothing in (0.0, 0.1)
    for oracle in [nn.CrossEntropyLoss(weights, label_smoothing=smoothing)]
]
CASES += [
    (BinaryCrossEntropy(weights), SETS, nn.BCEWithLogitsLoss(pos_weight=weights), SETS)
    for weights in (None, WEIGHTS)
]
CASES += [
    (SquaredError(100.0, 8.0), NUMBERS, nn.MSELoss(), (NUMBERS - 100)[:, None] / 8)
]
"""Objective, targets, torch's loss for a batch, and its targets."""


def logits_for(objective: Objective) -> torch.Tensor:
    outputs = 1 if isinstance(objective, SquaredError) else 3
    return torch.randn(COUNT, outputs, generator=torch.Generator().manual_seed(0))


def texts(labels: torch.Tensor) -> EncodedTexts:
    return replace(EncodedTexts.build([[5]] * len(labels)), labels=labels.numpy())


@pytest.mark.parametrize(("objective", "targets", "oracle", "own_targets"), CASES)
def test_loss_of_a_batch(
    objective: Objective,
    targets: torch.Tensor,
    oracle: nn.Module,
    own_targets: torch.Tensor,
) -> None:
    """Law: parts of a batch, summed and divided, are torch's mean of the batch.

    So are their gradients: neither ranks nor micro-batches change a step.
    """
    logits = logits_for(objective).requires_grad_()
    # Uneven parts, as of processes and micro-batches.
    parts = [np.arange(0, 1), np.arange(1, 4), np.arange(4, COUNT)]
    summed = sum(objective.loss_sum(logits[part], targets[part]) for part in parts)
    assert isinstance(summed, torch.Tensor)
    loss = summed / sum(objective.weight(texts(targets), part) for part in parts)
    wanted = oracle(logits, own_targets)
    torch.testing.assert_close(loss, wanted, rtol=CLOSE, atol=0)
    grads = [torch.autograd.grad(each, logits)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*grads, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("objective", "targets"), [case[:2] for case in CASES])
def test_loss_is_in_fp32(objective: Objective, targets: torch.Tensor) -> None:
    """Law: 16-bit logits are summed in fp32, in an autocast context too."""
    logits = logits_for(objective).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = objective.loss_sum(logits, targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, objective.loss_sum(logits.float(), targets))


@pytest.mark.parametrize(("objective", "targets"), [case[:2] for case in CASES])
def test_the_loss_that_is_reported(objective: Objective, targets: torch.Tensor) -> None:
    """Law: it has neither weights nor smoothing, and divides by the texts."""
    plain, logits = objective.unweighted(), logits_for(objective)
    assert plain.weight(texts(targets), np.arange(COUNT)) == COUNT
    base = {CrossEntropy: CrossEntropy(), BinaryCrossEntropy: BinaryCrossEntropy()}
    same = base.get(type(objective), objective)
    assert torch.equal(plain.loss_sum(logits, targets), same.loss_sum(logits, targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_tokens(smoothing: float) -> None:
    """Law: of tokens those that have no target count for nothing."""
    targets = torch.tensor([[IGNORED, 1, 0, IGNORED], [IGNORED, 2, IGNORED, IGNORED]])
    logits = torch.randn(2, 4, 3)
    found = CrossEntropy(None, smoothing).loss_sum(logits, targets)
    kept = targets != IGNORED
    oracle = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    wanted = float(oracle(logits[kept], targets[kept]))
    assert float(found) == pytest.approx(wanted, rel=CLOSE)


def test_no_targets() -> None:
    """Law: a batch without a target divides by one, not by zero."""
    encoded = texts(torch.tensor([0, 1, 2]))
    vars(encoded)["counts"] = np.array([3, 0, 1])
    plain = CrossEntropy()
    assert plain.weight(encoded, np.array([0, 1])) == 3.0
    assert plain.weight(encoded, np.array([1])) == 1.0

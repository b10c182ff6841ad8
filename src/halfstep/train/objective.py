"""The training loss of each kind of target: its sum, and the divisor of its mean.

Shapes: B examples, T positions, K outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from halfstep.train.data.entity_tags import IGNORED

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from halfstep.train.data.tokenized import EncodedTexts


class Objective(ABC):
    """A training loss, always computed in fp32, in an autocast context too.

    The loss of a step is the sum over all ranks and micro-batches divided by the weight
    of the whole batch, so it does not depend on how the batch is divided.
    """

    @abstractmethod
    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all targets, shape ()."""

    def weight(self, encoded: EncodedTexts, indices: np.ndarray) -> float:
        """Return the sum of a batch's target weights, the divisor of its mean loss."""
        # At least 1: a batch of texts without tokens has no targets.
        return float(max(1, encoded.counts[indices].sum()))

    def unweighted(self) -> Objective:
        """Return the loss that is reported: without weights and smoothing."""
        return self


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """One class per target; the weighted mean, as `torch.nn.CrossEntropyLoss`."""

    weights: Tensor | None = None
    """Weight of each class, shape (K,); None: equal weights."""
    smoothing: float = 0.0

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over logits (..., K) and int64 targets (...), those IGNORED excepted."""
        return functional.cross_entropy(
            logits.float().flatten(0, -2),
            targets.flatten(),
            weight=_on_device_of(logits, self.weights),
            label_smoothing=self.smoothing,
            ignore_index=IGNORED,
            reduction="sum",
        )

    def weight(self, encoded: EncodedTexts, indices: np.ndarray) -> float:
        """Return the number of targets, or the sum of their classes' weights."""
        if self.weights is None or encoded.labels is None:
            return super().weight(encoded, indices)
        return float(self.weights[torch.from_numpy(encoded.labels[indices])].sum())

    def unweighted(self) -> Objective:
        """Return the plain cross-entropy."""
        return CrossEntropy()


@dataclass(frozen=True)
class BinaryCrossEntropy(Objective):
    """Any number of labels per text; the mean over texts and labels."""

    positive_weights: Tensor | None = None
    """Weight of each label where it is true, shape (K,); None: 1."""

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over texts the mean over labels; both tensors have the shape (B, K)."""
        summed = functional.binary_cross_entropy_with_logits(
            logits.float(),
            targets.float(),
            pos_weight=_on_device_of(logits, self.positive_weights),
            reduction="sum",
        )
        return summed / logits.shape[-1]

    def unweighted(self) -> Objective:
        """Return the loss without weights."""
        return replace(self, positive_weights=None)


@dataclass(frozen=True)
class SquaredError(Objective):
    """One number per text, standardised: the model learns (label - mean) / scale.

    A head that starts near 0 would take many steps to reach labels around 100.
    """

    mean: float
    scale: float

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over logits (B, 1) and targets (B,), in squared `scale`s."""
        standardised = (targets.float() - self.mean) / self.scale
        errors = logits.float().squeeze(-1), standardised
        return functional.mse_loss(*errors, reduction="sum")


def _on_device_of(logits: Tensor, weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.to(logits.device)

"""Splits a batch in halves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from halfstep.numerics.formats import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

_FEWEST = 2
"""Fewest examples that can be split."""


def halves(batch: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
    """Return the first half of a batch's examples, and equally many of the rest.

    A tensor is split along its first dimension if that has the most common length of
    all tensors; other tensors and objects go into both halves.

    Args:
        batch: Input of a model.

    Returns:
        None if no tensor can be split.
    """
    sizes = Counter(item.shape[0] for item in tensors_in(batch) if item.ndim)
    if not sizes:
        return None
    examples = sizes.most_common(1)[0][0]
    half = examples // 2
    if examples < _FEWEST:
        return None

    def first(item: Tensor) -> Tensor:
        return item[:half] if item.ndim and item.shape[0] == examples else item

    def second(item: Tensor) -> Tensor:
        is_batched = item.ndim and item.shape[0] == examples
        return item[half : 2 * half] if is_batched else item

    return map_tensors(batch, first), map_tensors(batch, second)

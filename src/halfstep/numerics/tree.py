"""Halves of a batch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from halfstep.numerics.formats import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

_FEWEST = 2
"""Examples that can be halved."""


def halves(batch: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
    """Return the first half of a batch's examples, and as many of the others.

    A tensor is cut along its first dimension if that is as long as those of most of
    the tensors; others, and whatever is no tensor, go into both halves.

    Args:
        batch: As a model takes it.

    Returns:
        None where no dimension can be cut in two.
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

"""Halves of a batch, and a function over each tensor of a nested value."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

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


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """Return a copy of a nested value with each of its tensors changed.

    Args:
        value: Lists, tuples, named ones too, mappings and dataclasses keep their kind.
        change: Gives what stands for a tensor.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key in list(copied):
            copied[key] = map_tensors(copied[key], change)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        inside = {name: map_tensors(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **inside)
    return value

"""Float formats as facts, and the one function that casts nested values.

In: a word ("bf16"), a dtype, or any nested value that holds tensors. Out: a
`FloatFormat`, or the same value with its floating tensors in another dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch

from halfstep.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """One binary floating-point format; every number follows from its bit widths."""

    name: str
    """Short word used in flags, logs and checkpoints."""
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    """Explicit bits of the fraction; one ulp of 1.0 is 2**-mantissa_bits."""

    @property
    def bytes(self) -> int:
        """Size of one number."""
        return self.dtype.itemsize

    @property
    def max(self) -> float:
        """Largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def min_normal(self) -> float:
        """Smallest positive number with full precision."""
        return torch.finfo(self.dtype).smallest_normal

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number; half of it and less rounds to zero."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next larger number."""
        return 2.0**-self.mantissa_bits

    def __str__(self) -> str:
        """Return the word that `parse` turns back into this format."""
        return self.name


FP32 = FloatFormat("fp32", torch.float32, 8, 23)
BF16 = FloatFormat("bf16", torch.bfloat16, 8, 7)
FP16 = FloatFormat("fp16", torch.float16, 5, 10)

FORMATS = {format_.name: format_ for format_ in (FP32, BF16, FP16)}
_BY_DTYPE = {format_.dtype: format_ for format_ in FORMATS.values()}
_LONG_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"} | {
    "float16": "fp16",
    "half": "fp16",
}


def parse(word: str | torch.dtype) -> FloatFormat:
    """Return the format that a word or a dtype names.

    Args:
        word: "fp32", "bf16", "fp16", torch's long names, or a torch.dtype.

    Raises:
        UserError: If it names no format that halfstep trains in.
    """
    if isinstance(word, torch.dtype):
        found = _BY_DTYPE.get(word)
    else:
        key = word.strip().lower().removeprefix("torch.")
        found = FORMATS.get(_LONG_NAMES.get(key, key))
    if found is None:
        message = f"dtype={word!r} is not a format; choose one of {', '.join(FORMATS)}."
        raise UserError(message)
    return found


def word(dtype: torch.dtype) -> str:
    """Return a format's short word, or torch's for a dtype that is none of ours."""
    known = _BY_DTYPE.get(dtype)
    return known.name if known else str(dtype).removeprefix("torch.")


def is_low(dtype: torch.dtype) -> bool:
    """Say whether a dtype is a 16-bit float."""
    return dtype in (torch.bfloat16, torch.float16)


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Return `value` with its fp16, bf16 and fp32 tensors in `dtype`.

    Why: `value.to(dtype)` breaks token ids and masks, and model outputs are nested.
    Float64, integer, bool and complex tensors stay as they are, as under autocast:
    whoever made a float64 tensor meant it. Lists, tuples, named tuples, mappings
    (transformers' ModelOutput is one) and dataclasses keep their type.

    Args:
        value: A tensor, a nested container of tensors, or anything else.
        dtype: The dtype to cast to.
    """
    cast: T = _cast(value, dtype)
    return cast


def _cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _BY_DTYPE else value
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)
        # One by one: transformers' ModelOutput refuses `update`.
        for key, item in value.items():
            twin[key] = _cast(item, dtype)
        return twin
    if isinstance(value, list | tuple):
        items = [_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        cast = {name: _cast(getattr(value, name), dtype) for name in fields}
        return dataclasses.replace(value, **cast)
    return value

"""Properties of float formats, and functions over tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from halfstep.errors import UserError, format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: its dtype, bit widths and limits.

    Example:
        >>> FP16.max, BF16.epsilon
        (65504.0, 0.0078125)
    """

    name: str
    """Short name used in flags, logs and checkpoints."""
    dtype: torch.dtype
    """torch's dtype."""
    exponent_bits: int
    """Bits of the exponent."""
    mantissa_bits: int
    """Explicit bits of the fraction; one ulp of 1.0 is 2**-mantissa_bits."""

    @property
    def bytes(self) -> int:
        """Bytes per number."""
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
"""IEEE single precision."""
BF16 = FloatFormat("bf16", torch.bfloat16, 8, 7)
"""bfloat16: fp32's range with 8 bits of precision."""
FP16 = FloatFormat("fp16", torch.float16, 5, 10)
"""IEEE half precision: 11 bits of precision, finite numbers up to 65504."""

FORMATS = {format_.name: format_ for format_ in (FP32, BF16, FP16)}
_BY_DTYPE = {format_.dtype: format_ for format_ in FORMATS.values()}
AUTOCAST_DTYPES = frozenset(_BY_DTYPE)
"""What autocast casts: not float64, complex or integers."""
_LONG_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
_LONG_NAMES |= {"float16": "fp16", "half": "fp16"}


def parse(word: str | torch.dtype | FloatFormat) -> FloatFormat:
    """Return the format of a name or a dtype.

    Args:
        word: "fp32", "bf16", "fp16", torch's long names, a torch.dtype or a format.

    Raises:
        UserError: If it is not a format that halfstep trains in.

    Example:
        >>> parse("bfloat16").name
        'bf16'
    """
    if isinstance(word, FloatFormat):
        return word
    if isinstance(word, torch.dtype):
        format_ = _BY_DTYPE.get(word)
    else:
        key = word if isinstance(word, str) else ""  # untyped callers may pass anything
        key = key.strip().lower().removeprefix("torch.")
        format_ = FORMATS.get(_LONG_NAMES.get(key, key))
    if format_ is None:
        raise UserError(
            f"dtype={format_value(word)} is not a format; "
            f"choose one of {', '.join(FORMATS)}."
        )
    return format_


def word(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, or torch's name for any other dtype.

    Example:
        >>> word(torch.bfloat16), word(torch.int64)
        ('bf16', 'int64')
    """
    format_ = _BY_DTYPE.get(dtype)
    return format_.name if format_ else str(dtype).removeprefix("torch.")


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype is bf16 or fp16.

    Example:
        >>> is_low(torch.float16), is_low(torch.float32)
        (True, False)
    """
    return dtype in (torch.bfloat16, torch.float16)


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Return `value` with its fp16, bf16 and fp32 tensors cast to `dtype`.

    Float64, integer, bool and complex tensors are not cast, as under autocast.

    Lists, tuples, named tuples, mappings (transformers' ModelOutput is one) and
    dataclasses, frozen ones too, keep their type and other attributes; no constructor
    runs. A tensor that occurs twice is cast once and stays one object. A container in
    which nothing is cast is returned itself, not a copy. Sets, generators, modules and
    other objects are returned as they are, with the tensors in them.

    Args:
        value: A tensor, a nested container of tensors, or anything else. A container
            must not contain itself.
        dtype: The dtype to cast to.

    Example:
        >>> batch = {"x": torch.ones(2), "ids": torch.arange(2)}
        >>> {name: t.dtype for name, t in cast_floating(batch, torch.bfloat16).items()}
        {'x': torch.bfloat16, 'ids': torch.int64}
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in AUTOCAST_DTYPES else tensor

    return map_tensors(value, cast)


def map_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return a nested value with a function applied to each of its tensors.

    Args:
        value: As for `cast_floating`, with the same containers.
        change: Takes a tensor and returns its replacement, or the tensor itself.

    Example:
        >>> map_tensors([torch.ones(2), "text"], torch.neg)
        [tensor([-1., -1.]), 'text']
    """
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def change_once(tensor: torch.Tensor) -> torch.Tensor:
        # By identity in a list: torch.compile would recompile code that reads ids.
        for before, after in replaced:
            if before is tensor:
                return after
        replaced.append((tensor, change(tensor)))
        return replaced[-1][1]

    changed: T = _map(value, change_once)[0]
    return changed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the tensors in a nested value, from the containers of `cast_floating`.

    Args:
        value: Must not contain itself.

    Example:
        >>> [t.shape for t in tensors_in({"x": torch.ones(2), "n": 3})]
        [torch.Size([2])]
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    for _, item in _items(value):
        yield from tensors_in(item)


def _map(
    value: Any,  # noqa: ANN401
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Any, bool]:
    """Return the replacement of a value, and whether it is a different object."""
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return changed, changed is not value
    items = _items(value)
    mapped = [_map(item, change) for _, item in items]
    if not any(is_different for _, is_different in mapped):
        return value, False
    if isinstance(value, tuple):
        return _tuple_like(value, [item for item, _ in mapped]), True
    copied = _shallow_copy(value)
    for (key, _), (item, is_different) in zip(items, mapped, strict=True):
        if is_different:
            _set_item(copied, key, item)
    return copied, True


def _items(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Return a container's (key, item) pairs; none if the value is not a container."""
    if isinstance(value, MutableMapping):
        return list(value.items())
    # Tuple of types: older versions of torch.compile cannot trace `list | tuple`.
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    is_opaque = isinstance(value, (type, torch.nn.Module))
    if is_opaque or not dataclasses.is_dataclass(value):
        return []
    names = [field.name for field in dataclasses.fields(value)]
    # Fields with init=False may be unset.
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _set_item(container: Any, key: Any, item: object) -> None:  # noqa: ANN401
    if isinstance(container, (MutableMapping, list)):
        # Item by item: transformers' ModelOutput raises in `update`.
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also if frozen


def _shallow_copy(value: Any) -> Any:  # noqa: ANN401
    """Copy a container. torch.compile cannot trace `copy.copy` of plain ones."""
    if type(value) in (dict, list):
        return type(value)(value)
    return copy.copy(value)


def _tuple_like(value: Any, items: list[Any]) -> Any:  # noqa: ANN401
    if hasattr(value, "n_sequence_fields"):  # torch.return_types
        return type(value)(items)
    # Constructors of tuple subclasses take arbitrary arguments.
    copied = tuple.__new__(type(value), items)
    extra = getattr(value, "__dict__", None)
    if extra:
        vars(copied).update(extra)
    return copied

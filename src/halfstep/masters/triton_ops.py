"""Building blocks of the Triton kernels: tensor table, loads and stores, rounding.

In: nothing. Out: functions in Triton's language, and what they know a table by. Until
`triton_jit.load` hands them to Triton they are plain functions that cannot be called,
so that importing them needs no Triton.

bf16 is read and written as integers: the rounding is ours to the bit, on devices that
know no bf16 too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Value: TypeAlias = Any
"""A number or block on the device, or a pointer."""
constexpr: TypeAlias = Any  # noqa: PYI042 -- Triton looks for this word
"""Known when the kernel is compiled."""

tl: Any = None
"""`triton.language`, once it is loaded."""

# Words of the first line of a table: numbers of the rule, in double.
LR: Any = 0
DECAY: Any = 1
"""Weight decay; for AdamW what is left of the weight."""
KEEP: Any = 2
"""Momentum, or beta2."""
TAKE: Any = 3
"""1 - dampening, or 1 - beta2."""
MEAN_TAKE: Any = 4
"""1 - beta1; beta1 where FAR."""
EPS: Any = 5
MEAN_LOG: Any = 6
"""Of beta1."""
LOG: Any = 7
"""Of beta2."""

# Words of the lines below.
GRADIENT: Any = 0
NUMEL: Any = 1
BEFORE: Any = 2
"""Blocks of the tensors above."""
CHECK_WIDTH: Any = 3
"""Of a line of the check for inf and NaN."""
WEIGHT: Any = 3
RESIDUAL: Any = 4
STATE: Any = 5
"""And the two after it."""
STEP: Any = 8
FILLED: Any = 9
"""Whether SGD's momentum buffer holds anything."""
KEY: Any = 10
"""Two words for each of the two streams of random numbers."""
WIDTH: Any = 14

# Bits of `flags`.
DECAYS: Any = 1
DECOUPLED: Any = 2
NESTEROV: Any = 4
AMSGRAD: Any = 8
MAXIMIZE: Any = 16
FAR: Any = 32
"""Adam's mean lies nearer to the gradient than to the old mean."""

# Of floating-point formats.
INFINITE: Any = 0x7F800000
HIGH: Any = 0x7F80
"""The upper half of infinity, and infinity as bf16."""
LARGEST: Any = 0x7F7F
"""The largest finite bf16."""

CONSTANTS = {name: value for name, value in globals().items() if name.isupper()}
FUNCTIONS: list[Callable[..., Value]] = []


def on_device(function: Callable[..., Value]) -> Callable[..., Value]:
    """Put a function on the list of those that are Triton's."""
    FUNCTIONS.append(function)
    return function


@on_device
def row_of(table: Value, rows: Value, width: constexpr, program: Value) -> Value:
    """Return the last row that has no more blocks before it than this program."""
    low = program * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + ((middle + 1) * width + BEFORE))
        low = tl.where(before <= program, middle, low)
        high = tl.where(before <= program, high, middle)
    return low


@on_device
def number(table: Value, column: constexpr) -> Value:
    """Return a number of the rule, rounded once."""
    return tl.load(table + column).to(tl.float64, bitcast=True).to(tl.float32)


@on_device
def base(line: Value, column: constexpr, dtype: constexpr, aligned: constexpr) -> Value:
    """Return the pointer to a tensor of a row."""
    pointer = tl.load(line + column).to(tl.pointer_type(dtype))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@on_device
def get(
    line: Value,
    column: constexpr,
    kind: constexpr,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> Value:
    """Read a block: fp32 as it is, fp16 as fp32, 16 bits as uint32."""
    if kind == "fp32":
        value = tl.load(base(line, column, tl.float32, aligned) + at, mask=mask)
    elif kind == "fp16":
        half = tl.load(base(line, column, tl.float16, aligned) + at, mask=mask)
        value = half.to(tl.float32)
    else:
        bits = tl.load(base(line, column, tl.uint16, aligned) + at, mask=mask)
        value = bits.to(tl.uint32)
    return value


@on_device
def put(
    line: Value,
    column: constexpr,
    kind: constexpr,
    value: Value,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> None:
    """Write a block: fp32, fp32 as fp16, or 16 bits from uint32."""
    if kind == "fp32":
        tl.store(base(line, column, tl.float32, aligned) + at, value, mask=mask)
    elif kind == "fp16":
        half = value.to(tl.float16)
        tl.store(base(line, column, tl.float16, aligned) + at, half, mask=mask)
    else:
        bits = value.to(tl.uint16)
        tl.store(base(line, column, tl.uint16, aligned) + at, bits, mask=mask)


@on_device
def wide(value: Value, kind: constexpr) -> Value:
    """Return what was read as fp32."""
    if kind == "bf16":
        value = (value << 16).to(tl.float32, bitcast=True)
    return value


@on_device
def keep_nan(bits: Value, rounded: Value) -> Value:
    """Return the bits of bf16, with NaN where fp32 was NaN."""
    return tl.where((bits & 0x7FFFFFFF) > INFINITE, (bits >> 16) | 0x40, rounded)


@on_device
def nearest(value: Value) -> Value:
    """Round fp32 to the bits of bf16, ties to even."""
    bits = value.to(tl.uint32, bitcast=True)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    return keep_nan(bits, high + round_up)


@on_device
def round_stochastic(value: Value, random_bits: Value) -> Value:
    """Round fp32 to the bits of bf16 with 16 random bits; never to an infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + random_bits) >> 16
    return keep_nan(bits, tl.where((high & 0x7FFF) < LARGEST, high + round_up, high))


@on_device
def mix(word: Value) -> Value:
    """Scramble 32-bit words."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@on_device
def draw(line: Value, stream: constexpr, at: Value) -> Value:
    """Return 32 random bits for each number of a block."""
    first = tl.load(line + (KEY + 2 * stream)).to(tl.uint32)
    second = tl.load(line + (KEY + 2 * stream + 1)).to(tl.uint32)
    return mix(mix(at.to(tl.uint32) + first) ^ second)


@on_device
def stored(value: Value, kind: constexpr, random_bits: Value) -> Value:
    """Return a number of the optimizer's state as `put` takes it."""
    if kind == "bf16":
        value = round_stochastic(value, random_bits)
    return value


@on_device
def read_fp32(
    line: Value, encoding: constexpr, at: Value, mask: Value, aligned: constexpr
) -> Value:
    """Return the fp32 values of a block."""
    if encoding == "fp32":
        fp32 = get(line, RESIDUAL, "fp32", at, mask, aligned)
    elif encoding == "plain":
        fp32 = get(line, WEIGHT, "fp32", at, mask, aligned)
    elif encoding == "split":
        high = get(line, WEIGHT, "bf16", at, mask, aligned)
        low = get(line, RESIDUAL, "bf16", at, mask, aligned)
        size = high & 0x7FFF
        # Only these were ever carried into: not zero, and not NaN.
        rounded_up = tl.where((size > 0) & (size <= HIGH), low >> 15, 0)
        fp32 = (((high - rounded_up) << 16) | low).to(tl.float32, bitcast=True)
    else:
        fp32 = wide(get(line, WEIGHT, "bf16", at, mask, aligned), "bf16")
        if encoding == "kahan":
            fp32 += wide(get(line, RESIDUAL, "bf16", at, mask, aligned), "bf16")
    return fp32


@on_device
def write_fp32(
    line: Value,
    encoding: constexpr,
    weights: constexpr,
    fp32: Value,
    random_bits: Value,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> None:
    """Encode and store the fp32 values of a block."""
    weight = fp32
    if encoding == "fp32":
        put(line, RESIDUAL, "fp32", fp32, at, mask, aligned)
        if weights == "bf16":
            weight = nearest(fp32)
    elif encoding == "split":
        bits = fp32.to(tl.uint32, bitcast=True)
        weight = keep_nan(bits, (bits >> 16) + ((bits >> 15) & 1))
        put(line, RESIDUAL, "bf16", bits & 0xFFFF, at, mask, aligned)
    elif encoding == "kahan":
        weight = nearest(fp32)
        compensation = nearest(fp32 - wide(weight, "bf16"))
        compensation = tl.where((weight & HIGH) == HIGH, 0, compensation)
        put(line, RESIDUAL, "bf16", compensation, at, mask, aligned)
    elif encoding == "stochastic":
        weight = round_stochastic(fp32, random_bits)
    put(line, WEIGHT, weights, weight, at, mask, aligned)

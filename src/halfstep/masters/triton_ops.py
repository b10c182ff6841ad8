"""What every kernel is made of: a table of tensors, their memory, and rounding.

In: nothing. Out: functions in Triton's language, and what they know a table by. Until
`triton_jit.load` hands them to Triton they are plain functions that nobody can call,
so that nobody needs Triton to import them.

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
LOOK_WIDTH: Any = 3
"""Of a line that is only looked at."""
WEIGHT: Any = 3
EXTRA: Any = 4
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
    carry = ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    return keep_nan(bits, high + carry)


@on_device
def at_random(value: Value, sixteen: Value) -> Value:
    """Round fp32 to the bits of bf16 with 16 random bits; never to an infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    high = bits >> 16
    carry = ((bits & 0xFFFF) + sixteen) >> 16
    return keep_nan(bits, tl.where((high & 0x7FFF) < LARGEST, high + carry, high))


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
def stored(value: Value, kind: constexpr, sixteen: Value) -> Value:
    """Return a number of the optimizer's state as `put` takes it."""
    if kind == "bf16":
        value = at_random(value, sixteen)
    return value


@on_device
def truth_of(
    line: Value, form: constexpr, at: Value, mask: Value, aligned: constexpr
) -> Value:
    """Put the fp32 truth of a block together."""
    if form == "fp32":
        truth = get(line, EXTRA, "fp32", at, mask, aligned)
    elif form == "plain":
        truth = get(line, WEIGHT, "fp32", at, mask, aligned)
    elif form == "split":
        high = get(line, WEIGHT, "bf16", at, mask, aligned)
        low = get(line, EXTRA, "bf16", at, mask, aligned)
        size = high & 0x7FFF
        # Only these were ever carried into: not zero, and not NaN.
        carried = tl.where((size > 0) & (size <= HIGH), low >> 15, 0)
        truth = (((high - carried) << 16) | low).to(tl.float32, bitcast=True)
    else:
        truth = wide(get(line, WEIGHT, "bf16", at, mask, aligned), "bf16")
        if form == "kahan":
            truth += wide(get(line, EXTRA, "bf16", at, mask, aligned), "bf16")
    return truth


@on_device
def publish(
    line: Value,
    form: constexpr,
    weights: constexpr,
    truth: Value,
    sixteen: Value,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> None:
    """Take the fp32 truth of a block apart."""
    weight = truth
    if form == "fp32":
        put(line, EXTRA, "fp32", truth, at, mask, aligned)
        if weights == "bf16":
            weight = nearest(truth)
    elif form == "split":
        bits = truth.to(tl.uint32, bitcast=True)
        weight = keep_nan(bits, (bits >> 16) + ((bits >> 15) & 1))
        put(line, EXTRA, "bf16", bits & 0xFFFF, at, mask, aligned)
    elif form == "kahan":
        weight = nearest(truth)
        rest = nearest(truth - wide(weight, "bf16"))
        rest = tl.where((weight & HIGH) == HIGH, 0, rest)
        put(line, EXTRA, "bf16", rest, at, mask, aligned)
    elif form == "stochastic":
        weight = at_random(truth, sixteen)
    put(line, WEIGHT, weights, weight, at, mask, aligned)

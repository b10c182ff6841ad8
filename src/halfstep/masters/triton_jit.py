"""Triton kernels: fused updates, and the check of gradients for inf and NaN.

A table is 64-bit words: a line of numbers, then one line a tensor. A program finds its
line by the number of its block: a thousand tensors are one launch, whatever their
sizes. The numbers are no arguments, so no learning rate makes a kernel of its own.

Launch with `enable_fp_fusion=False`: a product and a sum contracted into one rounding
here and not there would make the forms differ from each other. bf16 is read and written
as integers: the rounding is ours to the bit, on devices that know no bf16 too.

Until `load` hands them to Triton these are plain functions that cannot be called, so
that importing them needs no Triton.
"""

from __future__ import annotations

import inspect
import threading
from importlib import import_module
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
_lock = threading.Lock()


def on_device(function: Callable[..., Value]) -> Callable[..., Value]:
    """Put a function on the list of those that are Triton's."""
    FUNCTIONS.append(function)
    return function


def load() -> dict[str, Any]:
    """Hand all functions to Triton, once; return them by name.

    Raises:
        ImportError: If there is no Triton.
    """
    namespace = globals()
    with _lock:
        if tl is None:
            # It ships no types; named like this, nobody needs it to check ours.
            triton: Any = import_module("triton")
            language: Any = import_module("triton.language")
            compiled = {n: language.constexpr(value) for n, value in CONSTANTS.items()}
            for function in FUNCTIONS:
                params = inspect.signature(function).parameters.values()
                # A single tensor, or a flag that happens to be aligned, must not make
                # a kernel of its own.
                unspecialized = [p.name for p in params if p.annotation != "constexpr"]
                compiled[function.__name__] = triton.jit(
                    function, do_not_specialize=unspecialized
                )
            # It reads annotations as it reads code.
            compiled |= {"Value": language.tensor, "constexpr": language.constexpr}
            namespace.update(compiled, tl=language)
    return {function.__name__: namespace[function.__name__] for function in FUNCTIONS}


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


@on_device
def sgd(
    table: Value,
    line: Value,
    g: Value,
    w: Value,
    bits: Value,
    states: constexpr,
    flags: constexpr,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> Value:
    """Return the weights after torch.optim.SGD; the buffer is written."""
    if DECAYS & flags:
        g = g + number(table, DECAY) * w
    if states != "none":
        momentum = number(table, KEEP)
        old = wide(get(line, STATE, states, at, mask, aligned), states)
        # Where nothing was ever written there may be NaN; it is not touched.
        filled = tl.load(line + FILLED) != 0
        buffer = tl.where(filled, momentum * old + number(table, TAKE) * g, g)
        new_state = stored(buffer, states, bits & 0xFFFF)
        put(line, STATE, states, new_state, at, mask, aligned)
        g = g + momentum * buffer if NESTEROV & flags else buffer
    return w - number(table, LR) * g


@on_device
def adam(
    table: Value,
    line: Value,
    correction: Value,
    g: Value,
    w: Value,
    bits: Value,
    states: constexpr,
    flags: constexpr,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> Value:
    """Return the weights after torch.optim.Adam or AdamW; the moments are written."""
    if DECAYS & flags:
        if DECOUPLED & flags:
            w = w * number(table, DECAY)
        else:
            g = g + number(table, DECAY) * w
    mean = wide(get(line, STATE, states, at, mask, aligned), states)
    square = wide(get(line, STATE + 1, states, at, mask, aligned), states)
    # torch.lerp goes from the nearer end.
    if FAR & flags:
        mean = g - (g - mean) * number(table, MEAN_TAKE)
    else:
        mean = mean + number(table, MEAN_TAKE) * (g - mean)
    square = number(table, KEEP) * square + number(table, TAKE) * g * g
    more = bits
    if states == "bf16":
        more = draw(line, 1, at)
    new_state = stored(mean, states, bits & 0xFFFF)
    put(line, STATE, states, new_state, at, mask, aligned)
    new_state = stored(square, states, more >> 16)
    put(line, STATE + 1, states, new_state, at, mask, aligned)
    if AMSGRAD & flags:
        old = wide(get(line, STATE + 2, states, at, mask, aligned), states)
        # NaN on either side wins, as in torch.
        square = tl.where((square > old) | (square != square), square, old)  # noqa: PLR0124
        new_state = stored(square, states, more & 0xFFFF)
        put(line, STATE + 2, states, new_state, at, mask, aligned)
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(correction + 1))
    return w - tl.load(correction) * tl.div_rn(mean, root + number(table, EPS))


@on_device
def step(
    table: Value,
    line: Value,
    correction: Value,
    factor: Value,
    rule: constexpr,
    encoding: constexpr,
    weights: constexpr,
    gradients: constexpr,
    states: constexpr,
    flags: constexpr,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> None:
    """Update one block."""
    g = wide(get(line, GRADIENT, gradients, at, mask, aligned), gradients) * factor
    if MAXIMIZE & flags:
        g = g * -1.0
    w = read_fp32(line, encoding, at, mask, aligned)
    bits = at
    if encoding == "stochastic" or states == "bf16":
        bits = draw(line, 0, at)
    if rule == "sgd":
        w = sgd(table, line, g, w, bits, states, flags, at, mask, aligned)
    else:
        w = adam(table, line, correction, g, w, bits, states, flags, at, mask, aligned)
    write_fp32(line, encoding, weights, w, bits >> 16, at, mask, aligned)


@on_device
def update(
    table: Value,
    rows: Value,
    corrections: Value,
    inverse: Value,
    found_inf: Value,
    rule: constexpr,
    encoding: constexpr,
    weights: constexpr,
    gradients: constexpr,
    states: constexpr,
    flags: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    """Update the tensors of a table, unless an overflow was found; one block each."""
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        row = row_of(table, rows, WIDTH, program)
        line = table + (row + 1) * WIDTH
        own = corrections + row * 2
        factor = tl.load(inverse)
        start = (program - tl.load(line + BEFORE)) * block
        numel = tl.load(line + NUMEL)
        at = start + tl.arange(0, block)
        # Without a mask memory is read and written in the widest pieces.
        if start + block <= numel:
            step(
                table,
                line,
                own,
                factor,
                rule,
                encoding,
                weights,
                gradients,
                states,
                flags,
                at,
                None,
                aligned,
            )
        else:
            step(
                table,
                line,
                own,
                factor,
                rule,
                encoding,
                weights,
                gradients,
                states,
                flags,
                at,
                at < numel,
                aligned,
            )


@on_device
def correct(table: Value, rows: Value, corrections: Value, block: constexpr) -> None:
    """Write Adam's lr / (1 - beta1**t) and sqrt(1 - beta2**t) for each tensor."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    mask = row < rows
    pointer = tl.load(table + ((row + 1) * WIDTH + STEP), mask=mask, other=0)
    pointer = pointer.to(tl.pointer_type(tl.float32))
    # In double: 1 - beta2**t loses ten bits of it at first.
    t = tl.load(pointer, mask=mask, other=1).to(tl.float64)
    lr = tl.load(table + LR).to(tl.float64, bitcast=True)
    mean_log = tl.load(table + MEAN_LOG).to(tl.float64, bitcast=True)
    log = tl.load(table + LOG).to(tl.float64, bitcast=True)
    size = lr / (1 - tl.exp(mean_log * t))
    root = tl.sqrt(1 - tl.exp(log * t))
    tl.store(corrections + row * 2, size.to(tl.float32), mask=mask)
    tl.store(corrections + (row * 2 + 1), root.to(tl.float32), mask=mask)


@on_device
def check_finite(
    table: Value,
    rows: Value,
    found_inf: Value,
    sums: Value,
    gradients: constexpr,
    norm: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    """Flag what is not finite; with `norm`, write the sum of squares of each block."""
    program = tl.program_id(0)
    line = table + (row_of(table, rows, CHECK_WIDTH, program) + 1) * CHECK_WIDTH
    start = (program - tl.load(line + BEFORE)) * block
    numel = tl.load(line + NUMEL)
    at = start + tl.arange(0, block)
    if start + block <= numel:
        check_block(line, found_inf, sums + program, gradients, norm, at, None, aligned)
    else:
        mask = at < numel
        check_block(line, found_inf, sums + program, gradients, norm, at, mask, aligned)


@on_device
def check_block(
    line: Value,
    found_inf: Value,
    sum_pointer: Value,
    gradients: constexpr,
    norm: constexpr,
    at: Value,
    mask: Value,
    aligned: constexpr,
) -> None:
    """Check one block."""
    g = wide(get(line, GRADIENT, gradients, at, mask, aligned), gradients)
    if mask is not None:
        g = tl.where(mask, g, 0.0)
    if norm:
        # In double no square of an fp32 number overflows or vanishes.
        double = g.to(tl.float64)
        total = tl.sum(double * double, axis=0)
        tl.store(sum_pointer, total)
        is_nonfinite = (total == float("inf")) | (total != total)  # noqa: PLR0124
    else:
        size = g.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        is_nonfinite = tl.max((size >= INFINITE).to(tl.int32), axis=0) != 0
    if is_nonfinite:
        # Any program that finds one writes the same.
        tl.store(found_inf, 1.0)

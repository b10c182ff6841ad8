"""Triton kernels that update weights and check gradients for inf and NaN.

One launch handles any number of tensors: a table of 64-bit words has a header row with
the rule's numbers, then one row per tensor, and each program finds its row by binary
search on its block index. The rule's numbers are in the table instead of in arguments,
so that a new learning rate does not recompile a kernel.

Launch with `enable_fp_fusion=False`: multiply-adds that are fused in one kernel but not
in another would make the encodings differ. bf16 is loaded and stored as integers, which
makes rounding bit-exact, also on devices without bf16.

`load` passes these functions to `triton.jit`; until then they cannot be called, and
importing this module does not need Triton.
"""

from __future__ import annotations

import inspect
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Value: TypeAlias = Any
"""A scalar or block on the device, or a pointer."""
constexpr: TypeAlias = Any  # noqa: PYI042 -- Triton looks for this word
"""A compile-time constant."""

tl: Any = None
"""`triton.language`, after `load`."""

# Columns of the header row, numbers of the rule in double. DECAY: weight decay; for
# AdamW the factor 1 - lr * weight_decay. KEEP: momentum, or beta2. TAKE: 1 - dampening,
# or 1 - beta2. MEAN_TAKE: 1 - beta1; beta1 with FAR. MEAN_LOG, LOG: of beta1 and beta2.
LR, DECAY, KEEP, TAKE, MEAN_TAKE, EPS, MEAN_LOG, LOG = range(8)

# Columns of the tensors' rows. BEFORE: blocks in the rows above. STATE: the first of
# three state tensors. FILLED: whether SGD's momentum buffer is initialized. KEY: two
# words for each of the two streams of random bits.
GRADIENT, NUMEL, BEFORE, WEIGHT, RESIDUAL, STATE = range(6)
STEP, FILLED, KEY, WIDTH = 8, 9, 10, 14
INDEX, CHECK_WIDTH = 3, 4
"""Of `check_finite`: the column with the tensor's index, and the row width."""

# Bits of `flags`. FAR: beta1 <= 0.5, the new mean is computed from the gradient.
DECAYS, DECOUPLED, NESTEROV, AMSGRAD, MAXIMIZE, FAR = (1 << bit for bit in range(6))

# Bit patterns of floating-point formats.
INFINITE = 0x7F800000
HIGH = 0x7F80
"""Upper half of fp32 infinity; bf16 infinity."""
LARGEST = 0x7F7F
"""The largest finite bf16."""

CONSTANTS = {name: value for name, value in globals().items() if name.isupper()}
FUNCTIONS: list[Callable[..., Value]] = []
_lock = threading.Lock()


def on_device(function: Callable[..., Value]) -> Callable[..., Value]:
    """Register a function that `load` passes to `triton.jit`."""
    FUNCTIONS.append(function)
    return function


def load() -> dict[str, Any]:
    """Pass all functions to `triton.jit`, once; return them by name.

    Raises:
        ImportError: If Triton is not installed.
    """
    namespace = globals()
    with _lock:
        if tl is None:
            # Any, so that type checking does not need Triton, which ships no types.
            triton: Any = import_module("triton")
            language: Any = import_module("triton.language")
            compiled = {n: language.constexpr(value) for n, value in CONSTANTS.items()}
            for function in FUNCTIONS:
                params = inspect.signature(function).parameters.values()
                # Do not compile variants for a single row or for an aligned integer.
                unspecialized = [p.name for p in params if p.annotation != "constexpr"]
                compiled[function.__name__] = triton.jit(
                    function, do_not_specialize=unspecialized
                )
            # Triton evaluates annotations when it compiles.
            compiled |= {"Value": language.tensor, "constexpr": language.constexpr}
            namespace.update(compiled, tl=language)
    return {function.__name__: namespace[function.__name__] for function in FUNCTIONS}


@on_device
def row_of(table: Value, rows: Value, width: constexpr, program: Value) -> Value:
    """Return the row that a program's block belongs to, by binary search."""
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
    """Return a number of the header row, as fp32."""
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
    """Load a block: fp32 as it is, fp16 as fp32, other 16-bit data as uint32."""
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
    """Store a block: fp32, fp32 as fp16, or 16 bits of uint32."""
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
    """Convert a result of `get` to fp32."""
    if kind == "bf16":
        value = (value << 16).to(tl.float32, bitcast=True)
    return value


@on_device
def keep_nan(bits: Value, rounded: Value) -> Value:
    """Return the rounded bf16 bits, with NaN where fp32 was NaN."""
    return tl.where((bits & 0x7FFFFFFF) > INFINITE, (bits >> 16) | 0x40, rounded)


@on_device
def nearest(value: Value) -> Value:
    """Round fp32 to bf16 bits, ties to even."""
    bits = value.to(tl.uint32, bitcast=True)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    return keep_nan(bits, high + round_up)


@on_device
def round_stochastic(value: Value, random_bits: Value) -> Value:
    """Round fp32 to bf16 bits with 16 random bits; never to infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    high = bits >> 16
    round_up = ((bits & 0xFFFF) + random_bits) >> 16
    return keep_nan(bits, tl.where((high & 0x7FFF) < LARGEST, high + round_up, high))


@on_device
def mix(word: Value) -> Value:
    """Hash 32-bit words: see `bf16_codecs.mix`."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@on_device
def draw(line: Value, stream: constexpr, at: Value) -> Value:
    """Return 32 random bits for each element of a block."""
    first = tl.load(line + (KEY + 2 * stream)).to(tl.uint32)
    second = tl.load(line + (KEY + 2 * stream + 1)).to(tl.uint32)
    return mix(mix(at.to(tl.uint32) + first) ^ second)


@on_device
def stored(value: Value, kind: constexpr, random_bits: Value) -> Value:
    """Convert optimizer state from fp32 to what `put` stores."""
    if kind == "bf16":
        value = round_stochastic(value, random_bits)
    return value


@on_device
def read_fp32(
    line: Value, encoding: constexpr, at: Value, mask: Value, aligned: constexpr
) -> Value:
    """Decode the fp32 values of a block."""
    if encoding == "fp32":
        fp32 = get(line, RESIDUAL, "fp32", at, mask, aligned)
    elif encoding == "plain":
        fp32 = get(line, WEIGHT, "fp32", at, mask, aligned)
    elif encoding == "split":
        high = get(line, WEIGHT, "bf16", at, mask, aligned)
        low = get(line, RESIDUAL, "bf16", at, mask, aligned)
        size = high & 0x7FFF
        # Encoding can round up only to these: not to zero, and not to NaN.
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
    """Return the weights after torch.optim.SGD; store the momentum buffer."""
    if DECAYS & flags:
        g = g + number(table, DECAY) * w
    if states != "none":
        momentum = number(table, KEEP)
        old = wide(get(line, STATE, states, at, mask, aligned), states)
        # An uninitialized buffer may contain NaN; do not multiply it.
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
    """Return the weights after torch.optim.Adam or AdamW; store the moments."""
    if DECAYS & flags:
        if DECOUPLED & flags:
            w = w * number(table, DECAY)
        else:
            g = g + number(table, DECAY) * w
    mean = wide(get(line, STATE, states, at, mask, aligned), states)
    square = wide(get(line, STATE + 1, states, at, mask, aligned), states)
    # torch.lerp starts from the nearer end point.
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
        # NaN in either operand propagates, as in torch.maximum.
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
    """Update all tensors of a table, one block per program, unless `found_inf` is 1."""
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        row = row_of(table, rows, WIDTH, program)
        line = table + (row + 1) * WIDTH
        own = corrections + row * 2
        factor = tl.load(inverse)
        start = (program - tl.load(line + BEFORE)) * block
        numel = tl.load(line + NUMEL)
        at = start + tl.arange(0, block)
        # Without a mask, loads and stores are vectorized to full width.
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
def correct(
    table: Value, rows: Value, corrections: Value, found_inf: Value, block: constexpr
) -> None:
    """Write Adam's lr / (1 - beta1**t) and sqrt(1 - beta2**t) for each tensor.

    Before, count the step t, unless `found_inf` is 1.
    """
    row = tl.program_id(0) * block + tl.arange(0, block)
    mask = row < rows
    pointer = tl.load(table + ((row + 1) * WIDTH + STEP), mask=mask, other=0)
    pointer = pointer.to(tl.pointer_type(tl.float32))
    count = tl.load(pointer, mask=mask, other=1)
    if tl.load(found_inf) == 0:
        count = count + 1.0
        tl.store(pointer, count, mask=mask)
    # In double: at first, 1 - beta2**t in fp32 would lose ten bits.
    t = count.to(tl.float64)
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
    inf_marks: Value,
    nan_marks: Value,
    sums: Value,
    gradients: constexpr,
    norm: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    """Set `found_inf` if a value is not finite, and the marks of its gradient.

    With `norm`, store sums of squares.
    """
    program = tl.program_id(0)
    line = table + (row_of(table, rows, CHECK_WIDTH, program) + 1) * CHECK_WIDTH
    inf = inf_marks + tl.load(line + INDEX)
    nan = nan_marks + tl.load(line + INDEX)
    start = (program - tl.load(line + BEFORE)) * block
    numel = tl.load(line + NUMEL)
    at = start + tl.arange(0, block)
    total = sums + program
    if start + block <= numel:
        check_block(
            line, found_inf, inf, nan, total, gradients, norm, at, None, aligned
        )
    else:
        mask = at < numel
        check_block(
            line, found_inf, inf, nan, total, gradients, norm, at, mask, aligned
        )


@on_device
def check_block(
    line: Value,
    found_inf: Value,
    inf_pointer: Value,
    nan_pointer: Value,
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
        # In double, squares of fp32 values neither overflow nor underflow.
        double = g.to(tl.float64)
        tl.store(sum_pointer, tl.sum(double * double, axis=0))
    # Bits of fp32 are ordered as the magnitudes, with NaN above inf.
    bits = g.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(bits, axis=0) >= INFINITE:
        # A race is harmless: all programs store the same value.
        tl.store(found_inf, 1.0)
        if tl.max(bits, axis=0) > INFINITE:
            tl.store(nan_pointer, 1.0)
        if tl.max((bits == INFINITE).to(tl.int32), axis=0) > 0:
            tl.store(inf_pointer, 1.0)

"""Triton kernels: fused updates, and the check of gradients for inf and NaN.

A table is 64-bit words: a line of numbers, then one line a tensor. A program finds its
line by the number of its block: a thousand tensors are one launch, whatever their
sizes. The numbers are no arguments, so no learning rate makes a kernel of its own.

Launch with `enable_fp_fusion=False`: a product and a sum contracted into one rounding
here and not there would make the forms differ from each other.
"""

from __future__ import annotations

import inspect
import threading
from importlib import import_module
from typing import Any

from halfstep.masters import triton_ops
from halfstep.masters.triton_ops import (
    AMSGRAD,
    BEFORE,
    CHECK_WIDTH,
    CONSTANTS,
    DECAY,
    DECAYS,
    DECOUPLED,
    EPS,
    FAR,
    FILLED,
    FUNCTIONS,
    GRADIENT,
    INFINITE,
    KEEP,
    LOG,
    LR,
    MAXIMIZE,
    MEAN_LOG,
    MEAN_TAKE,
    NESTEROV,
    NUMEL,
    STATE,
    STEP,
    TAKE,
    WIDTH,
    Value,
    constexpr,
    draw,
    get,
    number,
    on_device,
    put,
    read_fp32,
    row_of,
    stored,
    wide,
    write_fp32,
)

tl: Any = None
"""`triton.language`, once it is loaded."""

_lock = threading.Lock()


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
            # Each function looks names up in the module it was written in.
            vars(triton_ops).update(compiled, tl=language)
            namespace.update(compiled, tl=language)
    return {function.__name__: namespace[function.__name__] for function in FUNCTIONS}


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

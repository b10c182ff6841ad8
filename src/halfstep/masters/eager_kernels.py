"""Updates of parameters with torch's own operations, on chunks that stay in cache.

In: items on one device, a rule and a form. Out: state, fp32 value and weight, updated
in place. It runs wherever torch does, and rounds as the compiled kernels do, but for
torch's square root, which may miss the nearest fp32 by one. Small tensors are gathered
into one chunk, and cost a few operations together, not dozens each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.masters.chunk_codec import scratch
from halfstep.masters.eager_chunks import Chunk, cut_chunks
from halfstep.masters.update_rules import Sgd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halfstep.masters.eager_chunks import ChunkValues
    from halfstep.masters.update_rules import Adam, ParamUpdate

ROW = 4096
"""Numbers in one partial sum. Threads share rows out, and never one row."""


def available() -> bool:
    """Say that torch's operations are always there."""
    return True


def describe() -> str:
    """Say in one line what this is, for people."""
    return "torch's own operations, on chunks that stay in cache"


@torch.no_grad()
def update(
    items: Sequence[ParamUpdate],
    rule: Sgd | Adam,
    encoding: str,
    *,
    inverse: Tensor,
    clock: tuple[int, int],
) -> None:
    """Update parameters in place: state, fp32 value and weight.

    Args:
        items: On one device.
        rule: With which numbers.
        encoding: Of the fp32 value: "plain", "fp32", "split", "kahan", "stochastic".
        inverse: Of the loss scale, fp32, shape (). Gradients are multiplied by it.
        clock: Seed and step of the random numbers.
    """
    factor = -inverse if rule.maximize else inverse
    for (first, step), group in _group_updates(items, rule).items():
        for pieces in cut_chunks([item.weight for item in group]):
            chunk = Chunk(group, pieces, encoding)
            _apply(rule, chunk.read(rule, factor), first=first, step=step)
            chunk.write(clock)


@torch.no_grad()
def check_finite(
    gradients: Sequence[Tensor], *, norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Read gradients once, and change nothing.

    Args:
        gradients: On one device: bf16, fp16, fp32.
        norm: Whether the sum of squares is wanted.

    Returns:
        1.0 if a number is inf or NaN, else 0.0: fp32, shape (); and the sum of squares:
        fp64, shape (), always added in one order, whatever the number of threads.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in cut_chunks(gradients):
        total += _squares([piece.of(gradients[piece.index]) for piece in pieces])
    # No square of an fp32 number, and no sum of such, is too large for fp64.
    return (~torch.isfinite(total)).float(), total if norm else None


def _group_updates(
    items: Sequence[ParamUpdate], rule: Sgd | Adam
) -> dict[tuple[bool, float], list[ParamUpdate]]:
    """Return items by what an operation on many of them must have in common."""
    if isinstance(rule, Sgd):
        keys = [(item.is_first_step and rule.momentum != 0, 0.0) for item in items]
    else:
        steps = [item.step for item in items if item.step is not None]
        # One wait for the device, not one for each parameter.
        counts = torch.stack(steps).tolist() if steps else []
        keys = [(False, count) for count in counts]
    groups: dict[tuple[bool, float], list[ParamUpdate]] = {}
    for key, item in zip(keys, items, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _apply(rule: Sgd | Adam, values: ChunkValues, *, first: bool, step: float) -> None:
    """Do what torch.optim does, each operation rounded by itself.

    Why: torch multiplies and adds in one rounding where its vectors are full, and in
    two at the ends of a thread's share; `add(alpha=...)` depends on how many there are.
    """
    w, g, spare = values.fp32, values.gradient, values.scratch
    if isinstance(rule, Sgd):
        _sgd(rule, values, first=first)
        return
    a, b = values.states[:2]
    if rule.decoupled:
        w.mul_(1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    torch.sub(g, a, out=spare)
    near = 1 - rule.beta1
    # torch.lerp goes from the nearer end.
    if near < 0.5:  # noqa: PLR2004
        a.add_(spare.mul_(near))
    else:
        torch.sub(g, spare.mul_(1 - near), out=a)
    b.mul_(rule.beta2).add_(torch.mul(g, 1 - rule.beta2, out=spare).mul_(g))
    square = b
    if rule.amsgrad:
        square = torch.maximum(values.states[2], b, out=values.states[2])
    torch.sqrt(square, out=spare)
    spare.div_((1 - rule.beta2**step) ** 0.5).add_(rule.eps)
    torch.div(a, spare, out=spare)
    w.sub_(spare.mul_(rule.lr / (1 - rule.beta1**step)))


def _sgd(rule: Sgd, values: ChunkValues, *, first: bool) -> None:
    w, g, spare = values.fp32, values.gradient, values.scratch
    if rule.weight_decay:
        g.add_(torch.mul(w, rule.weight_decay, out=spare))
    if rule.momentum:
        buffer = values.states[0]
        if first:
            buffer.copy_(g)
        else:
            buffer.mul_(rule.momentum)
            buffer.add_(torch.mul(g, 1 - rule.dampening, out=spare))
        if rule.nesterov:
            g.add_(torch.mul(buffer, rule.momentum, out=spare))
        else:
            g = buffer
    w.sub_(torch.mul(g, rule.lr, out=spare))


def _squares(pieces: list[Tensor]) -> Tensor:
    """Return the sum of squares of some stretches, fp64, shape ()."""
    sizes = [piece.numel() for piece in pieces]
    rows = -(-sum(sizes) // ROW)
    room = scratch("squares", rows * ROW, torch.float64, pieces[0].device)
    used = room[: sum(sizes)]
    torch._foreach_copy_(used.split_with_sizes(sizes), pieces)
    room[used.numel() :].zero_()
    return room.mul_(room).view(rows, ROW).sum(1).sum()

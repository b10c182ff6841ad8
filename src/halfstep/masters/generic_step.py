"""Any optimizer's step over masters that have no memory of their own.

In: an optimizer, and the slots of its lean masters. Out: one step, taken some
parameters at a time, for which alone the fp32 truth is put together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch import optimizer_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.masters.encoding import Clock, Form, Slot

PIECE = 1 << 22
"""Numbers put together at once: 16 MiB of fp32."""


def absent(like: Tensor) -> Tensor:
    """Return NaN in fp32 in the shape of a tensor, in the memory of one number."""
    nan = torch.full((), torch.nan, dtype=torch.float32, device=like.device)
    return nan.expand(like.shape)


@torch.no_grad()
def step(
    optimizer: Optimizer,
    slots: Iterable[Slot],
    form: Form,
    clock: Clock,
    only: Tensor | None = None,
) -> None:
    """Let an optimizer step over lean masters, and publish them.

    torch's own optimizers keep all their state by parameter, so they are stepped
    piece by piece. Others, and those with step hooks, might count each piece as a
    step: they get all masters at once.

    Args:
        optimizer: Over the masters of `slots`, whose gradients are in their `.grad`,
            and parameters of other kinds.
        slots: All that are lean.
        form: How the truth is kept.
        clock: For random rounding.
        only: The one parameter of the optimizer to step over; default: all.
    """
    known: dict[Tensor, Slot] = {slot.master: slot for slot in slots}
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    limit = PIECE if by_parameter(optimizer) else None
    due = held
    if only is not None:
        due = [[param for param in params if param is only] for params in held]
    try:
        for piece in _pieces(due, known, limit):
            for group, params in zip(groups, piece, strict=True):
                group["params"] = params
            optimizer.param_groups = [group for group in groups if group["params"]]
            mine = [known[p] for params in piece for p in params if p in known]
            _step_over(optimizer, mine, form, clock)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, held, strict=True):
            group["params"] = params


def by_parameter(optimizer: Optimizer) -> bool:
    """Say whether stepping over parts of the parameters amounts to one step."""
    return optimizer_hooks.is_torchs_own(optimizer)


def _pieces(
    held: Sequence[list[Tensor]], known: dict[Tensor, Slot], limit: int | None
) -> Iterator[list[list[Tensor]]]:
    """Yield lists of parameters, one for each group, that come to `limit` numbers."""
    piece: list[list[Tensor]] = [[] for _ in held]
    size = 0
    for index, params in enumerate(held):
        for param in params:
            own = param.numel() if param in known else 0
            if limit is not None and size and size + own > limit:
                yield piece
                piece, size = [[] for _ in held], 0
            piece[index].append(param)
            size += own
    if any(piece):
        yield piece


def _step_over(
    optimizer: Optimizer, slots: list[Slot], form: Form, clock: Clock
) -> None:
    """Put the truth of some masters together, step, and take it apart again."""
    moved = [slot for slot in slots if slot.master.grad is not None]
    truths = [_dense(slot.weight) for slot in moved]
    for slot, truth in zip(moved, truths, strict=True):
        slot.decode_(form, truth)
        slot.master.data = truth
        _widen_states(optimizer, slot)
    try:
        optimizer.step()
    finally:
        for slot, truth in zip(moved, truths, strict=True):
            slot.encode_(form, truth, clock)
            slot.master.data = absent(slot.weight)
            narrow_states(optimizer, slot, form, clock)


def _dense(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.float32)


def _moments(
    optimizer: Optimizer, param: Tensor, shape: torch.Size
) -> Iterable[tuple[dict[str, Any], str, Tensor]]:
    """Yield where the optimizer keeps one number for each of a weight's."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    for key, held in list(state.items()):
        fits = torch.is_tensor(held) and held.shape == shape
        if fits and key != "step" and held.is_floating_point():
            yield state, key, held


def _widen_states(optimizer: Optimizer, slot: Slot) -> None:
    for state, key, held in _moments(optimizer, slot.master, slot.weight.shape):
        state[key] = held.float()


def narrow_states(
    optimizer: Optimizer, slot: Slot, form: Form, clock: Clock | None
) -> None:
    """Bring an optimizer's moments for a weight into the dtype of their form.

    Why at random: the second moment of Adam shrinks by a thousandth a step, which
    rounding to nearest in bf16 undoes each time.

    Args:
        optimizer: Holds them under the slot's master.
        slot: Of the weight.
        form: Says the dtype.
        clock: For rounding at random; None rounds to nearest, once.
    """
    held_now = _moments(optimizer, slot.master, slot.weight.shape)
    for number, (state, key, held) in enumerate(held_now, start=1):
        if held.dtype == form.states:
            continue
        if form.states == torch.bfloat16 and not held.dim():
            # Beside one number, what counts steps (NAdam, ASGD) looks like a moment.
            continue
        if clock is None or form.states != torch.bfloat16:
            state[key] = held.to(form.states)
        else:
            low = torch.empty_like(held, dtype=form.states)
            clock.round_(slot.number, number, held, low)
            state[key] = low


def narrow_all(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Bring an optimizer's moments for parameters into the parameters' own dtype."""
    for param in params:
        for state, key, held in _moments(optimizer, param, param.shape):
            state[key] = held.to(param.dtype)

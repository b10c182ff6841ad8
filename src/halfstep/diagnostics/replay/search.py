"""Replays of a step, as many as it takes to say what was wrong with it.

In: a model, and a callable that computes the loss of the failing micro-batch. Out: a
`BadOp`, or None where all is finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.diagnostics.replay import arguments, causes, tensor_facts
from halfstep.diagnostics.replay.causes import Known
from halfstep.diagnostics.replay.grad_sums import Sums
from halfstep.diagnostics.replay.gradients import exchanges, gradients
from halfstep.diagnostics.replay.index_checks import OutOfRange
from halfstep.diagnostics.replay.model_snapshot import as_it_was
from halfstep.diagnostics.replay.module_stack import Places
from halfstep.diagnostics.replay.op_trace import Watcher
from halfstep.distributed import process_group
from halfstep.scaling.step_history import Losses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.diagnostics.replay.arguments import Step
    from halfstep.diagnostics.replay.model_snapshot import Kept
    from halfstep.diagnostics.replay.op_trace import Event
    from halfstep.nonfinite.origin import BadOp


def first_bad(
    model: nn.Module,
    step: Step | Sequence[Step],
    *,
    scale: float = 1.0,
    number: int | None = None,
    losses: Losses | Sequence[float] = (),
    failed: bool = False,
    generator_state: Tensor | None = None,
    summed_in: torch.dtype | None = None,
) -> BadOp | None:
    """Run a step again, and say which operation made the first inf or NaN.

    Why: the gradients of a failed step are all NaN, and name nobody. Each operation of
    forward and backward pass is watched; the first that took in finite numbers and
    gave others, and whose result reached the loss or a gradient, is named. It is then
    run by itself in float32, which tells a format that is too narrow from an operation
    that is undefined. A mask of -inf that does what it should is not named.

    It waits for the device at each operation, and takes ten to a hundred times as long
    as a step, and memory for the gradients once more. What the model's modules hold
    (weights, gradients, buffers, flags, hooks, caches in plain containers) and random
    numbers are put back. No gradient is added to one that is
    there, so no hook that waits for that runs; and no probe sees it. Nothing is
    exchanged between DDP's processes, so one of them may call it alone; with FSDP, or
    with batch norms that are synchronised, all must.

    Args:
        model: As it is called: also in DDP, or compiled; then what it was compiled from
            runs.
        step: Computes the loss of the micro-batch that failed, shape (), not scaled. It
            must do all that the failing run did, and open the same region of autocast.
            Where gradients of several micro-batches are added up: a list with one for
            each, in order, so that their sum is looked at, too.
        scale: Loss scale at which it failed.
        number: Of the step, for the report.
        losses: Of the steps applied so far, which tell a learning rate that is too
            high: in order, or as `halfstep.scaling.step_history.Losses`.
        failed: The run was seen to give inf or NaN. Then a replay that gives none is
            repeated, and reported as one that could not be reproduced; or, where
            processes share gradients, as one that another process made.
        generator_state: `torch.get_rng_state()` from just before the failing step;
            None goes on from the present state, for a `step` that seeds by itself.
        summed_in: Format in which gradients of micro-batches are added up: float32 in a
            `Session` with master weights. None for their own, as torch does.

    Returns:
        None if loss and gradients are finite, and nobody said that they were not; and
        where another process made what is bad here, which is told there.

    Raises:
        UserError: If `model` is no module, `step` gives no loss, or a number is none.
    """
    steps = arguments.steps(model, step)
    arguments.check_numbers(scale, summed_in)
    history = losses if isinstance(losses, Losses) else _history(losses)
    known = Known(number, scale, history, len(steps), processes=process_group.size())

    def replay(scale: float) -> _Seen:
        with as_it_was(model, generator_state) as kept:
            return _replay(model, steps, scale, kept, summed_in)

    # Where a replay waits for other processes, all must make as many.
    together = exchanges(model)
    seen = replay(scale)
    if together or (failed and not seen.spoilt):
        again = replay(scale)
        seen = seen if seen.spoilt else again
    low = replay(1.0) if together or (seen.in_backward and scale > 1) else None
    known = replace(known, part=seen.part)
    if seen.refused is not None:
        return causes.out_of_range(seen.refused, known)
    if not seen.bad:
        return causes.not_reproduced(known) if failed else None
    event = seen.culprit
    if event is None:
        return causes.unseen(known, seen.bad.made, seen.watched)
    if not seen.in_backward:
        return causes.bad_op(event, known)
    if low is None or scale <= 1:
        return causes.bad_op(event, replace(known, boundary=seen.boundary, low=event))
    known = replace(known, boundary=low.boundary, low=low.culprit)
    return causes.bad_op(low.culprit or event, known)


def not_reproduced(number: int | None, scale: float, parts: int = 1) -> BadOp:
    """Return what is said of a step that failed, and was finite in two replays.

    Args:
        number: Of the step.
        scale: Loss scale at which it failed.
        parts: Micro-batches that were run again.
    """
    return causes.not_reproduced(Known(number, scale, Losses(), parts))


@dataclass
class _Seen:
    """What one replay showed."""

    bad: tensor_facts.Held
    """What loss and gradients hold."""
    culprit: Event | None = None
    boundary: float | None = None
    refused: OutOfRange | None = None
    watched: int = 0
    """Operations."""
    part: int | None = None
    """Place of the micro-batch; None for all of them together."""
    gradients: Sequence[Tensor | None] = ()

    @property
    def spoilt(self) -> bool:
        """Something was wrong."""
        return bool(self.bad) or self.refused is not None

    @property
    def in_backward(self) -> bool:
        """A number grew too large on the way back: it may be the loss scale's."""
        event = self.culprit
        if event is None or event.phase != "backward":
            return False
        return event.flaw is None or event.wide[0] == "finite"


def _replay(
    model: nn.Module,
    steps: Sequence[Step],
    scale: float,
    kept: Kept,
    summed_in: torch.dtype | None,
) -> _Seen:
    """Run all micro-batches; return what the first that was spoilt showed.

    If none was, what their sum shows.
    """
    found: _Seen | None = None
    sums = Sums(model, summed_in)
    for part, step in enumerate(steps):
        seen = _run(model, step, scale, kept)
        seen.part = part
        if found is None and seen.spoilt:
            found = seen
        # Where one waits for other processes, all must run as many.
        if found is not None and not exchanges(model):
            return found
        if len(steps) > 1:
            sums.add(seen.gradients)
        seen.gradients = ()
    event = sums.event() if found is None else None
    return found or _Seen(tensor_facts.Held() if event is None else event.held, event)


def _run(model: nn.Module, step: Step, scale: float, kept: Kept) -> _Seen:
    """Run one micro-batch, forward and backward."""
    with Places(model) as places:
        watcher = Watcher(places, kept.before)
        shards = [p for p in places.root.parameters() if p.requires_grad]
        try:
            with torch.inference_mode(mode=False), watcher, torch.enable_grad():
                with watcher.calls:
                    loss = step()
                arguments.check_loss(step, loss)
                watcher.going_back = True
                made = gradients(model, loss, scale, shards)
        except OutOfRange as error:
            return _Seen(tensor_facts.Held(), refused=error)
        except Exception:
            if not watcher.refused:
                raise
            culprit = _first(watcher.refused)
            return _Seen(tensor_facts.Held(nan=True), culprit)
        results: list[Tensor | None] = [loss]
        if not any(map(tensor_facts.held, tensor_facts.floats(loss))):
            arguments.check_graph(step, loss, shards)
            results = made
        bad = tensor_facts.Held()
        for part in tensor_facts.floats(results):
            bad |= tensor_facts.held(part)
        behind = watcher.behind(results) | watcher.sent
        mine = {event for event in behind if event.given != "exchange"}
        if behind and not mine:
            return _Seen(tensor_facts.Held())
        return _Seen(
            bad,
            _first(mine),
            watcher.boundary,
            watched=watcher.watched,
            gradients=made,
        )


def _first(events: set[Event]) -> Event | None:
    """Return the first that nobody meant, else the first."""
    return min(events, key=lambda event: (event.meant, event.number), default=None)


def _history(losses: Sequence[float]) -> Losses:
    history = Losses()
    for loss in losses:
        history.add(float(loss))
    return history

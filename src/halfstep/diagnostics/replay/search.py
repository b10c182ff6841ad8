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
from halfstep.diagnostics.replay.causes import ReplayContext
from halfstep.diagnostics.replay.grad_sums import GradSums
from halfstep.diagnostics.replay.gradients import exchanges, gradients
from halfstep.diagnostics.replay.index_checks import OutOfRange
from halfstep.diagnostics.replay.model_snapshot import restored_after
from halfstep.diagnostics.replay.module_stack import ModuleStack
from halfstep.diagnostics.replay.op_trace import OpTracer
from halfstep.distributed import process_group
from halfstep.scaling.step_history import LossHistory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.diagnostics.replay.arguments import Step
    from halfstep.diagnostics.replay.model_snapshot import ModelSnapshot
    from halfstep.diagnostics.replay.op_trace import NonFiniteEvent
    from halfstep.nonfinite.origin import BadOp


def find_nonfinite(
    model: nn.Module,
    step: Step | Sequence[Step],
    *,
    scale: float = 1.0,
    number: int | None = None,
    losses: LossHistory | Sequence[float] = (),
    failed: bool = False,
    generator_state: Tensor | None = None,
    summed_in: torch.dtype | None = None,
) -> BadOp | None:
    """Run a step again, and say which operation made the first inf or NaN.

    Why: the gradients of a failed step are all NaN, and name no op. Each operation of
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
            high: in order, or as `halfstep.scaling.step_history.LossHistory`.
        failed: The run was seen to give inf or NaN. Then a replay that gives none is
            repeated, and reported as one that could not be reproduced; or, where
            processes share gradients, as one that another process made.
        generator_state: `torch.get_rng_state()` from just before the failing step;
            None goes on from the present state, for a `step` that seeds by itself.
        summed_in: Format in which gradients of micro-batches are added up: float32 in a
            `Session` with master weights. None for their own, as torch does.

    Returns:
        None if loss and gradients are finite, and the run was not said to fail; and
        where another process made what is bad here, and reports it.

    Raises:
        UserError: If `model` is no module, `step` gives no loss, or a number is none.
    """
    steps = arguments.steps(model, step)
    arguments.check_numbers(scale, summed_in)
    history = losses if isinstance(losses, LossHistory) else _history(losses)
    context = ReplayContext(
        number, scale, history, len(steps), processes=process_group.world_size()
    )

    def replay(scale: float) -> _ReplayResult:
        with restored_after(model, generator_state) as snapshot:
            return _replay(model, steps, scale, snapshot, summed_in)

    # Where a replay waits for other processes, all must make as many.
    together = exchanges(model)
    result = replay(scale)
    if together or (failed and not result.has_failed):
        second = replay(scale)
        result = result if result.has_failed else second
    low = replay(1.0) if together or (result.in_backward and scale > 1) else None
    context = replace(context, part=result.part)
    if result.index_error is not None:
        return causes.out_of_range(result.index_error, context)
    if not result.bad:
        return causes.not_reproduced(context) if failed else None
    event = result.culprit
    if event is None:
        return causes.unseen(context, result.bad.kind, result.watched)
    if not result.in_backward:
        return causes.bad_op(event, context)
    if low is None or scale <= 1:
        return causes.bad_op(
            event, replace(context, boundary=result.boundary, low=event)
        )
    context = replace(context, boundary=low.boundary, low=low.culprit)
    return causes.bad_op(low.culprit or event, context)


def not_reproduced(number: int | None, scale: float, parts: int = 1) -> BadOp:
    """Return what is said of a step that failed, and was finite in two replays.

    Args:
        number: Of the step.
        scale: Loss scale at which it failed.
        parts: Micro-batches that were run again.
    """
    return causes.not_reproduced(ReplayContext(number, scale, LossHistory(), parts))


@dataclass
class _ReplayResult:
    """What one replay recorded."""

    bad: tensor_facts.NonFiniteKinds
    """What loss and gradients hold."""
    culprit: NonFiniteEvent | None = None
    boundary: float | None = None
    index_error: OutOfRange | None = None
    watched: int = 0
    """Operations."""
    part: int | None = None
    """Place of the micro-batch; None for all of them together."""
    gradients: Sequence[Tensor | None] = ()

    @property
    def has_failed(self) -> bool:
        """Something was wrong."""
        return bool(self.bad) or self.index_error is not None

    @property
    def in_backward(self) -> bool:
        """A number grew too large on the way back: it may be the loss scale's."""
        event = self.culprit
        if event is None or event.phase != "backward":
            return False
        return event.domain_error is None or event.fp32_result[0] == "finite"


def _replay(
    model: nn.Module,
    steps: Sequence[Step],
    scale: float,
    snapshot: ModelSnapshot,
    summed_in: torch.dtype | None,
) -> _ReplayResult:
    """Run all micro-batches; return the result of the first that failed.

    If none was, what their sum shows.
    """
    failure: _ReplayResult | None = None
    sums = GradSums(model, summed_in)
    for part, step in enumerate(steps):
        result = _run(model, step, scale, snapshot)
        result.part = part
        if failure is None and result.has_failed:
            failure = result
        # Where one waits for other processes, all must run as many.
        if failure is not None and not exchanges(model):
            return failure
        if len(steps) > 1:
            sums.add(result.gradients)
        result.gradients = ()
    event = sums.event() if failure is None else None
    return failure or _ReplayResult(
        tensor_facts.NonFiniteKinds() if event is None else event.nonfinite, event
    )


def _run(
    model: nn.Module, step: Step, scale: float, snapshot: ModelSnapshot
) -> _ReplayResult:
    """Run one micro-batch, forward and backward."""
    with ModuleStack(model) as places:
        tracer = OpTracer(places, snapshot.save)
        shards = [p for p in places.root.parameters() if p.requires_grad]
        try:
            with torch.inference_mode(mode=False), tracer, torch.enable_grad():
                with tracer.calls:
                    loss = step()
                arguments.check_loss(step, loss)
                tracer.going_back = True
                grads = gradients(model, loss, scale, shards)
        except OutOfRange as error:
            return _ReplayResult(tensor_facts.NonFiniteKinds(), index_error=error)
        except Exception:
            if not tracer.refused:
                raise
            culprit = _first(tracer.refused)
            return _ReplayResult(tensor_facts.NonFiniteKinds(nan=True), culprit)
        results: list[Tensor | None] = [loss]
        if not any(map(tensor_facts.nonfinite_kinds, tensor_facts.floats(loss))):
            arguments.check_graph(step, loss, shards)
            results = grads
        bad = tensor_facts.NonFiniteKinds()
        for part in tensor_facts.floats(results):
            bad |= tensor_facts.nonfinite_kinds(part)
        sources = tracer.sources(results) | tracer.sent
        own_sources = {event for event in sources if event.source_kind != "exchange"}
        if sources and not own_sources:
            return _ReplayResult(tensor_facts.NonFiniteKinds())
        return _ReplayResult(
            bad,
            _first(own_sources),
            tracer.boundary,
            watched=tracer.watched,
            gradients=grads,
        )


def _first(events: set[NonFiniteEvent]) -> NonFiniteEvent | None:
    """Return the first that was not intended, else the first."""
    return min(
        events, key=lambda event: (event.is_intended, event.number), default=None
    )


def _history(losses: Sequence[float]) -> LossHistory:
    history = LossHistory()
    for loss in losses:
        history.add(float(loss))
    return history

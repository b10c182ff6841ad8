"""Replays a failed step to find the operation that made the first inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.diagnostics.replay import causes, tensor_facts
from halfstep.diagnostics.replay.causes import ReplayContext
from halfstep.diagnostics.replay.gradients import GradSums, exchanges, gradients
from halfstep.diagnostics.replay.model_snapshot import restored_after
from halfstep.diagnostics.replay.module_stack import ModuleStack
from halfstep.diagnostics.replay.op_trace import OpTracer, OutOfRange
from halfstep.diagnostics.replay.tensor_facts import NonFiniteKinds
from halfstep.distributed import process_group
from halfstep.distributed.ddp import unwrap
from halfstep.errors import UserError, require, require_type
from halfstep.scaling.collapse import LossHistory

if TYPE_CHECKING:
    from halfstep.diagnostics.replay.model_snapshot import ModelSnapshot
    from halfstep.diagnostics.replay.op_trace import NonFiniteEvent
    from halfstep.nonfinite.origin import BadOp

Step = Callable[[], Tensor]
"""Computes the loss of one micro-batch."""

_EXAMPLE = "such as loss_fn(model(x), y).mean()"


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
) -> BadOp:
    """Repeat a step and find the operation that made its first inf or NaN.

    After an overflow all gradients are NaN and point to no operation. This traces each
    operation of the forward and backward pass and reports the first that made inf or
    NaN from finite inputs and whose result reached the loss or a gradient. The
    operation is then run in fp32, to tell a dtype that is too narrow from an operation
    that is undefined. Masks that contain -inf by design are not reported.

    It synchronizes at each operation, and takes ten to a hundred times as long as a
    step, with memory for one more set of gradients. Weights, gradients, buffers, flags,
    hooks, caches in plain containers and random states are restored. Hooks that run
    when a gradient is accumulated do not run, and no probe observes the replay. DDP's
    processes do not communicate, so one of them may call it alone; with FSDP or
    synchronized batch norms all processes must.

    Args:
        model: The model as it is called, DDP included. Of a compiled model the
            original runs.
        step: Returns the unscaled loss of the micro-batch that failed, shape (). It
            must do what the failing run did, under the same autocast context. With
            gradient accumulation: a list with one function for each micro-batch, in
            order, so that the sum of their gradients is checked too.
        scale: Loss scale of the failed step.
        number: Number of the step, for the report.
        losses: Losses of the steps applied so far, in order, or a
            `halfstep.scaling.collapse.LossHistory`; used to recognize a learning rate
            that is too high.
        failed: The run did have inf or NaN. A finite replay is then repeated, and
            reported as not reproduced, or as caused by another process.
        generator_state: `torch.get_rng_state()` from before the failed step. None: the
            present state, for a `step` that seeds by itself.
        summed_in: Dtype in which gradients of micro-batches are summed: float32 in a
            `Session` with master weights. None: their own dtype, as in torch.

    Returns:
        The operation, its module, cause and fix. It is falsy, and says so, if loss and
        gradients are finite and not `failed`, or if another process made the inf and
        reports it.

    Raises:
        UserError: If `model` is not a module, `step` returns no loss, or a number is
            out of range.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> x = torch.ones(1, 2)
        >>> bad = find_nonfinite(model, lambda: (model(x) * 0).log().sum())
        >>> bad.op, bad.cause, bad.evidence
        ('log', 'zero', 'its argument is 0')
    """
    check_model(model)
    steps = _check_steps(step)
    valid = isinstance(scale, int | float) and 0 < scale < math.inf
    require("scale", scale, valid, "a finite number above 0")
    history = losses if isinstance(losses, LossHistory) else LossHistory()
    for loss in () if isinstance(losses, LossHistory) else losses:
        history.add(float(loss))
    context = ReplayContext(number, scale, history, len(steps), root=unwrap(model))

    def replay(scale: float) -> _ReplayResult:
        with restored_after(model, generator_state) as snapshot:
            return _replay(model, steps, scale, snapshot, summed_in)

    # If a replay communicates, all processes must replay equally often.
    together = exchanges(model)
    result = replay(scale)
    if together or (failed and not result.has_failed):
        second = replay(scale)
        result = result if result.has_failed else second
    low = replay(1.0) if together or (result.in_backward and scale > 1) else None
    context = replace(context, part=result.part)
    if result.index_error is not None:
        return causes.out_of_range(result.index_error, context)
    if not result.nonfinite:
        if not failed:
            return causes.nothing(context, together=together)
        processes = process_group.world_size()
        return causes.not_reproduced(number, scale, len(steps), processes)
    event = result.event
    if event is None:
        return causes.unobserved(context, result.nonfinite.kind, result.num_ops)
    if result.in_backward:
        first = result if low is None or scale <= 1 else low
        context = replace(context, boundary=first.boundary, low=first.event)
        event = first.event or event
    return causes.bad_op(event, context)


def find_overflow(model: nn.Module, step: Step, scale: float) -> BadOp | None:
    """Return the first operation of a forward pass that overflows its dtype alone.

    Includes overflows hidden by a later operation (1 / inf is 0); `find_nonfinite`
    reports only those that reach the loss or a gradient.
    """
    with restored_after(model, None) as snapshot:
        event = _run(model, step, 1.0, snapshot).overflow
    context = ReplayContext(None, scale)
    return None if event is None else causes.bad_op(event, context)


def _check_steps(step: Step | Sequence[Step]) -> Sequence[Step]:
    """Return one callable for each micro-batch; raise UserError for invalid ones."""
    steps = step if isinstance(step, Sequence) else [step]
    expected = (
        "a function that computes the loss, such as lambda: loss_fn(model(x), y), or "
        "a list with one for each micro-batch"
    )
    require("step", step, bool(steps), expected)
    for one in steps:
        require_type("step", one, callable(one), expected)
    return steps


def check_model(model: nn.Module) -> None:
    """Check that a model is a module, and has run once if its modules are lazy."""
    require_type("model", model, isinstance(model, nn.Module), "a torch.nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name!r} of the model has no shape yet, as its module is lazy and "
                "has not run: call the model once first."
            )


def check_loss(source: str, loss: object, *, needs_graph: bool = True) -> None:
    """Check that a loss is one floating number, and has a graph if that is needed."""
    returned, advice = "", f"return the loss, one floating-point number, {_EXAMPLE}"
    if not isinstance(loss, Tensor):
        returned = f"a {type(loss).__name__}"
    elif loss.numel() != 1 or not loss.is_floating_point():
        returned = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
    elif needs_graph and not loss.requires_grad:
        returned = "a loss without a graph, so that there are no gradients"
        advice = (
            "compute it from the model's output, without detach(), item() or "
            "torch.no_grad()"
        )
    if returned:
        raise UserError(f"{source} returned {returned}: {advice}.")


@dataclass
class _ReplayResult:
    """Results of one replay."""

    nonfinite: NonFiniteKinds
    """Kinds of non-finite values in loss and gradients."""
    event: NonFiniteEvent | None = None
    """The first event that they result from."""
    boundary: float | None = None
    index_error: OutOfRange | None = None
    num_ops: int = 0
    part: int | None = None
    """Index of the micro-batch; None for the sum over all."""
    gradients: Sequence[Tensor | None] = ()
    overflow: NonFiniteEvent | None = None
    """First overflow of the forward pass that is finite in fp32, even if hidden."""

    @property
    def has_failed(self) -> bool:
        """Whether a value was non-finite or an index out of range."""
        return bool(self.nonfinite) or self.index_error is not None

    @property
    def in_backward(self) -> bool:
        """Whether a gradient overflowed, so that the loss scale may be the cause."""
        event = self.event
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

    If none failed, return the result of the sum of their gradients.
    """
    failure: _ReplayResult | None = None
    sums = GradSums(model, summed_in)
    for part, step in enumerate(steps):
        result = _run(model, step, scale, snapshot)
        result.part = part
        if failure is None and result.has_failed:
            failure = result
        # If passes communicate, all processes must run equally many.
        if failure is not None and not exchanges(model):
            return failure
        if len(steps) > 1:
            sums.add(result.gradients)
        result.gradients = ()
    event = None if failure else sums.event()
    nonfinite = NonFiniteKinds() if event is None else event.nonfinite
    return failure or _ReplayResult(nonfinite, event)


_SECOND_BACKWARD = "Trying to backward through the graph a second time"
_BACKWARD_IN_STEP = (
    "step ran the backward pass itself, which find_nonfinite does: it must return the "
    "loss before loss.backward() or session.backward(loss)."
)


def _run(
    model: nn.Module, step: Step, scale: float, snapshot: ModelSnapshot
) -> _ReplayResult:
    """Run one micro-batch, forward and backward."""
    name = getattr(step, "__qualname__", type(step).__name__)
    source = f"step {name!r}"
    with ModuleStack(model) as modules:
        tracer = OpTracer(modules, snapshot.save)
        trained = [p for p in modules.root.parameters() if p.requires_grad]
        try:
            with torch.inference_mode(mode=False), tracer, torch.enable_grad():
                with tracer.calls:
                    loss = step()
                check_loss(source, loss, needs_graph=False)
                tracer.in_backward = True
                grads = gradients(model, loss, scale, trained)
        except OutOfRange as error:
            return _ReplayResult(NonFiniteKinds(), index_error=error)
        except Exception as error:
            if tracer.rejected:
                kinds, first = NonFiniteKinds(nan=True), _first(tracer.rejected)
                return _ReplayResult(kinds, first, overflow=tracer.overflow)
            if _SECOND_BACKWARD in str(error):
                raise UserError(_BACKWARD_IN_STEP) from error
            raise
        results: list[Tensor | None] = [loss]
        if not any(map(tensor_facts.nonfinite_kinds, tensor_facts.floats(loss))):
            check_loss(source, loss, needs_graph=bool(trained))
            results = grads
        nonfinite = NonFiniteKinds()
        for part in tensor_facts.floats(results):
            nonfinite |= tensor_facts.nonfinite_kinds(part)
        sources = tracer.sources(results) | tracer.sent
        local = {event for event in sources if event.source_kind != "exchange"}
        if sources and not local:
            return _ReplayResult(NonFiniteKinds())
        return _ReplayResult(
            nonfinite,
            _first(local),
            tracer.boundary,
            num_ops=tracer.num_ops,
            gradients=grads,
            overflow=tracer.overflow,
        )


def _first(events: set[NonFiniteEvent]) -> NonFiniteEvent | None:
    """Return the first event that was not intended, else the first."""
    return min(events, key=lambda one: (one.is_intended, one.number), default=None)

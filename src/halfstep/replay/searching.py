"""Replays of a step, as many as it takes to say what was wrong with it.

In: a model, and a callable that computes the loss of the failing micro-batch. Out: a
`BadOp`, or None where all is finite.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep import distributed, probe_hooks
from halfstep.replay import values, verdict
from halfstep.replay.indices import OutOfRange
from halfstep.replay.places import Places
from halfstep.replay.verdict import Known
from halfstep.replay.watching import Watcher
from halfstep.scaler.past import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.autograd.graph import Node

    from halfstep.bad_op import BadOp
    from halfstep.replay.watching import Event


def first_bad(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    scale: float = 1.0,
    number: int | None = None,
    losses: Losses | Sequence[float] = (),
    failed: bool = False,
    generator_state: Tensor | None = None,
) -> BadOp | None:
    """Run a step again, and say which operation made the first inf or NaN.

    Why: the gradients of a failed step are all NaN, and name nobody. Each operation of
    forward and backward pass is watched; the first that took in finite numbers and
    gave others, and whose result reached the loss or a gradient, is named. It is then
    run by itself in float32, which tells a format that is too narrow from an operation
    that is undefined. A mask of -inf that does what it should is not named.

    It waits for the device at each operation, and takes ten to a hundred times as long
    as a step. Weights, gradients, buffers and torch's random numbers are put back. No
    gradient is added to one that is there, so no hook that waits for that runs; and
    no probe sees it. Nothing is exchanged between DDP's processes, so one of them may
    call it alone; with FSDP, or with batch norms that are synchronised, all must.

    Args:
        model: As it is called: also in DDP, or compiled; then what it was compiled from
            runs.
        step: Computes the loss of the micro-batch that failed, shape (), not scaled. It
            must do all that the failing run did, and open the same region of autocast.
        scale: Loss scale at which it failed.
        number: Of the step, for the report.
        losses: Of the steps applied so far, which tell a learning rate that is too
            high: in order, or as `halfstep.scaler.past.Losses`.
        failed: The run was seen to give inf or NaN. Then a replay that gives none is
            repeated, and reported as one that could not be reproduced.
        generator_state: `torch.get_rng_state()` from just before the failing step;
            None goes on from the present state, for a `step` that seeds by itself.

    Returns:
        None if loss and gradients are finite, and nobody said that they were not; and
        where another process made what is bad here, which is told there.
    """
    history = losses if isinstance(losses, Losses) else _history(losses)
    known = Known(number, scale, history)
    # Where each replay exchanges shards, all processes must make as many.
    sharded = _is_sharded(model)
    seen = _replay(model, step, scale, generator_state)
    if sharded or (failed and not seen.spoilt):
        again = _replay(model, step, scale, generator_state)
        seen = seen if seen.spoilt else again
    low = None
    if sharded or (seen.in_backward and scale > 1):
        low = _replay(model, step, 1.0, generator_state)
    if seen.refused is not None:
        return verdict.out_of_range(seen.refused, known)
    if not seen.bad:
        return verdict.not_reproduced(known) if failed else None
    event = seen.culprit
    if event is None:
        return verdict.unseen(known, seen.bad.made)
    if not seen.in_backward:
        return verdict.bad_op(event, known)
    if low is None or scale <= 1:
        return verdict.bad_op(event, replace(known, boundary=seen.boundary, low=event))
    known = replace(known, boundary=low.boundary, low=low.culprit)
    return verdict.bad_op(low.culprit or event, known)


def not_reproduced(number: int | None, scale: float) -> BadOp:
    """Return what is said of a step that failed, and was finite in two replays.

    Args:
        number: Of the step.
        scale: Loss scale at which it failed.
    """
    return verdict.not_reproduced(Known(number, scale, Losses()))


@dataclass
class _Seen:
    """What one replay showed."""

    bad: values.Held
    """What loss and gradients hold."""
    culprit: Event | None = None
    boundary: float | None = None
    refused: OutOfRange | None = None

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
    step: Callable[[], Tensor],
    scale: float,
    generator_state: Tensor | None,
) -> _Seen:
    with _as_it_was(model, generator_state), Places(model) as places:
        watcher = Watcher(places)
        shards = [p for p in places.root.parameters() if p.requires_grad]
        try:
            with watcher, torch.enable_grad():
                loss = step()
                watcher.going_back = True
                gradients = _gradients(model, loss, scale, shards)
        except OutOfRange as error:
            return _Seen(values.Held(), refused=error)
        except Exception:
            if not watcher.refused:
                raise
            culprit = _first(watcher.refused)
            return _Seen(values.Held(nan=True), culprit)
        results: list[Tensor | None] = [loss]
        if not any(map(values.held, values.floats(loss))):
            results = gradients
        bad = values.Held()
        for part in values.floats(results):
            bad |= values.held(part)
        behind = watcher.behind(results) | watcher.sent
        mine = {event for event in behind if event.given != "exchange"}
        if behind and not mine:
            return _Seen(values.Held())
        return _Seen(bad, _first(mine), watcher.boundary)


def _first(events: set[Event]) -> Event | None:
    """Return the first that nobody meant, else the first."""
    return min(events, key=lambda event: (event.meant, event.number), default=None)


def _gradients(
    model: nn.Module, loss: Tensor, scale: float, shards: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the scaled loss; those in the model may be lost.

    Args:
        model: Bare or wrapped.
        loss: Not scaled.
        scale: To multiply it by.
        shards: The model's parameters, as they were before the forward pass.
    """
    params = [p for p in distributed.bare(model).parameters() if p.requires_grad]
    if not params or not loss.requires_grad:
        return []
    scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    if not _needs_backward(model, scaled):
        found = torch.autograd.grad(scaled, params, allow_unused=True)
        return list(found)
    # Shards are other parameters than what was gathered of them for the forward pass.
    with _unused(_leaves(scaled)), _unused([*params, *shards]):
        torch.autograd.backward(scaled)
        return [param.grad for param in (*params, *shards)]


@contextlib.contextmanager
def _unused(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Give leaves fresh gradients, and let no hook use them, as an optimizer may."""
    kept = []
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks or {}  # noqa: SLF001
        kept.append((leaf, leaf.grad, hooks, dict(hooks)))
        leaf.grad = None
        hooks.clear()
    try:
        yield
    finally:
        for leaf, gradient, hooks, held in reversed(kept):
            leaf.grad = gradient
            hooks.update(held)


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass adds to."""
    last = "torch::autograd::AccumulateGrad"
    return [node.variable for node in _nodes(loss) if node.name() == last]  # type: ignore[attr-defined]


def _needs_backward(model: nn.Module, loss: Tensor) -> bool:
    """Say whether gradients come by `backward` alone.

    So it is with reentrant checkpoints; and FSDP2's reach its shards only there.
    """
    reentrant = "CheckpointFunctionBackward"
    return _is_sharded(model) or any(n.name() == reentrant for n in _nodes(loss))


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Go through the graph of a loss."""
    left, seen = [loss.grad_fn], {loss.grad_fn}
    while left:
        node = left.pop()
        if node is None:
            continue
        yield node
        more = {one for one, _ in node.next_functions} - seen
        seen |= more
        left += more


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(m, "set_requires_gradient_sync") for m in model.modules())


def _history(losses: Sequence[float]) -> Losses:
    history = Losses()
    for loss in losses:
        history.add(float(loss))
    return history


@contextlib.contextmanager
def _as_it_was(model: nn.Module, generator_state: Tensor | None) -> Iterator[None]:
    """Put back buffers, gradients and random numbers; let nothing be compiled.

    Nor exchanged, by DDP, or seen by a probe.
    """
    gradients = [(param, param.grad) for param in model.parameters()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(values.gpus(model.parameters())))
        stack.enter_context(probe_hooks.all_paused())
        stack.enter_context(_buffers_kept(model))
        if generator_state is not None:
            torch.set_rng_state(generator_state)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(_alone(module))
        stack.enter_context(warnings.catch_warnings())
        # That hooks fire for a wrapper too: they are ours, and know wrappers.
        warnings.filterwarnings(
            "ignore", "Using `torch.compile\\(module\\)` when there"
        )
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for param, gradient in gradients:
                param.grad = gradient


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back buffers, and what a forward pass has put in the place of one.

    A cache that grew stays: whatever else tells its size has grown, too.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    places = [(m._buffers, dict(m._buffers.items())) for m in model.modules()]  # noqa: SLF001
    try:
        yield
    finally:
        for now, before in places:
            for name in before.keys() & set(now.keys()):
                new, held = now[name], before[name]
                if new is not held and _are_alike(new, held):
                    now[name] = held
        with torch.no_grad():
            for buffer, value in kept:
                if _are_alike(buffer, value):
                    buffer.copy_(value)


def _are_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape


@contextlib.contextmanager
def _alone(module: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Let DDP exchange nothing, buffers neither."""
    kept = module.require_forward_param_sync, module.broadcast_buffers
    module.require_forward_param_sync = module.broadcast_buffers = False
    try:
        with module.no_sync():
            yield
    finally:
        module.require_forward_param_sync, module.broadcast_buffers = kept

"""Gradients of a loss, taken so that nothing else notices.

In: a model and its loss. Out: gradients; those that the model holds stay, and no hook
that waits for one runs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.distributed import ddp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.autograd.graph import Node


def gradients(
    model: nn.Module, loss: Tensor, scale: float, shards: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the scaled loss; those in the model may be lost.

    Args:
        model: Bare or wrapped.
        loss: Not scaled.
        scale: To multiply it by.
        shards: The model's parameters, as they were before the forward pass.
    """
    params = [p for p in ddp.unwrap(model).parameters() if p.requires_grad]
    if not params or not loss.requires_grad:
        return []
    scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    if not _needs_backward(model, scaled):
        grads = torch.autograd.grad(scaled, params, allow_unused=True)
        return list(grads)
    # Shards are other parameters than what was gathered of them for the forward pass.
    with _fresh_grads(_leaves(scaled)), _fresh_grads([*params, *shards]):
        torch.autograd.backward(scaled)
        return [param.grad for param in (*params, *shards)]


@contextlib.contextmanager
def _fresh_grads(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Give leaves fresh gradients, and let no hook use them, as an optimizer may."""
    saved = []
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks or {}  # noqa: SLF001
        saved.append((leaf, leaf.grad, hooks, dict(hooks)))
        leaf.grad = None
        hooks.clear()
    try:
        yield
    finally:
        for leaf, gradient, hooks, saved_hooks in reversed(saved):
            leaf.grad = gradient
            hooks.update(saved_hooks)


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass adds to."""
    last = "torch::autograd::AccumulateGrad"
    return [node.variable for node in _nodes(loss) if node.name() == last]  # type: ignore[attr-defined]


def _needs_backward(model: nn.Module, loss: Tensor) -> bool:
    """Say whether gradients come by `backward` alone.

    So it is with reentrant checkpoints; and FSDP2's reach its shards only there.
    """
    reentrant = "CheckpointFunctionBackward"
    return is_sharded(model) or any(n.name() == reentrant for n in _nodes(loss))


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Go through the graph of a loss."""
    pending, seen = [loss.grad_fn], {loss.grad_fn}
    while pending:
        node = pending.pop()
        if node is None:
            continue
        yield node
        more = {one for one, _ in node.next_functions} - seen
        seen |= more
        pending += more


def is_sharded(model: nn.Module) -> bool:
    """Say whether processes hold pieces of it, as FSDP2 has them."""
    return any(hasattr(m, "set_requires_gradient_sync") for m in model.modules())


def exchanges(model: nn.Module) -> bool:
    """Say whether its passes wait for other processes, as shards and norms make them.

    DDP's do not: a replay lets it exchange nothing.
    """
    norms = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return norms or is_sharded(model)

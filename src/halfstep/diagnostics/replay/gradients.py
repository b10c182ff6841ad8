"""Computes the gradients of a replayed loss, and their sum over micro-batches.

The model's own `.grad` is restored, and no post-accumulate-grad hook runs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.diagnostics.replay import tensor_facts
from halfstep.diagnostics.replay.module_stack import ROOT, Place
from halfstep.diagnostics.replay.op_trace import NonFiniteEvent
from halfstep.distributed import ddp
from halfstep.nonfinite.graph import nodes_of
from halfstep.numerics.local_tensor import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SUM = "sum"
"""`source_kind` of an event of a sum of gradients."""


def gradients(
    model: nn.Module, loss: Tensor, scale: float, shards: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the scaled loss.

    `shards` are the model's parameters as they were before the forward pass.
    """
    params = [p for p in ddp.unwrap(model).parameters() if p.requires_grad]
    if not params or not loss.requires_grad:
        return []
    scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    assert scaled.grad_fn is not None  # noqa: S101 -- the loss requires a gradient
    nodes = nodes_of(scaled.grad_fn)
    # Reentrant checkpoints and FSDP2's shards support only `backward`.
    reentrant = any(n.name() == "CheckpointFunctionBackward" for n in nodes)
    if not (reentrant or is_sharded(model)):
        return list(torch.autograd.grad(scaled, params, allow_unused=True))
    last = "torch::autograd::AccumulateGrad"
    leaves = [n.variable for n in nodes if n.name() == last]  # type: ignore[attr-defined]
    # Shards and the parameters gathered from them for forward are different tensors.
    with _fresh_grads(leaves), _fresh_grads([*params, *shards]):
        torch.autograd.backward(scaled)
        return [param.grad for param in (*params, *shards)]


@contextlib.contextmanager
def _fresh_grads(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Remove gradients of leaves, and hooks that use them and may step an optimizer."""
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


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards the model over processes."""
    return any(hasattr(m, "set_requires_gradient_sync") for m in model.modules())


def exchanges(model: nn.Module) -> bool:
    """Return whether passes communicate in a replay, as FSDP2 and SyncBatchNorm do.

    DDP does not: a replay disables its communication.
    """
    norms = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return norms or is_sharded(model)


class GradSums:
    """Sums gradients of a model over micro-batches, in `dtype` or else their own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._root = ddp.unwrap(model)
        named = self._root.named_parameters()
        self._names = [name for name, param in named if param.requires_grad]
        self._dtype = dtype
        self._totals: dict[int, Tensor] = {}
        self._absmax = 0.0

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of `gradients`.

        Gradients of shards follow those of parameters, in the same order.
        """
        for index, gradient in enumerate(grads):
            if gradient is None:
                continue
            local = local_part(gradient)
            part = local.detach().to(self._dtype or local.dtype)
            absmax = tensor_facts.absmax(tensor_facts.floats(part))
            self._absmax = max(self._absmax, absmax)
            total = self._totals.get(index)
            self._totals[index] = part.clone() if total is None else total + part

    def event(self) -> NonFiniteEvent | None:
        """Return the event of the first sum that is non-finite."""
        nonfinite: dict[int, tensor_facts.NonFiniteKinds] = {}
        for index, total in self._totals.items():
            dense = total.coalesce() if total.is_sparse else total
            for part in tensor_facts.floats(dense):
                kinds = tensor_facts.nonfinite_kinds(part)
                if kinds:
                    nonfinite[index] = kinds
        if not nonfinite:
            return None
        first = min(nonfinite)
        name = self._names[first % len(self._names)]
        path = name.rpartition(".")[0]
        return NonFiniteEvent(
            number=0,
            place=Place(path or ROOT, type(self._root.get_submodule(path)).__name__),
            phase="backward",
            op="add",
            aten_name="add",
            nonfinite=nonfinite[first],
            dtype=self._totals[first].dtype,
            inputs=self._absmax,
            count=(len(nonfinite), len(self._totals)),
            source_kind=SUM,
            source=name,
        )

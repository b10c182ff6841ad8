"""Caches 16-bit casts of weights, and casts again when a weight has changed."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from halfstep._torch import optimizer_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from halfstep.casting.grad_accumulation import Fp32GradAccumulator


_LOW = (torch.bfloat16, torch.float16)
_NO_VERSION = -1
"""A version that no weight has."""
SMALL = 4096
"""Weight size in elements up to which casting again with torch, for the autograd
history, costs less than a Python autograd.Function."""
LARGE = 1 << 21
"""The same on a CPU if no cast is used for a second graph: what a function saves then
is new memory for the cast and its gradient, and large memory is slow to get."""


def _without_modes() -> AbstractContextManager[object]:
    """Hide casts from dispatch modes.

    Why: selective checkpointing counts operations, and the recomputation finds the cast
    in the cache.
    """
    before_dispatch: Any = torch._ops.mode_stack_state_for_pre_dispatch()  # type: ignore[no-untyped-call]  # noqa: SLF001
    if torch._C._len_torch_dispatch_stack() or before_dispatch.count():  # noqa: SLF001
        return _python_dispatch._disable_current_modes()  # noqa: SLF001
    return nullcontext()


@dataclass(eq=False, slots=True)
class _Entry:
    """One weight in one dtype."""

    weight_ref: weakref.ref[Tensor]
    data: Tensor
    """Without autograd history, which would keep the weight alive."""
    differentiable: Tensor | None = None
    """The same values with autograd history, while a context is open."""
    version: int = _NO_VERSION
    address: int = 0
    epoch: int = 0
    context_number: int = 0
    """Number of the context in which it was cast."""
    in_grad_mode: bool = True


class CastCache:
    """16-bit copies of fp32 weights that outlive an autocast context.

    With gradient accumulation, a weight is then cast once per optimizer step, not once
    per micro-batch. torch has one cache per process, keyed by the weight alone: it
    returns the wrong dtype to a nested context and the old value of a weight that was
    changed in place, does not cache frozen weights, and is emptied when the outermost
    context ends. Here the key is the weight, the dtype and autograd's version counter.

    An optimizer step is noticed, a fused one too. A write through `weight.data` is not,
    since autograd does not count it: call `refresh` after one.

    Args:
        gradients: Accumulates the 16-bit gradients of the weights in fp32 while a
            context is open. None leaves them to autograd.
        for_training: Without grad mode, neither reuse casts of an earlier context nor
            keep any for a later one. Averaged weights are often written through
            `weight.data` before an evaluation, which would go unnoticed.
        max_recast_numel: With `gradients`, torch casts weights of up to this number of
            elements again for each graph.

    Attributes:
        hits: Number of casts that were served from the cache.
        misses: Number of casts that were made.
        bytes_cast: Bytes of all casts made, including those dropped since.
        is_open: Whether a context uses the cache. Then the gradients of all uses of a
            weight are summed in 16 bits, as with torch's cache.

    Example:
        >>> from halfstep import autocast
        >>> layer, cache = nn.Linear(4, 4, bias=False), CastCache()
        >>> for _ in range(3):  # three micro-batches
        ...     with autocast("cpu", torch.bfloat16, cache=cache):
        ...         _ = layer(torch.ones(1, 4))
        >>> cache.misses, cache.hits
        (1, 2)
    """

    def __init__(
        self,
        gradients: Fp32GradAccumulator | None = None,
        *,
        for_training: bool = False,
        max_recast_numel: int = SMALL,
    ) -> None:
        """Start empty."""
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._gradients = gradients
        self._for_training = for_training
        self._max_recast_numel = max_recast_numel
        self._num_contexts = 0
        self._epoch = 0
        self._lock = threading.RLock()
        self.is_open = False
        self.hits = 0
        self.misses = 0
        self.bytes_cast = 0
        _caches[id(self)] = self
        user, patch = object(), optimizer_hooks.STEP_PATCH
        patch.acquire(user)
        weakref.finalize(self, patch.release, user).atexit = False

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Make objects with a cache copyable and picklable; a copy is empty."""
        return partial(CastCache, for_training=self._for_training), ()

    @property
    def bytes(self) -> int:
        """Bytes of the casts in the cache."""
        return sum(entry.data.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        """Return the number of casts in the cache."""
        return len(self._entries)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is cached: an fp32 parameter, or a trainable leaf.

        Views, activations and the proxies of a tracer are not.
        """
        cls = type(tensor)
        return (
            tensor.dtype == torch.float32
            and (cls is nn.Parameter or (cls is Tensor and tensor.requires_grad))
            and tensor.is_leaf
            and not tensor._is_view()  # noqa: SLF001
            and not tensor.is_inference()
        )

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a dtype, from the cache if it is a weight."""
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001
            # They support `Tensor.to`, but not our autograd.Function.
            return tensor.to(dtype)
        entry = self._entries.get((id(tensor), dtype))
        if entry is not None and self._is_current(entry, tensor):
            self.hits += 1
            return self._with_grad(entry, tensor)
        return self.get(tensor, dtype) if self.is_weight(tensor) else tensor.to(dtype)

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight (see `is_weight`) in a dtype; its gradient flows to it."""
        key = id(weight), dtype
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._is_current(entry, weight):
                self.hits += 1
            else:
                entry = self._cast(key, entry, weight)
            return self._with_grad(entry, weight)

    def _is_current(self, entry: _Entry, weight: Tensor) -> bool:
        """Return whether this is a cast of the weight's current value."""
        return (
            entry.weight_ref() is weight
            and entry.epoch == self._epoch
            and entry.version == weight._version  # noqa: SLF001
            and entry.address == weight.data_ptr()
            and (
                not self._for_training
                or entry.context_number == self._num_contexts
                or torch.is_grad_enabled()
            )
        )

    def _cast(
        self, key: tuple[int, torch.dtype], cached: _Entry | None, weight: Tensor
    ) -> _Entry:
        self.misses += 1
        if cached is not None and cached.weight_ref() is not weight:
            cached = None
        result, recasts = None, self._recasts(weight)
        with _without_modes():
            if recasts and self._needs_grad(weight):
                result = weight.to(key[1])
                data = result.detach()
            elif (
                not recasts  # else `data` is the memory of a cast in an earlier graph
                and cached is not None
                and cached.epoch != self._epoch
                and cached.data.shape == weight.shape
                and cached.data.device == weight.device
            ):
                data = cached.data.copy_(weight.detach())
            else:
                data = weight.detach().to(key[1])
        if cached is None or data.is_inference():

            def forget(_: object) -> None:
                self._entries.pop(key, None)

            cached = _Entry(weakref.ref(weight, forget), data)
            if not data.is_inference():
                self._entries[key] = cached
        cached.data = data
        cached.differentiable = result if self.is_open else None
        cached.version = weight._version  # noqa: SLF001
        cached.address, cached.epoch = weight.data_ptr(), self._epoch
        cached.context_number = self._num_contexts
        cached.in_grad_mode = torch.is_grad_enabled()
        self.bytes_cast += data.nbytes
        return cached

    def _needs_grad(self, weight: Tensor) -> bool:
        return weight.requires_grad and torch.is_grad_enabled()

    def _recasts(self, weight: Tensor) -> bool:
        """Return whether torch casts a weight again to give the cast a history."""
        return self._gradients is not None and weight.numel() <= self._max_recast_numel

    def _with_grad(self, entry: _Entry, weight: Tensor) -> Tensor:
        """Return a cast, with autograd history if a gradient may need it."""
        if not self._needs_grad(weight):
            return entry.data
        result = entry.differentiable
        if result is not None:
            return result
        with _without_modes():
            if self._recasts(weight):
                result = weight.to(entry.data.dtype)
            else:
                result = _CachedCast.apply(weight, entry.data, self._gradients)  # type: ignore[no-untyped-call]
        if self.is_open:
            entry.differentiable = result
        return result

    def open(self) -> None:
        """Record that a context was entered: all uses of a weight share one cast."""
        self._num_contexts += not self.is_open
        self.is_open = True

    def close(self) -> None:
        """Record that the context has ended: the next one has another graph."""
        self.is_open = False
        for entry in list(self._entries.values()):
            entry.differentiable = None
            if self._for_training and not entry.in_grad_mode:
                entry.version = _NO_VERSION

    def invalidate(self, weights: Iterable[Tensor]) -> None:
        """Cast these weights again on next use, whatever their version counters."""
        if not self._entries:
            return
        for key in product(map(id, weights), _LOW):
            entry = self._entries.get(key)
            if entry is not None:
                entry.version = _NO_VERSION

    def refresh(self) -> None:
        """Cast each weight again on next use, into the same memory.

        Call it after an optimizer step, when no graph needs the old casts. A backward
        pass that still does raises torch's error about a tensor modified in place.
        """
        self._epoch += 1

    def clear(self) -> None:
        """Drop every cast."""
        self._entries.clear()


_caches: weakref.WeakValueDictionary[int, CastCache] = weakref.WeakValueDictionary()


def _invalidate_stepped(optimizer: torch.optim.Optimizer) -> None:
    # One call, without a lock: threads add caches, and Ctrl-C must not leave it locked.
    for reference in _caches.valuerefs():
        cache = reference()
        if cache is not None:
            groups = map(itemgetter("params"), optimizer.param_groups)
            cache.invalidate(chain.from_iterable(groups))


optimizer_hooks.register_post_step_callback(_invalidate_stepped)


class _CachedCast(torch.autograd.Function):
    """`weight.to(dtype)` with a cached result; backward may add to `.grad` itself."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's context has no useful type
        weight: Tensor,
        data: Tensor,
        gradients: Fp32GradAccumulator | None,
    ) -> Tensor:
        ctx.weight, ctx.gradients = weight, gradients
        # `data` itself must stay without history. The version counter is shared.
        return data.detach()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: Tensor,
    ) -> tuple[Tensor | None, None, None]:
        if ctx.gradients is not None and ctx.gradients.accumulate(ctx.weight, gradient):
            return None, None, None
        return gradient.to(ctx.weight.dtype), None, None

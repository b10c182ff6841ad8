"""Weights cast once, and never served stale.

In: a weight and a 16-bit dtype. Out: the weight in that dtype, cast when it was first
asked for, or when the weight has changed since.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from halfstep._torch import optimizer_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from halfstep.casting.grad_accumulation import Fp32GradAccumulator


_LOW = (torch.bfloat16, torch.float16)
_NO_VERSION = -1
"""A version that no weight has."""
SMALL = 4096
"""Numbers of a weight up to which torch's own cast, made once more for its history,
costs less than a function of autograd in Python."""


def _without_modes() -> AbstractContextManager[object]:
    """Hide casts from dispatch modes.

    Why: selective checkpointing counts operations; it must not see a cast here that
    the recomputation finds made.
    """
    before_dispatch: Any = torch._ops.mode_stack_state_for_pre_dispatch()  # type: ignore[no-untyped-call]  # noqa: SLF001
    if torch._C._len_torch_dispatch_stack() or before_dispatch.count():  # noqa: SLF001
        return _python_dispatch._disable_current_modes()  # noqa: SLF001
    return nullcontext()


class _Entry:
    """One weight in one dtype."""

    __slots__ = (
        "address",
        "context",
        "data",
        "differentiable",
        "epoch",
        "in_grad_mode",
        "version",
        "weight_ref",
    )

    def __init__(
        self, weight: Tensor, data: Tensor, epoch: int, on_freed: Callable[[Any], None]
    ) -> None:
        self.context = 0
        """Number of the context that it was cast in."""
        self.in_grad_mode = True
        self.weight_ref = weakref.ref(weight, on_freed)
        self.data = data
        """Without history: history would hold the weight, which then never dies."""
        self.differentiable: Tensor | None = None
        """The same numbers with history, while a region is open."""
        self.update(weight, epoch)

    def update(self, weight: Tensor, epoch: int) -> None:
        """Take down what the weight is like now."""
        self.version = weight._version  # noqa: SLF001
        self.address = weight.data_ptr()
        self.epoch = epoch

    def is_current(self, weight: Tensor, epoch: int) -> bool:
        """Say whether this is that weight as it is now."""
        return (
            self.weight_ref() is weight
            and self.epoch == epoch
            and self.version == weight._version  # noqa: SLF001
            and self.address == weight.data_ptr()
        )

    def can_reuse_memory(self, weight: Tensor, epoch: int) -> bool:
        """Say whether the cast's memory may serve the weight's new value."""
        return (
            self.weight_ref() is weight
            and self.epoch != epoch
            and self.data.shape == weight.shape
            and self.data.device == weight.device
        )


class CastCache:
    """Weights in 16 bits, for as many regions and micro-batches as its owner likes.

    Why: torch keeps one cache for the process, whose key is the weight alone. It
    serves a nested region the other dtype, a weight changed in place its old value,
    leaves frozen weights out, and forgets all when the outermost region closes. Here
    the key is the weight, the dtype, and the version that autograd counts.

    An edit through `weight.data` is counted by nobody; call `refresh` after one. Nor is
    one by a fused optimizer, whose steps are watched instead.

    Attributes:
        hits: Times that a cast was found.
        misses: Times that one was made.
        bytes_cast: Size of all casts made, those since forgotten too.
        is_open: A context uses it: a weight's gradients are summed in 16 bits, as under
            torch's cache, from all its uses in the region.
    """

    def __init__(
        self,
        gradients: Fp32GradAccumulator | None = None,
        *,
        for_training: bool = False,
    ) -> None:
        """Start empty.

        Args:
            for_training: Without grad mode, serve no cast of an earlier context, and
                leave none for a later one: averaged weights are often put in through
                `weight.data`, which nothing counts, for an evaluation.
            gradients: Takes in the 16-bit gradients of the weights while it is open;
                None leaves them to autograd.
        """
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._gradients = gradients
        self._for_training = for_training
        self._num_contexts = 0
        self._epoch = 0
        self._lock = threading.RLock()
        self.is_open = False
        self.hits = 0
        self.misses = 0
        self.bytes_cast = 0
        with _lock:
            _caches.add(self)
        optimizer_hooks.STEP_PATCH.acquire()
        weakref.finalize(self, optimizer_hooks.STEP_PATCH.release).atexit = False

    def __reduce__(self) -> tuple[type[CastCache], tuple[()]]:
        """Let what holds a cache be copied and pickled; a copy starts empty."""
        return CastCache, ()

    @property
    def bytes(self) -> int:
        """Size of all casts it holds."""
        return sum(entry.data.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        """Return the number of casts it holds."""
        return len(self._entries)

    def is_weight(self, tensor: Tensor) -> bool:
        """Say whether a tensor is a weight: a parameter, or an fp32 leaf that learns.

        Views, activations and what tracing puts in a weight's place are none.
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
            # They look through `Tensor.to`, not through a function of ours.
            return tensor.to(dtype)
        entry = self._entries.get((id(tensor), dtype))
        if entry is not None and self._is_current(entry, tensor):
            self.hits += 1
            return self._with_grad(entry, tensor)
        return self.get(tensor, dtype) if self.is_weight(tensor) else tensor.to(dtype)

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in a 16-bit dtype; its gradient flows to the weight.

        Args:
            weight: One of which `is_weight` is true.
            dtype: What to cast it to.
        """
        key = id(weight), dtype
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._is_current(entry, weight):
                self.hits += 1
            else:
                entry = self._cast(key, entry, weight)
            return self._with_grad(entry, weight)

    def _is_current(self, entry: _Entry, weight: Tensor) -> bool:
        return entry.is_current(weight, self._epoch) and (
            not self._for_training
            or entry.context == self._num_contexts
            or torch.is_grad_enabled()
        )

    def _cast(
        self, key: tuple[int, torch.dtype], cached: _Entry | None, weight: Tensor
    ) -> _Entry:
        self.misses += 1
        with _without_modes():
            data = weight.detach()
            if cached is not None and cached.can_reuse_memory(weight, self._epoch):
                cached.data.copy_(data)
                cached.update(weight, self._epoch)
                cached.differentiable = None
            else:
                data = data.to(key[1])

                def forget(_: object) -> None:
                    self._entries.pop(key, None)

                cached = _Entry(weight, data, self._epoch, forget)
                if not data.is_inference():
                    self._entries[key] = cached
        cached.context = self._num_contexts
        cached.in_grad_mode = torch.is_grad_enabled()
        self.bytes_cast += cached.data.nbytes
        return cached

    def _with_grad(self, entry: _Entry, weight: Tensor) -> Tensor:
        """Return a cast, with history where a gradient may ask for it."""
        if not weight.requires_grad or not torch.is_grad_enabled():
            return entry.data
        result = entry.differentiable
        if result is not None:
            return result
        with _without_modes():
            if self._gradients is not None and weight.numel() <= SMALL:
                result = weight.to(entry.data.dtype)
            else:
                result = _CachedCast.apply(weight, entry.data, self._gradients)  # type: ignore[no-untyped-call]
        if self.is_open:
            entry.differentiable = result
        return result

    def open(self) -> None:
        """Take note that a region opens, which serves a weight's every use one cast."""
        self._num_contexts += not self.is_open
        self.is_open = True

    def close(self) -> None:
        """Take note that the region has closed: the next has another graph."""
        self.is_open = False
        for entry in list(self._entries.values()):
            entry.differentiable = None
            if self._for_training and not entry.in_grad_mode:
                entry.version = _NO_VERSION

    def invalidate(self, weights: Iterable[Tensor]) -> None:
        """Cast these weights again, though their versions may be as before."""
        for key in itertools.product(map(id, weights), _LOW):
            entry = self._entries.get(key)
            if entry is not None:
                entry.version = _NO_VERSION

    def refresh(self) -> None:
        """Cast each weight again when it is next asked for, into the same memory.

        For the moment after an optimizer step: no graph needs the old casts then.
        A backward pass that still does raises torch's error on a tensor changed in
        place.
        """
        self._epoch += 1

    def clear(self) -> None:
        """Forget every cast."""
        self._entries.clear()


_lock = threading.Lock()
_caches: weakref.WeakSet[CastCache] = weakref.WeakSet()


def _invalidate_stepped(optimizer: torch.optim.Optimizer) -> None:
    with _lock:
        caches = list(_caches)
    for cache in caches:
        cache.invalidate(p for group in optimizer.param_groups for p in group["params"])


optimizer_hooks.register_post_step_callback(_invalidate_stepped)


class _CachedCast(torch.autograd.Function):
    """`weight.to(dtype)`, made before, whose backward may add to `.grad` itself."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's context has no useful type
        weight: Tensor,
        data: Tensor,
        gradients: Fp32GradAccumulator | None,
    ) -> Tensor:
        ctx.weight, ctx.gradients = weight, gradients
        # A trial of the loss scale runs it once more; outside of a session's own
        # backward pass `gradients` takes nothing in.
        ctx.repeatable = True
        # Not itself: it must stay without history. The version counter is shared.
        return data.detach()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: Tensor,
    ) -> tuple[Tensor | None, None, None]:
        if ctx.gradients is not None and ctx.gradients.accumulate(ctx.weight, gradient):
            return None, None, None
        return gradient.to(ctx.weight.dtype), None, None

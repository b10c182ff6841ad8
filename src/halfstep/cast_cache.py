"""Weights cast once, and never served stale.

In: a weight and a 16-bit dtype. Out: the weight in that dtype, cast when it was first
asked for, or when the weight has changed since.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.fold import Gradients


class _Entry:
    """One weight in one dtype."""

    __slots__ = ("address", "epoch", "low", "of", "version")

    def __init__(
        self, weight: Tensor, low: Tensor, epoch: int, forget: Callable[[Any], None]
    ) -> None:
        self.of = weakref.ref(weight, forget)
        self.low = low
        self.note(weight, epoch)

    def note(self, weight: Tensor, epoch: int) -> None:
        """Take down what the weight is like now."""
        self.version = weight._version  # noqa: SLF001
        self.address = weight.data_ptr()
        self.epoch = epoch

    def fits(self, weight: Tensor, epoch: int) -> bool:
        """Say whether this is that weight as it is now."""
        return (
            self.of() is weight
            and self.epoch == epoch
            and self.version == weight._version  # noqa: SLF001
            and self.address == weight.data_ptr()
            and weight.requires_grad == self.low.requires_grad
        )

    def may_be_written(self, weight: Tensor, epoch: int) -> bool:
        """Say whether the cast's memory may serve the weight's new value."""
        return (
            self.of() is weight
            and self.epoch != epoch
            and self.low.shape == weight.shape
            and self.low.device == weight.device
            and weight.requires_grad == self.low.requires_grad
        )


class CastCache:
    """Weights in 16 bits, for as many regions and micro-batches as its owner likes.

    Why: torch keeps one cache for the process, whose key is the weight alone. It
    serves a nested region the other dtype, a weight changed in place its old value,
    leaves frozen weights out, and forgets all when the outermost region closes. Here
    the key is the weight, the dtype, and the version that autograd counts.

    An edit through `weight.data` is counted by nobody; call `renew` after one.

    Attributes:
        hits: Times that a cast was found.
        misses: Times that one was made.
        bytes_cast: Size of all casts made, those since forgotten too.
    """

    def __init__(self, gradients: Gradients | None = None) -> None:
        """Start empty.

        Args:
            gradients: Takes in the 16-bit gradients of the weights while it is open;
                None leaves them to autograd.
        """
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._gradients = gradients
        self._epoch = 0
        self.hits = 0
        self.misses = 0
        self.bytes_cast = 0

    @property
    def bytes(self) -> int:
        """Size of all casts it holds."""
        return sum(entry.low.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        """Return the number of casts it holds."""
        return len(self._entries)

    def takes(self, tensor: Tensor) -> bool:
        """Say whether a tensor is a weight: a parameter, or an fp32 leaf that learns.

        Views, activations and what tracing puts in a weight's place are none.
        """
        kind = type(tensor)
        return (
            tensor.dtype == torch.float32
            and (kind is nn.Parameter or (kind is Tensor and tensor.requires_grad))
            and tensor.is_leaf
            and not tensor._is_view()  # noqa: SLF001
            and not tensor.is_inference()
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
        )

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a dtype, from the cache if it is a weight."""
        entry = self._entries.get((id(tensor), dtype))
        if entry is not None and entry.fits(tensor, self._epoch):
            self.hits += 1
            return entry.low
        return self.get(tensor, dtype) if self.takes(tensor) else tensor.to(dtype)

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in a 16-bit dtype; its gradient flows to the weight.

        Args:
            weight: One that it `takes`.
            dtype: What to cast it to.
        """
        key = id(weight), dtype
        entry = self._entries.get(key)
        if entry is not None and entry.fits(weight, self._epoch):
            self.hits += 1
            return entry.low
        self.misses += 1
        # Selective checkpointing counts casts; it must not see one here that the
        # recomputation finds made.
        with _disable_current_modes():
            if entry is not None and entry.may_be_written(weight, self._epoch):
                with torch.no_grad():
                    entry.low.copy_(weight)
                entry.note(weight, self._epoch)
                self.bytes_cast += entry.low.nbytes
                return entry.low
            # One made without history would keep later gradients from the weight.
            with torch.enable_grad():
                low = cast(weight, dtype, self._gradients)
        self.bytes_cast += low.nbytes

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        if not low.is_inference():
            self._entries[key] = _Entry(weight, low, self._epoch, forget)
        return low

    def renew(self) -> None:
        """Cast each weight again when it is next asked for, into the same memory.

        For the moment after an optimizer step: no graph needs the old casts then.
        A backward pass that still does raises torch's error on a tensor changed in
        place.
        """
        self._epoch += 1

    def clear(self) -> None:
        """Forget every cast."""
        self._entries.clear()


def cast(weight: Tensor, dtype: torch.dtype, gradients: Gradients | None) -> Tensor:
    """Return a weight in a dtype, its gradient folded into `gradients` if given."""
    if gradients is None or not weight.requires_grad:
        return weight.to(dtype)
    low: Tensor = _Cast.apply(weight, dtype, gradients)  # type: ignore[no-untyped-call]
    return low


class _Cast(torch.autograd.Function):
    """`weight.to(dtype)`, whose backward may add to the weight's gradient itself."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's context has no useful type
        weight: Tensor,
        dtype: torch.dtype,
        gradients: Gradients,
    ) -> Tensor:
        ctx.weight, ctx.gradients = weight, gradients
        return weight.to(dtype)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: Tensor,
    ) -> tuple[Tensor | None, None, None]:
        if ctx.gradients.take(ctx.weight, gradient):
            return None, None, None
        return gradient.to(ctx.weight.dtype), None, None

"""Reads facts of tensors, such as non-finite kinds; runs operations again in fp32.

These functions synchronize with the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from halfstep.nonfinite.domains import local_data

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOW = {torch.float16, torch.bfloat16}


class NonFiniteKinds(NamedTuple):
    """Which of NaN, +inf and -inf a tensor contains."""

    nan: bool = False
    posinf: bool = False
    neginf: bool = False

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return self.nan or self.posinf or self.neginf

    def __or__(self, other: NonFiniteKinds) -> NonFiniteKinds:
        """Return the kinds in either."""
        return NonFiniteKinds(
            *(one or two for one, two in zip(self, other, strict=True))
        )

    @property
    def kind(self) -> str:
        """Return "NaN" or "inf"."""
        return "NaN" if self.nan else "inf"


def floats(value: object) -> list[Tensor]:
    """Return the floating tensors in a nested value; complex ones as real views."""
    tensors = []
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            part = local_data(leaf)
            if part.is_complex():
                # A conjugate view has no real view; its base is finite if it is.
                part = torch.view_as_real(part.conj() if part.is_conj() else part)
            if part.is_floating_point() and part.itemsize > 1:
                tensors.append(part)
    return tensors


def storage_key(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, unique while that is alive; 0 if empty."""
    if not tensor.numel() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        return 0
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return key


def storage_ref(tensor: Tensor) -> object:
    """Return a weak reference that keeps a storage's key unique but not its memory."""
    if not storage_key(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def nonfinite_kinds(value: Tensor) -> NonFiniteKinds:
    """Return the kinds of non-finite values in a tensor."""
    if not value.numel():
        return NonFiniteKinds()
    low, high = torch.stack(torch.aminmax(value.detach())).tolist()
    if math.isfinite(low) and math.isfinite(high):
        return NonFiniteKinds()
    if not math.isnan(low):
        return NonFiniteKinds(posinf=high == math.inf, neginf=low == -math.inf)
    value = value.detach()
    return NonFiniteKinds(
        nan=True,
        posinf=bool((value == math.inf).any()),
        neginf=bool((value == -math.inf).any()),
    )


def absmax(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite magnitude; 0.0 if there is none."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel():
            finite = torch.nan_to_num(tensor.detach().abs().double(), 0, 0, 0)
            largest = max(largest, float(finite.max()))
    return largest


def run_in_fp32(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, float]:
    """Return "finite", "not finite" or "not run", and the largest finite magnitude."""

    def widened(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor) and value.dtype in _LOW:
            return value.detach().float()
        return torch.float32 if isinstance(value, torch.dtype) else value

    inputs = _pytree.tree_map(widened, (args, kwargs))
    # Forking the random state of all GPUs would initialize each of them.
    gpus = sorted({t.get_device() for t in floats(inputs) if t.is_cuda})
    try:
        with torch.random.fork_rng(gpus), torch.no_grad():
            output = func(*inputs[0], **inputs[1])
    except Exception:  # noqa: BLE001 -- some kernels exist in 16 bits only
        return "not run", 0.0
    results = floats(output)
    kind = "not finite" if any(map(nonfinite_kinds, results)) else "finite"
    return kind, absmax(results)

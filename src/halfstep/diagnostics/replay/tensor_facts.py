"""What numbers a tensor holds, and what an operation gives in float32.

In: tensors, or an operation with its arguments. Out: magnitudes on the host. All of it
waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from halfstep.nonfinite.saved_values import local_data

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOW = {torch.float16, torch.bfloat16}


class NonFiniteKinds(NamedTuple):
    """Which kinds of non-finite numbers a tensor holds."""

    nan: bool = False
    posinf: bool = False
    """+inf."""
    neginf: bool = False
    """-inf."""

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return self.nan or self.posinf or self.neginf

    def __or__(self, other: NonFiniteKinds) -> NonFiniteKinds:
        """Return what either holds."""
        return NonFiniteKinds(
            *(one or two for one, two in zip(self, other, strict=True))
        )

    @property
    def kind(self) -> str:
        """In a word."""
        return "NaN" if self.nan else "inf"


def floats(value: object) -> list[Tensor]:
    """Return the floating tensors in a nested value, complex ones as pairs."""
    tensors = []
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            part = local_data(leaf)
            if part.is_complex():
                # Of a conjugate view there is none, and what it views is as finite.
                part = torch.view_as_real(part.conj() if part.is_conj() else part)
            if part.is_floating_point() and part.itemsize > 1:
                tensors.append(part)
    return tensors


def storage_key(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor, as long as it is held; 0 of none."""
    if not tensor.numel() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        return 0
    memory: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return memory


def storage_ref(tensor: Tensor) -> object:
    """Return what keeps `key` from being another memory's, and no numbers alive."""
    if not storage_key(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def nonfinite_kinds(value: Tensor) -> NonFiniteKinds:
    """Return which kinds of non-finite numbers a tensor holds."""
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


def count_nonfinite(value: Tensor) -> tuple[int, int]:
    """Return how many numbers are not finite, of how many."""
    return int((~value.detach().isfinite()).sum()), value.numel()


def gpus(tensors: Iterable[Tensor]) -> list[int]:
    """Return the numbers of the GPUs that tensors are on.

    Why: to keep the random numbers of all would begin to use each one, and torch warns.
    """
    return sorted({t.get_device() for t in tensors if t.is_cuda})


def absmax(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite magnitude; 0.0 if there is none."""
    most = 0.0
    for tensor in tensors:
        if tensor.numel():
            finite = torch.nan_to_num(tensor.detach().abs().double(), 0, 0, 0)
            most = max(most, float(finite.max()))
    return most


def run_in_fp32(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, float]:
    """Run an operation again in float32.

    Args:
        func: The operation.
        args: As before it ran: what it writes into must be a copy.
        kwargs: Likewise.

    Returns:
        "finite", "not finite" or "not run"; and the largest finite magnitude.
    """

    def widened(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor) and value.dtype in _LOW:
            return value.detach().float()
        return torch.float32 if isinstance(value, torch.dtype) else value

    inputs = _pytree.tree_map(widened, (args, kwargs))
    try:
        with torch.random.fork_rng(gpus(floats(inputs))), torch.no_grad():
            output = func(*inputs[0], **inputs[1])
    except Exception:  # noqa: BLE001 -- some kernels take 16 bits alone
        return "not run", 0.0
    results = floats(output)
    kind = "not finite" if any(map(nonfinite_kinds, results)) else "finite"
    return kind, absmax(results)

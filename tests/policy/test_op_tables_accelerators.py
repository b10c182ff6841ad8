"""torch's tables for CUDA, XPU and MPS against torch, without any of them.

The oracle is torch's own casting kernels, which also run on tensors without memory.
Each operation runs under autocast, and once more without it on operands cast as
`decide` says: both must run the same kernels, casts included.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from op_arguments import arguments
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.casting.dispatch_kernels import overload_of
from halfstep.policy import decide
from halfstep.policy.op_tables import BANNED, FP32_RESULT, TABLES

DEVICES = ("cuda", "xpu", "mps")
NO_MEMORY = FakeTensorMode()


with NO_MEMORY:
    ARGUMENTS = {device: arguments(device) for device in DEVICES}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if dtype and seen else value


def dtypes_of(value: Any) -> list[torch.dtype]:
    if isinstance(value, tuple | list):
        return [dtype for item in value for dtype in dtypes_of(item)]
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return [value.dtype] if seen else []


@contextmanager
def region(device: str, low: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, low)
    torch.set_autocast_enabled(device, True)  # noqa: FBT003 -- torch's own
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)  # noqa: FBT003
        torch.set_autocast_dtype(device, before)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which kernels run on which dtypes, copies included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.prim.device.default:
            self.seen.append(f"{func} {dtypes_of(args)}")
        return func(*args, **(kwargs or {}))


def kernels(call: Any, given: Any, words: Any, dtype: torch.dtype | None) -> list[str]:
    """Return what casts and call run, in no order, and how the call ends."""
    with Recorder() as recorder:
        try:
            end = str(dtypes_of(call(*cast(given, dtype), **words)))
        # Without the device some kernels are missing; the casts before them are not.
        except (RuntimeError, AssertionError) as error:
            end = type(error).__name__
    return [*sorted(recorder.seen), end]


WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Operations that take a dtype under another name."""
WANTED: dict[str, tuple[Any, ...]] = {
    "norm.Scalar": (2,),
    "norm.ScalarOpt_dim": (False,),
}
"""What those want besides."""


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_is_called(device: str) -> None:
    """Law: nothing below is left out."""
    assert TABLES[device].keys() <= ARGUMENTS[device].keys()


@pytest.mark.parametrize(
    ("device", "operation"),
    [(device, operation) for device in DEVICES for operation in TABLES[device]],
)
@pytest.mark.filterwarnings("ignore:.*(chain_matmul|torch.cross).*:UserWarning")
def test_autocast_runs_what_is_decided(device: str, operation: str) -> None:
    """Law: autocast runs the kernels, casts included, that `decide`'s casts run.

    An fp32 result is what the same call with dtype=torch.float32 gives: no copy.
    """
    low = torch.float16
    first, *others = ARGUMENTS[device][operation]
    with NO_MEMORY:
        half = cast(first, low)
        for given in ((first, *others), (half, *others), (half, *cast(others, low))):
            found = decide(operation, dtypes_of(given), device, low=low)
            with region(device, low):
                theirs = kernels(overload_of(operation), given, {}, None)
            if found.category == BANNED:
                assert theirs == ["RuntimeError"]
            elif found.category == FP32_RESULT:
                call = overload_of(WITH_DTYPE.get(operation, operation))
                more = (*given, *WANTED.get(operation, ()))
                assert theirs == kernels(call, more, {"dtype": torch.float32}, None)
            else:
                assert theirs == kernels(overload_of(operation), given, {}, found.dtype)

"""A mode in which reading a number from a tensor fails."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a number is read from a tensor, which waits for the device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

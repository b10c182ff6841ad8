"""Eager autocast: torch's regions, made safe to enter twice.

In: a device and a dtype. Out: a context manager and decorator under which each
operation runs as the policy's table says.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

import torch

from halfstep.errors import UserError
from halfstep.policy import TORCH, Policy

if TYPE_CHECKING:
    from types import TracebackType


class _Regions(threading.local):
    """The regions that one thread has entered through one instance, outermost first."""

    def __init__(self) -> None:
        self.entered: list[torch.autocast] = []

    def __reduce__(self) -> tuple[type[_Regions], tuple[()]]:
        """Let what holds an instance be copied and pickled; a copy is not entered."""
        return _Regions, ()


class autocast(torch.autocast):
    """`torch.autocast`, which may be entered again while it is entered.

    Why: torch keeps the state to restore on the instance. When one instance is
    entered twice, or a decorated function calls itself, or two threads share one, the
    outer state is lost and autocast stays on after the exit. Here each entry is a
    region of its own.

    It sets torch's own state, so everything that asks torch whether autocast is on
    (checkpointing, DDP, model code, third-party kernels) gets the true answer.

    Args:
        device_type: "cpu", "cuda", ...
        dtype: The 16-bit dtype; default torch's for the device.
        enabled: False makes the region run as called.
        cache_enabled: Whether weights cast once stay cast for the region; default
            as it is set now.
        policy: "torch" or None: torch's table for the device. Rules of your own take
            effect through `prepare`, which knows the model's modules.

    Raises:
        UserError: If the policy holds rules.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        if (self.policy or TORCH).rules:
            message = (
                f"policy='{self.policy}' holds rules, and a bare region does not know "
                "the model they speak of: pass the policy to halfstep.prepare()."
            )
            raise UserError(message)
        self._regions = _Regions()

    def __enter__(self) -> Self:
        """Open a region."""
        region = torch.autocast(
            self.device, self.fast_dtype, self._enabled, self._cache_enabled
        )
        region.__enter__()  # type: ignore[no-untyped-call]
        self._regions.entered.append(region)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:  # noqa: ANN401 -- torch's signature
        """Close the region opened last, and restore what was before it."""
        return self._regions.entered.pop().__exit__(exc_type, exc_value, traceback)

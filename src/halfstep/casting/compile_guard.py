"""Makes torch.compile recompile when the active policy changes.

Before it runs compiled code, torch compares the autocast state of all device types with
that at compile time, also for code from the cache on disk; it does not know policies.
So a number made from the policy's text (28560 are possible) is encoded as the autocast
state of four device types that this machine does not have.

A version of torch may lack some of these types, hence the list of candidates.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from itertools import islice
from typing import Any

import torch

from halfstep.policy import op_tables
from halfstep.policy.rules import TORCH, Policy

_CANDIDATE_DEVICES = ("ipu", "maia", "mtia", "hpu", "mps", "xpu", "xla")
_NUM_DEVICES = 4
_DIGIT_DTYPES = (
    *(None, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def _is_spare(device: str) -> bool:
    """Return whether a device type has autocast state, but no device here."""
    if not torch.amp.is_autocast_available(device):
        return False
    machine = {"mps": torch.backends.mps, "xpu": torch.xpu}.get(device)
    return machine is None or not machine.is_available()


_SPARE_DEVICES = tuple(islice(filter(_is_spare, _CANDIDATE_DEVICES), _NUM_DEVICES))
_DEFAULT_DTYPES = {
    device: torch.get_autocast_dtype(device) for device in _SPARE_DEVICES
}
_CACHE_IGNORES_DTYPES = torch.__version__ < "2.13"
"""The key of torch's cache of traced graphs on disk, `enable_autograd_cache`, lacks the
dtypes of autocast: with 2.9.1 a policy got what another had compiled. 2.10 to 2.12 were
not tried."""
_MAX_NUMBER = len(_DIGIT_DTYPES) ** len(_SPARE_DEVICES) - 1

_numbers = {TORCH: 0}


class _Thread(threading.local):
    """The number that is encoded in a thread; 0: no policy is active."""

    def __init__(self) -> None:
        self.number = 0


_thread = _Thread()


def enter(policy: Policy | None, *, casts: bool) -> tuple[int | None, dict[str, Any]]:
    """Encode a policy, and make torch.compile trace backward passes without autocast.

    Why: by default it traces them under the autocast of the context around the compiled
    function, which computes the gradients of fp32 operations in 16 bits.

    Args:
        policy: None: encode none.
        casts: Whether a policy casts; backward passes are left alone otherwise.

    Returns:
        The number and torch's settings before, for `restore`; None: nothing to restore.
    """
    before = None if policy is None else _thread.number
    if policy is not None:
        if policy not in _numbers:
            _numbers[policy] = _new_number(policy)
        set_number(_numbers[policy])
    settings: dict[str, Any] = {}
    config: Any = sys.modules.get("torch._functorch.config") if casts else None
    if getattr(config, "backward_pass_autocast", None) == "same_as_forward":
        settings["backward_pass_autocast"] = config.backward_pass_autocast
        config.backward_pass_autocast = "off"  # noqa: S105 -- no password
    if _CACHE_IGNORES_DTYPES and getattr(config, "enable_autograd_cache", False):
        settings["enable_autograd_cache"] = config.enable_autograd_cache
        config.enable_autograd_cache = False
    return before, settings


def restore(before: int | None, settings: dict[str, Any]) -> None:
    """Undo an `enter`."""
    if before is not None:
        set_number(before)
    for name, value in settings.items():
        setattr(sys.modules["torch._functorch.config"], name, value)


def number() -> int:
    """Return the number that is encoded in this thread."""
    return _thread.number


def set_number(number: int) -> None:
    """Encode a number in the autocast state of the spare device types."""
    if number == _thread.number:
        return
    _thread.number = number
    for device in _SPARE_DEVICES:
        number, digit = divmod(number, len(_DIGIT_DTYPES))
        dtype = _DIGIT_DTYPES[digit]
        torch.set_autocast_enabled(device, dtype is not None)
        torch.set_autocast_dtype(device, dtype or _DEFAULT_DTYPES[device])


def _new_number(policy: Policy) -> int:
    """Return a number >= 1 for a policy; the same in every process."""
    # The tables count too: another version of halfstep may have others.
    text = f"{policy} {op_tables.NAMED[policy.base]}"
    digest = hashlib.sha256(text.encode()).digest()
    number: int = 1 + int.from_bytes(digest[:8], "big") % _MAX_NUMBER
    while number in _numbers.values():
        number = 1 + number % _MAX_NUMBER
    return number

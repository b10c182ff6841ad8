"""A sign for torch.compile: which policy was in force when it compiled.

In: a policy. Out: a state of torch that differs from one policy to the next, so that
code compiled under one is not run under another.

Before it runs compiled code, torch compares autocast's state, for all types of device,
with that at compile time, also where another process compiled it and left it on disk;
of a policy it knows nothing. So the policy's number stands in the state of four device
types that no tensor here is on. It is made from the policy's text: 28560 there are.

Each version of torch knows other types, hence the candidates: 2.6 has no autocast for
the second and third, and takes two that are left. And 2.6 compares nothing of that:
there, this room adds the number to what it does compare.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from itertools import islice
from typing import Any

import torch

from halfstep import optable
from halfstep.policy import TORCH, Policy

_CANDIDATES = ("ipu", "maia", "mtia", "hpu", "mps", "xpu", "xla")
_PLACES = 4
_DIGITS = (
    *(None, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def _is_spare(device: str) -> bool:
    """Say whether torch keeps autocast's state of a type that nothing here is on."""
    if not torch.amp.is_autocast_available(device):
        return False
    machine = {"mps": torch.backends.mps, "xpu": torch.xpu}.get(device)
    return machine is None or not machine.is_available()


_SPARE = tuple(islice(filter(_is_spare, _CANDIDATES), _PLACES))
_DEFAULT = {device: torch.get_autocast_dtype(device) for device in _SPARE}
_MOST = len(_DIGITS) ** len(_SPARE) - 1

_numbers: dict[Policy, int] = {}


class _Thread(threading.local):
    """The number that a thread shows; 0 where no policy is in force."""

    def __init__(self) -> None:
        self.number = 0


_thread = _Thread()


def show(policy: Policy) -> int:
    """Let torch's state tell a policy; return what `restore` takes."""
    before = _thread.number
    if policy == TORCH:
        restore(0)
    else:
        restore(_number(policy))
    return before


def _number(policy: Policy) -> int:
    """Return a policy's number, from 1 on: the same in every process."""
    if policy not in _numbers:
        # Another version of halfstep may have other tables.
        text = f"{policy} {optable.NAMED[policy.base]}"
        digest = hashlib.sha256(text.encode()).digest()
        number = int.from_bytes(digest[:8], "big") % _MOST
        while number in _numbers.values():
            number = (number + 1) % _MOST
        _numbers[policy] = number
    return 1 + _numbers[policy]


def restore(number: int) -> None:
    """Let torch's state tell the policy with a number again."""
    if number == _thread.number:
        return
    _thread.number = number
    for device in _SPARE:
        number, digit = divmod(number, len(_DIGITS))
        dtype = _DIGITS[digit]
        torch.set_autocast_enabled(device, dtype is not None)
        torch.set_autocast_dtype(device, dtype or _DEFAULT[device])


def _is_compared() -> bool:
    """Say whether torch compares autocast's state before it runs compiled code."""
    device = _SPARE[0]
    guard = torch._C._dynamo.guards.GlobalStateGuard()  # noqa: SLF001
    torch.set_autocast_enabled(device, True)  # noqa: FBT003 -- torch's own
    compared = not guard.check()
    torch.set_autocast_enabled(device, False)  # noqa: FBT003
    return compared


def _compared() -> tuple[object, ...]:
    """Return what compiled code depends on in this thread, but for what is on."""
    dtypes = (torch.get_autocast_dtype(device) for device in optable.TABLES)
    return _thread.number, *dtypes


def _compare() -> None:
    """Let all code that is compiled from now on compare the policy's number.

    Each compilation makes one object that holds what is compared: ours adds the number.
    """
    places: list[Any] = [torch._C._dynamo.guards]  # noqa: SLF001
    # The module that makes them takes a second to import: it may be there already.
    places += filter(None, [sys.modules.get("torch._dynamo.guards")])

    class Guards(places[0].RootGuardManager):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            here = _compared()
            self.add_lambda_guard(
                lambda _: _compared() == here, ["halfstep: another policy or dtype"]
            )

    for place in places:
        place.RootGuardManager = Guards


if not _is_compared():
    _compare()

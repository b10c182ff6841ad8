"""A sign for torch.compile: which policy was in force when it compiled.

In: a policy. Out: a state of torch that differs from one policy to the next, so that
code compiled under one is not run under another.

Before it runs compiled code, torch compares autocast's state, for all types of device,
with that at compile time; of a policy it knows nothing. So the policy's number stands
in the state of device types that no tensor here is on. 80 policies have numbers of
their own; beyond, two that are 80 apart share one.
"""

from __future__ import annotations

import torch

from halfstep.policy import TORCH, Policy

_SPARE = ("ipu", "maia", "mtia", "hpu")
_DIGITS = (None, torch.bfloat16, torch.float16)
_MOST = len(_DIGITS) ** len(_SPARE) - 1

_numbers: dict[Policy, int] = {}

State = list[tuple[str, bool, torch.dtype]]


def show(policy: Policy | None) -> State:
    """Let torch's state tell a policy; return what `hide` restores.

    Args:
        policy: None: torch's own table.
    """
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _SPARE
    ]
    number = 0
    if policy is not None and policy != TORCH:
        number = 1 + _numbers.setdefault(policy, len(_numbers)) % _MOST
    for device in _SPARE:
        number, place = divmod(number, len(_DIGITS))
        digit = _DIGITS[place]
        torch.set_autocast_enabled(device, digit is not None)
        if digit is not None:
            torch.set_autocast_dtype(device, digit)
    return before


def hide(before: State) -> None:
    """Restore torch's state."""
    for device, enabled, dtype in before:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)

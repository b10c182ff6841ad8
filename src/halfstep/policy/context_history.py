"""Which policy was active when an autograd node was made.

`casting` writes it on entry to a context, `scaling` reads it for the advice on a loss.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from halfstep.policy.rules import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.autograd.graph import Node

    from halfstep.policy.rules import Policy


class _ContextHistory(threading.local):
    """The autocast contexts with a policy that this thread entered last."""

    def __init__(self) -> None:
        self.last: deque[tuple[Policy, list[int]]] = deque(maxlen=16)
        """Policy; autograd's sequence numbers on entry and on exit."""

    def policy_of(self, nodes: Iterable[Node]) -> Policy:
        """Return the policy under which one of these autograd nodes was made."""
        numbers = [node._sequence_nr() for node in nodes]  # noqa: SLF001
        for policy, (start, stop) in reversed(self.last):
            if any(start <= number < stop for number in numbers):
                return policy
        return TORCH


context_history = _ContextHistory()

"""One ordinary step of a run under the profiler, for the doctor to judge speed by.

In: a step that is due. Out: what it returned, and where its time went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch._C._autograd import _profiler_enabled

from halfstep.profiling.steps import summary, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from halfstep.choice import Choice
    from halfstep.profiling.result import Profile
    from halfstep.train.clock import Clock

T = TypeVar("T")

LOOKED_AT = 20
"""The step that is looked at: by then memory is mapped and caches are full. A shorter
run is looked at in its last step."""

_DEVICES = {"cpu"}
"""Where it is known to cost next to nothing. On a GPU the profiler loads a library of
the driver first, and what that costs was not measured."""


def due(number: int, total: int, device: torch.device) -> bool:
    """Say whether a step is the one to look at.

    Args:
        number: Of the step, from 1.
        total: Steps of the run.
        device: That it trains on.
    """
    ours = number == min(LOOKED_AT, total) and device.type in _DEVICES
    return ours and not _profiler_enabled()  # whoever profiles the program comes first


def looked(step: Callable[[], T], clock: Clock, choice: Choice) -> tuple[T, Profile]:
    """Make a step, and say where its time went. It computes what it always does.

    Args:
        step: Makes it.
        clock: Of the step, with its input timed.
        choice: Level and format of the run.
    """
    made: list[T] = []
    seen = watched(lambda: made.append(step()))
    waited = clock.parts["input"]
    found = summary(
        seen,
        seen.length / 1e9 + waited,
        waited,
        level=choice.level.name,
        dtype=choice.format.name,
    )
    return made[0], found

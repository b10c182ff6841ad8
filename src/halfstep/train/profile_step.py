"""One ordinary step of a run under the profiler, for the doctor to judge speed by.

In: a step that is due. Out: what it returned, and where its time went, if that can be
read.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

from torch._C._autograd import _profiler_enabled

from halfstep.diagnostics.profiling.profile_step import summary, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from halfstep.diagnostics.profiling.profile_result import Profile
    from halfstep.diagnostics.profiling.timeline import Timeline
    from halfstep.machine.recommendation import Choice
    from halfstep.train.timers import Clock

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


def looked(
    step: Callable[[], T], clock: Clock, choice: Choice
) -> tuple[T, Profile | None]:
    """Make a step, and say where its time went. It computes what it always does.

    Not to know that must not end a run: it is told in a warning, and is None.

    Args:
        step: Makes it.
        clock: Of the step, with its input timed.
        choice: Level and format of the run.
    """
    made: list[T] = []
    own: list[Exception] = []

    def once() -> None:
        try:
            made.append(step())
        except Exception as error:
            own.append(error)
            raise

    try:
        found = _summed_up(watched(once), clock.parts["input"], choice)
    except Exception as error:  # noqa: BLE001 -- whatever the profiler may raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return made[0], found
    if own:
        raise own[0]
    message = f"where the time of a step goes could not be read: {why}"
    warnings.warn(f"{message}; training goes on.", stacklevel=2)
    return (made[0] if made else step()), None


def _summed_up(seen: Timeline, waited: float, choice: Choice) -> Profile:
    return summary(
        seen,
        seen.length / 1e9 + waited,
        waited,
        level=choice.level.name,
        dtype=choice.format.name,
    )

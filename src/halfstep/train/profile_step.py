"""Profiles one step of a run, from which the doctor judges speed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

from torch._C._autograd import _profiler_enabled

from halfstep.diagnostics.profiling.profile_step import summary, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from halfstep.diagnostics.profiling.profile_result import Profile
    from halfstep.machine.recommendation import Choice
    from halfstep.train.train_state import Timers

T = TypeVar("T")

PROFILED_STEP = 20
"""By this step memory is allocated and caches are full. A shorter run profiles its last
step."""

_DEVICES = {"cpu"}
"""Where profiling is known to be cheap. On a GPU the profiler first loads a driver
library, whose cost was not measured."""


def is_profile_step(number: int, total: int, device: torch.device) -> bool:
    """Return whether to profile this step."""
    ours = number == min(PROFILED_STEP, total) and device.type in _DEVICES
    return ours and not _profiler_enabled()  # the program may itself be profiled


def run_profiled(
    step: Callable[[], T], clock: Timers, choice: Choice
) -> tuple[T, Profile | None]:
    """Run a step under the profiler; its results are the same as without.

    If the profile cannot be read, warns and returns None for it.
    """
    results: list[T] = []
    try:
        timeline = watched(lambda: results.append(step()))
        waited = clock.seconds["input"]
        wall = timeline.length / 1e9 + waited
        level, dtype = choice.level.name, choice.format.name
        return results[0], summary(timeline, wall, waited, level=level, dtype=dtype)
    except Exception as error:
        if not results:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"where the time of a step goes could not be read: {reason}"
        warnings.warn(f"{message}; training goes on.", stacklevel=2)
    return results[0], None

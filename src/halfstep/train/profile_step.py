"""One ordinary step of a run under the profiler, for the doctor to judge speed by."""

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
"""The step that is profiled: by then memory is mapped and caches are full. A shorter
run is profiled in its last step."""

_DEVICES = {"cpu"}
"""Where it is known to cost next to nothing. On a GPU the profiler loads a library of
the driver first, and what that costs was not measured."""


def is_profile_step(number: int, total: int, device: torch.device) -> bool:
    """Say whether a step is the one to profile."""
    ours = number == min(PROFILED_STEP, total) and device.type in _DEVICES
    return ours and not _profiler_enabled()  # whoever profiles the program comes first


def run_profiled(
    step: Callable[[], T], clock: Timers, choice: Choice
) -> tuple[T, Profile | None]:
    """Make a step, and say where its time went. It computes what it always does.

    A profile that cannot be read must not end a run: it is a warning, and None.
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

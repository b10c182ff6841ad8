"""Measures time and memory of training steps in fp32 and at the level."""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING

from halfstep.diagnostics.preflight.measurements import Cost
from halfstep.diagnostics.preflight.rules import is_decided
from halfstep.diagnostics.preflight.scale_search import line_of
from halfstep.diagnostics.preflight.validation import raised
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.diagnostics.preflight.model_copy import ModelCopy, Pass
    from halfstep.diagnostics.preflight.scale_search import ScaleSearch

_MAX_SECONDS = 15.0  # approximate limit; slow steps are timed fewer times
_MORE = 4  # factor for the number of rounds if the result is undecided


class StepError(Exception):
    """A training step failed at the level but not in fp32."""


def time_steps(
    search: ScaleSearch, model_copy: ModelCopy, used: Pass, steps: int
) -> tuple[Cost, Cost, tuple[float, ...]]:
    """Measure training steps in fp32 and at the level, alternating.

    Returns:
        Cost in fp32; cost at the level; the speed-up of each round. A round is a step
        of both, so that other load on the machine slows both.
    """
    copies = (search.fp32_copy, model_copy)
    search.fp32_copy.begin(1.0)
    model_copy.begin(used.scale)
    warm_up = sum(_round(search, model_copy))  # allocates the optimizer's state
    fit = int(max(1, min(steps, _MAX_SECONDS / warm_up)))
    if fit < steps:
        search.notes.append(
            f"{fit} of {steps} steps were timed: a step of each kind takes some "
            f"{warm_up:.1f} s"
        )
    times = rounds(lambda: _round(search, model_copy), fit)
    saved = search.fp32_passes[0].saved_bytes, used.saved_bytes
    costs = []
    for one, seconds, saved_bytes in zip(
        copies, zip(*times, strict=True), saved, strict=True
    ):
        with _reporting_errors(search, one):
            memory = one.last_step(search.loss_fn, search.batches[0])
        costs.append(Cost(statistics.median(seconds), {**memory, "saved": saved_bytes}))
    return costs[0], costs[1], tuple(plain / low for plain, low in times)


def rounds(
    make_round: Callable[[], tuple[float, float]], count: int
) -> list[tuple[float, float]]:
    """Return the seconds of each round; run more rounds if the result is undecided.

    It is undecided if the machine is busy or the level about as fast as fp32. Then up
    to four times as many rounds run, within the time limit.
    """
    times = [make_round() for _ in range(count)]
    extra_seconds = 0.0
    while (
        not is_decided([plain / low for plain, low in times])
        and len(times) < _MORE * count
        and extra_seconds <= _MAX_SECONDS
    ):
        times.append(make_round())
        extra_seconds += sum(times[-1])
    return times


def _round(search: ScaleSearch, model_copy: ModelCopy) -> tuple[float, float]:
    """Run a step in fp32 and one at the level; return the seconds of each."""
    batch = search.batches[0]
    with _reporting_errors(search, search.fp32_copy):
        plain = search.fp32_copy.step(search.loss_fn, batch)
    with _reporting_errors(search, model_copy):
        low = model_copy.step(search.loss_fn, batch)
    return plain, low


@contextlib.contextmanager
def _reporting_errors(search: ScaleSearch, model_copy: ModelCopy) -> Iterator[None]:
    """Convert an error of a step to a `UserError` in fp32, else to a `StepError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if model_copy is search.fp32_copy:
            advice = "Give check the optimizer that will train."
            what = f"a step of {model_copy.optimizer},"
            raise raised(what, error, advice) from error
        raise StepError(line_of(error)) from error

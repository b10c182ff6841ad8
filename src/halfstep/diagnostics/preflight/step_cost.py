"""Whole training steps in fp32 and at the level: their time, their memory.

In: twins, after their passes. Out: a `Cost` of each. Where steps take long there are
fewer, on a part of the batch, and notes say so.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.diagnostics.preflight.measurements import Cost
from halfstep.diagnostics.preflight.rules import settled
from halfstep.diagnostics.preflight.scale_search import line_of
from halfstep.diagnostics.preflight.validation import raised
from halfstep.errors import UserError
from halfstep.numerics import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from halfstep.diagnostics.preflight.model_copy import Pass, Twin
    from halfstep.diagnostics.preflight.scale_search import Trials

_LONGEST = 15.0  # seconds for all of them, about; beyond it less must do
_SLOW = 0.3  # of that, where steps are hopeless: a CPU without products of the format
_MORE = 4  # times as many steps where they do not tell
_WARM_UP = 1  # it makes the optimizer's state; kernels have run before
_UNTIMED = _WARM_UP + 1  # the last one tells memory and what rounding swallows


class StepError(Exception):
    """A training step failed at the level, in a line; in fp32 it did not."""


@dataclass(frozen=True)
class Steps:
    """What training steps in fp32 and at a level took."""

    fp32: Cost
    low: Cost
    ratios: tuple[float, ...]
    """Of each round, a step of both, how many times as fast the level was. Load that
    comes and goes slows both steps of a round."""
    batch: object
    """That the steps were made with."""


def stepped(trials: Trials, twin: Twin, used: Pass, steps: int) -> Steps:
    """Make training steps in fp32 and at the level, in turns; take time and memory.

    Args:
        trials: With the twin in fp32; takes notes of what was left out.
        twin: At the level.
        used: Its pass, at the scale to train with.
        steps: To be timed of each kind, at least 1.
    """
    twins = (trials.plain, twin)
    twin.begin(used.scale)
    batch, rounds = _fitting(trials, twin, used, _UNTIMED + steps)
    trials.plain.begin(1.0)
    twin.begin(used.scale)
    times = [_round(trials, twin, batch) for _ in range(rounds - 1)][_WARM_UP:]
    saved = trials.right[0].saved_bytes, used.saved_bytes
    costs = []
    for one, spent, kept in zip(twins, zip(*times, strict=True), saved, strict=True):
        with _told(trials, one):
            memory = {**one.last_step(trials.loss_fn, batch), "saved": kept}
        costs.append(Cost(statistics.median(spent), memory))
    ratios = tuple(plain / low for plain, low in times)
    return Steps(costs[0], costs[1], ratios, batch)


def repeated(trials: Trials, twin: Twin, steps: Steps) -> tuple[float, ...]:
    """Return the ratios of more rounds where those made do not tell the speed-up.

    They do not where the machine is busy or the level about as fast as fp32. There are
    up to four times as many then, as far as the time goes.
    """
    ratios, spent = list(steps.ratios), 0.0
    while not settled(ratios) and len(ratios) < _MORE * len(steps.ratios):
        plain, low = _round(trials, twin, steps.batch)
        ratios.append(plain / low)
        spent += plain + low
        if spent > _LONGEST:
            break
    return tuple(ratios)


def _round(trials: Trials, twin: Twin, batch: object) -> tuple[float, float]:
    """Make a step in fp32 and one at the level; return the seconds of each."""
    with _told(trials, trials.plain):
        plain = trials.plain.step(trials.loss_fn, batch)
    with _told(trials, twin):
        low = twin.step(trials.loss_fn, batch)
    return plain, low


def _fitting(trials: Trials, twin: Twin, used: Pass, rounds: int) -> tuple[object, int]:
    """Return a batch, or a part of it, and how many rounds fit into the time.

    A round is a step of each kind.
    """
    parts: Iterable[tuple[object, float]] = _parts(trials)
    whole = trials.right[0].seconds + used.seconds
    if twin.widened:  # passes were quicker than steps will be
        parts = list(parts)
        small, part = parts[-1]
        for one in (trials.plain, twin, twin):  # the first also compiles
            with _told(trials, one):
                spent = one.step(trials.loss_fn, small)
        whole = trials.right[0].seconds + spent / part
    least, longest = _UNTIMED + 1, _LONGEST * (_SLOW if twin.widened else 1.0)
    for batch, share in parts:  # noqa: B007 -- where it ends is what is used
        if whole * share * least <= longest:
            break
    fit = max(least, int(min(rounds, longest / (whole * share))))
    if share < 1:
        trials.notes.append(
            f"steps were made with 1/{1 / share:g} of the batch: one of each kind "
            f"with all of it would take some {whole:.0f} s"
        )
    if fit < rounds:
        trials.notes.append(
            f"{fit - _UNTIMED} of {rounds - _UNTIMED} steps were timed: a step of each "
            f"kind takes some {whole * share:.1f} s"
        )
    return batch, fit


def _parts(trials: Trials) -> Iterator[tuple[object, float]]:
    """Give the batch, half of it, and so on, as far as it runs, each with its share."""
    batch: object | None = trials.batches[0]
    share = 1.0
    while batch is not None:
        yield batch, share
        batch, share = _half(trials, batch), share / 2


def _half(trials: Trials, batch: object) -> object | None:
    """Return half of a batch, None where it cannot be trained with in fp32."""
    try:
        cut = tree.halves(batch)
        if cut is not None and tree.halves(cut[0]) is not None:  # one is too few
            part: object = cut[0]
            trials.plain.run(trials.loss_fn, part, counted=False)
            return part
    except Exception:  # noqa: BLE001 -- a part of the batch was our idea
        return None
    return None


@contextlib.contextmanager
def _told(trials: Trials, twin: Twin) -> Iterator[None]:
    """Turn what a step raises into words.

    Raises:
        UserError: If it does so in fp32.
        StepError: If it does so at the level alone.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if twin is trials.plain:
            advice = "Give check the optimizer that will train."
            what = f"a step of {twin.optimizer},"
            raise raised(what, error, advice) from error
        raise StepError(line_of(error)) from error

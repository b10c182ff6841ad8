"""Whole training steps in fp32 and at the level: their time, their memory."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.diagnostics.preflight.measurements import Cost
from halfstep.diagnostics.preflight.rules import is_decided
from halfstep.diagnostics.preflight.scale_search import line_of
from halfstep.diagnostics.preflight.validation import raised
from halfstep.errors import UserError
from halfstep.numerics import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from halfstep.diagnostics.preflight.model_copy import ModelCopy, Pass
    from halfstep.diagnostics.preflight.scale_search import ScaleSearch

_LONGEST = 15.0  # seconds for all of them, about; beyond it less must do
_SLOW = 0.3  # of that, where steps are hopeless: a CPU without products of the format
_MORE = 4  # times as many steps where they do not tell
_WARM_UP = 1  # it makes the optimizer's state; kernels have run before
_UNTIMED = _WARM_UP + 1  # the last one measures memory and lost updates


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


def time_steps(
    search: ScaleSearch, model_copy: ModelCopy, used: Pass, steps: int
) -> Steps:
    """Make training steps in fp32 and at the level, in turns; take time and memory.

    Args:
        search: With the copy in fp32; takes notes of what was left out.
        model_copy: At the level.
        used: Its pass, at the scale to train with.
        steps: To be timed of each kind, at least 1.
    """
    copies = (search.fp32_copy, model_copy)
    model_copy.begin(used.scale)
    batch, rounds = _fitting(search, model_copy, used, _UNTIMED + steps)
    search.fp32_copy.begin(1.0)
    model_copy.begin(used.scale)
    times = [_round(search, model_copy, batch) for _ in range(rounds - 1)][_WARM_UP:]
    saved = search.fp32_passes[0].saved_bytes, used.saved_bytes
    costs = []
    for one, spent, saved_bytes in zip(
        copies, zip(*times, strict=True), saved, strict=True
    ):
        with _reporting_errors(search, one):
            memory = {**one.last_step(search.loss_fn, batch), "saved": saved_bytes}
        costs.append(Cost(statistics.median(spent), memory))
    ratios = tuple(plain / low for plain, low in times)
    return Steps(costs[0], costs[1], ratios, batch)


def more_ratios(
    search: ScaleSearch, model_copy: ModelCopy, steps: Steps
) -> tuple[float, ...]:
    """Return the ratios of more rounds where those made do not tell the speed-up.

    They do not where the machine is busy or the level about as fast as fp32. There are
    up to four times as many then, as far as the time goes.
    """
    ratios, spent = list(steps.ratios), 0.0
    while not is_decided(ratios) and len(ratios) < _MORE * len(steps.ratios):
        plain, low = _round(search, model_copy, steps.batch)
        ratios.append(plain / low)
        spent += plain + low
        if spent > _LONGEST:
            break
    return tuple(ratios)


def _round(
    search: ScaleSearch, model_copy: ModelCopy, batch: object
) -> tuple[float, float]:
    """Make a step in fp32 and one at the level; return the seconds of each."""
    with _reporting_errors(search, search.fp32_copy):
        plain = search.fp32_copy.step(search.loss_fn, batch)
    with _reporting_errors(search, model_copy):
        low = model_copy.step(search.loss_fn, batch)
    return plain, low


def _fitting(
    search: ScaleSearch, model_copy: ModelCopy, used: Pass, rounds: int
) -> tuple[object, int]:
    """Return a batch, or a part of it, and how many rounds fit into the time.

    A round is a step of each kind.
    """
    parts: Iterable[tuple[object, float]] = _parts(search)
    round_seconds = search.fp32_passes[0].seconds + used.seconds
    if model_copy.emulates_fp16:  # passes were quicker than steps will be
        parts = list(parts)
        small, part = parts[-1]
        for one in (
            search.fp32_copy,
            model_copy,
            model_copy,
        ):  # the first also compiles
            with _reporting_errors(search, one):
                spent = one.step(search.loss_fn, small)
        round_seconds = search.fp32_passes[0].seconds + spent / part
    least, longest = (
        _UNTIMED + 1,
        _LONGEST * (_SLOW if model_copy.emulates_fp16 else 1.0),
    )
    for batch, share in parts:  # noqa: B007 -- where it ends is what is used
        if round_seconds * share * least <= longest:
            break
    fit = max(least, int(min(rounds, longest / (round_seconds * share))))
    if share < 1:
        search.notes.append(
            f"steps were made with 1/{1 / share:g} of the batch: one of each kind "
            f"with all of it would take some {round_seconds:.0f} s"
        )
    if fit < rounds:
        search.notes.append(
            f"{fit - _UNTIMED} of {rounds - _UNTIMED} steps were timed: a step of each "
            f"kind takes some {round_seconds * share:.1f} s"
        )
    return batch, fit


def _parts(search: ScaleSearch) -> Iterator[tuple[object, float]]:
    """Give the batch, half of it, and so on, as far as it runs, each with its share."""
    batch: object | None = search.batches[0]
    share = 1.0
    while batch is not None:
        yield batch, share
        batch, share = _half(search, batch), share / 2


def _half(search: ScaleSearch, batch: object) -> object | None:
    """Return half of a batch, None where it cannot be trained with in fp32."""
    try:
        cut = tree.halves(batch)
        if cut is not None and tree.halves(cut[0]) is not None:  # one is too few
            part: object = cut[0]
            search.fp32_copy.run(search.loss_fn, part, counted=False)
            return part
    except Exception:  # noqa: BLE001 -- a part of the batch was our idea
        return None
    return None


@contextlib.contextmanager
def _reporting_errors(search: ScaleSearch, model_copy: ModelCopy) -> Iterator[None]:
    """Turn what a step raises into a `UserError` or a `StepError`.

    Raises:
        UserError: If it does so in fp32.
        StepError: If it does so at the level alone.
    """
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

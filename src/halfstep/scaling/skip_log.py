"""Reports skipped steps and non-finite losses: one warning each, then rare log records.

A dynamic scale skips some steps until it has found its level. They are logged at INFO,
which Python does not print by default.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from halfstep.errors import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.nonfinite.origin import BadOp
    from halfstep.scaling.loss_scale import ScaleRule
    from halfstep.scaling.step_report import NonFiniteParam

_logger = logging.getLogger(__name__)

MIN_CONSECUTIVE = 5
"""Number of consecutive overflows that causes a warning."""
STABLE_SCALE = 4096.0
"""A dynamic scale above it may still be descending from 2**16, where it starts: four
halvings."""
FIRST_STABLE_SCALE = 256.0
"""The same before the first applied step: healthy models were seen to start here."""
MIN_FREQUENT = 6
"""Number of skips, each after an applied step, that causes a warning..."""
FREQUENT_WINDOW = 50
"""... if they occur within so many steps. Growth every `growth_interval` steps causes
fewer."""
_FIND_ADVICE = "halfstep.find_nonfinite(model, step) finds the operation."


class SkipLog:
    """Counts overflows at one loss scale, and decides which to report.

    Attributes:
        consequence: Consequence of a non-finite gradient, for log records.
        steps: Steps so far, this one included.
        clean_steps: Those without overflow.
    """

    def __init__(self) -> None:
        self.consequence = "step skipped"
        self.steps = self.clean_steps = 0
        self._skips = self._losses = 0
        self._alarmed = self._warned = False
        self._streak_starts: deque[int] = deque(maxlen=MIN_FREQUENT)
        """Steps at which the last runs of consecutive skips began."""

    def log_overflow(
        self,
        scale: float,
        in_a_row: int,
        rule: ScaleRule,
        culprits: Callable[[], Sequence[NonFiniteParam]],
    ) -> None:
        """Count a step with non-finite gradients; report it if alarming or 2**n-th.

        Args:
            scale: Loss scale of its backward pass.
            in_a_row: Number of consecutive such steps, this one included.
            rule: The scale's rule.
            culprits: Returns the parameters; called only if the step is reported.
        """
        self._skips += 1
        self._alarmed = self._alarmed and in_a_row > 1
        is_fixed = rule.backoff_factor == 1
        stable_scale = STABLE_SCALE if self.clean_steps else FIRST_STABLE_SCALE
        low = is_fixed or scale <= max(stable_scale, rule.min_scale)
        is_alarming = in_a_row >= MIN_CONSECUTIVE and low and not self._alarmed
        text = f"{in_a_row} steps in a row were skipped"
        if in_a_row == 1:
            self._streak_starts.append(self.steps)
            span = self.steps - self._streak_starts[0] + 1
            often = len(self._streak_starts) == MIN_FREQUENT and span <= FREQUENT_WINDOW
            # A short growth interval skips steps by design.
            is_alarming |= (
                often and rule.growth_interval * MIN_FREQUENT > FREQUENT_WINDOW
            )
            text = f"steps were skipped {MIN_FREQUENT} times within {span}"
        if not is_alarming and self._skips & (self._skips - 1):
            return  # not the 1st, 2nd, 4th, 8th, ...
        self._alarmed = self._alarmed or is_alarming
        gradients_text = (
            f"non-finite gradient{_names_text(culprits())} at loss scale {scale:g}"
        )
        if is_alarming and not self._warned:
            self._warned = True
            warn_caller(f"{text}: {gradients_text}. {_FIND_ADVICE}")
            return
        floor = scale <= rule.min_scale * (1 + 2**-23)  # fp32 may have rounded it up
        level = logging.WARNING if is_fixed or floor or is_alarming else logging.INFO
        _logger.log(
            level, "%s: %s (%d so far).", self.consequence, gradients_text, self._skips
        )

    def log_loss(self, value: float, bad_op: BadOp | None, graph_error: str) -> None:
        """Report a non-finite loss or sum of losses: first a warning, then log records.

        Args:
            value: The loss.
            bad_op: The cause in its graph, if one was found.
            graph_error: Why the graph could not be examined; "" if it could.
        """
        self._losses += 1
        if self._losses == 1:
            cause = _FIND_ADVICE
            if bad_op is not None:
                cause = cause_text(bad_op) + second_opinion(bad_op)
            cause += f" (graph not read: {graph_error})" if graph_error else ""
            warn_caller(f"the loss is {value:g} before the backward pass. {cause}")
        elif not self._losses & (self._losses - 1):
            _logger.warning("the loss is %g; not finite %d times.", value, self._losses)


def cause_text(bad_op: BadOp) -> str:
    """Return a cause with its evidence and the advice, as sentences."""
    place, evidence = bad_op.place, bad_op.evidence
    if place != "model" and not evidence.startswith(place):
        evidence = f"{place}: {evidence}"
    return f"Cause: {bad_op.cause} ({evidence}). {bad_op.advice}"


def second_opinion(bad_op: BadOp) -> str:
    """Return what names the module of an overflow, which a graph does not hold."""
    if bad_op.cause != "forward range":
        return ""
    return " halfstep.find_nonfinite(model, step) names the module."


def _names_text(culprits: Sequence[NonFiniteParam]) -> str:
    names = [culprit.name for culprit in culprits]
    if not names:
        return "s"  # on another rank, or the names have not arrived yet
    return f" of {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")

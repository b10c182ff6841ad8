"""Detects, without synchronization, that no smaller loss scale can help.

In: scale, consecutive skips and loss of each step. Out: `LossScaleCollapse` with the
cause and advice, if the run cannot continue.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from halfstep._torch import async_read
from halfstep._torch.async_read import DelayedScalars
from halfstep.errors import UserError, require, require_type, warn_caller
from halfstep.nonfinite import optimizer_eps
from halfstep.nonfinite.graph import find_in_graph, nodes_of
from halfstep.nonfinite.origin import BadOp
from halfstep.policy.rules import context_history
from halfstep.reporting.table import format_count
from halfstep.scaling.skip_log import SkipLog, cause_text, second_opinion
from halfstep.scaling.step_report import Constant, NonFiniteMarks, first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from halfstep.policy.rules import Policy
    from halfstep.scaling.loss_scale import ScaleRule, ScaleState
    from halfstep.scaling.step_report import NonFiniteParam

_CAPTURED = (
    "the update of the loss scale is captured in a CUDA graph: replays change the "
    "scale, but no skipped step and no collapse is reported; read the scale itself."
)

MAX_OVERFLOWS_AT_MIN_SCALE = 10
"""Consecutive overflows at the minimum scale that end the run. More than one, since a
single non-finite batch must not end it."""

EARLY_STEPS = 20
"""Up to so many applied steps, overflow in a forward pass that worked before is blamed
on the learning rate, unless the loss fell: the weights have changed, and batches are
like the first ones."""

LOWER_RATE = "Lower the learning rate, warm it up, or clip gradients (clip_grad_norm)."


@dataclass
class LossHistory:
    """First and last loss of the applied steps, and their number."""

    first: float = math.nan
    last: float = math.nan
    applied: int = 0
    from_first_step: bool = True
    """Whether `applied` counts from the run's first step; else there were more."""

    @property
    def is_early(self) -> bool:
        """Whether the run is known to have applied few steps, without a lower loss."""
        is_lower = self.applied > 1 and self.last < self.first
        return self.from_first_step and 0 < self.applied <= EARLY_STEPS and not is_lower

    def add(self, loss: float) -> None:
        """Add the loss of one applied step."""
        # A loss from the middle of a run is no reference: it may differ from the next
        # by a factor of 2 either way.
        if self.from_first_step and not self.applied:
            self.first = loss
        self.last = loss
        self.applied += 1

    def has_diverged(self, current: float) -> bool:
        """Return whether the loss has at least doubled since the first step.

        Args:
            current: Loss of the last step, which was skipped; ignored if not finite.
        """
        last = abs(current) if math.isfinite(current) else 0.0
        return max(abs(self.last), last) >= 2 * abs(self.first) > 0


@dataclass
class StepHistory:
    """Statistics of the steps so far."""

    losses: LossHistory = field(default_factory=LossHistory)
    scales: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Loss scales of the consecutive skipped steps, at most 64."""

    def add(self, scale: float, loss: float, *, skipped: bool) -> None:
        """Add one step: its scale, its loss (NaN if unknown), and the outcome."""
        if skipped:
            self.scales.append(scale)
        else:
            self.losses.add(loss)
            self.scales.clear()

    def data(self) -> dict[str, Any]:
        """Return plain values, without losses.

        One state is saved for all ranks, and losses differ between ranks.
        """
        return {
            "applied": self.losses.applied,
            "begun": self.losses.from_first_step,
            "history": [*self.scales],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StepHistory:
        """Return the history of values from `data`.

        Raises:
            UserError: If it is not a dict, or a value is missing or of another type.
        """
        require_type("'watch'", data, isinstance(data, dict), "a dict, as it was saved")
        for name in cls().data():
            if name not in data:
                raise UserError(
                    f"loss-scale state's 'watch' has no {name!r}; it holds {[*data]}."
                )
        applied, begun, scales = data["applied"], data["begun"], data["history"]
        is_valid = type(applied) is int and applied >= 0
        require("watch['applied']", applied, is_valid, "a number of steps, >= 0")
        require("watch['begun']", begun, isinstance(begun, bool), "True or False")
        is_valid = isinstance(scales, list) and all(map(_is_scale, scales))
        require("watch['history']", scales, is_valid, "a list of finite numbers > 0")
        losses = LossHistory(applied=applied, from_first_step=begun)
        return cls(losses, deque(scales, maxlen=64))


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


@dataclass(frozen=True)
class _FailedLoss:
    """A loss of a step that was skipped, or may be, and what its graph shows."""

    loss: Tensor
    step: int
    finite: bool
    bad_op: BadOp | None
    graph_error: str = ""
    """Why the graph could not be examined; "" if it could."""

    @property
    def rank(self) -> tuple[bool, str]:
        """Whether it is not finite, and the cause in its graph."""
        return not self.finite, "" if self.bad_op is None else self.bad_op.cause

    def replaces(self, other: _FailedLoss | None) -> bool:
        """Return whether this loss explains the skipped steps better than another."""
        if other is None:
            return True
        if self.rank == other.rank:
            if self.step == other.step and self.rank == (False, ""):
                # Of two finite losses the larger one makes the larger gradients.
                return float(self.loss.abs().sum()) > float(other.loss.abs().sum())
            # Before its first step a scaler does not know the parameters' names.
            return self.step > other.step
        is_worse = self.finite < other.finite
        return is_worse or (self.finite == other.finite and other.bad_op is None)


class LossScaleCollapse(RuntimeError):  # noqa: N818 -- a public name of the API
    """Every step overflows and no smaller loss scale is left to try.

    Args:
        message: All of the following, as text.
        history: Loss scales of the consecutive skipped steps, oldest first, at most 64.
        loss_finite: Whether the losses of the skipped steps were finite, as far as
            observed; None if unknown.
        inf_in: Parameters with inf in their gradients.
        nan_in: Parameters with NaN in their gradients.
        cause: That of `bad_op`.
        advice: What to do next.
        bad_op: The operation that made the first inf or NaN, from the graph or from a
            replay; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        history: Sequence[float] = (),
        loss_finite: bool | None = None,
        inf_in: Sequence[str] = (),
        nan_in: Sequence[str] = (),
        cause: str = "",
        advice: str = "",
        bad_op: BadOp | None = None,
    ) -> None:
        super().__init__(message)
        self.history = tuple(history)
        self.loss_finite = loss_finite
        self.inf_in = tuple(inf_in)
        self.nan_in = tuple(nan_in)
        self.cause = cause
        self.advice = advice
        self.bad_op = bad_op

    def attach_replay(self, bad_op: BadOp) -> None:
        """Replace the cause and advice by those of a replay, which are more precise."""
        self.bad_op = bad_op
        self.cause, self.advice = bad_op.cause, bad_op.advice
        self.args = (f"{self.args[0]} The step, run again: {bad_op}",)


def is_collapsed(scale: float, skips_in_a_row: int, rule: ScaleRule) -> bool:
    """Return whether so many consecutive skips end the run."""
    limit = rule.max_consecutive_skips
    if limit is not None and skips_in_a_row >= limit:
        return True
    if rule.backoff_factor == 1 or skips_in_a_row < MAX_OVERFLOWS_AT_MIN_SCALE:
        return False
    # The scale is fp32: the minimum may have been rounded up.
    return scale <= rule.min_scale * (1 + 2**-23)


class CollapseMonitor:
    """Observes each step without synchronization, and raises if no scale can help."""

    def __init__(self, first_scale: float) -> None:
        self.log = SkipLog()
        self._history = StepHistory()
        self._delayed = DelayedScalars()
        self._param_readers: deque[
            Callable[[list[float]], Sequence[NonFiniteParam]]
        ] = deque()
        self._loss: Tensor | None = None
        self._loss_sum: Tensor | None = None
        self._failed_loss: _FailedLoss | None = None
        """The loss that explains the consecutive skipped steps best."""
        self._one_skip_left = False
        self._last_read_scale = first_scale
        self._steps_unread = self._num_outdated = 0
        self._is_captured = False

    def on_loss(
        self, loss: Tensor, name_of: Callable[[Tensor], str], policy: Policy | None
    ) -> None:
        """Record an unscaled loss before its backward pass.

        A non-finite loss is reported at once on a CPU, the first one with its cause;
        on other devices when its value has arrived. If one more skip would end the run,
        the graph is examined now, while it still holds its tensors, which synchronizes.
        """
        self._loss = None
        # Under functorch transforms (`vmap`) or FakeTensorMode it has no single value.
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(loss)  # noqa: SLF001
        if wrapped or isinstance(loss, FakeTensor):
            return
        detached = self._loss = loss.detach()  # another thread may set `_loss`
        value = 0.0
        if loss.numel() == 1 and not loss.is_complex():
            if loss.device.type in async_read.READABLE_DEVICES:
                value = float(detached)
            else:
                # The sum over micro-batches is non-finite if one of them is.
                total, wide = self._loss_sum, detached.float()
                if total is not None:
                    wide = total + async_read.to_device_async(wide, total.device)
                self._loss_sum = wide
        bad_op, error = None, ""
        is_first = self._failed_loss is None or self._failed_loss.finite
        if self._one_skip_left or (is_first and not math.isfinite(value)):
            bad_op, error = self._examine(loss, name_of, policy)
            finite = bool(detached.isfinite().all())
            failed = _FailedLoss(detached, self.log.steps, finite, bad_op, error)
            if failed.replaces(self._failed_loss):
                self._failed_loss = failed
        if not math.isfinite(value):
            if bad_op is not None:
                losses = self._history.losses
                bad_op = find_cause(bad_op, losses, detached, finite=False)
            self.log.log_loss(value, bad_op, error)

    @staticmethod
    def _examine(
        loss: Tensor, name_of: Callable[[Tensor], str], policy: Policy | None
    ) -> tuple[BadOp | None, str]:
        """Return the cause that the graph of a loss shows, or why it was not read."""
        try:
            policy = policy or context_history.policy_of(nodes_of(loss.grad_fn))
            return find_in_graph(loss, name_of, str(policy)), ""
        except Exception as error:  # noqa: BLE001
            # A graph may hold tensors of any class. Failing to find the cause must not
            # end a run that can still continue.
            return None, f"{type(error).__name__}: {error}".splitlines()[0]

    def needs_names(self, device: torch.device) -> bool:
        """Return whether `NonFiniteMarks` are needed to name this step's parameters.

        Not on a CPU, where names are known anyway. On other devices it costs a pass
        over all gradients, so only after a step is known to have overflowed.
        """
        is_readable = device.type in async_read.READABLE_DEVICES
        return bool(self._history.scales) and not is_readable

    def may_be_below_one(self, rule: ScaleRule) -> bool:
        """Return whether the scale may be below 1, given the values read so far."""
        lowest = self._last_read_scale * rule.backoff_factor**self._steps_unread
        return lowest < 1 or self._is_captured or async_read.is_capturing()

    def on_external_set(self) -> None:
        """Record that the scale was set by other code; its value must arrive first."""
        self._last_read_scale, self._steps_unread = 0.0, 0
        self._num_outdated = self._delayed.num_pending

    def on_step(
        self,
        rule: ScaleRule,
        scale_used: Tensor,
        state: ScaleState,
        culprits: Callable[[], Sequence[NonFiniteParam]],
    ) -> None:
        """Record one step; only values that have arrived on the host are read.

        Args:
            rule: The scale's rule, with minimum and limit of skips.
            scale_used: Scale of its backward pass, shape ().
            state: State after the step.
            culprits: Returns the parameters with non-finite gradients; called if there
                is something to report. `NonFiniteMarks` are read when they arrive.

        Raises:
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
        """
        if scale_used.is_cuda and async_read.is_capturing():
            self._loss = self._loss_sum = None
            self._is_captured = True
            warn_caller(_CAPTURED)
            return
        self._steps_unread += 1
        loss, loss_sum = self._loss, self._loss_sum
        if loss is None or loss.numel() != 1 or loss.is_complex():
            loss = torch.full_like(scale_used, math.nan)
        values = [scale_used, state.skips_in_a_row, state.scale, loss]
        values.append(scale_used if loss_sum is None else loss_sum)
        self._loss_sum = None
        read_culprits = culprits
        if scale_used.device.type in async_read.READABLE_DEVICES:
            numbers, num_unread = [*map(float, values)], 0
        else:
            values += self._submit_names(culprits, scale_used.device)
            delayed_numbers = self._delayed.submit(values)
            if delayed_numbers is None:
                return
            numbers, marks = delayed_numbers[:5], delayed_numbers[5:]
            read_culprits = partial(self._param_readers.popleft(), marks)
            num_unread = self._delayed.num_pending
        scale, num_skipped, next_scale, loss_value, loss_sum_value = numbers
        if self._num_outdated:  # it was sent before other code set the scale
            self._num_outdated -= 1
        else:
            self._last_read_scale, self._steps_unread = next_scale, num_unread
        history, skipped = self._history, bool(num_skipped)
        history.add(scale, loss_value, skipped=skipped)
        if not math.isfinite(loss_sum_value):
            self.log.log_loss(loss_sum_value, None, "")
        self.log.steps += 1
        self._one_skip_left = False
        if not skipped:
            self.log.clean_steps += 1
            self._failed_loss = None
            return
        skips = int(num_skipped)
        self.log.log_overflow(scale, skips, rule, read_culprits)
        self._check_next_skip(rule, skips)
        if is_collapsed(scale, skips, rule):
            raise self._make_error(skips, culprits())

    def _submit_names(
        self, culprits: Callable[[], Sequence[NonFiniteParam]], device: torch.device
    ) -> list[Tensor]:
        """Return tensors to copy to the host with a step, to name its parameters."""
        if isinstance(culprits, NonFiniteMarks) and self.needs_names(device):
            self._param_readers.append(culprits.nonfinite_params)
            return [culprits.marks]
        current = culprits() if isinstance(culprits, Constant) else ()
        self._param_readers.append(lambda _: current)
        return []

    def _check_next_skip(self, rule: ScaleRule, skips: int) -> None:
        """Update whether one more skip after `skips` in a row would end the run."""
        self._one_skip_left = skips > 0 and is_collapsed(
            self._last_read_scale, skips + 1, rule
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values. Synchronizes with the device."""
        return self._history_with_pending().data()

    def _history_with_pending(self) -> StepHistory:
        history = copy.deepcopy(self._history)
        for scale, skipped, _, loss, *_ in self._delayed.read_pending():
            history.add(scale, loss, skipped=bool(skipped))
        return history

    def restore(self, history: StepHistory, rule: ScaleRule, skips: int) -> None:
        """Continue from a saved history, after `skips` in a row."""
        self._history = history
        self._check_next_skip(rule, skips)

    def _make_error(
        self, skips: int, culprits: Sequence[NonFiniteParam]
    ) -> LossScaleCollapse:
        failed, loss = self._failed_loss, self._loss
        if failed is None and loss is not None:
            failed = _FailedLoss(loss, 0, bool(loss.isfinite().all()), None)
        scales = self._history.scales
        finite = None if failed is None else failed.finite
        bad_op = find_cause(
            None if failed is None else failed.bad_op,
            self._history.losses,
            None if failed is None else failed.loss,
            finite=finite,
            is_last=failed is None or failed.loss is loss,
        )
        bad_op = replace(bad_op, scale=scales[-1])
        inf_in = [culprit.name for culprit in culprits if culprit.inf]
        nan_in = [culprit.name for culprit in culprits if culprit.nan]
        kinds = {"inf": inf_in, "NaN": nan_in}
        nonfinite_text = "; ".join(
            f"{kind} in gradients of {first_names(n)}" for kind, n in kinds.items() if n
        )
        first, last = scales[0], scales[-1]
        scale_text = f"{first:g} to {last:g}" if first != last else f"{last:g}"
        error = "" if failed is None else failed.graph_error
        graph_text = f" (graph not read: {error})" if error else ""
        message = (
            f"{skips} steps in a row were skipped, at loss scale {scale_text}. "
            f"{cause_text(bad_op)} Observed: "
            f"{nonfinite_text or 'no such gradient is left in this process'}."
            f"{graph_text}{second_opinion(bad_op)}"
        )
        return LossScaleCollapse(
            message,
            history=scales,
            loss_finite=finite,
            inf_in=inf_in,
            nan_in=nan_in,
            cause=bad_op.cause,
            advice=bad_op.advice,
            bad_op=bad_op,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Graphs cannot be pickled, and what is pending is in the history.
        cleared = {"_loss": None, "_loss_sum": None, "_failed_loss": None}
        pending = {"_param_readers": deque(), "_num_outdated": 0}
        history = {"_history": self._history_with_pending()}
        return self.__dict__ | cleared | pending | history


def find_cause(
    bad_op: BadOp | None,
    losses: LossHistory,
    loss: Tensor | None,
    *,
    finite: bool | None,
    is_last: bool = True,
) -> BadOp:
    """Return the most likely cause of endless overflow.

    Args:
        bad_op: Cause found in the graph of the loss; None if its forward pass was
            finite, or was not examined.
        losses: Losses of the applied steps.
        loss: The loss of a skipped step.
        finite: Whether it was finite; None if unknown.
        is_last: Whether it was the last of its step, as `losses` are.
    """
    value = math.nan if loss is None else float(loss.abs().float().mean())
    phase = "backward" if finite else "forward"
    make = partial(BadOp, phase=phase, scale=1.0, reproduced=False)
    drifted = bad_op is not None and bad_op.cause in {"forward range", "weight"}
    diverged = losses.has_diverged(value if is_last else math.nan)
    diverged = diverged and (drifted or bad_op is None)
    # An eps that underflows in fp16 is as likely to give NaN weights after a few steps.
    is_epsilon = bad_op is not None and optimizer_eps.CURE in bad_op.advice
    if diverged or (drifted and losses.is_early and not is_epsilon):
        last = value if is_last and math.isfinite(value) else losses.last
        evidence = f"the loss went from {losses.first:.3g} to {last:.3g}"
        if bad_op is None:
            return make(cause="learning rate", evidence=evidence, advice=LOWER_RATE)
        advice, rule = LOWER_RATE, ""
        if not diverged:
            steps = format_count(losses.applied, "step")
            evidence = f"the forward pass worked for {steps} only"
            advice, rule = f"{LOWER_RATE} If it is low: {bad_op.advice}", bad_op.rule
        evidence = f"{bad_op.evidence}; {evidence}"
        return replace(
            bad_op, cause="learning rate", evidence=evidence, advice=advice, rule=rule
        )
    if bad_op is not None:
        return bad_op
    loss_text = "not shown" if loss is None else f"{value:.4g}"
    make = partial(make, module="loss", cause="loss function")
    if finite is False:
        return make(
            nonfinite_kind="NaN" if math.isnan(value) else "inf",
            evidence=f"it is {loss_text}",
            advice="Look at the loss function and its inputs: print them for this "
            "batch.",
        )
    return make(
        evidence=f"it is {loss_text}, yet its gradients overflow",
        advice="Take a mean over elements, not a sum, or divide the loss; or train in "
        "bf16.",
    )

"""`Session`: trains a prepared model with its optimizer.

A step collects gradients, unscales them, reduces found_inf over ranks, clips, updates
the weights and returns a report: see `Session._update_weights`.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, is_not, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep._torch.optimizer_params import named_parameters as optimizer_parameters
from halfstep._torch.optimizer_params import params_of, unnamed
from halfstep.casting import convert_model, dtype_mismatch
from halfstep.distributed import ddp
from halfstep.errors import UserError, require_type, warn_caller
from halfstep.machine import recommendation
from halfstep.masters.optimizer_in_backward import OptimizerInBackward, check_norm
from halfstep.masters.rounding_loss import RoundingLossCounter
from halfstep.reporting.table import Report
from halfstep.scaling import misuse
from halfstep.scaling.found_inf_reduction import reduce_found_inf
from halfstep.scaling.loss_scaler import LossScaler
from halfstep.scaling.step_report import Constant, NonFiniteParam, StepReport
from halfstep.session import fsdp, model_hooks
from halfstep.session import memory as session_memory
from halfstep.session import state_dict as session_state_dict
from halfstep.session.autocast_contexts import AutocastContexts, ForwardContext
from halfstep.session.ddp_sync import GradientSync
from halfstep.session.explain import precision_table
from halfstep.session.lr_schedule import LRSchedule, check_scheduler
from halfstep.session.optimizer_step import (
    AccumulationWindow,
    OptimizerStep,
    StepEnd,
    check_clip_norm,
)
from halfstep.session.running_stats import RunningStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from halfstep.machine.recommendation import Choice
    from halfstep.masters.encoding import MasterEncoding
    from halfstep.masters.rounding_loss import RoundingLoss
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table
    from halfstep.scaling import ScaleRule


_logger = logging.getLogger(__name__)
_GRAD, _WEIGHT, _VERSION = map(attrgetter, ("grad", "weight", "_version"))
_IS_SET = partial(is_not, None)


class Session(Report):
    """A model and an optimizer that train at one level; `prepare` makes it.

    Attributes:
        model: The prepared model. Assign a wrapper of it (DDP, torch.compile) here.
        optimizer: The optimizer; at O2 its parameters are the master weights.
        scaler: The `halfstep.scaling.LossScaler`.
        policy: The `Policy` in use, with the rules that the level implies.
        choice: Level, dtype and the reason for both.
        backward_call: The program's call of `backward`, as errors name it.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session = hs.prepare(model, optimizer, "O2", dtype="bf16")
        >>> for batch in torch.ones(3, 4, 2):
        ...     with session.autocast():
        ...         loss = session.model(batch).square().mean()
        ...     session.backward(loss)
        ...     report = session.step()
        >>> session.steps_applied, session.steps_skipped
        (3, 0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        choice: Choice,
        *,
        policy: Policy,
        rule: ScaleRule,
        device: torch.device,
        clip_grad_norm: float | None,
        accumulate: int,
        scheduler: LRScheduler | None,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        process_group: torch.distributed.ProcessGroup | None,
        master: MasterEncoding | None,
        optimizer_in_backward: bool,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.choice = choice
        self.backward_call = "session.backward(loss)"
        self._device = device
        self.scaler = LossScaler(rule, device)
        self._unwrapped = model
        # As long as `self.model` is this object, it is not wrapped in DDP.
        self._model_without_ddp = model if ddp.unwrap(model) is model else None
        self._group = process_group
        self._names = {id(param): name for name, param in named_parameters}
        level = fsdp.conversion_level(model, choice.level)
        conversion = convert_model.convert_(model, level, choice.format.dtype, policy)
        optimizer.zero_grad()  # gradients from before are not scaled
        self._user_policy, self.policy = policy, conversion.policy
        self._num_implied_rules = len(self.policy.rules) - len(policy.rules)
        self._contexts = AutocastContexts(choice, self.policy, device.type, accumulate)
        self._masters = fsdp.make_masters(
            model, optimizer, choice, master, conversion.originals
        )
        if self._masters.encoding.is_compact:
            # `Optimizer.load_state_dict` casts moments to fp32, as the master weights.
            normalize = self._masters.normalize_states
            optimizer.register_load_state_dict_post_hook(lambda _: normalize())
        has_masters = bool(self._masters.master_params)
        model_hooks.attach(self, model, choice, device.type, masters=has_masters)
        self._checks_versions = rule.scales and process_group is None
        self._grad_versions: dict[int, int] = {}
        """id -> version counter of each gradient after the last backward pass."""
        self._optimizer_step = OptimizerStep(self._masters, clip_grad_norm, device)
        self._in_backward: OptimizerInBackward | None = None
        if optimizer_in_backward:
            self._in_backward = OptimizerInBackward(
                self._masters, norm=clip_grad_norm is not None
            )
            self.scaler.monitor.log.consequence = "parameters left out"
        self._rounding_loss: RoundingLossCounter | None = None
        self._awaits_first_loss = True
        """Whether no loss has been given to `backward` yet."""
        self._num_attempted = 0
        self._num_skipped = torch.zeros((), device=self._device)
        self._window = AccumulationWindow(accumulate)
        self._grad_mode = torch.is_grad_enabled()
        """At the start of the last call of `backward`, `step` or `flush`."""
        self._step_end: StepEnd | None = None
        """Of a step whose update has begun, until the step has ended."""
        model_hooks.check_external_steps(self._masters, self.scaler, self._window)
        self._grad_sync = GradientSync(self._masters, choice.format.dtype, accumulate)
        self._lr_schedule = LRSchedule(scheduler)
        self._running_stats = RunningStats(model) or None

    def autocast(self, *, record: bool = False) -> ForwardContext:
        """Return the autocast context for forward pass and loss of one micro-batch.

        It may be entered any number of times.

        Args:
            record: Record each operation for `explain`. Off by default: it is slow.
        """
        return ForwardContext(partial(self._forward_contexts, record=record))

    def _forward_contexts(
        self, *, record: bool
    ) -> list[contextlib.AbstractContextManager[Any]]:
        """Prepare a forward pass; return its contexts, the autocast context last."""
        window = self._window
        if not self._num_attempted:
            self._check_not_replaced()
        # Not an evaluation: teachers, metrics and checkpointed blocks in training.
        training = self._unwrapped.training or window.num_contexts > 0
        if not torch.is_grad_enabled() and not training:
            window.warn_if_pending()
        # Before the forward pass, since it writes to weights.
        self._masters.add_new_params()
        contexts: list[contextlib.AbstractContextManager[Any]] = []
        if self.model is not self._model_without_ddp:
            no_sync = self._grad_sync.forward_context(self.model, window.num_done)
            contexts.append(no_sync)
        contexts.append(self._contexts.select(record=record))
        if torch.is_grad_enabled():
            if self._running_stats is not None and not window.has_begun:
                self._running_stats.save()
            window.num_contexts += 1
        return contexts

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Scale a loss and run its backward pass; a micro-batch may have several.

        Args:
            loss: Mean loss of the micro-batch, shape (). Neither scaled by a GradScaler
                nor divided by `accumulate`: `backward` does both.
            retain_graph: Keep the graph, for another loss of the same forward pass.

        Raises:
            UserError: If `loss` is not a tensor, or a GradScaler has scaled the first;
                for `retain_graph` under DDP, which averages once a forward pass.
            DtypeMismatch: In place of torch's error, if the pass mixes dtypes.
        """
        try:
            self._backward(loss, retain=retain_graph)
        except BaseException as error:
            self._end_failed_call(error)
            mismatch = dtype_mismatch.explain(error)
            if mismatch is not None:
                raise mismatch from error
            raise

    def _backward(self, loss: Tensor, *, retain: bool) -> None:
        """Check a loss, run its backward pass, and record it in the window."""
        self._grad_mode = torch.is_grad_enabled()
        is_tensor = isinstance(loss, Tensor)
        if not is_tensor:
            expected = "a Tensor with its graph, as the loss function returns it"
            require_type("loss", loss, is_tensor, expected)
        window = self._window
        if window.is_partial:
            self.zero_grad()
        second_pass = window.loss is not None
        if second_pass and self._in_backward is not None:
            raise UserError(
                "optimizer_in_backward=True updates weights in each backward pass: "
                "call session.step() before the next. Add losses up into one."
            )
        if self._awaits_first_loss:
            self._check_first_loss(loss)
        window.is_partial = True
        self.scaler.observe_loss(loss, self._name, self._user_policy)
        if window.has_gradients and not second_pass:
            window.warn_if_cleared(has_gradients=bool(self._reachable_grads()))
        window.loss = loss.detach()
        window.num_passes += 1
        self._run_backward(loss, second_pass, keep_graph=retain)
        if self.model is not self._model_without_ddp:
            self._grad_sync.after_backward()
        if self._checks_versions:
            self._grad_versions = self._read_grad_versions()
        window.is_partial = False

    def _check_first_loss(self, loss: Tensor) -> None:
        """Detect a scaled loss, no autocast context, and a model too small to gain."""
        model_hooks.check_not_scaled(loss)
        self._awaits_first_loss = False
        if self._contexts.is_missing:
            low = self.choice.level.low_weights
            dtype = "the dtypes of the weights" if low else "fp32"
            warn_caller(
                "the forward pass ran outside session.autocast(), so no rule of level "
                f"{self.choice} applied, and without another autocast it ran in "
                f"{dtype}. Write `with session.autocast(): loss = ...` before "
                "session.backward(loss)."
            )
        params = [*self._unwrapped.parameters()]
        note = recommendation.small_model_note(self.choice, params, loss)
        if note:
            _logger.warning(note)

    def _end_failed_call(self, error: BaseException) -> None:
        """Leave no part of a window behind a call of `backward` or `step` that raised.

        A call that is refused before it changes anything leaves the window as it was.
        If the weights have been updated, the step is completed. Otherwise the window is
        dropped whole: parts of it must not reach the update of another.

        Ctrl-C may come between any two instructions. Errors that the program catches
        and repairs are `Exception`s, after which a loss may still wait for its step.
        """
        # An interrupted `no_grad` may have left it off.
        torch.set_grad_enabled(self._grad_mode)
        window, in_backward = self._window, self._in_backward
        self._masters.stepping = False
        if self._step_end is not None:
            self._masters.complete_update(self._step_end.rng)
            if in_backward is not None:
                in_backward.discard()
            self._end_step(self._step_end)
        elif window.is_partial or (
            window.loss is not None and not isinstance(error, Exception)
        ):
            if in_backward is not None and in_backward.count:
                updated = in_backward.count - len(in_backward.skipped_params)
                error.add_note(
                    f"optimizer_in_backward=True: {updated} of "
                    f"{len(params_of(self.optimizer))} parameters were updated before "
                    "the error, and keep the update."
                )
                self._masters.mark_synced()
            self.zero_grad()
            window.is_partial = True

    def _read_grad_versions(self) -> dict[int, int]:
        """Return id -> version counter of each gradient."""
        grads = self._reachable_grads()
        return dict(zip(map(id, grads), map(_VERSION, grads), strict=True))

    def _warn_if_grads_changed(self) -> None:
        """Warn once if gradients were changed since the last backward pass.

        Clipping by hand compares the norms of scaled gradients. Multiplying them, as an
        average over ranks does, is correct at any scale but cannot be told apart.
        """
        if not self._read_grad_versions().items() <= self._grad_versions.items():
            self._checks_versions = False
            warn_caller(
                "gradients were changed between session.backward() and session.step(), "
                "where they are multiplied by the loss scale: to clip them, call "
                "halfstep.prepare(..., clip_grad_norm=...) instead."
            )

    def _run_backward(
        self, loss: Tensor, second_pass: bool, *, keep_graph: bool
    ) -> None:
        """Run a backward pass; the second of a micro-batch is accumulated in fp32."""
        if keep_graph and ddp.is_data_parallel(self.model):
            raise UserError(
                "retain_graph=True: DDP averages gradients once for each forward pass, "
                "so a second loss would make ranks differ. Add losses up into one."
            )
        size = self._window.size
        scaled = self.scaler.scale(loss / size if size > 1 else loss)
        accumulator = self._contexts.grad_accumulator
        masters, in_backward = self._masters, self._in_backward
        # Hooks that consume gradients are active in our own passes only: the model may
        # be part of another one, whose backward passes must not change.
        hooked = in_backward is not None or size > 1
        is_local = hooked and not ddp.is_data_parallel(self.model)
        if second_pass:
            masters.accumulate_grads()
        try:
            if in_backward is not None:
                in_backward.start(in_backward=is_local)
            elif is_local:
                masters.accumulate_in_backward()
            if accumulator is not None:
                accumulator.start(scaled)
            scaled.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
        finally:
            if accumulator is not None:
                accumulator.stop()
            if is_local:
                masters.consume_in_backward(None)
        if second_pass:
            masters.accumulate_grads()
        if in_backward is not None and not is_local:
            in_backward.step_all()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, unscaled gradient) of the step that `step` will take.

        Call it after the last backward pass of the step and before `step`; under DDP on
        all ranks. Each gradient is a copy, in fp32 if it was in 16 bits, not clipped,
        and made when it is yielded. Reading them does not change the step.

        Raises:
            UserError: Without a backward pass since the last step, before the last
                micro-batch of an accumulation window, or with optimizer_in_backward.
            RuntimeError: If another backward pass has made the gradients.

        Example:
            >>> import halfstep as hs
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
            >>> session = hs.prepare(model, optimizer, "O2", dtype="bf16")
            >>> with session.autocast():
            ...     loss = session.model(torch.tensor([1.0, 3.0])).sum()
            >>> session.backward(loss)
            >>> {name: grad.tolist() for name, grad in session.grads()}
            {'weight': [[1.0, 3.0]], 'bias': [1.0]}
            >>> session.step().applied
            True
        """
        self._prepare_reading_grads("session.grads()")
        pairs = self._optimizer_step.unscaled_grads(self.scaler)
        return ((self._name(param), gradient) for param, gradient in pairs)

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients that `grads` would yield, shape ().

        It makes no copies where a kernel updates the weights (SGD, Adam and AdamW, with
        dense gradients). `prepare(clip_grad_norm=math.inf)` puts the norm into each
        report instead.

        Raises:
            UserError: As `grads`.
            RuntimeError: If there is no gradient.

        Example:
            >>> import halfstep as hs
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
            >>> session = hs.prepare(model, optimizer, "O2", dtype="bf16")
            >>> with session.autocast():
            ...     loss = session.model(torch.tensor([3.0, 4.0])).sum()
            >>> session.backward(loss)
            >>> session.grad_norm().item()
            5.0
        """
        self._prepare_reading_grads("session.grad_norm()")
        return self._optimizer_step.unscaled_norm(self.scaler)

    def _prepare_reading_grads(self, call: str) -> None:
        """Bring gradients into the state in which `step` takes them, or raise."""
        window = self._window
        if self._in_backward is not None:
            raise misuse.updated_in_backward(excluded=call)
        if window.is_partial:
            raise misuse.pass_failed(self.backward_call)
        if not window.num_pending:
            self._optimizer_step.reject_foreign_grads(self.backward_call)
            raise UserError(
                f"{call} was called without a backward pass since the last step; call "
                f"it between {self.backward_call} and the step."
            )
        if window.loss is None or window.num_done + 1 < window.size:
            raise UserError(
                f"{call} was called in micro-batch {window.num_pending} of "
                f"{window.size}: the gradients of a step are complete after the "
                "backward pass of the last."
            )
        if self.model is not self._model_without_ddp and self._grad_sync.is_pending:
            # As in `step`: fp32 sums are averaged over ranks.
            if self._checks_versions:
                self._warn_if_grads_changed()
            self._masters.accumulate_grads()
            self._grad_sync.finish_step(self.model)
            self._grad_versions = self._read_grad_versions()

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        *,
        create_graph: bool = True,
        retain_graph: bool | None = None,
        allow_unused: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return unscaled gradients for a gradient penalty (WGAN-GP, R1).

        A replacement for `torch.autograd.grad`, inside `session.autocast()` or after
        it. In fp16 the pass is scaled, so that small gradients do not become zero, and
        the result is unscaled. inf and NaN reach the loss, and `step` skips. It does
        not work with torch.compile, which cannot differentiate twice.

        Args:
            outputs: Unscaled outputs of the model, any shape.
            inputs: Tensors that require gradients.
            grad_outputs: One tensor of the shape of each output; None for shape ().
            create_graph: Make the gradients differentiable, for use in a loss.
            retain_graph: Keep the graph of the outputs. None: as `create_graph`.
            allow_unused: Return None for an input that no output depends on.

        Returns:
            One gradient for each input, of its shape, in fp32 or wider.

        Raises:
            RuntimeError: torch's own, for example for an input that is not used.

        Example:
            >>> import halfstep as hs
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
            >>> session = hs.prepare(model, optimizer, "O1", dtype="bf16")
            >>> real = torch.tensor([[1.0, 3.0]], requires_grad=True)
            >>> with session.autocast():
            ...     score = session.model(real).sum()
            ...     (slope,) = session.grad(score, real)
            ...     loss = -score + 5 * slope.square().sum(1).mean()  # R1
            >>> session.backward(loss)
            >>> session.step().applied
            True
        """
        many = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        # Backward operations have the dtypes of the forward pass.
        with torch.autocast(self._device.type, enabled=False):
            return self.scaler.grad(
                many,
                inputs,
                grad_outputs,
                create_graph=create_graph,
                retain_graph=retain_graph,
                allow_unused=allow_unused,
            )

    def step(self) -> StepReport:
        """Finish a micro-batch; after the last of `accumulate`, update the weights.

        A step whose gradients hold inf or NaN changes nothing: neither weights nor
        optimizer state nor its counters. Gradients are cleared in both cases. Only an
        optimizer on a GPU that is not fused synchronizes with the device, since it
        cannot skip by itself.

        Returns:
            What the step did; `complete` is False for all but the last micro-batch.

        Raises:
            RuntimeError: If there was no backward pass, or it left no gradient.
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
        """
        try:
            return self._step(is_flush=False)
        except BaseException as error:
            self._end_failed_call(error)
            raise

    def flush(self) -> StepReport:
        """Update the weights with fewer than `accumulate` micro-batches.

        For the end of an epoch. The step uses the mean of the micro-batches so far.
        Without any, nothing happens, and the report is not complete.
        """
        try:
            return self._step(is_flush=True)
        except BaseException as error:
            self._end_failed_call(error)
            raise

    def _step(self, *, is_flush: bool) -> StepReport:
        """Count a micro-batch, if there is one, and update after the last of a step."""
        self._grad_mode = torch.is_grad_enabled()
        window = self._window
        self._masters.add_new_params()  # may refuse, and nothing is counted yet
        is_complete = is_flush and window.num_done > 0
        if not is_flush or window.loss is not None or window.is_partial:
            is_complete = self._end_microbatch() or is_flush
        if not is_complete:
            self._contexts.after_microbatch()
            return StepReport(self._num_attempted, complete=False)
        window.is_partial = True
        if self._in_backward is None:
            return self._update_weights()
        return self._finish_in_backward(self._in_backward)

    def _end_microbatch(self) -> bool:
        """Count one micro-batch; return whether it was the last of its step."""
        window = self._window
        if window.is_partial:
            raise misuse.pass_failed(self.backward_call)
        if window.loss is None:
            if not window.num_done:
                self._optimizer_step.reject_foreign_grads(self.backward_call)
            raise misuse.step_without_backward(self._num_attempted, self.backward_call)
        window.is_partial = True
        if self._checks_versions:
            self._warn_if_grads_changed()
        window.num_done += 1
        window.loss = None
        is_last = window.num_done >= window.size
        if window.size > 1:
            window.warn_if_too_rare()
            self._masters.accumulate_grads()
            window.has_gradients = bool(self._reachable_grads())
            window.is_partial = is_last
        return is_last

    def _update_weights(self) -> StepReport:
        """Take one optimizer step, in five stages."""
        params, grads = self._collect_grads()
        found_inf, norm = self._optimizer_step.check(grads, self.scaler)
        found_inf = reduce_found_inf(found_inf, grads, self._group)
        end = self._clip_and_update(params, grads, found_inf, norm)
        return self._end_step(end)

    def _finish_in_backward(self, in_backward: OptimizerInBackward) -> StepReport:
        """Report the updates that were made during the backward pass."""
        if not in_backward.count:
            raise misuse.no_gradient()
        left_out, norm = in_backward.skipped_params, in_backward.norm
        is_skipped = len(left_out) == in_backward.count
        names = tuple(map(self._name, left_out))
        nonfinite = tuple(
            NonFiniteParam(name, *kinds)
            for name, kinds in zip(names, left_out.values(), strict=True)
        )
        report = StepReport(
            self._num_attempted + 1,
            complete=True,
            found_inf=is_skipped,
            norm=Constant(norm),
            culprits=Constant(nonfinite),
            left_out=names,
        )
        found_inf = torch.full((), float(bool(left_out)), device=self._device)
        skipped = torch.full((), float(is_skipped), device=self._device)
        self._step_end = end = self._make_end(report, found_inf, skipped)
        in_backward.finish_step()
        return self._end_step(end)

    def _make_end(
        self, report: StepReport, found_inf: Tensor, skipped: Tensor
    ) -> StepEnd:
        """Return what ends a step, with the state that shows what has been done."""
        count = self._num_skipped._version  # noqa: SLF001
        state, rng = self.scaler.state, self._masters.rng
        return StepEnd(report, found_inf, skipped, state, count, rng)

    def _collect_grads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the optimizer's parameters and gradients, averaged over ranks."""
        window = self._window
        if self.model is not self._model_without_ddp:
            self._grad_sync.finish_step(self.model)
        if not self._num_attempted:
            self._check_not_replaced()
        step = self._optimizer_step
        params, grads = step.collect(self.scaler, in_fp32=window.size > 1)
        if not grads and self._group is None:
            raise misuse.no_gradient()
        if grads and window.num_done < window.size:
            # Each loss was divided by `window.size`: make it the mean of those done.
            torch._foreach_mul_(grads, window.size / window.num_done)
        return params, grads

    def _clip_and_update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        found_inf: Tensor,
        norm: Tensor | None,
    ) -> StepEnd:
        """Update the weights unless `found_inf` is 1; return what ends the step."""
        step = self._optimizer_step
        culprits: Callable[[], tuple[NonFiniteParam, ...]] = tuple
        if step.skips_on_device or found_inf:
            culprits = step.nonfinite_params(params, grads, self._name)
        report = StepReport(
            self._num_attempted + 1,
            complete=True,
            scale_used=self.scaler.state.scale,
            found_inf=found_inf,
            norm=Constant(norm),
            culprits=culprits,
        )
        end = self._make_end(report, found_inf, found_inf)
        measured: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._rounding_loss is not None:
            measured = self._rounding_loss.measure(report)
        try:
            self._step_end = end
            with measured:
                step.update(found_inf, norm)
        except Exception:
            self._step_end = None  # it may have updated nothing: the window is dropped
            raise
        return end

    def _end_step(self, end: StepEnd) -> StepReport:
        """Count a step, clear its gradients, and update loss scale and schedule.

        Called again after an interrupt, it does what has not been done.
        """
        self._num_attempted = end.report.step
        if self._num_skipped._version == end.count_version:  # noqa: SLF001
            self._num_skipped += end.skipped
        self._masters.optimizer.zero_grad()  # also clears those of 16-bit weights
        if self._running_stats is not None:
            self._running_stats.restore(end.found_inf)
        if self.scaler.state is end.scale_state:
            self.scaler.update(end.found_inf, end.report.culprits)
        if self._lr_schedule.scheduler is not None:
            self._lr_schedule.step(self._num_attempted - self._num_skipped)
        unmatched = self._contexts.after_step(self._num_implied_rules)
        self._window.reset()
        self._step_end = None
        if unmatched:
            warn_caller(unmatched)
        return end.report

    def _check_not_replaced(self) -> None:
        weights = map(self._masters.model_param, params_of(self.optimizer))
        fsdp.check_not_replaced(self._unwrapped, weights)

    def _reachable_grads(self) -> list[Tensor]:
        """Return the `.grad` of all weights and master weights that have one."""
        groups = self.optimizer.param_groups
        weights = map(_WEIGHT, self._masters.master_params.values())
        params = chain(*map(itemgetter("params"), groups), weights)
        return list(filter(_IS_SET, map(_GRAD, params)))

    def _name(self, param: Tensor) -> str:
        weight = self._masters.model_param(param)
        if id(weight) in self._names:
            return self._names[id(weight)]
        # It was added after `prepare`, or belongs to no module of the model.
        named = chain(
            self._unwrapped.named_parameters(), optimizer_parameters(self.optimizer)
        )
        names = (name for name, p in named if self._masters.model_param(p) is weight)
        return next(names, unnamed(param))

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step."""
        return self._window.size

    @property
    def clip_grad_norm(self) -> float | None:
        """Maximum norm of all gradients; None neither clips nor computes the norm."""
        return self._optimizer_step.clip

    @clip_grad_norm.setter
    def clip_grad_norm(self, largest: float | None) -> None:
        largest = check_clip_norm(largest)
        if self._in_backward is not None:
            check_norm(largest)
        self._optimizer_step.clip = largest

    @property
    def scheduler(self) -> LRScheduler | None:
        """Learning-rate schedule; the session steps it after each applied step."""
        return self._lr_schedule.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        check_scheduler(scheduler, self.optimizer)
        self._lr_schedule = LRSchedule(scheduler, self.steps_applied)

    @property
    def steps_applied(self) -> int:
        """Optimizer steps that updated the weights. May synchronize."""
        return self._num_attempted - self.steps_skipped

    @property
    def steps_skipped(self) -> int:
        """Optimizer steps skipped for inf or NaN. May synchronize."""
        return int(self._num_skipped)

    def explain(self) -> Table:
        """Return a table of what is stored and computed in which dtype, and why.

        After `session.autocast(record=True)` it has a line for each operation that ran;
        before, for each type of module.
        """
        ran = self._contexts.table()
        if ran is not None:
            return replace(ran, notes=(*ran.notes, *self._notes()))
        device = self._device.type
        return precision_table(
            self._unwrapped,
            self.choice,
            self.policy,
            device,
            self._notes(),
            autocast=self._awaits_first_loss or not self._contexts.is_missing,
        )

    def _notes(self) -> tuple[str, ...]:
        """Return the settings, one line each."""
        rule = self.scaler.rule
        moves = "dynamic" if rule.backoff_factor < 1 else "fixed"
        dtypes = {param.dtype for param in self._unwrapped.parameters()}
        reason = (
            recommendation.float64_warning(self.choice, dtypes) or self.choice.reason
        )
        return (
            f"level {self.choice}: {reason}",
            f"policy: {self.policy}",
            self._masters.note(),
            f"update: {self._masters.describe()}",
            f"loss scale: {self.scaler.state.scale.item():g}, {moves}",
        )

    def __str__(self) -> str:
        """Return the settings and step counts, in lines. May synchronize."""
        count = sum(param.numel() for param in self._unwrapped.parameters())
        pending = self._window.num_pending
        window = f"micro-batches a step: {self.accumulate}, {pending} of the next"
        lines = [
            f"{self._title()}, {count:,} parameters on {self._device}",
            *self._notes(),
            *([window] if self.accumulate > 1 else []),
            f"steps: {self.steps_applied} applied, {self.steps_skipped} skipped",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return one short line; `print` shows more."""
        return f"<{self._title()} at {self.choice}>"

    def _title(self) -> str:
        model, optimizer = type(self._unwrapped).__name__, type(self.optimizer).__name__
        return f"Session of {model} and {optimizer}"

    def zero_grad(self) -> None:
        """Clear all gradients of the current step, including their fp32 sums."""
        self._masters.optimizer.zero_grad()
        self._grad_sync.is_pending = False
        if self._in_backward is not None:
            self._in_backward.discard()
        self._window.reset()

    def __iter__(self) -> NoReturn:
        """Raise on `model, optimizer = prepare(...)`."""
        raise TypeError(
            "prepare() returns one Session: write session = halfstep.prepare(model, "
            "optimizer); the model is session.model, the optimizer session.optimizer."
        )

    def __reduce__(self) -> NoReturn:
        """Raise on copy and pickle: hooks would still refer to the original."""
        raise UserError(
            "a Session cannot be copied or pickled; save session.state_dict() and load "
            "it into a session over a copy of the model."
        )

    def memory(self) -> dict[str, int]:
        """Return the bytes of "weights", "gradients", "masters" and "moments"."""
        return session_memory.memory_by_use(self._unwrapped, self._masters)

    def count_rounding_loss(self, *, every: int = 100) -> None:
        """Count updates lost to rounding from now on; `lost_updates` returns them.

        A sample of each parameter group is compared before and after an update.

        Args:
            every: Optimizer steps from one count to the next, >= 1.

        Raises:
            UserError: If `every` is out of its range, or with optimizer_in_backward.

        Example:
            >>> import halfstep as hs
            >>> model = torch.nn.Linear(8, 8)
            >>> optimizer = torch.optim.SGD(model.parameters(), 1e-9)
            >>> session = hs.prepare(model, optimizer, "O3", dtype="bf16")
            >>> session.count_rounding_loss(every=1)
            >>> with session.autocast():
            ...     loss = session.model(torch.ones(8)).sum()
            >>> session.backward(loss)
            >>> report = session.step()
            >>> [lost.share for lost in session.lost_updates()]
            [1.0]
        """
        if self._in_backward is not None:
            excluded = "session.count_rounding_loss()"
            raise misuse.updated_in_backward(excluded=excluded)
        counter = RoundingLossCounter(self._masters, every)
        if self._rounding_loss is not None:
            counter.last = self._rounding_loss.last
        self._rounding_loss = counter

    def lost_updates(self) -> tuple[RoundingLoss, ...]:
        """Return the last count of updates lost to rounding, by parameter group.

        It is () before the first count, and without `count_rounding_loss`.
        """
        return () if self._rounding_loss is None else self._rounding_loss.last

    def weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers by name, 16-bit weights as fp32 masters."""
        return session_state_dict.weights(self._unwrapped, self._masters)

    def state_dict(self) -> dict[str, Any]:
        """Return all that resuming needs, as tensors and plain values.

        Raises:
            RuntimeError: Between the micro-batches of a step: a state holds no
                gradients.
        """
        if self._window.num_pending:
            raise RuntimeError(
                f"session.state_dict() after {self._window.num_done} of "
                f"{self.accumulate} micro-batches, or a backward pass, would lose "
                "their gradients; call it after a full step, or after session.flush()."
            )
        return {
            **session_state_dict.save(self._unwrapped, self._masters, self.choice),
            "scaler": self.scaler.state_dict(),
            "steps": {"attempted": self._num_attempted, "skipped": self.steps_skipped},
            "schedule": self._lr_schedule.state_dict(),
        }

    def first_moments(self) -> dict[str, Tensor]:
        """Return the optimizer's moments as they are before the first step, by name.

        For a loader that must know the tensors of a state in advance. It changes
        nothing.
        """
        return session_state_dict.first_moments(self._unwrapped, self._masters)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state.

        With the same level, `master` and dtype, training continues bit-exactly. A state
        of another level or `master` brings weights, optimizer state and counters; a
        state of another dtype starts with a new loss scale.

        Args:
            state: What `state_dict` returned.

        Raises:
            UserError: If it is of another version, or weights, optimizer or schedule do
                not fit. Nothing has been changed then, nor after an exception of the
                schedule, the optimizer or a module's `set_extra_state`.
        """
        session_state_dict.check(state, self._unwrapped, self._masters)
        self.scaler.check(state["scaler"])
        self._lr_schedule.check(state["schedule"])
        with contextlib.ExitStack() as undo:
            for group in self.optimizer.param_groups:  # a schedule may write to it
                undo.callback(group.update, dict(group))
            self._lr_schedule.load_scheduler(state["schedule"], undo)
            session_state_dict.load_optimizer_and_extra(
                state, self._unwrapped, self._masters, self.choice, undo
            )
            undo.pop_all()
        session_state_dict.load_weights(state, self._unwrapped, self._masters)
        if state["dtype"] == self.choice.format.name:
            # Another dtype needs another scale: 65536 is right only for fp16.
            self.scaler.load_state_dict(state["scaler"])
        self.zero_grad()
        if self._running_stats is not None:
            self._running_stats.save()
        self._num_attempted = state["steps"]["attempted"]
        self._num_skipped.fill_(state["steps"]["skipped"])
        self._lr_schedule.restart(state["schedule"], self.steps_applied)

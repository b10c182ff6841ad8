"""A model and an optimizer at work at one level.

In: both, a choice of level and format, a policy. Out: a session whose step collects
gradients, unscales them, agrees on overflow, clips and updates, and publishes weights,
and says what it did.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.casting import convert_model
from halfstep.distributed import ddp
from halfstep.errors import require_kind, warn_caller
from halfstep.masters import optimizer_in_backward
from halfstep.masters.optimizer_in_backward import Release
from halfstep.masters.rounding_loss import Counter
from halfstep.scaling import misuse
from halfstep.scaling.grad_versions import GradVersions
from halfstep.scaling.per_loss import Scales
from halfstep.scaling.per_pass import Passes
from halfstep.scaling.step_report import (
    Constant,
    Culprit,
    StepReport,
    non_finite,
    seen_later,
)
from halfstep.scaling.unscaled_gradients import let_go
from halfstep.session import fsdp, model_hooks
from halfstep.session import memory as session_memory
from halfstep.session import state_dict as session_state_dict
from halfstep.session.accumulation_window import Window
from halfstep.session.autocast_regions import Regions
from halfstep.session.backward_hooks import Arrivals
from halfstep.session.ddp_sync import Exchange
from halfstep.session.explain import explained, notes_on
from halfstep.session.lr_schedule import Schedule, check_scheduler
from halfstep.session.optimizer_step import Updates, norm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim.lr_scheduler import LRScheduler

    from halfstep.casting.autocast_mode import Region
    from halfstep.casting.policy_autocast import Steered
    from halfstep.machine.recommendation import Choice
    from halfstep.masters.encoding import Form
    from halfstep.masters.rounding_loss import Lost
    from halfstep.policy.rules import Policy
    from halfstep.reporting.table import Table
    from halfstep.scaling import LossScaler, ScaleRule
    from halfstep.scaling.unscale import Agreement


class Session:
    """A model and an optimizer at work at one level; `prepare` makes it.

    `model`, `optimizer`, `scaler`, `policy` and `choice` are the parts it works with;
    `model` may be replaced by a wrapper of itself (DDP, torch.compile).
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
        drop_bad_microbatch: bool,
        retries: int,
        scheduler: LRScheduler | None,
        names: Iterable[tuple[str, nn.Parameter]],
        process_group: torch.distributed.ProcessGroup | None,
        master: Form | None,
        release_gradients: bool,
        lost_updates_every: int | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.choice = choice
        self._device = device
        self._scales = Scales(rule, process_group)
        self.scaler: LossScaler = self._scales.of("", device)
        self._passes = Passes(
            self._scales, drop=drop_bad_microbatch, retries=retries, group=process_group
        )
        self._bare = model
        self._group = process_group
        self._names = {id(param): name for name, param in names}
        level = fsdp.converted_at(model, choice.level)
        conversion = convert_model.convert_(model, level, choice.format.dtype, policy)
        optimizer.zero_grad()  # what is left from before is not scaled
        self.policy = conversion.policy
        self._implied = len(self.policy.rules) - len(policy.rules)
        self._regions = Regions(choice, self.policy, self._device.type)
        self._masters = fsdp.masters_of(
            model, optimizer, choice, master, conversion.originals
        )
        session_state_dict.settle(self._masters)
        slots = bool(self._masters.slots)
        model_hooks.attach(model, choice, device.type, masters=slots)
        self._versions = GradVersions(active=rule.scales and process_group is None)
        self._updates = Updates(self._masters, self._passes, clip_grad_norm, device)
        self._release: Release | None = None
        if release_gradients:
            self._release = Release(self._masters, norm=clip_grad_norm is not None)
            self.scaler.watch.log.what = "parameters left out"
        self._arrivals = Arrivals(self._masters, self._release, accumulate)
        self._lost: Counter | None = None
        if lost_updates_every is not None:
            self._lost = Counter(self._masters, lost_updates_every)
        self._nested = 0
        """Regions open now."""
        self._attempted = 0
        self._skipped = torch.zeros((), device=self._device)
        self._window = Window(accumulate)
        self._window.watch(self)
        self._exchange = Exchange(self._masters, choice.format.dtype, accumulate)
        self._schedule = Schedule(scheduler)

    @contextlib.contextmanager
    def autocast(self, *, record: bool = False) -> Iterator[Region | Steered]:
        """Open the region for the forward pass and the loss of one micro-batch.

        Args:
            record: Observe each operation, for `explain` to tell; slow.
        """
        if not self._attempted:
            fsdp.check_held(self._bare, map(self._masters.stored, self._params()))
        # Teachers, metrics and checkpointed blocks run without gradients as well.
        training = self._bare.training or self._nested > 0
        if not torch.is_grad_enabled() and not training:
            self._window.evaluating()
        self._masters.adopt()  # writes to weights, so not after the forward pass
        apart = self._passes.apart
        local = self._exchange.begin(self.model, self._window.done, apart=apart)
        region = self._regions.open(record=record)
        self._window.regions += torch.is_grad_enabled() and not self._nested
        self._nested += 1
        try:
            with local, region:
                yield region
        finally:
            self._nested -= 1

    def backward(self, loss: Tensor, *, name: str = "") -> None:
        """Run the backward pass of the scaled loss; more losses may follow.

        Args:
            loss: Mean loss of the micro-batch, shape ().
            name: Losses of different names have loss scales of their own. Their
                gradients are unscaled, and looked at, before they are added up. Under
                DDP each needs a forward pass of its own.
        """
        right = "a Tensor with its graph, as the loss function returns it"
        require_kind("loss", loss, isinstance(loss, Tensor), right)
        if self._passes.keeps_graphs and ddp.is_data_parallel(self.model):
            raise misuse.retries_under_ddp()
        if self._release is not None and self._window.loss is not None:
            raise misuse.released_twice()
        scaler = self._scales.of(name, self._device)
        scaler.begin(loss, self._name)
        first = not self._window.pending
        again = self._window.loss is not None and not self._passes.apart
        if self._window.loss is None and not self._passes.apart:
            self._window.going_on(
                held=bool(self._window.held and self._held_gradients())
            )
        self._window.loss = loss.detach()
        self._window.passes += not name

        def backward(keep: bool) -> None:
            scaled = scaler.scale(loss / self.accumulate)
            arrivals = self._arrivals.during(self.model, again=again)
            with self._regions.folding(scaled), arrivals:
                scaled.backward(retain_graph=keep)  # type: ignore[no-untyped-call]

        def settle() -> None:
            self._masters.fold()
            self._exchange.settle(self.model)

        try:
            self._passes.run(name, backward, self._params(), settle=settle)
        except Exception:
            # Out of memory half way: what it left must not enter the next update.
            if first:
                self.zero_grad()
            else:
                self._window.failed = True
            raise
        self._exchange.passed(apart=self._passes.apart)
        if self._versions.active:
            self._versions.note(self._held_gradients())
        if self._passes.keeps_graphs:
            let_go(loss)

    def step(self) -> StepReport:
        """Finish a micro-batch; after the last of `accumulate`, update the weights.

        A step whose gradients hold inf or NaN changes nothing: not the weights, not
        the optimizer's state, not its counters. Gradients are cleared either way.
        Nothing here waits for the device, but for an optimizer on a GPU that is not
        fused: it cannot skip by itself.

        Raises:
            RuntimeError: If no backward pass came before, or it left no gradient.
            LossScaleCollapse: If skipping has gone on for too long.
        """
        if not self._ends_window():
            return StepReport(self._attempted, complete=False)
        return self._optimizer_step()

    def flush(self) -> StepReport:
        """Update the weights with an unfinished accumulation window.

        The mean of the micro-batches that have come counts, as if `accumulate` were
        their number. Without any, nothing happens, and the report is not complete.
        For the end of an epoch whose batches do not fill the last window.
        """
        if self._window.loss is not None:
            report = self.step()
            if report.complete:
                return report
        if not self._window.done:
            return StepReport(self._attempted, complete=False)
        return self._optimizer_step()

    def _optimizer_step(self) -> StepReport:
        """Update the weights, and what follows applied steps."""
        report = self._update() if self._release is None else self._released()
        self._schedule.step(self._attempted - self._skipped)
        unmatched = self._regions.stepped(self._implied)
        if unmatched:
            warn_caller(unmatched)
        return report

    def _ends_window(self) -> bool:
        """Take in one micro-batch; say whether it was the last of its step."""
        if self._window.failed:
            raise misuse.pass_failed()
        if self._window.loss is None:
            raise misuse.step_without_backward(self._attempted)
        self._window.counted()
        if self._versions.active:
            self._versions.check(self._held_gradients())
        if self.accumulate > 1:
            self._masters.fold()
        self._window.done += 1
        self._window.loss = None
        if self.accumulate > 1:
            self._window.held = bool(self._held_gradients())
        return self._window.done >= self.accumulate

    def _update(self) -> StepReport:
        """Judge the gradients, update the weights, move the loss scale."""
        gradients = self._gradients()
        agreement = self._updates.judge([gradient for _, gradient in gradients])
        report = self._report(gradients, agreement)
        if self._lost is None:
            self._updates.apply(report)
        else:
            with self._lost.around(report):
                self._updates.apply(report)
        self._updates.clear()
        self._window.end()
        self._scales.move(agreement.wait(), report.culprits)
        return report

    def _released(self) -> StepReport:
        """Say what was updated while the backward pass ran."""
        releasing = self._release
        assert releasing is not None  # noqa: S101
        if not releasing.count:
            raise misuse.no_gradient()
        count = releasing.count
        left_out, norm = releasing.finish()
        self._updates.clear()
        self._window.end()
        self._attempted += 1
        self._skipped += len(left_out) == count
        found = [Culprit(self._name(param), inf=True, nan=True) for param in left_out]
        bad = torch.full((), float(bool(left_out)), device=self._device)
        self._scales.move(bad, lambda: tuple(found))
        return StepReport(
            self._attempted,
            complete=True,
            found_inf=len(left_out) == count,
            norm=lambda: norm,
            culprits=lambda: tuple(found),
            left_out=tuple(culprit.name for culprit in found),
        )

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameters and gradients of the step, averaged over processes."""
        self._exchange.finish(self.model)
        found = self._updates.gradients(folded=self.accumulate > 1)
        if not self._attempted:
            fsdp.check_held(self._bare, map(self._masters.stored, self._params()))
        if not found and self._group is None:
            raise misuse.no_gradient()
        if found and self._window.share != 1:
            gradients = [gradient for _, gradient in found]
            torch._foreach_mul_(gradients, self._window.share)
        return found

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _held_gradients(self) -> list[Tensor]:
        """Return the gradients that the caller can reach, of weights and masters."""
        every = self._params()
        every += [slot.weight for slot in self._masters.slots.values()]
        return [grad for param in every if (grad := param.grad) is not None]

    def _report(
        self, gradients: list[tuple[Tensor, Tensor]], agreement: Agreement
    ) -> StepReport:
        """Take down what clipping and clearing will destroy."""
        norm, found_inf = self._updates.norm, agreement.wait()
        culprits: Callable[[], tuple[Culprit, ...]] = tuple
        if self._updates.skips_on_device:
            culprits = seen_later(self._named(gradients))
        elif found_inf:
            culprits = Constant(non_finite(self._named(gradients)))
        self._attempted += 1
        self._skipped += found_inf
        return StepReport(
            self._attempted,
            complete=True,
            scale_used=self._passes.scale,
            found_inf=found_inf,
            norm=lambda: norm,
            culprits=culprits,
            dropped=self._passes.dropped(),
        )

    def _named(self, found: list[tuple[Tensor, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(self._name(param), gradient) for param, gradient in found]

    def _name(self, param: Tensor) -> str:
        shape = f"a parameter of shape {tuple(param.shape)}"
        return self._names.get(id(self._masters.stored(param)), shape)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self._window.size

    @property
    def clip_grad_norm(self) -> float | None:
        """Largest norm of all gradients; None neither clips nor takes the norm."""
        return self._updates.clip

    @clip_grad_norm.setter
    def clip_grad_norm(self, largest: float | None) -> None:
        largest = norm_of(largest)
        if self._release is not None:
            optimizer_in_backward.check_norm(largest)
        self._updates.clip = largest

    @property
    def scheduler(self) -> LRScheduler | None:
        """Steps once for each step that is applied from when it is set."""
        return self._schedule.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        check_scheduler(scheduler, self.optimizer)
        self._schedule = Schedule(scheduler, self.steps_applied)

    @property
    def steps_applied(self) -> int:
        """Optimizer steps that updated the weights. May wait for the device."""
        return self._attempted - self.steps_skipped

    @property
    def steps_skipped(self) -> int:
        """Optimizer steps left out for inf or NaN. May wait for the device."""
        return int(self._skipped)

    def explain(self) -> Table:
        """Return what ran how, and why, as a table.

        After a region with `session.autocast(record=True)` each operation in it has a
        row; before, each type of module, with what it is stored and runs in.
        """
        return explained(
            self._bare,
            self.choice,
            self.policy,
            self._device.type,
            ran=self._regions.table(),
            scaler=self.scaler,
            masters=self._notes(),
        )

    def _notes(self) -> tuple[str, str]:
        return self._masters.note(), f"update: {self._masters.describe()}"

    def __str__(self) -> str:
        """Say what is trained how, and how far. May wait for the device."""
        count = sum(param.numel() for param in self._bare.parameters())
        pending = self._window.pending
        window = f"micro-batches a step: {self.accumulate}, {pending} of the next"
        model, optimizer = type(self._bare).__name__, type(self.optimizer).__name__
        lines = [
            f"Session of {model} and {optimizer}, {count:,} numbers on {self._device}",
            *notes_on(self.choice, self.policy, self.scaler, self._notes()),
            *([window] if self.accumulate > 1 else []),
            f"steps: {self.steps_applied} applied, {self.steps_skipped} skipped",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the first word on a session; `print` it for more."""
        model, optimizer = type(self._bare).__name__, type(self.optimizer).__name__
        return f"<Session of {model} and {optimizer} at {self.choice}>"

    def zero_grad(self) -> None:
        """Forget all gradients of the step under way, folded and kept ones too."""
        self._updates.clear()
        self._exchange.drop()
        if self._release is not None:
            self._release.drop()
        self._window.end()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: hooks would still belong to the original."""
        raise misuse.session_copied()

    def memory(self) -> dict[str, int]:
        """Return the bytes held now in weights, gradients, masters and moments."""
        return session_memory.of(self._bare, self._masters)

    def lost_updates(self) -> tuple[Lost, ...]:
        """Return how many updates rounding swallowed, from the last count of them."""
        return () if self._lost is None else self._lost.last

    def weights(self) -> dict[str, Tensor]:
        """Return every weight and buffer by name, fp32 masters in place of 16 bits."""
        return session_state_dict.weights(self._bare, self._masters)

    def state_dict(self) -> dict[str, Any]:
        """Return all that resuming needs, as tensors and plain values.

        Raises:
            RuntimeError: In the middle of an accumulation window, whose gradients a
                state does not hold.
        """
        if self._window.pending:
            raise misuse.state_in_window(self._window.done, self.accumulate)
        return {
            **session_state_dict.save(self._bare, self._masters, self.choice),
            "scales": self._scales.state_dict(),
            "steps": {"attempted": self._attempted, "skipped": self.steps_skipped},
            "schedule": self._schedule.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, to the bit if level, form and dtype are the same.

        A state of any other level or form of masters brings weights, optimizer and
        counters; one of another format begins with a new loss scale.

        Raises:
            UserError: If it is of another version, or weights or optimizer do not fit.
        """
        # What can be refused comes first: a refused state must leave all as it was.
        state = session_state_dict.check(state, self._bare, self._masters)
        self._scales.check(state["scales"])
        session_state_dict.load(state, self._bare, self._masters, self.choice)
        if state["dtype"] == self.choice.format.name:
            # Another format needs another scale: 65536 is right for fp16 alone.
            self._scales.load_state_dict(state["scales"])
        self.zero_grad()
        self._attempted = state["steps"]["attempted"]
        self._skipped.fill_(state["steps"]["skipped"])
        self._schedule.load_state_dict(state["schedule"], self.steps_applied)

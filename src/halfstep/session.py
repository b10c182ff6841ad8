"""A model and an optimizer at work at one level.

In: both, a choice of level and format, a policy. Out: a session whose step collects
gradients, unscales them, agrees on overflow, clips and updates, and publishes weights,
and says what it did.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import convert, distributed, fused, late
from halfstep.errors import UserError
from halfstep.explain import precision_table
from halfstep.forward import Regions
from halfstep.master import MasterWeights, NoMasters
from halfstep.scaler.isolate import let_go
from halfstep.scaler.passes import Passes
from halfstep.scaler.scales import Scales
from halfstep.scaler.unscale import Agreement
from halfstep.schedule import Schedule
from halfstep.stats import StepReport, by_mesh, non_finite, seen_later, total_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim.lr_scheduler import LRScheduler

    from halfstep.casting import Region
    from halfstep.choice import Choice
    from halfstep.policy import Policy
    from halfstep.report import Table
    from halfstep.scaler import LossScaler, ScaleRule
    from halfstep.stats import Culprit
    from halfstep.steered import Steered

STATE_VERSION = 2


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
        self.clip_grad_norm = clip_grad_norm
        self.accumulate = accumulate
        self._bare = model
        self._group = process_group
        self._names = {id(param): name for name, param in names}
        conversion = convert.convert_(model, choice.level, choice.format.dtype, policy)
        self.policy = conversion.policy
        self._implied = len(self.policy.rules) - len(policy.rules)
        self._regions = Regions(choice, self.policy, self._device.type)
        self._masters: MasterWeights | NoMasters = NoMasters()
        if choice.level.masters:
            self._masters = MasterWeights(optimizer, conversion.originals)
        self._attempted = 0
        self._skipped = torch.zeros((), device=self._device)
        self._micro = 0
        self._local = self._unaveraged = False
        self._loss: Tensor | None = None
        self._schedule = Schedule(scheduler)

    @contextlib.contextmanager
    def autocast(self, *, record: bool = False) -> Iterator[Region | Steered]:
        """Open the region for the forward pass and the loss of one micro-batch.

        Args:
            record: Observe each operation, for `explain` to tell; slow.
        """
        with contextlib.ExitStack() as regions:
            self._local = self._quiet
            if self._local:
                regions.enter_context(distributed.unsynchronised(self.model))
            region = self._regions.open(record=record)
            with region:
                yield region

    @property
    def _quiet(self) -> bool:
        """Gradients of this micro-batch need not be averaged over processes yet.

        Those that are looked at, or leave the model for their masters, after each
        micro-batch are averaged each time; others wait for the last one.
        """
        apart = self._passes.apart or bool(self._masters.pairs)
        return self._micro + 1 < self.accumulate and not apart

    def backward(self, loss: Tensor, *, name: str = "") -> None:
        """Run the backward pass of the scaled loss; more losses may follow.

        Args:
            loss: Mean loss of the micro-batch, shape ().
            name: Losses of different names have loss scales of their own. Their
                gradients are unscaled, and looked at, before they are added up. Under
                DDP each needs a forward pass of its own.
        """
        if self._passes.keeps_graphs and distributed.is_data_parallel(self.model):
            message = (
                "retries run a backward pass again, whose gradients DDP would not "
                "average: it does so once for each forward pass. Set retries=0."
            )
            raise UserError(message)
        scaler = self._scales.of(name, self._device)
        scaler.begin(loss, self._name)
        self._loss = loss.detach()

        def backward(keep: bool) -> None:
            scaled = scaler.scale(loss / self.accumulate)
            with self._regions.folding(scaled):
                scaled.backward(retain_graph=keep)  # type: ignore[no-untyped-call]

        params = [p for group in self.optimizer.param_groups for p in group["params"]]

        def settle() -> None:
            self._masters.fold()
            if self._local or self._unaveraged:
                distributed.average(self.model, params)
                self._unaveraged = False

        self._passes.run(name, backward, params, settle=settle)
        self._unaveraged = self._local and not self._passes.apart
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
        gradients, agreement = self._unscale()
        report = self._report(gradients, agreement)
        self._clip_and_update(report)
        self._scales.move(agreement.wait(), report.culprits)
        self._schedule.step(self._attempted - self._skipped)
        unmatched = self._regions.stepped(self._implied)
        if unmatched:
            warnings.warn(unmatched, stacklevel=2)
        return report

    def _ends_window(self) -> bool:
        """Take in one micro-batch; say whether it was the last of its step."""
        if self._loss is None:
            message = (
                "session.step() was called without a backward pass since the last; "
                f"{self._attempted} steps are done. Call session.backward(loss) first; "
                "to sum over 4 batches, set accumulate=4 in prepare()."
            )
            raise RuntimeError(message)
        self._masters.fold()
        self._micro += 1
        if self._micro < self.accumulate:
            self._loss = None
        return self._micro >= self.accumulate

    def _unscale(self) -> tuple[list[tuple[str, Tensor]], Agreement]:
        """Return the named gradients of the step, unscaled, and the ranks' verdict."""
        found_inf = self._passes.show()
        found = [
            (self._name(param), param.grad)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if not found and self._group is None:
            message = (
                "no parameter of the optimizer has a gradient: is the loss computed "
                "from session.model, and do its parameters require gradients?"
            )
            raise RuntimeError(message)
        if found_inf is not None:
            return found, Agreement(found_inf)
        return found, self._passes.unscale_([gradient for _, gradient in found])

    def _name(self, param: Tensor) -> str:
        shape = f"a parameter of shape {tuple(param.shape)}"
        return self._names.get(id(self._masters.stored(param)), shape)

    def _report(
        self, gradients: list[tuple[str, Tensor]], agreement: Agreement
    ) -> StepReport:
        """Take down what clipping and clearing will destroy."""
        tensors = [gradient for _, gradient in gradients]
        norm = None
        if self.clip_grad_norm is not None and tensors:
            norm = total_norm(tensors)
        found_inf = agreement.wait()
        culprits: Callable[[], tuple[Culprit, ...]] = tuple
        if self._skips_on_device:
            culprits = seen_later(gradients)
        elif found_inf:
            culprits = partial(tuple, non_finite(gradients))
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

    @property
    def _skips_on_device(self) -> bool:
        """The optimizer's kernel itself leaves everything alone on overflow."""
        return fused.skips_inside(self.optimizer) and not late.on_host(self._device)

    def _clip_and_update(self, report: StepReport) -> None:
        """Update the weights unless the step is skipped; clear the gradients."""
        if self._skips_on_device:
            self._clip(report.norm())
            fused.step(self.optimizer, torch.as_tensor(report.found_inf))
            self._masters.publish()
        elif report.applied:
            self._clip(report.norm())
            self.optimizer.step()
            self._masters.publish()
        self.optimizer.zero_grad()
        self._passes.close()
        self._micro, self._loss = 0, None

    def _clip(self, norm: Tensor | float | None) -> None:
        if isinstance(norm, Tensor) and self.clip_grad_norm != torch.inf:
            params = [p for g in self.optimizer.param_groups for p in g["params"]]
            for alike in by_mesh(params):
                nn.utils.clip_grads_with_norm_(alike, self.clip_grad_norm or 0.0, norm)

    @property
    def scheduler(self) -> LRScheduler | None:
        """Steps once for each step that is applied from when it is set."""
        return self._schedule.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
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
        rule = self.scaler.rule
        moves = f"dynamic ({rule.strategy})" if rule.backoff_factor < 1 else "fixed"
        notes = (
            f"level {self.choice}: {self.choice.reason}",
            f"policy: {self.policy}",
            f"fp32 master weights: {sum(m.numel() for _, m in self._masters.pairs)}",
            f"loss scale: {self.scaler.state.scale.item():g}, {moves}",
        )
        ran = self._regions.table()
        if ran is not None:
            return replace(ran, notes=(*ran.notes, *notes))
        return precision_table(
            self._bare, self.choice, self.policy, self._device.type, notes
        )

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return every weight and buffer by name, fp32 masters in place of 16 bits."""
        masters = {id(low): high for low, high in self._masters.pairs}
        held = self._bare.state_dict(keep_vars=True)
        tensors = {name: t for name, t in held.items() if isinstance(t, Tensor)}
        return {name: masters.get(id(t), t).detach() for name, t in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that resuming needs, as tensors and plain values.

        Raises:
            RuntimeError: In the middle of an accumulation window, whose gradients a
                state does not hold.
        """
        if self._micro:
            message = (
                f"session.state_dict() after {self._micro} of {self.accumulate} "
                "micro-batches would lose their gradients; call it after a full step."
            )
            raise RuntimeError(message)
        return {
            "version": STATE_VERSION,
            "level": self.choice.level.name,
            "dtype": self.choice.format.name,
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "scales": self._scales.state_dict(),
            "steps": {"attempted": self._attempted, "skipped": self.steps_skipped},
            "schedule": self._schedule.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, to the bit where level and dtype are the same.

        A state of another format brings weights, optimizer and counters; the loss
        scale begins anew.

        Raises:
            UserError: If it is of another version, or its weights do not fit.
        """
        if state.get("version") != STATE_VERSION:
            message = (
                f"session state has version {state.get('version')!r}; this halfstep "
                f"reads version {STATE_VERSION}."
            )
            raise UserError(message)
        own = self.weights()
        for name in own.keys() | state["weights"].keys():
            mine, saved = own.get(name), state["weights"].get(name)
            if mine is None or saved is None or mine.shape != saved.shape:
                message = (
                    f"weight {name!r}: the state holds {_shape(saved)}, the model "
                    f"{_shape(mine)}; build the model that was saved."
                )
                raise UserError(message)
        # What can be refused comes first: a refused state must leave all as it was.
        self._scales.check(state["scales"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["dtype"] == self.choice.format.name:
            # Another format needs another scale: 65536 is right for fp16 alone.
            self._scales.load_state_dict(state["scales"])
        for name, tensor in own.items():
            tensor.copy_(state["weights"][name])
        self._masters.publish()
        self.optimizer.zero_grad()
        self._passes.close()
        self._micro, self._loss = 0, None
        self._attempted = state["steps"]["attempted"]
        self._skipped.fill_(state["steps"]["skipped"])
        self._schedule.load_state_dict(state["schedule"], self.steps_applied)


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"

"""A model and an optimizer at work at one level.

In: both, a choice of level and format, a policy. Out: a session whose step collects
gradients, unscales them, agrees on overflow, clips and updates, and publishes weights,
and says what it did.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import convert, distributed, fused
from halfstep.errors import UserError
from halfstep.explain import precision_table
from halfstep.formats import is_low
from halfstep.forward import Regions
from halfstep.master import MasterWeights, NoMasters
from halfstep.scaler import Late, collapse, is_collapsed
from halfstep.stats import StepReport, dense, non_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from halfstep.casting import Region
    from halfstep.choice import Choice
    from halfstep.policy import Policy
    from halfstep.report import Table
    from halfstep.scaler import LossScaler
    from halfstep.steered import Steered

STATE_VERSION = 1


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
        scaler: LossScaler,
        clip_grad_norm: float | None,
        accumulate: int,
        names: Iterable[tuple[str, nn.Parameter]],
        process_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.choice = choice
        self.scaler = scaler
        self.clip_grad_norm = clip_grad_norm
        self.accumulate = accumulate
        self._bare = model
        self._group = process_group
        self._device = scaler.state.scale.device
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
        self._loss: Tensor | None = None
        self._late = Late()

    @contextlib.contextmanager
    def autocast(self, *, record: bool = False) -> Iterator[Region | Steered]:
        """Open the region for the forward pass and the loss of one micro-batch.

        Args:
            record: Observe each operation, for `explain` to tell; slow.
        """
        with contextlib.ExitStack() as regions:
            if self._quiet:
                regions.enter_context(distributed.unsynchronised(self.model))
            region = self._regions.open(record=record)
            with region:
                yield region

    @property
    def _quiet(self) -> bool:
        """Gradients of this micro-batch need not be averaged over processes yet.

        Those that leave the model for their masters after each micro-batch are
        averaged each time; others wait for the last one.
        """
        return self._micro + 1 < self.accumulate and not self._masters.pairs

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss; more losses may follow.

        Args:
            loss: Mean loss of the micro-batch, shape ().
        """
        self._loss = loss.detach()
        scaled = self.scaler.scale(loss / self.accumulate)
        with self._regions.folding(scaled):
            scaled.backward()  # type: ignore[no-untyped-call]

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
        gradients = self._collect()
        found_inf = self._agree(self.scaler.unscale_([grad for _, grad in gradients]))
        report = self._report(gradients, found_inf)
        self._clip_and_update(report)
        self.scaler.update(found_inf)
        self._watch(report)
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

    def _collect(self) -> list[tuple[str, Tensor]]:
        """Return the gradients that the optimizer is about to use, with names."""
        found = [
            (self._name(param), param.grad)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if not found:
            message = (
                "no parameter of the optimizer has a gradient: is the loss computed "
                "from session.model, and do its parameters require gradients?"
            )
            raise RuntimeError(message)
        return found

    def _name(self, param: nn.Parameter) -> str:
        shape = f"a parameter of shape {tuple(param.shape)}"
        return self._names.get(id(self._masters.stored(param)), shape)

    def _agree(self, found_inf: Tensor) -> Tensor:
        """Let one rank's overflow be every rank's."""
        if self._group is None:
            return found_inf
        return distributed.highest(found_inf, self._group)

    def _report(
        self, gradients: list[tuple[str, Tensor]], found_inf: Tensor
    ) -> StepReport:
        """Take down what clipping and clearing will destroy."""
        names, tensors = zip(*gradients, strict=True)
        norm = None
        if self.clip_grad_norm is not None:
            # A 16-bit norm would overflow long before its gradients do.
            stored = [dense(grad) for grad in tensors]
            wide = [g.float() if is_low(g.dtype) else g for g in stored]
            norm = nn.utils.get_total_norm(wide)
        suspects: Callable[[], tuple[str, ...]] = tuple
        if self._skips_on_device:
            peaks = torch.stack(torch._foreach_norm(tensors, torch.inf))  # noqa: SLF001

            def suspects() -> tuple[str, ...]:
                bad = (~torch.isfinite(peaks)).tolist()
                return tuple(n for n, b in zip(names, bad, strict=True) if b)

        elif found_inf:
            culprits = non_finite(gradients)

            def suspects() -> tuple[str, ...]:
                return culprits

        self._attempted += 1
        self._skipped += found_inf
        return StepReport(
            self._attempted,
            complete=True,
            scale_used=self.scaler.state.scale,
            found_inf=found_inf,
            norm=norm,
            names=suspects,
        )

    @property
    def _skips_on_device(self) -> bool:
        """The optimizer's kernel itself leaves everything alone on overflow."""
        return self._device.type != "cpu" and fused.skips_inside(self.optimizer)

    def _clip_and_update(self, report: StepReport) -> None:
        """Update the weights unless the step is skipped; clear the gradients."""
        if self._skips_on_device:
            self._clip(report.norm)
            fused.step(self.optimizer, torch.as_tensor(report.found_inf))
            self._masters.publish()
        elif report.applied:
            self._clip(report.norm)
            self.optimizer.step()
            self._masters.publish()
        self.optimizer.zero_grad()
        self._micro, self._loss = 0, None

    def _clip(self, norm: Tensor | None) -> None:
        if norm is not None and self.clip_grad_norm != torch.inf:
            params = [p for g in self.optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grads_with_norm_(params, self.clip_grad_norm or 0.0, norm)

    def _watch(self, report: StepReport) -> None:
        """Stop a run in which no step has been applied for too long."""
        if not self._skips_on_device and report.applied:
            return
        used, skips = report.scale_used, self.scaler.state.skips_in_a_row
        arrived = self._late.send(torch.stack((torch.as_tensor(used), skips)))
        if arrived and is_collapsed(arrived[0], int(arrived[1]), self.scaler.rule):
            names = report.found_inf_in
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004
            whose = ", ".join(names[:3]) or "another process"
            seen = f"not finite: gradients of {whose}{more}"
            raise collapse(arrived[0], int(arrived[1]), seen)

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
        moves = "dynamic" if self.scaler.rule.backoff_factor < 1 else "fixed"
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
            "scaler": self.scaler.state_dict(),
            "steps": {"attempted": self._attempted, "skipped": self.steps_skipped},
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
        self.optimizer.load_state_dict(state["optimizer"])
        if state["dtype"] == self.choice.format.name:
            # Another format needs another scale: 65536 is right for fp16 alone.
            self.scaler.load_state_dict(state["scaler"])
        for name, tensor in own.items():
            tensor.copy_(state["weights"][name])
        self._masters.publish()
        self.optimizer.zero_grad()
        self._micro, self._loss = 0, None
        self._attempted = state["steps"]["attempted"]
        self._skipped.fill_(state["steps"]["skipped"])


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"

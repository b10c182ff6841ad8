"""Unscales and checks each backward pass of a step separately.

Usually gradients are unscaled once, at the end of a step. That does not work for losses
with separate scales, or passes that may be dropped or repeated: gradients at two scales
cannot be added, and an inf cannot be removed from a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._torch.async_read import to_device_async
from halfstep._torch.optimizer_params import gradients_of, named_parameters, params_of
from halfstep.errors import UserError, require, require_int
from halfstep.nonfinite.graph import nodes_of
from halfstep.numerics.local_tensor import local_values
from halfstep.scaling import misuse
from halfstep.scaling.collapse import LossHistory, StepHistory
from halfstep.scaling.found_inf_reduction import reduce_found_inf
from halfstep.scaling.loss_scaler import LossScaler
from halfstep.scaling.unscale import dtypes_of, unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist
    from torch.optim import Optimizer

    from halfstep.scaling.loss_scale import ScaleRule, ScaleState
    from halfstep.scaling.step_report import NonFiniteParam

_ACTIONS = ("skip", "drop_microbatch")


@dataclass(frozen=True)
class Retry:
    """For `on_overflow`: repeat a backward pass that overflowed, at a lower loss scale.

    Each pass but the last synchronizes with the device, to read whether it overflowed.
    It does not work under DDP, which averages gradients once per forward pass.

    Args:
        times: Maximum number of repetitions, >= 0.
        then: If the last one overflows too: "skip" the step, or "drop_microbatch".

    Raises:
        UserError: If an argument is out of its range.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> retry = hs.Retry(2)
        >>> session = hs.prepare(model, optimizer, "O0", on_overflow=retry)
        >>> session.backward(model(torch.ones(2)).sum())
        >>> session.step().applied
        True
    """

    times: int
    then: str = "skip"

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", require_int("times", self.times, 0))
        is_valid = isinstance(self.then, str) and self.then in _ACTIONS
        require("then", self.then, is_valid, "'skip' or 'drop_microbatch'")

    @classmethod
    def of(cls, on_overflow: object) -> Retry:
        """Return the `Retry` for an argument; "skip", "drop_microbatch": 0 times.

        Raises:
            UserError: If it is neither of them, nor a `Retry`.
        """
        if isinstance(on_overflow, cls):
            return on_overflow
        is_valid = isinstance(on_overflow, str) and on_overflow in _ACTIONS
        expected = "'skip', 'drop_microbatch' or a halfstep.Retry"
        require("on_overflow", on_overflow, is_valid, expected)
        return cls(0, str(on_overflow))

    @property
    def drops(self) -> bool:
        """Whether a pass whose last try overflowed is left out of the step."""
        return self.then == "drop_microbatch"

    @property
    def checks_each_pass(self) -> bool:
        """Whether gradients are unscaled and checked after each backward pass."""
        return self.drops or self.times > 0


class LossScalers:
    """One LossScaler per loss name, all with one rule; "" is the unnamed loss."""

    def __init__(self, rule: ScaleRule, group: dist.ProcessGroup | None = None) -> None:
        self.rule = rule
        self._group = group
        self._scalers: dict[str, LossScaler] = {}
        self._saved: dict[str, Any] = {}
        self._found_inf: dict[str, Tensor] = {}
        self._from_first_step = True

    def get_or_create(self, name: str, device: torch.device) -> LossScaler:
        """Return the scaler of a loss; a new one takes its state from a loaded one."""
        if name not in self._scalers:
            scaler = self._scalers[name] = LossScaler(self.rule, device, self._group)
            if name in self._saved:
                scaler.load_state_dict(self._saved.pop(name))
            elif not self._from_first_step:
                scaler.monitor.restore(
                    StepHistory(LossHistory(from_first_step=False)), self.rule
                )
        scaler = self._scalers[name]
        scaler.rule = self.rule
        scaler.multiplies |= self.rule.scales
        return scaler

    def get(self, name: str) -> LossScaler:
        """Return the scaler of a loss that `get_or_create` was called for."""
        return self._scalers[name]

    def record_found_inf(self, name: str, found_inf: Tensor) -> None:
        """Record the flag of one backward pass of a loss, shape ()."""
        previous = self._found_inf.get(name)
        combined = found_inf if previous is None else torch.maximum(previous, found_inf)
        self._found_inf[name] = combined

    def update(
        self, found_inf: Tensor, culprits: Callable[[], Sequence[NonFiniteParam]]
    ) -> None:
        """Update the scales that were used in this step.

        Raises:
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
        """
        flags, self._found_inf = self._found_inf, {}
        if not flags:
            self._scalers[""].update(found_inf, culprits)
        for name, flag in flags.items():
            self._scalers[name].update(flag, culprits, skipped=found_inf)

    def reset(self) -> None:
        """Discard the flags recorded since the last step."""
        self._found_inf = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all states by name. Synchronizes with the device."""
        current = {name: scaler.state_dict() for name, scaler in self._scalers.items()}
        return self._saved | current

    @staticmethod
    def check(state: dict[str, Any] | None) -> None:
        """Raise if a state cannot be loaded; None can.

        Raises:
            UserError: If a field is missing.
        """
        for one in (state or {}).values():
            LossScaler.check(one)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load states by name; that of a loss not used yet when it is first used.

        Args:
            state: None if the run did not save one, such as a run of torch's scaler.

        Raises:
            UserError: If a field is missing.
        """
        self.check(state)
        self._from_first_step = state is not None
        self._saved, self._found_inf = dict(state or {}), {}
        for name, scaler in list(self._scalers.items()):
            if name in self._saved:
                scaler.load_state_dict(self._saved.pop(name))
            else:
                del self._scalers[name]  # it starts again with the rule's scale


class BackwardPasses:
    """Unscales and checks each backward pass of a step separately.

    It replaces the `LossScaler` in a session's step, with gradients already unscaled.
    A `GradScaler` runs its passes with `run_for`, for each optimizer by itself.
    """

    needs_only_found_inf = False
    group = None
    """No group for the step: the flag of each pass is already reduced over ranks."""

    def __init__(
        self,
        loss_scalers: LossScalers,
        on_overflow: Retry,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._loss_scalers = loss_scalers
        self.on_overflow = on_overflow
        self._group = group
        self._unscaled = UnscaledGradients(drop=on_overflow.drops)
        self._last_name = ""
        self._found_inf = torch.zeros(())
        self._active: list[UnscaledGradients] = []
        """Sums of the optimizers of a `GradScaler` that have had a pass."""
        self.num_dropped: Tensor | int = 0
        """Number of passes left out of this step, shape ()."""
        self.last_scale: Tensor | None = None
        """Loss scale of the last pass of this step, shape ()."""
        self.keeps_graphs = on_overflow.times > 0
        """Whether graphs are retained until the last try."""

    def check(self, name: str, *, is_ddp: bool = False) -> None:
        """Raise if a pass would give wrong gradients.

        Raises:
            UserError: For retries under DDP, which would not average the second try;
                for a named loss with "drop_microbatch".
        """
        if is_ddp and self.keeps_graphs:
            raise UserError(
                "halfstep.Retry runs a backward pass again, whose gradients DDP would "
                "not average: it does so once for each forward pass. Set "
                "on_overflow='skip' or 'drop_microbatch'."
            )
        if name and self.on_overflow.drops:
            raise UserError(
                f"the loss {name!r} has a scale of its own, but 'drop_microbatch' "
                "counts micro-batches of one loss; use one of the two."
            )

    def run(
        self,
        name: str,
        backward: Callable[[bool], None],
        parameters: Sequence[Tensor],
    ) -> Tensor | None:
        """Run `backward(keep_graph)`, which fills `.grad`; unscale and check.

        Returns:
            1.0 if it is left out of the step, else 0.0, shape (). None without
            "drop_microbatch".
        """
        found_inf = self._run(name, backward, parameters)
        self._unscaled.accumulate(parameters, found_inf)
        return found_inf if self.on_overflow.drops else None

    def _run(
        self,
        name: str,
        backward: Callable[[bool], None],
        parameters: Sequence[Tensor],
    ) -> Tensor:
        """Run a pass, again at a lower scale while it overflows; unscale its gradients.

        Each try but the last synchronizes with the device.

        Returns:
            1.0 if the last try overflowed on any rank, else 0.0. float32, shape ().
        """
        self._last_name, scaler = name, self._loss_scalers.get(name)
        for retries_left in range(self.on_overflow.times, -1, -1):
            for parameter in parameters:
                parameter.grad = None
            backward(retries_left > 0)
            found_inf = self._unscale(parameters)
            if not retries_left or not found_inf:
                break
            scaler.back_off()
        self._loss_scalers.record_found_inf(name, found_inf)
        self.last_scale = scaler.state.scale.clone()
        if self.on_overflow.drops:
            self.num_dropped = self.num_dropped + found_inf
        return found_inf

    def _unscale(self, parameters: Sequence[Tensor]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        found_inf = self._loss_scalers.get(self._last_name).unscale_(gradients)
        return reduce_found_inf(found_inf, gradients, self._group)

    def unscale_earlier(self, parameters: Sequence[Tensor]) -> None:
        """Unscale and collect gradients that unnamed losses have left in `.grad`."""
        found_inf = self._unscale(parameters)
        self._loss_scalers.record_found_inf("", found_inf)
        self._unscaled.accumulate(parameters, found_inf)

    def run_for(
        self,
        optimizers: Sequence[tuple[Optimizer, dict[str, Any]]],
        scaler: LossScaler,
        name: str,
        loss: Tensor,
        *,
        retain_graph: bool,
    ) -> None:
        """Run one pass; `optimizers` are pairs with the `GradScaler`'s state of each.

        Raises:
            UserError: Without optimizers, or for a named loss with "drop_microbatch".
            RuntimeError: If there are gradients that no such pass made, or an optimizer
                has been stepped.
            ValueError: If gradients are fp16.
        """
        if not optimizers:
            raise UserError(
                "scaler.backward(loss) was given no optimizer: name all whose "
                "parameters the loss reaches, as in scaler.backward(loss, optimizer)."
            )
        self.check(name)
        sums = [self._sums_of(optimizer, state) for optimizer, state in optimizers]
        owned = [params_of(optimizer) for optimizer, _ in optimizers]

        def backward(keep_graph: bool) -> None:
            scaled = scaler.scale(loss)
            scaled.backward(retain_graph=keep_graph or retain_graph)  # type: ignore[no-untyped-call]
            for optimizer, _ in optimizers:
                if torch.float16 in dtypes_of(gradients_of(optimizer)):
                    raise misuse.fp16_gradients(optimizer)

        # Two optimizers may share a parameter.
        params = list(dict.fromkeys(param for own in owned for param in own))
        found_inf = self._run(name, backward, params)
        if self.keeps_graphs and not retain_graph:
            free_graph(loss)
        self._active += sums
        for total, own, (_, state) in zip(sums, owned, optimizers, strict=True):
            total.accumulate(own, found_inf)
            sum_found_inf = total.restore_grads()
            state["found_inf_per_device"] = {sum_found_inf.device: sum_found_inf}
            state["stage"] = OptState.UNSCALED

    def _sums_of(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> UnscaledGradients:
        """Return an optimizer's sums so far, ready for another pass."""
        if state["stage"] is OptState.STEPPED:
            raise misuse.unscaled_twice(OptState.STEPPED, None)
        sums: UnscaledGradients = state.setdefault(
            "unscaled_gradients", UnscaledGradients(drop=self.on_overflow.drops)
        )
        sums.sync_user_edits()
        for name, param in named_parameters(optimizer) if not sums.num_passes else ():
            if param.grad is not None:
                raise RuntimeError(
                    f"scaler.backward() found a gradient in {name} that it did not "
                    "make: call optimizer.zero_grad() first, and use "
                    "scaler.backward() for every loss."
                )
        return sums

    def check_not_mixed(self, loss: Tensor) -> None:
        """Raise if a scaled loss reaches parameters with unscaled gradients.

        Raises:
            RuntimeError: If it does.
        """
        unscaled_params = {param for sums in self._active for param in sums.parameters}
        for node in nodes_of(loss.grad_fn) if unscaled_params else ():
            if getattr(node, "variable", None) in unscaled_params:
                raise RuntimeError(
                    "scaler.scale() was given a loss that reaches parameters whose "
                    "gradients scaler.backward() has unscaled already; use "
                    "scaler.backward() for it too."
                )

    def sums_in_fp32(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, copy of its gradient in fp32 or wider)."""
        for param, total in self._unscaled.sums():
            wide = torch.promote_types(total.dtype, torch.float32)
            yield param, total.to(wide, copy=True)

    def restore_grads(self) -> None:
        """Put the sums of the passes into `.grad`."""
        self._found_inf = self._unscaled.restore_grads()

    def unscale_(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the flag of the step; the gradients are already unscaled."""
        del gradients
        return self._found_inf

    @property
    def state(self) -> ScaleState:
        """The loss scale of the last pass."""
        return self._loss_scalers.get(self._last_name).state

    def update(
        self, found_inf: Tensor, culprits: Callable[[], Sequence[NonFiniteParam]]
    ) -> None:
        """Update each scale that was used by the flags of its passes; end the step.

        Raises:
            LossScaleCollapse: If every step is skipped and no smaller scale helps.
        """
        try:
            self._loss_scalers.update(found_inf, culprits)
        finally:
            self.reset()

    def reset(self) -> None:
        """Discard the passes since the last step."""
        self._unscaled.reset()
        self._loss_scalers.reset()
        self.num_dropped, self.last_scale = 0, None
        self._active.clear()


def free_graph(loss: Tensor) -> None:
    """Free the graph retained for another try, although the user keeps the loss."""
    if not loss._is_view():  # noqa: SLF001
        loss.detach_()


class UnscaledGradients:
    """Sums of the unscaled gradients of the passes so far.

    Args:
        drop: Leave out passes that overflowed, and use the mean of the others for
            them; otherwise one such pass skips the step.
    """

    def __init__(self, *, drop: bool) -> None:
        self._drop = drop
        self._totals: dict[Tensor, Tensor] = {}
        self._restored: dict[Tensor, tuple[Tensor, int]] = {}
        self.num_passes = 0
        """Number of passes since the last `reset`."""
        self._num_overflowed: Tensor | None = None

    @property
    def parameters(self) -> Iterable[Tensor]:
        """The parameters with a sum."""
        return self._totals.keys()

    @torch.no_grad()
    def sync_user_edits(self) -> None:
        """Copy edits that the user made to the sums in `.grad` back to the sums."""
        for parameter, (restored, version) in self._restored.items():
            current = parameter.grad
            if current is None:
                del self._totals[parameter]
            elif current is not restored or current._version != version:  # noqa: SLF001
                self._totals[parameter] = (current / self._mean_factor(current)).to(
                    current.dtype
                )
        if self._restored and not self._totals:
            self.reset()
        self._restored.clear()

    def _mean_factor(self, total: Tensor) -> Tensor | int:
        """Return the number of passes divided by the number without overflow."""
        if not self._drop or self._num_overflowed is None:
            return 1
        num_clean = (self.num_passes - self._num_overflowed).clamp(min=1)
        return self.num_passes / to_device_async(num_clean, total.device)

    @torch.no_grad()
    def accumulate(self, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
        """Add the unscaled `.grad` of a pass to the sums, and set `.grad` to None.

        `found_inf` is 1.0 if these gradients held inf or NaN, else 0.0, shape ().
        """
        self.num_passes += 1
        num_overflowed = self._num_overflowed
        self._num_overflowed = (
            found_inf.clone() if num_overflowed is None else num_overflowed + found_inf
        )
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self._drop:
                # Not multiplied by 0: inf * 0 is NaN.
                values = local_values(gradient)
                values.masked_fill_(found_inf.to(values.device) > 0, 0)
            total = self._totals.get(parameter)
            if total is None:
                # Cloned: its memory may be a buffer that the next pass writes to.
                self._totals[parameter] = gradient.clone()
            elif total.is_sparse:
                self._totals[parameter] = gradient + total
            else:
                total.add_(gradient)
            parameter.grad = None

    def sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, sum of its gradients, scaled up for dropped passes)."""
        for parameter, total in self._totals.items():
            grad = total
            if self._drop:
                grad = (total * self._mean_factor(total)).to(total.dtype)
            yield parameter, grad

    @torch.no_grad()
    def restore_grads(self) -> Tensor:
        """Put the sums into `.grad`; return whether the step must be skipped.

        Returns:
            1.0 if a pass overflowed (with `drop`: if all did) or a sum is non-finite,
            else 0.0. float32, shape ().
        """
        num_overflowed = self._num_overflowed
        assert num_overflowed is not None, "restore_grads() comes after accumulate()"  # noqa: S101
        for parameter, grad in self.sums():
            parameter.grad = grad
            self._restored[parameter] = grad, grad._version  # noqa: SLF001
        found_inf = (
            num_overflowed >= self.num_passes if self._drop else num_overflowed > 0
        ).float()
        if self.num_passes > 1:
            # The sum of finite gradients may overflow.
            sums = [grad for grad, _ in self._restored.values()]
            found_inf = torch.maximum(
                found_inf, unscale_(sums, torch.ones_like(found_inf))
            )
        return found_inf

    def reset(self) -> None:
        """Discard the sums."""
        self._totals.clear()
        self._restored.clear()
        self.num_passes, self._num_overflowed = 0, None

"""`GradScaler.backward`: passes that are unscaled and checked one by one.

In: a loss, and the optimizers whose parameters it reaches. Out: unscaled sums in
`.grad`, and a flag for each optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep._torch.optimizer_params import gradients_of
from halfstep.errors import UserError
from halfstep.scaling import misuse
from halfstep.scaling.per_pass import UnscaledGradients, free_graph, run_pass
from halfstep.scaling.strategies import nodes_of
from halfstep.scaling.unscale import dtypes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.scaling.loss_scaler import LossScaler
    from halfstep.scaling.per_pass import LossScalers, Retry


class PerPassBackward:
    """Runs passes for a `GradScaler`, with `UnscaledGradients` for each optimizer.

    Args:
        loss_scalers: By the name of the loss.
        on_overflow: Whether a pass that overflowed is run again, or left out.
        group: Ranks that must agree.
    """

    def __init__(
        self,
        loss_scalers: LossScalers,
        on_overflow: Retry,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._loss_scalers = loss_scalers
        self.on_overflow = on_overflow
        self._group = group
        self.num_dropped: Tensor | int = 0
        """Passes left out since the last `update`, shape ()."""
        self.last_scale: Tensor | None = None
        """Scale of the last pass since then, shape ()."""
        self._active: list[UnscaledGradients] = []

    def check_not_mixed(self, loss: Tensor) -> None:
        """Refuse a scaled loss that reaches gradients which are unscaled already.

        Raises:
            RuntimeError: If it does.
        """
        if not self._active or loss.grad_fn is None:
            return
        unscaled_params = {
            param for ledger in self._active for param in ledger.parameters
        }
        for node in nodes_of(loss.grad_fn):
            if getattr(node, "variable", None) in unscaled_params:
                raise misuse.mixed_scales()

    def last_scale_or(self, usual: Tensor) -> Tensor:
        """Return the scale of the last pass, or the usual one if there was none."""
        return usual if self.last_scale is None else self.last_scale

    def end_step(self) -> None:
        """Begin the next iteration."""
        self.num_dropped, self.last_scale = 0, None
        self._active.clear()

    def backward(
        self,
        scaler: LossScaler,
        name: str,
        loss: Tensor,
        optimizers: Sequence[tuple[Optimizer, dict[str, Any]]],
        *,
        retain_graph: bool,
    ) -> None:
        """Run one pass.

        Args:
            scaler: Of the loss.
            name: Of the loss.
            loss: Shape ().
            optimizers: Each with what the `GradScaler` keeps of it in this iteration.
            retain_graph: As for `Tensor.backward`.

        Raises:
            UserError: If there is no optimizer, or a named loss where passes are left
                out.
            RuntimeError: If gradients are there that no such pass made, or an optimizer
                has been stepped.
            ValueError: If gradients are fp16.
        """
        if not optimizers:
            message = (
                "scaler.backward(loss) was given no optimizer: name all whose "
                "parameters the loss reaches, as in scaler.backward(loss, optimizer)."
            )
            raise UserError(message)
        if name and self.on_overflow.drops:
            raise misuse.named_loss_with_drop(name)
        accumulators = [
            self._accumulator(optimizer, state) for optimizer, state in optimizers
        ]
        owned = [
            [p for g in o.param_groups for p in g["params"]] for o, _ in optimizers
        ]
        # Two optimizers may share a parameter.
        params = list(dict.fromkeys(param for own in owned for param in own))

        def backward(keep: bool) -> None:
            scaled = scaler.scale(loss)
            scaled.backward(retain_graph=keep or retain_graph)  # type: ignore[no-untyped-call]
            for optimizer, _ in optimizers:
                if torch.float16 in dtypes_of(gradients_of(optimizer)):
                    raise misuse.fp16_gradients(optimizer)

        retries, group = self.on_overflow.times, self._group
        found_inf = run_pass(scaler, backward, params, retries=retries, group=group)
        self._loss_scalers.record_found_inf(name, found_inf)
        self.last_scale = scaler.state.scale.clone()
        if retries and not retain_graph:
            free_graph(loss)
        if self.on_overflow.drops:
            self.num_dropped = self.num_dropped + found_inf
        self._active += accumulators
        for accumulator, own, (_, state) in zip(
            accumulators, owned, optimizers, strict=True
        ):
            accumulator.accumulate(own, found_inf)
            sum_found_inf = accumulator.restore_grads()
            state["found_inf_per_device"] = {sum_found_inf.device: sum_found_inf}
            state["stage"] = OptState.UNSCALED

    def _accumulator(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> UnscaledGradients:
        """Return an optimizer's gradients so far, ready for another pass."""
        if state["stage"] is OptState.STEPPED:
            raise misuse.unscaled_twice(OptState.STEPPED, None)
        accumulator: UnscaledGradients = state.setdefault(
            "unscaled_gradients", UnscaledGradients(drop=self.on_overflow.drops)
        )
        accumulator.sync_user_edits()
        if not accumulator.num_passes:
            misuse.check_no_gradients([optimizer])
        return accumulator

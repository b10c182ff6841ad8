"""From the gradients of a step to updated weights.

In: gradients that backward passes left, scaled, in 16 bits or folded up. Out: a
verdict on them that all ranks share, and the update, clipped, or nothing changed.
"""

from __future__ import annotations

import weakref
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep._torch import async_read, fused_optimizers, optimizer_hooks
from halfstep.errors import UserError, require_positive, warn_caller
from halfstep.masters import cpu_kernels, fused_step
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.norms import group_by_mesh, total_norm
from halfstep.scaling.loss_scaler import inverse_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.masters import MasterWeights
    from halfstep.scaling.per_pass import BackwardPasses


_IS_SPARSE = attrgetter("is_sparse")


def check_clip_norm(clip: object) -> float | None:
    """Return a largest norm of gradients; None for none.

    Raises:
        UserError: If it is no number above 0.
    """
    if clip is None:
        return None
    return require_positive("clip_grad_norm", clip, "a number above 0, or None")


class OptimizerStep:
    """Checks the gradients of each step, and updates the weights.

    Where the masters have a kernel, gradients are read twice and never written: once
    to look for inf and NaN, once in the pass that unscales, clips, updates and
    publishes. Otherwise they are unscaled in place, and the optimizer steps itself.

    Args:
        masters: Over the optimizer.
        passes: Whose gradients they are.
        clip: Largest norm of all gradients; None neither clips nor takes the norm.
        device: Of the loss scale.
    """

    def __init__(
        self,
        masters: MasterWeights,
        passes: BackwardPasses,
        clip: float | None,
        device: torch.device,
    ) -> None:
        self.masters = masters
        self.clip = clip
        self.norm: Tensor | None = None
        """Norm of the unscaled gradients of the step under way, shape ()."""
        self._passes = passes
        self._device = device
        self._inverse = torch.ones((), device=device)
        self._per_pass_found_inf: Tensor | None = None
        self._is_fused = self._grads_still_scaled = self._warned = False
        # The optimizer outlives the session, which is then no more to be called.
        optimizer_hooks.register_pre_step_check(
            masters.optimizer, partial(_check_external_step, masters, weakref.ref(self))
        )

    def check_external_step(self) -> None:
        """Refuse a step of gradients that the session scaled; warn of others.

        Raises:
            UserError: After `session.backward` of a scaled loss.
        """
        has_scale = self._passes.loss_scalers.rule.scales
        if self._passes.loss_name is not None and has_scale:
            message = (
                "optimizer.step() was called after session.backward(), whose gradients "
                "are multiplied by the loss scale: call session.step(), which unscales "
                "them."
            )
            raise UserError(message)
        has_run = self._passes.loss_name is not None
        if self._warned or not (has_scale or has_run):
            return
        self._warned = True
        if has_run:
            warn_caller(
                "optimizer.step() was called after session.backward(): it neither "
                "clips, nor skips inf and NaN, nor waits for all micro-batches, nor "
                "steps the schedule. Call session.step() instead."
            )
        else:
            warn_caller(
                "optimizer.step() was called in place of session.step(): unless "
                "another scaler scales the loss, small gradients become zero in fp16. "
                "Call session.backward(loss), then session.step()."
            )

    @torch.no_grad()
    def unscaled_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter of the optimizer, copy of its unscaled gradient in fp32)."""
        if self._passes.per_pass:
            for param, total in self._passes.unscaled_sums():
                wide = torch.promote_types(total.dtype, torch.float32)
                yield param, total.to(wide, copy=True)
            return
        inverse = inverse_scale(self._passes.scaler.state.scale)
        groups = self.masters.optimizer.param_groups
        for param in (param for group in groups for param in group["params"]):
            # A 16-bit gradient may not have been added to its fp32 sum yet.
            low = self.masters.model_param(param).grad
            parts = [param.grad, None if low is param.grad else low]
            wide_parts = [
                part.to(torch.promote_types(part.dtype, torch.float32))
                for part in parts
                if part is not None
            ]
            if wide_parts:
                # torch adds sparse to dense, and not the other way round.
                first, *rest = sorted(wide_parts, key=_IS_SPARSE)
                total = sum(rest, first)
                yield param, total * async_read.to_device_async(inverse, total.device)

    def grads(self, *, in_fp32: bool) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter of the optimizer, gradient) for each that has one.

        Args:
            in_fp32: They must be in fp32, for they were added up.
        """
        masters, passes = self.masters, self._passes
        masters.add_new_params()
        self._per_pass_found_inf = passes.restore_grads() if passes.per_pass else None
        grads = masters.grads()
        self._is_fused = self._has_kernel and fused_step.can_read(
            [gradient for _, gradient in grads]
        )
        self._grads_still_scaled = self._is_fused and passes.needs_only_found_inf
        if not self._grads_still_scaled and not in_fp32:
            masters.accumulate_grads()
            grads = masters.grads()
        return grads

    @property
    def _has_kernel(self) -> bool:
        masters = self.masters
        return masters.kernel is not None and not fused_step.why_not_fused(
            masters.optimizer
        )

    def unscale(self, gradients: list[Tensor]) -> Tensor:
        """Unscale gradients if no kernel will, and take their norm if they are clipped.

        Returns:
            1.0 if one of any rank is inf or NaN, else 0.0: float32, shape ().
        """
        norm, passes = self.clip is not None, self._passes
        if self._grads_still_scaled and self.masters.kernel is not None:
            self._inverse = inverse_scale(passes.scaler.state.scale)
            found_inf, squares = self.masters.kernel.check_finite(gradients, norm=norm)
            if squares is not None:
                self.norm = (squares.sqrt() * self._inverse).float()
            return passes.reduce_found_inf(found_inf, gradients)
        self._inverse = torch.ones((), device=self._device)
        if self._per_pass_found_inf is not None:
            found_inf = self._per_pass_found_inf
        elif self._needs_no_unscaling(gradients):
            # torch's kernel writes what it reads, also where the scale is 1.
            found_inf = _check_finite(gradients)
            passes.reduce_found_inf(found_inf, gradients)
        else:
            found_inf = passes.scaler.unscale_(gradients)
            passes.reduce_found_inf(found_inf, gradients)
        if norm and gradients:
            self.norm = total_norm(gradients)
            if self.clip != torch.inf:
                # To divide by a norm that overflowed would make every gradient 0.
                found_inf = torch.maximum(found_inf, self.norm.isinf().float())
        return found_inf

    def _needs_no_unscaling(self, gradients: list[Tensor]) -> bool:
        """Say whether gradients were never scaled, and may be read where they are."""
        return (
            self._device.type == "cpu"
            and not self._passes.loss_scalers.rule.scales
            and self._passes.needs_only_found_inf
            and {*map(type, gradients)} <= {Tensor, nn.Parameter}
        )

    @property
    def skips_on_device(self) -> bool:
        """A kernel on the device itself leaves everything alone on overflow."""
        if self._is_fused and self.masters.kernel is not None:
            return self.masters.kernel.on_device
        inside = fused_optimizers.handles_found_inf(self.masters.optimizer)
        return (
            inside
            and not self.masters.encoding.is_compact
            and not async_read.is_cpu(self._device)
        )

    @torch.no_grad()
    def update(self, found_inf: Tensor, *, on_device: bool) -> None:
        """Clip, update the weights and publish them, unless `found_inf` is 1.

        Args:
            found_inf: As `unscale` returned it.
            on_device: `skips_on_device`.
        """
        optimizer = self.masters.optimizer
        if self._is_fused:
            factor = self._inverse * self._clip_coef()
            if on_device:
                self.masters.update(factor, found_inf=found_inf)
            elif not found_inf:
                self.masters.update(factor)
        elif on_device:
            self._clip()
            self.masters.sync_external_writes()
            with self.masters.own_step():
                fused_optimizers.step(optimizer, found_inf)
            self.masters.publish()
        elif not found_inf:
            self._clip()
            self.masters.step()

    def _clip_coef(self) -> Tensor | float:
        """Return what gradients are multiplied by, as torch clips them."""
        if self.norm is None or self.clip is None or self.clip == torch.inf:
            return 1.0
        return (self.clip / (self.norm + 1e-6)).clamp(max=1.0)

    def _clip(self) -> None:
        if self.norm is not None and self.clip is not None and self.clip != torch.inf:
            params = [param for param, _ in self.masters.grads()]
            for mesh_params in group_by_mesh(params):
                nn.utils.clip_grads_with_norm_(mesh_params, self.clip, self.norm)

    def zero_grad(self) -> None:
        """Forget the gradients of the step."""
        self.masters.optimizer.zero_grad()
        self.masters.clear()
        self._passes.end_step()
        self.norm = self._per_pass_found_inf = None
        self._is_fused = self._grads_still_scaled = False


def _check_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1.0 if a gradient on the CPU is inf or NaN, else 0.0; write to none."""
    found_inf = torch.zeros((), dtype=torch.float32)
    readable = gradients
    if not fused_step.can_read(gradients):
        readable = [g for g in gradients if fused_step.can_read((g,))]
    if not cpu_kernels.available():
        readable = []
    if readable:
        found_inf, _ = cpu_kernels.check_finite(readable, norm=False)
    if len(readable) < len(gradients):
        # Of other dtypes, lazily negated, or sparse.
        read = set(map(id, readable))
        others = [dense_values(g) for g in gradients if id(g) not in read]
        all_finite = all(bool(values.isfinite().all()) for values in others)
        found_inf = torch.maximum(found_inf, torch.tensor(float(not all_finite)))
    return found_inf


def _check_external_step(
    masters: MasterWeights, step_ref: weakref.ref[OptimizerStep]
) -> None:
    """Refuse a step by hand, which would find no gradients in the masters.

    Where parameters are the optimizer's own, it finds them. Without any, there is
    nothing to lose: schedules are kept quiet by such a step.
    """
    if masters.stepping:
        return
    master_params = masters.master_params.values()
    if any(
        s.weight.grad is not None or s.master.grad is not None for s in master_params
    ):
        message = (
            "optimizer.step() was called while the session holds gradients of 16-bit "
            "weights: call session.step(), which unscales and clips them, steps, and "
            "publishes the weights."
        )
        raise UserError(message)
    groups = masters.optimizer.param_groups
    has_grads = any(p.grad is not None for group in groups for p in group["params"])
    optimizer_step = step_ref()
    if has_grads and optimizer_step is not None:
        optimizer_step.check_external_step()

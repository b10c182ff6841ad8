"""Unscales, checks and clips the gradients of a step, and updates the weights.

`Session._update_weights` calls these stages in their order.

In: scaled gradients, in 16 bits or accumulated in fp32. Out: found_inf and, if it is 0,
updated weights. `AccumulationWindow` counts the micro-batches of a step, and warns
about unfinished windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep._torch import async_read, fused_optimizers
from halfstep._torch.optimizer_params import params_of
from halfstep.errors import require_positive, warn_caller
from halfstep.masters import cpu_kernels, fused_step, triton_kernels
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.norms import (
    absmax_of,
    group_by_mesh,
    nonfinite_marks,
    total_norm,
)
from halfstep.scaling import misuse
from halfstep.scaling.loss_scaler import inverse_scale
from halfstep.scaling.step_report import (
    Constant,
    NonFiniteMarks,
    find_nonfinite_params,
)
from halfstep.scaling.unscale import unscale_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.masters import MasterWeights
    from halfstep.masters.encoding import RoundingRng
    from halfstep.masters.fused_step import Kernel
    from halfstep.scaling.loss_scale import ScaleState
    from halfstep.scaling.loss_scaler import LossScaler
    from halfstep.scaling.step_report import NonFiniteParam, StepReport


_IS_SPARSE = attrgetter("is_sparse")
_PARAM, _GRAD = itemgetter(0), itemgetter(1)


def _widened(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def check_clip_norm(clip: object) -> float | None:
    """Return a valid `clip_grad_norm`."""
    if clip is None:
        return None
    return require_positive("clip_grad_norm", clip, "a number above 0, or None")


class OptimizerStep:
    """Checks the gradients of each step, and updates the weights.

    With a fused kernel, gradients are read twice and never written: once to check for
    inf and NaN, once in the pass that unscales, clips, updates and copies back to the
    model weights. Otherwise they are unscaled in place and the optimizer steps.
    """

    def __init__(
        self, masters: MasterWeights, clip: float | None, device: torch.device
    ) -> None:
        self.masters = masters
        self.clip = clip
        self._device = device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._inverse = self._one
        self._marks: Tensor | None = None
        """`nonfinite_marks` of the gradients of the current step, once computed."""
        self._has_triton = triton_kernels.available(device)
        self._kernel: Kernel | None = None
        """Updates the weights in the current step; None: the optimizer does."""
        self._in_place = False
        """Whether gradients are unscaled in place, although a kernel could do it."""
        self._named: list[Tensor] = []
        """Parameters that `_names` names."""
        self._names: list[str] = []

    @torch.no_grad()
    def unscaled_grads(self, scaler: LossScaler) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (optimizer's parameter, copy of its unscaled gradient, >= fp32)."""
        inverse = inverse_scale(scaler.state.scale)
        for param, gradient in self._scaled_grads():
            wide = gradient.to(_widened(gradient))
            yield param, wide * async_read.to_device_async(inverse, wide.device)

    @torch.no_grad()
    def unscaled_norm(self, scaler: LossScaler) -> Tensor:
        """Return the norm of `unscaled_grads`, shape (), without their copies."""
        grads = [gradient for _, gradient in self._scaled_grads()]
        if not grads:
            raise misuse.no_gradient()
        kernel, squares = self.masters.kernel, None
        if kernel is not None and fused_step.can_read(grads):
            _, squares = kernel.check_finite(grads, norm=True)
        norm = total_norm(grads) if squares is None else squares.sqrt().float()
        inverse = inverse_scale(scaler.state.scale)
        return norm * async_read.to_device_async(inverse, norm.device)

    def _scaled_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (optimizer's parameter, its gradient as it is: scaled, any dtype)."""
        for param in params_of(self.masters.optimizer):
            # A 16-bit gradient may not be accumulated in its fp32 sum yet.
            low = self.masters.model_param(param).grad
            parts = [param.grad, None if low is param.grad else low]
            # torch supports dense + sparse, but not sparse + dense.
            present = sorted((p for p in parts if p is not None), key=_IS_SPARSE)
            if len(present) > 1:
                present = [part.to(_widened(part)) for part in present]
            if present:
                yield param, sum(present[1:], present[0])

    def first_grad(self) -> Tensor | None:
        """Return the gradient of the first parameter that has one."""
        return next((gradient for _, gradient in self._scaled_grads()), None)

    def reject_foreign_grads(self, backward_call: str) -> None:
        """Raise if there are gradients; call it if `backward_call` has made none."""
        if self.first_grad() is not None:
            raise misuse.foreign_gradients(backward_call)

    def collect(
        self, scaler: LossScaler, *, in_fp32: bool, in_place: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (the optimizer's parameters that have gradients, these gradients).

        This chooses what `check` and `update` do in this step.

        `in_fp32`: gradients of 16-bit weights are already accumulated in fp32.
        `in_place`: `check` must unscale them in place, for the caller to edit.
        """
        masters = self.masters
        pairs, kernel = masters.grads(), masters.kernel
        can_fuse = kernel is not None and not fused_step.why_not_fused(
            masters.optimizer
        )
        if not can_fuse or not fused_step.can_read([*map(_GRAD, pairs)]):
            kernel = None
        self._kernel = kernel
        # With a scale below 1, unscaling itself can overflow, which `check` must see.
        self._in_place = in_place or scaler.may_be_below_one
        if (kernel is None or self._in_place) and not in_fp32:
            masters.accumulate_grads()
            pairs = masters.grads()
        return [*map(_PARAM, pairs)], [*map(_GRAD, pairs)]

    def check(
        self, grads: list[Tensor], scaler: LossScaler
    ) -> tuple[Tensor, Tensor | None]:
        """Unscale gradients, unless the kernel of `update` will, and check them.

        Returns:
            1.0 if one on this rank is inf or NaN, else 0.0, float32, shape (); and the
            norm of the unscaled gradients, shape (), if it is needed.
        """
        self._inverse, self._marks = self._one, None
        if not grads:  # other ranks may have some
            return torch.zeros_like(self._one), None
        is_plain = {*map(type, grads)} <= {Tensor, nn.Parameter}
        is_foreign = self._is_readable and not is_plain
        norm = None
        if self._kernel is not None and not self._in_place:
            found_inf, norm = self._check_scaled(self._kernel, grads, scaler)
        elif self._in_place or scaler.multiplies or is_foreign:
            found_inf = scaler.unscale_(grads)
        elif self._is_readable:
            # torch's kernel would write to the gradients even if the scale is 1.
            found_inf = _check_finite(grads)
        else:
            found_inf, self._marks = self._check_each(grads)
        if self.clip is None:
            return found_inf, None
        if norm is None:
            norm = total_norm(grads)
        if self.clip != torch.inf:
            # Clipping by a norm that overflowed would make every gradient 0.
            found_inf = torch.maximum(found_inf, norm.isinf().float())
        return found_inf, norm

    def _check_scaled(
        self, kernel: Kernel, grads: list[Tensor], scaler: LossScaler
    ) -> tuple[Tensor, Tensor | None]:
        """Check gradients that the kernel will unscale, and compute their norm."""
        if scaler.multiplies:
            self._inverse = inverse_scale(scaler.state.scale)
        needs_norm = self.clip is not None
        if kernel.on_device:
            measured = triton_kernels.check_each(grads, norm=needs_norm)
            found_inf, squares, self._marks = measured
        else:
            found_inf, squares = kernel.check_finite(grads, norm=needs_norm)
        if squares is None:
            return found_inf, None
        return found_inf, (squares.sqrt() * self._inverse).float()

    @property
    def _is_readable(self) -> bool:
        """Whether the host reads numbers of the device without synchronization."""
        return self._device.type in async_read.READABLE_DEVICES

    def _check_each(self, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return 1.0 if a gradient holds inf or NaN, else 0.0; and their marks."""
        is_one_launch = (
            self._has_triton
            and {gradient.device for gradient in grads} == {self._device}
            and fused_step.can_read(grads)
            and not async_read.is_capturing()
        )
        if is_one_launch:
            found_inf, _, marks = triton_kernels.check_each(grads, norm=False)
            return found_inf, marks
        absmax = absmax_of(grads)
        found_inf = unscale_([absmax.to(_widened(absmax))], self._one)
        return found_inf, nonfinite_marks(grads, absmax)

    def nonfinite_params(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        name_of: Callable[[Tensor], str],
    ) -> Callable[[], tuple[NonFiniteParam, ...]]:
        """Return a function that returns the parameters with non-finite gradients.

        It reads the gradients now, before clipping and clearing destroy them, without
        synchronization if the update kernel skips by itself.
        """
        if [*map(id, params)] != [*map(id, self._named)]:
            self._named, self._names = params, [*map(name_of, params)]
        if self.skips_on_device and grads:
            if self._marks is None:
                _, self._marks = self._check_each(grads)
            return NonFiniteMarks(self._names, self._marks)
        return Constant(find_nonfinite_params(zip(self._names, grads, strict=True)))

    @property
    def skips_on_device(self) -> bool:
        """Whether the update kernel itself skips on overflow, without the host."""
        if self._kernel is not None:
            return self._kernel.on_device
        inside = fused_optimizers.handles_found_inf(self.masters.optimizer)
        return inside and not self.masters.encoding.is_compact and not self._is_readable

    @torch.no_grad()
    def update(self, found_inf: Tensor, norm: Tensor | None) -> None:
        """Clip, update and copy back to the model weights, unless `found_inf` is 1.

        `norm` is that of `check`.
        """
        masters, on_device = self.masters, self.skips_on_device
        if not on_device and found_inf:
            return
        max_norm = None if self.clip == torch.inf else self.clip
        if self._kernel is not None:
            factor = self._inverse
            if max_norm is not None and norm is not None:
                factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
            masters.update(factor, found_inf=found_inf if on_device else None)
            return
        if max_norm is not None and norm is not None:
            for mesh_params in group_by_mesh([param for param, _ in masters.grads()]):
                nn.utils.clip_grads_with_norm_(mesh_params, max_norm, norm)
        if on_device:
            masters.sync_external_writes()
            with masters.own_step():
                fused_optimizers.step(masters.optimizer, found_inf)
            masters.publish()
        else:
            masters.step()


def _check_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1.0 if a CPU gradient holds inf or NaN, else 0.0; modifies none."""
    found_inf = torch.zeros((), dtype=torch.float32)
    readable = gradients if cpu_kernels.available() else []
    if not fused_step.can_read(readable):
        readable = [g for g in gradients if fused_step.can_read((g,))]
    if readable:
        found_inf, _ = cpu_kernels.check_finite(readable, norm=False)
    if len(readable) < len(gradients):
        # Other dtypes, lazily negated (`is_neg`), or sparse.
        read = set(map(id, readable))
        others = [dense_values(g) for g in gradients if id(g) not in read]
        all_finite = all(bool(values.isfinite().all()) for values in others)
        found_inf = torch.maximum(found_inf, torch.tensor(float(not all_finite)))
    return found_inf


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What is left to do once the weights are updated, and what tells it is done."""

    report: StepReport
    found_inf: Tensor
    """1.0 if a gradient was non-finite, else 0.0, shape ()."""
    skipped: Tensor
    """1.0 if no weight was updated, else 0.0, shape ()."""
    scale_state: ScaleState
    """Of the scaler, before the step."""
    count_version: int
    """Version counter of the number of skipped steps, before the step."""
    rng: RoundingRng
    """Of the master weights, before the step."""


class AccumulationWindow:
    """Micro-batches since the last optimizer step.

    Attributes:
        size: Micro-batches per step.
        num_done: Micro-batches that `session.step` has counted.
        loss: Loss of the current micro-batch; None between micro-batches.
        num_contexts: Training contexts opened since the last call of `session.step`.
        num_passes: Backward passes since then.
        is_partial: A backward pass or a step is changing the gradients, or was ended
            by an exception, and the window has been dropped.
        has_gradients: The last micro-batch left gradients that the caller can clear.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_done = 0
        self.loss: Tensor | None = None
        self.num_contexts = self.num_passes = 0
        self.has_gradients = self.is_partial = False
        self._warned_pending = self._warned_cleared = self._warned_rare = False

    @property
    def num_pending(self) -> int:
        """Number of micro-batches whose gradients no step has used yet."""
        return self.num_done + (self.loss is not None)

    @property
    def has_begun(self) -> bool:
        """Whether any part of the window has been computed."""
        return bool(self.num_contexts or self.num_pending)

    def reset(self) -> None:
        """Start the next window."""
        self.num_done, self.loss, self.has_gradients = 0, None, False
        self.num_contexts = self.num_passes = 0
        self.is_partial = False

    def warn_if_cleared(self, *, has_gradients: bool) -> None:
        """Warn once if gradients of the window are gone before its next pass."""
        if self.has_gradients and not has_gradients and not self._warned_cleared:
            self._warned_cleared = True
            warn_caller(
                f"gradients of {self.num_done} of {self.size} micro-batches were "
                "cleared before the step that needs them: leave optimizer.zero_grad() "
                "out; session.step() clears them after each full window."
            )

    def warn_if_too_rare(self) -> None:
        """Warn once if `session.step` is called per window, not per micro-batch.

        Several losses of one micro-batch normally share a context; but two contexts for
        two losses are common, so windows of 2 do not warn.
        """
        is_too_rare = (
            self.size > 2  # noqa: PLR2004
            and self.num_passes == self.num_contexts == self.size
        )
        self.num_contexts = self.num_passes = 0
        if is_too_rare and not self._warned_rare:
            self._warned_rare = True
            warn_caller(
                f"session.step() was called after {self.size} backward passes, which "
                f"with accumulate={self.size} it counts as one micro-batch of "
                f"{self.size}: call it after each backward pass."
            )

    def warn_if_pending(self) -> None:
        """Warn once that the weights do not include the pending micro-batches."""
        if self.num_done and not self._warned_pending:
            self._warned_pending = True
            warn_caller(
                f"evaluation with {self.num_done} of {self.size} micro-batches "
                "pending: the weights lack them. session.flush() updates with those "
                "there are."
            )

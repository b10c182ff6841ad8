"""Steps the optimizer inside the backward pass, so that gradients never coexist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch import optimizer_hooks
from halfstep.errors import UserError
from halfstep.masters import fused_step
from halfstep.numerics.local_tensor import local_values

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from halfstep.masters import MasterWeights
    from halfstep.masters.fused_step import Kernel
    from halfstep.scaling import ScaleRule


def check(
    rule: ScaleRule,
    clip: float | None,
    accumulate: int,
    *,
    needs_agreement: bool,
) -> None:
    """Reject options that need all gradients of a step at once.

    `needs_agreement`: ranks must agree on what is skipped.
    """
    why = ""
    if rule.scales:
        why = "a loss scale: use dtype='bf16', or loss_scale='none'"
    elif accumulate > 1:
        why = f"accumulate={accumulate}: gradients would have to stay"
    elif needs_agreement:
        why = "process_group: weights are updated before ranks can agree"
    if why:
        message = f"optimizer_in_backward=True updates in backward; it excludes {why}."
        raise UserError(message)
    check_norm(clip)


def check_norm(clip: float | None) -> None:
    """Reject gradient clipping."""
    if clip is not None and clip != torch.inf:
        raise UserError(
            f"optimizer_in_backward=True updates in backward; it excludes "
            f"clip_grad_norm={clip}: the norm is known only after the last gradient. "
            "math.inf only measures."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Reject an optimizer that cannot be stepped for one parameter at a time."""
    if not optimizer_hooks.runs_only_torch_code(optimizer):
        raise UserError(
            f"optimizer_in_backward=True steps over one parameter at a time, and "
            f"{type(optimizer).__name__} might count each as a step: it is not "
            "torch's own, or has step hooks. Leave optimizer_in_backward out."
        )


class OptimizerInBackward:
    """Updates each parameter as soon as its gradient exists, and frees the gradient.

    A gradient with inf or NaN skips the update of its own parameter only. `norm`:
    compute the norm of all gradients.
    """

    def __init__(self, masters: MasterWeights, *, norm: bool) -> None:
        check_optimizer(masters.optimizer)
        self.masters = masters
        self.skipped_params: dict[Tensor, tuple[bool, bool]] = {}
        """Parameters of the optimizer whose gradients were non-finite in this step ->
        whether they held inf, whether NaN."""
        self.stepped_params: set[Tensor] = set()
        """Parameters of the optimizer with a gradient since the last step."""
        self._square_sum: Tensor | None = None
        self._needs_norm = norm
        self._kernel: Kernel | None = None
        self._group_of: dict[Tensor, dict[str, Any]] = {}

    @property
    def count(self) -> int:
        """Number of gradients since the last step."""
        return len(self.stepped_params)

    def start(self, *, in_backward: bool) -> None:
        """Update as gradients arrive, until `consume_in_backward(None)`, or later."""
        # A step hook may have been added after `prepare`.
        optimizer = self.masters.optimizer
        check_optimizer(optimizer)
        self.masters.add_new_params()
        is_unfused = bool(fused_step.why_not_fused(optimizer))
        self._kernel = None if is_unfused else self.masters.kernel
        # `load_state_dict` replaces the optimizer's group dicts.
        self._group_of = {p: g for g in optimizer.param_groups for p in g["params"]}
        if not self.stepped_params:
            # After the first gradient, this step's own updates have changed weights.
            self.masters.sync_external_writes()
        if in_backward:
            self.masters.consume_in_backward(self._step_param, self._group_of)

    def discard(self) -> None:
        """Forget which weights the current step has updated."""
        self.skipped_params, self._square_sum, self.stepped_params = {}, None, set()

    def step_all(self) -> None:
        """Update with the gradients of a backward pass, after ranks averaged them."""
        for param in self._group_of:
            self._step_param(param)

    @torch.no_grad()
    def _step_param(self, param: Tensor) -> None:
        """Update a parameter with its gradient, and free the gradient."""
        weight = self.masters.model_param(param)
        gradient = weight.grad
        if gradient is None:
            return
        if param not in self._group_of:  # it has left the optimizer
            weight.grad = None
            return
        if param in self.stepped_params:
            raise UserError(
                f"a weight of shape {tuple(weight.shape)} got a second gradient after "
                "its update: a checkpoint with use_reentrant=True that shares it? Set "
                "use_reentrant=False, or optimizer_in_backward=False."
            )
        self.stepped_params.add(param)
        kernel = self._kernel if fused_step.can_read([gradient]) else None
        values = local_values(gradient.coalesce() if gradient.is_sparse else gradient)
        if kernel is None:
            norm = torch.linalg.vector_norm(values, dtype=torch.float64)
            # Squares of fp32 values cannot overflow fp64.
            found_inf = ~norm.isfinite()
            square = norm.square() if self._needs_norm else None
        else:
            found_inf, square = kernel.check_finite([values], norm=self._needs_norm)
        if found_inf:
            has_inf, has_nan = values.isinf().any(), values.isnan().any()
            self.skipped_params[param] = bool(has_inf), bool(has_nan)
        else:
            if square is not None:
                total = self._square_sum
                self._square_sum = square if total is None else total + square
            if kernel is None:
                self.masters.step_param(param)
            else:
                group = self._group_of[param]
                self.masters.update_param(group, param, found_inf=found_inf)
            self.masters.mark_param_synced(param)
        weight.grad = param.grad = None

    @property
    def norm(self) -> Tensor | None:
        """Norm of all gradients of the current step, shape (), if it is computed."""
        return None if self._square_sum is None else self._square_sum.sqrt().float()

    def finish_step(self) -> None:
        """End a step."""
        self.discard()
        self.masters.advance_rng()
        optimizer_hooks.notify(self.masters.optimizer)

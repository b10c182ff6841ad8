"""Updates inside the backward pass, so that gradients never exist all at once.

In: masters, and gradients as they arrive. Out: updated weights, each gradient freed at
once, and the parameters whose gradients could not be used.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._torch import optimizer_hooks
from halfstep.errors import UserError
from halfstep.masters import eager_kernels, fused_step, generic_step

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
    agreed: bool,
    whole: bool,
) -> None:
    """Refuse what needs all gradients of a step at once.

    Args:
        rule: Of the loss scale.
        clip: Largest norm of all gradients.
        accumulate: Micro-batches of a step.
        agreed: Ranks must agree on what is skipped.
        whole: Micro-batches are dropped or repeated, or lost updates counted.

    Raises:
        UserError: With what to leave out.
    """
    why = ""
    if rule.scales:
        why = "a loss scale: use dtype='bf16', or loss_scale='none'"
    elif accumulate > 1:
        why = f"accumulate={accumulate}: gradients would have to stay"
    elif agreed:
        why = "process_group: weights are updated before ranks can agree"
    elif whole:
        why = "drop_bad_microbatch, retries and lost_updates_every"
    if why:
        message = f"release_gradients=True updates inside backward; it excludes {why}."
        raise UserError(message)
    check_norm(clip)


def check_norm(clip: float | None) -> None:
    """Refuse to clip.

    Raises:
        UserError: If it is asked for.
    """
    if clip is not None and clip != torch.inf:
        message = (
            f"release_gradients=True updates inside backward; it excludes "
            f"clip_grad_norm={clip}: the norm is known only after the last gradient. "
            "math.inf only measures."
        )
        raise UserError(message)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step over one parameter by itself.

    Raises:
        UserError: With why.
    """
    if not generic_step.by_parameter(optimizer):
        message = (
            f"release_gradients=True steps over one parameter at a time, and "
            f"{type(optimizer).__name__} might count each as a step: it is not "
            "torch's own, or has step hooks. Leave release_gradients out."
        )
        raise UserError(message)


class Release:
    """Updates each parameter as soon as its gradient is there.

    A gradient with inf or NaN leaves its own parameter alone; others have moved, or
    will. Without a loss scale such a gradient is a fault of the run, not of the scale.

    Args:
        masters: With a kernel, or over an optimizer that keeps its state by parameter.
        norm: Sum up the squares of the gradients too.

    Raises:
        UserError: If the optimizer cannot step over one parameter by itself.
    """

    def __init__(self, masters: MasterWeights, *, norm: bool) -> None:
        check_optimizer(masters.optimizer)
        self.masters = masters
        self.left_out: list[Tensor] = []
        """Parameters of the optimizer whose gradients were not finite."""
        self.used: set[Tensor] = set()
        """Parameters of the optimizer whose gradients came since the last step."""
        self._squares: Tensor | None = None
        self._norm = norm
        self._kernel: Kernel | None = None
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._hooked: set[Tensor] = set()
        self._at_once = False

    @property
    def count(self) -> int:
        """Gradients that came since the last step."""
        return len(self.used)

    def begin(self, *, at_once: bool) -> None:
        """See to it that gradients are used.

        Args:
            at_once: When they arrive; otherwise it is `use_all` that does it.
        """
        self._at_once = at_once
        # A step hook may have come after `prepare`.
        optimizer = self.masters.optimizer
        check_optimizer(optimizer)
        self.masters.adopt()
        hindered = bool(fused_step.hindrance(optimizer))
        self._kernel = None if hindered else self.masters.kernel
        # Loading a state gives an optimizer groups of its own anew.
        self._group_of = {p: g for g in optimizer.param_groups for p in g["params"]}
        if not self.used:
            # Otherwise the weights were changed by this step's own updates.
            self.masters.refresh()
        for param in self._group_of:
            weight = self.masters.stored(param)
            if param not in self._hooked and weight.requires_grad:
                self._hooked.add(param)
                use = partial(self._on_arrival, param)
                weight.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Leave gradients of other passes alone."""
        self._at_once = False

    def drop(self) -> None:
        """Forget which weights the step under way has updated."""
        self.left_out, self._squares, self.used = [], None, set()

    def use_all(self) -> None:
        """Use what is there after a backward pass whose gradients travelled."""
        for param in self._group_of:
            weight = self.masters.stored(param)
            if weight.grad is not None:
                self._use(param, weight)

    def _on_arrival(self, param: Tensor, weight: Tensor) -> None:
        if self._at_once:
            self._use(param, weight)

    @torch.no_grad()
    def _use(self, param: Tensor, weight: Tensor) -> None:
        """Update a parameter by its gradient, and free that."""
        gradient = weight.grad
        if gradient is None:
            return
        if param in self.used:
            message = (
                f"a weight of shape {tuple(weight.shape)} got a second gradient after "
                "its update: a checkpoint with use_reentrant=True that shares it? Set "
                "use_reentrant=False, or release_gradients=False."
            )
            raise UserError(message)
        self.used.add(param)
        masters = self.masters
        kernel = self._kernel if fused_step.usable([gradient]) else None
        look = eager_kernels.look if kernel is None else kernel.look
        numbers = gradient
        if gradient.is_sparse:
            numbers = gradient.coalesce().values()
        found, square = look([numbers], norm=self._norm)
        if found:
            self.left_out.append(param)
        else:
            if square is not None:
                total = self._squares
                self._squares = square if total is None else total + square
            if kernel is None:
                masters.step_over(param)
            else:
                one = torch.ones((), device=weight.device)
                only = self._group_of[param], param
                masters.update(one, found_inf=found, only=only)
        weight.grad = param.grad = None

    def finish(self) -> tuple[list[Tensor], Tensor | None]:
        """End a step; return parameters left out, and the norm of all gradients."""
        left_out, squares = self.left_out, self._squares
        self.left_out, self.used, self._squares = [], set(), None
        self.masters.tick()
        optimizer_hooks.tell(self.masters.optimizer)
        return left_out, None if squares is None else squares.sqrt().float()

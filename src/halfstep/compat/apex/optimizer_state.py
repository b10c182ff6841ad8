"""Attaches amp's state to an optimizer: saved gradients, master weights, skipped steps.

Gradients of the optimizer are then unscaled after each pass before they are summed, and
its `step` can be skipped.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from halfstep.compat.apex import masters as registry
from halfstep.compat.apex.state import STATE, AmpError, log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from halfstep.masters import MasterWeights

_ATTRIBUTE = "_amp_stash"


class OverflowCheck(Protocol):
    """A loss scaler that has checked gradients."""

    def finish_check(self) -> None:
        """Read the result of the check and mark the optimizers that must skip."""

    def skip_message(self) -> str:
        """Return the message about a skipped step."""


class AmpOptimizerState:
    """Gradients of one optimizer between backward passes.

    Backward passes of one step may have different loss scales, so scaled gradients
    cannot be summed. Unscaled gradients are saved before a pass, and added in fp32 to
    the gradients of that pass after these are unscaled.

    Attributes:
        unchecked: Loss scalers that unscaled gradients of this optimizer and whose
            result is not read yet.
        skipped_by: The loss scaler that found an overflow, so that the next step is
            skipped; None for no skip.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.unchecked: list[OverflowCheck] = []
        self.skipped_by: OverflowCheck | None = None
        self._saved_grads: dict[Tensor, Tensor] = {}
        self._pending_scale: float | None = None
        self._is_synced = False
        registry.record(self.pairs)

    @property
    def pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Pairs of 16-bit parameter and fp32 master weight."""
        return [] if self.masters is None else self.masters.pairs

    def stored(self, param: Tensor) -> Tensor:
        """Return the model's parameter for one of the optimizer's parameters."""
        return param if self.masters is None else self.masters.model_param(param)

    def _own_params(self) -> Iterator[Tensor]:
        """Yield the parameters without a master weight."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if self.stored(param) is param:
                    yield param

    def prepare(self, scale: float) -> None:
        """Save the unscaled gradients before a backward pass.

        Args:
            scale: Loss scale of the pass.

        Raises:
            AmpError: If gradients with another scale are not unscaled yet.
        """
        if not self._is_synced:
            registry.sync_from_params(self.pairs)
            self._is_synced = True
        if self._pending_scale is not None and any(True for _ in self._scaled()):
            if self._pending_scale != scale:
                message = (
                    f"gradients scaled by {self._pending_scale:g} wait to be unscaled, "
                    f"and this loss is scaled by {scale:g}: leave delay_unscale out "
                    "where losses have scales of their own."
                )
                raise AmpError(message)
            return
        self._pending_scale = None
        for param in self._own_params():
            if param.grad is not None:
                self._saved_grads[param] = param.grad
                param.grad = None
        for param, _ in self.pairs:
            param.grad = None

    def _scaled(self) -> Iterator[Tensor]:
        yield from (param for param in self._own_params() if param.grad is not None)
        yield from (p for p, _ in self.pairs if p.grad is not None)

    def delay(self, scale: float) -> None:
        """Leave the gradients of a pass scaled, for a later pass to unscale."""
        self._pending_scale = scale

    def restore(self) -> None:
        """Drop the gradients of a failed pass, unless earlier ones are scaled too."""
        if self._pending_scale is None:
            for param in [*self._own_params(), *(p for p, _ in self.pairs)]:
                param.grad = None
            self._add_saved_grads()

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Return the scaled gradients of a pass, of 16-bit parameters in fp32.

        Returns:
            (parameter, gradient). A gradient is the parameter's `.grad`, or is to be
            added to it by `add`.
        """
        self._pending_scale = None
        grads: list[tuple[Tensor, Tensor]] = []
        new_masters = []
        for param, master in self.pairs:
            if param.grad is None:
                continue
            if master.grad is None:
                new_masters.append(master)
                continue
            grads.append((master, param.grad.float()))
            param.grad = None
        if self.masters is not None:
            self.masters.accumulate_grads()
        grads += [(m, m.grad) for m in new_masters if m.grad is not None]
        grads += [(p, p.grad) for p in self._own_params() if p.grad is not None]
        return grads

    @torch.no_grad()
    def add(self, unscaled: list[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of `collect`, now unscaled, to those of earlier passes."""
        for param, gradient in unscaled:
            if param.grad is not gradient:
                _add_grad(param, gradient)
        self._add_saved_grads()

    def _add_saved_grads(self) -> None:
        for param, gradient in self._saved_grads.items():
            _add_grad(param, gradient)
        self._saved_grads.clear()

    def step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the optimizer's own step, unless a gradient is non-finite.

        Raises:
            AmpError: If a closure is given, gradients are still scaled, or there was no
                `scale_loss`.
            LossScaleCollapse: If skipping has gone on for too long.
        """
        for scaler in list(self.unchecked):
            scaler.finish_check()
        self._check_unscaled()
        self._check_masters_have_grads()
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and (self.pairs or STATE.scales):
            message = (
                f"{type(self.optimizer).__name__}.step was given a closure, and amp "
                "does not support one where it scales losses or keeps masters."
            )
            raise AmpError(message)
        if self.skipped_by is not None:
            log(self.skipped_by.skip_message())
            self.skipped_by = None
            self.clear_master_grads()
            # Otherwise schedulers warn that they step before the optimizer.
            vars(self.optimizer)["_opt_called"] = True
            return None
        with STATE.without_casts():
            result = run(*args, **kwargs)
        if self.masters is not None:
            self.masters.publish()
        self.clear_master_grads()
        return result

    def _check_unscaled(self) -> None:
        """Reject a step whose gradients are still scaled."""
        waits = self._pending_scale is not None and any(True for _ in self._scaled())
        if waits and (self._pending_scale != 1 or self.pairs):
            message = (
                "optimizer.step() was called while its gradients are still scaled by "
                f"{self._pending_scale:g}: the last scale_loss before a step must "
                "leave delay_unscale=False."
            )
            raise AmpError(message)

    def _check_masters_have_grads(self) -> None:
        """Reject a step without effect: no master weight has a gradient."""
        num_grads = sum(param.grad is not None for param, _ in self.pairs)
        if num_grads and all(master.grad is None for _, master in self.pairs):
            message = (
                f"gradients never went through amp.scale_loss: {num_grads} weights "
                "have one, no master has. Call backward() in `with amp.scale_loss("
                "loss, optimizer) as scaled_loss:`."
            )
            raise AmpError(message)

    def clear_master_grads(self) -> None:
        """Free gradients of master weights, which model.zero_grad() does not clear."""
        for _, master in self.pairs:
            master.grad = None

    def zero_grad(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Clear the gradients of the model's parameters and of the master weights."""
        run(*args, **kwargs)
        self._saved_grads.clear()
        self._pending_scale = None
        for param, master in self.pairs:
            param.grad = master.grad = None

    def add_param_group(
        self,
        run: Callable[..., None],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Add parameters, with master weights if the others have them."""
        run(*args, **kwargs)
        before = len(self.pairs)
        if self.masters is not None:
            self.masters.add_new_params()
        registry.record(self.pairs[before:])


def _add_grad(param: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, which may be missing or sparse."""
    grad = param.grad
    if grad is None:
        param.grad = gradient
    elif grad.is_sparse or gradient.is_sparse:
        param.grad = grad + gradient
    else:
        grad.add_(gradient)


def attach(optimizer: torch.optim.Optimizer, masters: MasterWeights | None) -> None:
    """Attach amp's state to an optimizer, and wrap its methods."""
    state = AmpOptimizerState(optimizer, masters)
    setattr(optimizer, _ATTRIBUTE, state)
    for name in ("step", "zero_grad", "add_param_group"):
        _route(optimizer, name, getattr(state, name))


def _route(
    optimizer: torch.optim.Optimizer, name: str, through: Callable[..., Any]
) -> None:
    own = getattr(optimizer, name)

    # Schedulers mark `step` (wraps copies the mark) and require a bound method.
    @functools.wraps(own)
    def method(_: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return through(own, *args, **kwargs)

    setattr(optimizer, name, MethodType(method, optimizer))


def state_of(optimizer: object) -> AmpOptimizerState:
    """Return amp's state of an optimizer.

    Raises:
        AmpError: If it did not go through `initialize`.
    """
    state: AmpOptimizerState | None = getattr(optimizer, _ATTRIBUTE, None)
    if state is None:
        message = (
            f"{type(optimizer).__name__} did not come from amp.initialize: pass it "
            "there once, before training, and use what it returns."
        )
        raise AmpError(message)
    return state


def is_attached(optimizer: object) -> bool:
    """Return whether an optimizer went through `initialize`."""
    return hasattr(optimizer, _ATTRIBUTE)

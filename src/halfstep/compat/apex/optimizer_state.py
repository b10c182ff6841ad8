"""What amp keeps of an optimizer: saved gradients, masters, a step to skip.

In: an optimizer and perhaps masters. Out: the same optimizer, whose gradients are
unscaled pass by pass before they are added up, and whose `step` can be left out.
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
    """A loss scaler that has looked at gradients."""

    def finish_check(self) -> None:
        """Say what it saw, to those whose gradients they were."""

    def skip_message(self) -> str:
        """Return what to print of a skipped step."""


class AmpOptimizerState:
    """Gradients of one optimizer between backward passes.

    Why: two backward passes may have different loss scales, and the scale moves
    between them. A sum of scaled gradients has no scale. So what was unscaled is set
    aside during a pass, and added in fp32 to what that pass leaves, once unscaled.

    Attributes:
        unchecked: Loss scalers that have seen gradients of this optimizer, and were
            not asked yet whether they were finite.
        skipped_by: The loss scaler for whose sake the next step is left out.
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
        """(16-bit parameter, fp32 master)."""
        return [] if self.masters is None else self.masters.pairs

    def stored(self, param: Tensor) -> Tensor:
        """Return the model's parameter behind one of the optimizer's."""
        return param if self.masters is None else self.masters.model_param(param)

    def _own_params(self) -> Iterator[Tensor]:
        """Yield the parameters that are their own masters."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if self.stored(param) is param:
                    yield param

    def prepare(self, scale: float) -> None:
        """Set aside what is unscaled, before a backward pass.

        Args:
            scale: Of the loss.

        Raises:
            AmpError: If scaled gradients of another scale wait to be unscaled.
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
        """Forget what a pass that failed has left, unless passes before it wait too."""
        if self._pending_scale is None:
            for param in [*self._own_params(), *(p for p, _ in self.pairs)]:
                param.grad = None
            self._add_saved_grads()

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """Bring the gradients of a pass to where they are unscaled.

        Returns:
            Each with the parameter it is of. Some are the parameter's gradient, the
            others are to be added to it.
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
        """Add what `collect` returned, unscaled, to what is there already."""
        for param, gradient in unscaled:
            if param.grad is not gradient:
                _add_grad(param, gradient)
        self._add_saved_grads()

    def _add_saved_grads(self) -> None:
        for param, gradient in self._saved_grads.items():
            _add_grad(param, gradient)
        self._saved_grads.clear()

    def step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the optimizer's own step, unless a gradient was not finite.

        Raises:
            AmpError: If a closure is given, gradients are still scaled, or none went
                through `scale_loss`.
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
            self._clear()
            # A schedule would warn that it steps before the optimizer did.
            vars(self.optimizer)["_opt_called"] = True
            return None
        with STATE.without_casts():
            result = run(*args, **kwargs)
        if self.masters is not None:
            self.masters.publish()
        self._clear()
        return result

    def _check_unscaled(self) -> None:
        """Refuse a step whose gradients nobody has unscaled."""
        waits = self._pending_scale is not None and any(True for _ in self._scaled())
        if waits and (self._pending_scale != 1 or self.pairs):
            message = (
                "optimizer.step() was called while its gradients are still scaled by "
                f"{self._pending_scale:g}: the last scale_loss before a step must "
                "leave delay_unscale=False."
            )
            raise AmpError(message)

    def _check_masters_have_grads(self) -> None:
        """Refuse a step that would do nothing, since no gradient reached a master."""
        num_grads = sum(param.grad is not None for param, _ in self.pairs)
        if num_grads and all(master.grad is None for _, master in self.pairs):
            message = (
                f"gradients never went through amp.scale_loss: {num_grads} weights "
                "have one, no master has. Call backward() in `with amp.scale_loss("
                "loss, optimizer) as scaled_loss:`."
            )
            raise AmpError(message)

    def _clear(self) -> None:
        """Free the masters' gradients, which model.zero_grad() does not reach."""
        for _, master in self.pairs:
            master.grad = None

    def zero_grad(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Clear the gradients of the model's parameters and of the masters."""
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
        """Add parameters, with masters where the others have them."""
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

    # The scheduler's mark on `step` must show, and it asks for a bound method.
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
    """Say whether an optimizer went through `initialize`."""
    return hasattr(optimizer, _ATTRIBUTE)

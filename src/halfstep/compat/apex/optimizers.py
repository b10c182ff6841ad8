"""Implements apex's fused optimizers as subclasses of torch's with the same update.

Arguments are apex's. Those that ask for another update than torch's raise `AmpError`;
those about how apex computes it, such as `set_grad_none`, are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

_DECOUPLED = "decoupled_weight_decay"
"""torch's name for `adam_w_mode`, an option of each parameter group."""


class FusedAdam(torch.optim.AdamW):
    """torch's AdamW, with the decay of Adam where `adam_w_mode` is False.

    Raises:
        AmpError: With `bias_correction=False`, `amsgrad` or `master_weights` (amp's O2
            has master weights).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        del set_grad_none
        refused = {"bias_correction": not bias_correction, "amsgrad": amsgrad}
        _refuse("FusedAdam", refused | {"master_weights": master_weights})
        super().__init__(params, lr, betas, eps, weight_decay, capturable=capturable)
        self.defaults[_DECOUPLED] = adam_w_mode
        self._keep_mode()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state but keep the mode, which AdamW would reset to True."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_mode()

    def _keep_mode(self) -> None:
        for group in self.param_groups:
            group[_DECOUPLED] = self.defaults[_DECOUPLED]


class FusedSGD(torch.optim.SGD):
    """torch's SGD; raises `AmpError` with `wd_after_momentum`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads, set_grad_none
        _refuse("FusedSGD", {"wd_after_momentum": wd_after_momentum})
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov=nesterov
        )


class FusedAdagrad(torch.optim.Adagrad):
    """torch's Adagrad; raises `AmpError` with `adagrad_w_mode`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        del set_grad_none
        _refuse("FusedAdagrad", {"adagrad_w_mode": adagrad_w_mode})
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)


def _absent(name: str) -> Callable[..., NoReturn]:
    """Return a function in place of an optimizer that torch has not."""

    def raise_error(*_: object, **__: object) -> NoReturn:
        raise AmpError(
            f"{name} has no counterpart in torch: use FusedAdam, FusedSGD or "
            "FusedAdagrad, or another library's optimizer, which amp.initialize takes "
            "as well."
        )

    return raise_error


FusedLAMB, FusedNovoGrad = map(_absent, ("FusedLAMB", "FusedNovoGrad"))


def _refuse(name: str, asked: dict[str, bool]) -> None:
    for option, wanted in asked.items():
        if wanted:
            raise AmpError(
                f"{name}: the given {option} asks for an update that torch's optimizer "
                "does not do; leave it at its default."
            )

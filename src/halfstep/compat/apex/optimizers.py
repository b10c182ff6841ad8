"""Implements apex's fused optimizers as subclasses of torch's with the same update.

Options that torch's optimizers lack raise `AmpError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

_DECOUPLED = "decoupled_weight_decay"
"""torch's name for `adam_w_mode`, an option of each parameter group."""


class FusedAdam(torch.optim.AdamW):
    """torch's AdamW, with the decay of Adam where `adam_w_mode` is False.

    Args:
        params: As for torch.
        lr: Learning rate.
        bias_correction: False is rejected.
        betas: As for torch.
        eps: As for torch.
        adam_w_mode: Decay shrinks the weight itself.
        weight_decay: As for torch.
        amsgrad: True is rejected, as by apex.
        set_grad_none: Not used: torch's `zero_grad` does so by default.
        capturable: As for torch.
        master_weights: True is rejected: amp's O2 keeps masters.

    Raises:
        AmpError: If something is asked for that torch has not.
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
    """torch's SGD.

    Args:
        params: As for torch.
        lr: Learning rate.
        momentum: As for torch.
        dampening: As for torch.
        weight_decay: As for torch.
        nesterov: As for torch.
        wd_after_momentum: True is rejected.
        materialize_master_grads: Not used: they always are.
        set_grad_none: Not used: torch's `zero_grad` does so by default.

    Raises:
        AmpError: If something is asked for that torch has not.
    """

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
    """torch's Adagrad.

    Args:
        params: As for torch.
        lr: Learning rate.
        eps: As for torch.
        weight_decay: As for torch.
        set_grad_none: Not used: torch's `zero_grad` does so by default.
        adagrad_w_mode: True is rejected.

    Raises:
        AmpError: If something is asked for that torch has not.
    """

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


def FusedLAMB(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401, N802
    """Raise: torch has no LAMB.

    Raises:
        AmpError: Always.
    """
    _absent("FusedLAMB")


def FusedNovoGrad(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401, N802
    """Raise: torch has no NovoGrad.

    Raises:
        AmpError: Always.
    """
    _absent("FusedNovoGrad")


def _absent(name: str) -> NoReturn:
    message = (
        f"{name} has no counterpart in torch: use FusedAdam, FusedSGD or FusedAdagrad, "
        "or another library's optimizer, which amp.initialize takes as well."
    )
    raise AmpError(message)


def _refuse(name: str, asked: dict[str, bool]) -> None:
    for option, wanted in asked.items():
        if wanted:
            message = (
                f"{name}: the given {option} asks for an update that torch's optimizer "
                "does not do; leave it at its default."
            )
            raise AmpError(message)

"""Hooks that report a 16-bit model used without its session.

In: a model whose weights are low. Out: hooks on it. One names the autocast context when
a forward pass outside of it fails; one warns of a `state_dict` without master weights.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.casting import dtype_mismatch
from halfstep.errors import warn_caller
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from halfstep.machine.recommendation import Choice


def attach(model: nn.Module, choice: Choice, device: str, *, masters: bool) -> None:
    """Hook a model whose weights were converted.

    Args:
        model: As it was prepared.
        choice: Level and format.
        device: Its device type.
        masters: There are master weights.
    """
    stored = f"{choice.format.name} (level {choice.level.name})"
    if choice.level.low_weights and choice.level.autocast:
        model.register_forward_hook(DtypeErrorHook(stored, device), always_call=True)
    if masters:
        hook = LowStateDictHook(choice.format.name)
        model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]


class DtypeErrorHook:
    """Forward hook: adds a line to errors about dtypes where autocast is off.

    Why: autocast contexts explain such errors; here there was none to do it.

    Args:
        stored: Format and level of the weights.
        device: Device type of the model.
    """

    def __init__(self, stored: str, device: str) -> None:
        self._stored = stored
        self._device = device

    def __call__(self, _module: nn.Module, _args: object, output: object) -> None:
        """Look at the exception under way, if the forward pass has left one."""
        if torch.compiler.is_compiling() or output is not None:
            return
        error = sys.exc_info()[1]
        if error is None or torch.is_autocast_enabled(self._device):
            return
        if dtype_mismatch.is_about_dtypes(error) and _ADVICE not in error.args[0]:
            advice = f"-> the model's weights are {self._stored}, {_ADVICE}"
            error.args = (f"{error.args[0].rstrip()}\n{advice}", *error.args[1:])


_ADVICE = (
    "and it was called outside of session.autocast(): open "
    "`with session.autocast():` around the call."
)


class LowStateDictHook:
    """State-dict hook: warns once that weights in it are 16-bit.

    Copies and pickles of the model have no session, and do not warn.

    Args:
        dtype: Format of the weights.
        active: Not warned yet.
    """

    def __init__(self, dtype: str, *, active: bool = True) -> None:
        self._dtype = dtype
        self._active = active

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _meta: object
    ) -> None:
        """Look at a state that is about to be returned."""
        if not self._active:
            return
        # Buffers may be in 16 bits by the model's own choice.
        named = module.named_parameters(remove_duplicate=False)
        if any(_is_low_copy(state.get(f"{prefix}{name}")) for name, _ in named):
            self._active = False
            warn_caller(
                f"model.state_dict() holds {self._dtype} weights: use "
                "session.weights() for their fp32 values, or session.state_dict() to "
                "resume training."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _inactive, (self._dtype,)


def _inactive(dtype: str) -> LowStateDictHook:
    return LowStateDictHook(dtype, active=False)


def _is_low_copy(value: object) -> bool:
    """Say whether it is a 16-bit copy; with `keep_vars` parameters come themselves."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return is_low(value.dtype)

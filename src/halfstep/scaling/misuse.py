"""Makes the errors about misuse of a `GradScaler` or a session.

Where torch raises too, the message begins with torch's, for code that matches on it;
the cause follows.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import OptState

from halfstep._torch.optimizer_params import named_parameters
from halfstep.errors import UserError
from halfstep.scaling.step_report import first_names

if TYPE_CHECKING:
    from torch.optim import Optimizer

_PACKAGE_DIR = f"{Path(__file__).parent}{os.sep}"


def caller() -> tuple[str, int]:
    """Return file and line of the innermost frame outside of this package."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        _PACKAGE_DIR
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def unscaled_twice(stage: OptState, where: tuple[str, int] | None) -> RuntimeError:
    """Return the error for a second `unscale_`, or one after `step`."""
    if stage is OptState.STEPPED:
        message = "unscale_() is being called after step()."
        return RuntimeError(message + _first_call(where, "before step()"))
    message = (
        "unscale_() has already been called on this optimizer since the last update()."
    )
    return RuntimeError(message + _first_call(where, "after the last micro-batch"))


def stepped_twice(where: tuple[str, int] | None) -> RuntimeError:
    """Return the error for a second `step` before `update`."""
    message = "step() has already been called since the last update()."
    return RuntimeError(message + _first_call(where, "for each optimizer"))


def _first_call(where: tuple[str, int] | None, when: str) -> str:
    """Return where the first call was, and when to call it."""
    place = "" if where is None else " The first call was at {}:{};".format(*where)
    return f"{place} call it once in an iteration, {when}, and update() at its end."


def no_gradients(optimizer: Optimizer) -> AssertionError:
    """Return the error for a step without gradients."""
    return AssertionError(
        f"No inf checks were recorded for this optimizer. {why_no_gradients(optimizer)}"
    )


def why_no_gradients(optimizer: Optimizer) -> str:
    """Return which parameters have no gradients, and the likely cause."""
    named_params = list(named_parameters(optimizer))
    names = [name for name, _ in named_params]
    if any(param.grad is not None for _, param in named_params):
        return "Its gradients came after unscale_(): call that after backward()."
    if not any(param.requires_grad for _, param in named_params):
        cause = "they are frozen (requires_grad is False)"
    elif any(not param.is_leaf for _, param in named_params):
        cause = "some are not leaf tensors: make the optimizer after moving the model"
    else:
        cause = (
            "no backward() since they were cleared, a loss that does not depend on "
            "them, or an optimizer over another model's parameters"
        )
    return f"No gradient in {first_names(names)}. Likely cause: {cause}."


def fp16_gradients(optimizer: Optimizer) -> ValueError:
    """Return the error for fp16 gradients, which unscaling could flush to zero."""
    fp16_names = [
        name
        for name, param in named_parameters(optimizer)
        if param.grad is not None and param.grad.dtype == torch.float16
    ]
    more = f" and {len(fp16_names) - 1} more" if len(fp16_names) > 1 else ""
    return ValueError(
        f"Attempting to unscale FP16 gradients. {fp16_names[0]}{more} is stored in "
        "float16: keep weights in float32 and use autocast (level O1), or let "
        "halfstep.prepare(model, optimizer, 'O2') keep float32 master weights."
    )


def step_without_backward(steps: int, backward_call: str) -> RuntimeError:
    """Session, adapters: `step` without their backward pass."""
    call, more = "optimizer.step()", ""
    if backward_call.startswith("session."):
        call = "session.step()"
        more = "; to sum over 4 batches, set accumulate=4 in prepare()"
    return RuntimeError(
        f"{call} was called without a backward pass since the last; "
        f"{steps} steps are done. Call {backward_call} first{more}."
    )


def foreign_gradients(backward_call: str) -> RuntimeError:
    """Session, adapters: the gradients are of a backward pass that was not theirs."""
    return RuntimeError(
        f"this step has gradients of another backward pass: call {backward_call} in "
        "place of loss.backward(), or of another session's, before each step."
    )


def updated_in_backward(*, excluded: str) -> UserError:
    """Session: a method that needs all gradients before the update."""
    return UserError(
        "optimizer_in_backward=True updates weights and frees their gradients in the "
        f"backward pass; it excludes {excluded}."
    )


def pass_failed(backward_call: str) -> RuntimeError:
    """Session: `step` after a backward pass or a step that raised an exception."""
    return RuntimeError(
        "the last backward pass or step ended with an exception, and the gradients of "
        f"its window were dropped: begin the next with {backward_call}."
    )


def no_gradient() -> RuntimeError:
    """Session: a step without any gradient."""
    return RuntimeError(
        "no parameter of the optimizer has a gradient: is the loss computed "
        "from session.model, and do its parameters require gradients?"
    )

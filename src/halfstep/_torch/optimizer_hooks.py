"""Callbacks around optimizer steps, and detection of other libraries' hooks."""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from halfstep._torch.patches import AttributePatch, SharedPatches

if TYPE_CHECKING:
    from collections.abc import Callable


class PreStepHook:
    """A step pre-hook of halfstep's, recognizable by its type."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, *_: object) -> None:
        """Run the check."""
        self._check()


_callbacks: list[Callable[[Optimizer], None]] = []


def register_post_step_callback(hook: Callable[[Optimizer], None]) -> None:
    """Call `hook` with each optimizer that has stepped.

    Steps that torch runs are only reported while `STEP_PATCH` has a user.
    """
    _callbacks.append(hook)


def register_pre_step_check(optimizer: Optimizer, check: Callable[[], None]) -> None:
    """Call `check` before each step of an optimizer."""
    optimizer.register_step_pre_hook(PreStepHook(check))


def runs_only_torch_code(optimizer: Optimizer) -> bool:
    """Return whether a step runs only torch's code: no subclass, patch or hook."""
    is_torch_class = type(optimizer).__module__.startswith("torch.optim.")
    is_patched = "step" in vars(optimizer) and not is_wrapped_by_lr_scheduler(optimizer)
    return is_torch_class and not is_patched and not has_foreign_hooks(optimizer)


def is_wrapped_by_lr_scheduler(optimizer: Optimizer) -> bool:
    """Return whether a learning-rate scheduler is the only wrapper of its step."""
    step = vars(optimizer).get("step")
    is_wrapped = getattr(step, "_wrapped_by_lr_sched", False)
    return is_wrapped and getattr(step, "__wrapped__", None) is type(optimizer).step


def notify(optimizer: Optimizer) -> None:
    """Run the post-step callbacks for an optimizer."""
    for hook in _callbacks:
        hook(optimizer)


def _with_notification(
    original: Callable[[Optimizer], None],
) -> Callable[[Optimizer], None]:
    @functools.wraps(original)
    def step_code(self: Optimizer) -> None:
        original(self)
        notify(self)

    return step_code


# Not torch's global hook table, since another thread may be iterating over it.
STEP_PATCH = SharedPatches(
    AttributePatch(Optimizer, "_optimizer_step_code", _with_notification)
)
"""While it has a user, steps of all torch optimizers run the callbacks."""


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has step hooks other than halfstep's."""
    tables: Any = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = chain.from_iterable(map(dict.values, tables))
    return not {*map(type, hooks)} <= {PreStepHook}

"""Callbacks after an optimizer's step: halfstep's caches, hooks of other libraries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from halfstep._torch.patches import SharedPatches, attribute_patch

if TYPE_CHECKING:
    from collections.abc import Callable


class PreStepHook:
    """Looks at each step of an optimizer before it is taken.

    Args:
        check: May raise.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, *_: object) -> None:
        """Be the hook."""
        self._check()


_callbacks: list[Callable[[Optimizer], None]] = []


def register_post_step_callback(hook: Callable[[Optimizer], None]) -> None:
    """Call a function of ours with each optimizer that has stepped.

    Only while `STEP_PATCH` has a user does it hear of steps that torch takes.
    """
    _callbacks.append(hook)


def register_pre_step_check(optimizer: Optimizer, check: Callable[[], None]) -> None:
    """Call a function of ours before each step that an optimizer takes itself."""
    optimizer.register_step_pre_hook(PreStepHook(check))


def runs_only_torch_code(optimizer: Optimizer) -> bool:
    """Say whether a step runs torch's code and no other: no subclass, patch or hook."""
    is_torch_class = type(optimizer).__module__.startswith("torch.optim.")
    is_patched = "step" in vars(optimizer) and not is_wrapped_by_lr_scheduler(optimizer)
    return is_torch_class and not is_patched and not has_foreign_hooks(optimizer)


def is_wrapped_by_lr_scheduler(optimizer: Optimizer) -> bool:
    """Say whether a learning-rate scheduler, and nobody else, has wrapped its step."""
    step = vars(optimizer).get("step")
    is_wrapped = getattr(step, "_wrapped_by_lr_sched", False)
    return is_wrapped and getattr(step, "__wrapped__", None) is type(optimizer).step


def notify(optimizer: Optimizer) -> None:
    """Tell our own that an optimizer's parameters were updated."""
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


# Not torch's table of hooks for all optimizers: a thread may be iterating over it.
STEP_PATCH = SharedPatches(
    attribute_patch(Optimizer, "_optimizer_step_code", _with_notification)
)
"""While it has a user, torch tells of the steps of all optimizers."""


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Say whether anybody but us must be called when this optimizer steps."""
    tables: Any = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = [hook for table in tables for hook in table.values()]
    return any(not isinstance(hook, PreStepHook) for hook in hooks)

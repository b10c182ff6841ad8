"""Who must know that an optimizer has stepped: caches of ours, and hooks of others.

In: functions of ours. Out: they are called after each optimizer's step, while anybody
asks for it, or by us where we update weights in the optimizer's place; and whether
anybody else wants to know.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from halfstep._torch.patches import SharedPatches, attribute

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard:
    """Looks at each step of an optimizer before it is taken.

    Args:
        look: May raise.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __call__(self, *_: object) -> None:
        """Be the hook."""
        self._look()


_own: list[Callable[[Optimizer], None]] = []


def after_each_step(hook: Callable[[Optimizer], None]) -> None:
    """Call a function of ours with each optimizer that has stepped.

    Only while `STEPS` has a user does it hear of steps that torch takes.
    """
    _own.append(hook)


def guard(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Call a function of ours before each step that an optimizer takes itself."""
    optimizer.register_step_pre_hook(Guard(look))


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Say whether a step runs torch's code and no other: no subclass, patch or hook."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    patched = "step" in vars(optimizer) and not is_counted(optimizer)
    return own and not patched and not others(optimizer)


def is_counted(optimizer: Optimizer) -> bool:
    """Say whether a learning-rate scheduler, and nobody else, has wrapped its step."""
    step = vars(optimizer).get("step")
    counted = getattr(step, "_wrapped_by_lr_sched", False)
    return counted and getattr(step, "__wrapped__", None) is type(optimizer).step


def tell(optimizer: Optimizer) -> None:
    """Tell our own that an optimizer's parameters were updated."""
    for hook in _own:
        hook(optimizer)


def _telling(original: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    @functools.wraps(original)
    def step_code(self: Optimizer) -> None:
        original(self)
        tell(self)

    return step_code


# Not torch's table of hooks for all optimizers: a thread may be iterating over it.
STEPS = SharedPatches(attribute(Optimizer, "_optimizer_step_code", _telling))
"""While it has a user, torch tells of the steps of all optimizers."""


def others(optimizer: Optimizer) -> bool:
    """Say whether anybody but us must be called when this optimizer steps."""
    tables: Any = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = [hook for table in tables for hook in table.values()]
    return any(not isinstance(hook, Guard) for hook in hooks)

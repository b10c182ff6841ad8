"""Who is told when an optimizer has stepped: our own rooms, and others.

In: functions of ours that must know. Out: the same told by torch after each step, or by
us where we update weights in torch's place; and whether anybody else wants to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


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


Hook = Callable[[Optimizer, Any, Any], None]

_own: list[Hook] = []


def after_each_step(hook: Hook) -> None:
    """Tell a function of ours from now on which optimizer has stepped."""
    _own.append(hook)
    torch_optimizer.register_optimizer_step_post_hook(hook)


def guard(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Call a function of ours before each step that an optimizer takes itself."""
    optimizer.register_step_pre_hook(Guard(look))


def tell(optimizer: Optimizer) -> None:
    """Tell our own that an optimizer's parameters were updated without its step."""
    for hook in _own:
        hook(optimizer, (), {})


def others(optimizer: Optimizer) -> bool:
    """Say whether anybody but us must be called when this optimizer steps."""
    tables = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = [hook for table in tables for hook in table.values()]
    return any(hook not in _own and not isinstance(hook, Guard) for hook in hooks)

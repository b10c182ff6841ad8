"""Who is told when an optimizer has stepped: our own rooms, and others.

In: functions of ours that must know. Out: the same told by torch after each step, or by
us where we update weights in torch's place; and whether anybody else wants to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

_own: list[Callable[[Optimizer, Any, Any], None]] = []


def after_each_step(hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Tell a function of ours from now on which optimizer has stepped."""
    _own.append(hook)
    torch_optimizer.register_optimizer_step_post_hook(hook)


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
    return any(hook not in _own for table in tables for hook in table.values())

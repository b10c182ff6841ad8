"""Combines several optimizers into one, with the groups and the state of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


class ChainedOptimizer(Optimizer):
    """Steps several optimizers over different parameters, one after the other.

    The groups are the same dict objects as in the optimizers, so that their schedulers
    still work; all share one state dict.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._group_counts = [len(each.param_groups) for each in optimizers]
        groups = [group for each in optimizers for group in each.param_groups]
        try:
            super().__init__(groups, {})
        except ValueError as error:
            message = "a parameter is in two of the optimizers: give each its own."
            raise UserError(message) from error
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of the optimizers.

        Raises if a group was added to one of them since: it would not be unscaled.
        """
        for each, groups in zip(self.optimizers, self._own_groups(), strict=True):
            if len(each.param_groups) != len(groups):
                raise UserError(
                    f"the {type(each).__name__} was given a parameter group after "
                    "prepare: add groups before, or give prepare that optimizer alone."
                )
        for each in self.optimizers:
            each.step(closure)

    def _own_groups(self) -> list[list[dict[str, Any]]]:
        """Return the groups of each optimizer, without those added since."""
        groups = iter(self.param_groups)
        return [[next(groups) for _ in range(count)] for count in self._group_counts]

    def __getstate__(self) -> dict[str, Any]:
        own = {"optimizers": self.optimizers, "_group_counts": self._group_counts}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each, groups in zip(self.optimizers, self._own_groups(), strict=True):
            each.__setstate__({"state": self.state, "param_groups": groups})


def optimizers_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers inside a ChainedOptimizer, else the optimizer itself."""
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.optimizers
    return (optimizer,)

"""Strategies that propose a loss scale: none (back-off), measured, logmax.

In: each loss before its backward pass, and the unscaled gradients after it. Out: the
scale that a strategy asks for, or None; `advance` has the last word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from halfstep.errors import UserError
from halfstep.scaling.logmax_strategy import LogMaxStrategy
from halfstep.scaling.measured_strategy import MeasuredStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from halfstep.scaling.loss_scale import ScaleState


class ScaleStrategy(Protocol):
    """Looks on, and asks for a scale."""

    name: str
    """The word that `strategy` knows it by."""

    def on_loss(self, loss: Tensor, state: ScaleState) -> Tensor | None:
        """Look at a loss before it is scaled and its backward pass runs.

        Args:
            loss: Unscaled, with its graph.
            state: Before the step.

        Returns:
            The scale to begin with, float32, shape (); None lets it stay.
        """

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> Tensor | None:
        """Ask for the scale of the next step.

        Args:
            gradients: Unscaled, as `unscale_` left them; of several optimizers in
                several calls, the lowest of whose answers counts.
            state: The state under which the backward passes ran.
            found_inf: Not zero if a gradient held inf or NaN. Shape ().

        Returns:
            A power of two, float32, shape (); None asks for nothing.
        """

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Take note of what the ranks agreed on, just before the scale moves.

        Args:
            state: Before the step.
            found_inf: Not zero if the step overflowed on any rank, shape ().
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from. May wait for the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; {} begins anew."""


class BackoffStrategy:
    """Asks for nothing: growth and back-off decide."""

    name = "backoff"

    def on_loss(self, loss: Tensor, state: ScaleState) -> None:
        """Let the scale stay."""

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> None:
        """Ask for nothing."""

    def on_found_inf(self, state: ScaleState, found_inf: Tensor) -> None:
        """Take note of nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in nothing."""


def make_strategy(name: str, group: dist.ProcessGroup | None = None) -> ScaleStrategy:
    """Return a new strategy.

    Args:
        name: "backoff", "measured" or "logmax".
        group: Ranks that must agree on a scale; default all.

    Raises:
        UserError: If no strategy has that name.
    """
    factories: dict[str, Callable[[], ScaleStrategy]] = {
        "backoff": BackoffStrategy,
        "measured": lambda: MeasuredStrategy(group=group),
        "logmax": lambda: LogMaxStrategy(group=group),
    }
    if name not in factories:
        message = f"strategy={name!r} is unknown; choose one of {', '.join(factories)}."
        raise UserError(message)
    return factories[name]()

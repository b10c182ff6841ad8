"""Who proposes the next loss scale: nobody, a measurement, or statistics.

In: each loss before its backward pass, and the unscaled gradients after it. Out: the
scale that a strategy asks for, or None; `advance` has the last word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from halfstep.errors import UserError
from halfstep.scaling.logmax_strategy import LogMax
from halfstep.scaling.measured_strategy import Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from halfstep.scaling.loss_scale import ScaleState


class Strategy(Protocol):
    """Looks on, and asks for a scale."""

    name: str
    """The word that `strategy` knows it by."""

    def watch(self, loss: Tensor, state: ScaleState) -> Tensor | None:
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

    def settle(self, state: ScaleState, found_inf: Tensor) -> None:
        """Take note of what the ranks agreed on, just before the scale moves.

        Args:
            state: Before the step.
            found_inf: Not zero if the step overflowed on any rank, shape ().
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from. May wait for the device."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; {} begins anew."""


class Backoff:
    """Asks for nothing: growth and back-off decide."""

    name = "backoff"

    def watch(self, loss: Tensor, state: ScaleState) -> None:
        """Let the scale stay."""

    def propose(
        self, gradients: Sequence[Tensor], state: ScaleState, found_inf: Tensor
    ) -> None:
        """Ask for nothing."""

    def settle(self, state: ScaleState, found_inf: Tensor) -> None:
        """Take note of nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in nothing."""


def strategy(word: str, group: dist.ProcessGroup | None = None) -> Strategy:
    """Return a new strategy.

    Args:
        word: "backoff", "measured" or "logmax".
        group: Ranks that must agree on a scale; default all.

    Raises:
        UserError: If no strategy has that name.
    """
    known: dict[str, Callable[[], Strategy]] = {
        "backoff": Backoff,
        "measured": lambda: Measured(group=group),
        "logmax": lambda: LogMax(group=group),
    }
    if word not in known:
        message = f"strategy={word!r} is unknown; choose one of {', '.join(known)}."
        raise UserError(message)
    return known[word]()

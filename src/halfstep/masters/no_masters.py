"""No master weights: the optimizer updates the model's own parameters.

In: an optimizer. Out: the interface of `MasterWeights`, with nothing behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.masters.master_weights import MasterWeights

if TYPE_CHECKING:
    from torch import Tensor, nn


class NoMasters(MasterWeights):
    """The same where the optimizer updates the model's own parameters."""

    keeps = False

    def add_new_params(
        self, originals: dict[nn.Parameter, Tensor] | None = None
    ) -> None:
        """Leave parameters as they are."""

    def describe(self) -> str:
        """Say in one line how weights are updated."""
        return f"{type(self.optimizer).__name__}'s own step"

    def note(self) -> str:
        """Say that there are none."""
        return "master weights: none"

"""Whether gradients were changed since a backward pass left them.

In: gradients that are multiplied by a loss scale. Out: whether one was written to, or
put in the place of another: clipping by hand compares the norms of scaled gradients.
Multiplying them, as an average over ranks does, is right at any scale, and looks alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.errors import warn_caller

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class GradVersions:
    """Remembers gradients by torch's count of writes to each, which costs no reading.

    Attributes:
        active: There is a loss scale, and nothing has been reported yet.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._versions: dict[int, int] = {}

    def record(self, gradients: Iterable[Tensor]) -> None:
        """Remember gradients as they are now."""
        self._versions = {id(grad): grad._version for grad in gradients}  # noqa: SLF001

    def check(self, gradients: Iterable[Tensor]) -> None:
        """Warn once if one of them is not as it was; those set to None do not count."""
        versions = self._versions
        if all(versions.get(id(grad)) == grad._version for grad in gradients):  # noqa: SLF001
            return
        self.active = False
        warn_caller(
            "gradients were changed between session.backward() and session.step(), "
            "where they are multiplied by the loss scale: to clip them, call "
            "halfstep.prepare(..., clip_grad_norm=...) instead."
        )

"""Hooks on gradients while a backward pass of the session runs.

In: masters, perhaps a release. Out: gradients folded or used as they arrive, in our
passes alone: a model may be another's too, whose passes must find nothing changed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from halfstep.distributed import ddp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from halfstep.masters import MasterWeights
    from halfstep.masters.optimizer_in_backward import OptimizerInBackward


class BackwardHooks:
    """Opens and closes the hooks of masters and release around each pass.

    Args:
        masters: Fold gradients where several passes make up a step.
        in_backward: Uses them at once, if given.
        accumulate: Micro-batches of a step.
    """

    def __init__(
        self,
        masters: MasterWeights,
        in_backward: OptimizerInBackward | None,
        accumulate: int,
    ) -> None:
        self._masters = masters
        self._in_backward = in_backward
        self._accumulate = accumulate

    @contextlib.contextmanager
    def active(self, model: nn.Module, *, second_pass: bool) -> Iterator[None]:
        """Take gradients of one backward pass in.

        Args:
            model: As the user calls it; DDP averages gradients before they are used.
            second_pass: Another pass of this micro-batch came before. Both are added up

                fp32.
        """
        is_local = not ddp.is_data_parallel(model)
        masters, in_backward = self._masters, self._in_backward
        if second_pass:
            masters.accumulate_grads()
        if in_backward is not None:
            in_backward.start(in_backward=is_local)
        else:
            masters.accumulate_in_backward(on=is_local and self._accumulate > 1)
        try:
            yield
        finally:
            masters.accumulate_in_backward(on=False)
            if in_backward is not None:
                in_backward.stop()
        if second_pass:
            masters.accumulate_grads()
        if in_backward is not None and not is_local:
            in_backward.step_all()

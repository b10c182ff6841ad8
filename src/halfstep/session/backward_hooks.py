"""What becomes of gradients while a backward pass of the session runs.

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
    from halfstep.masters.optimizer_in_backward import Release


class Arrivals:
    """Opens and closes the hooks of masters and release around each pass.

    Args:
        masters: Fold gradients where several passes make up a step.
        release: Uses them at once, if given.
        accumulate: Micro-batches of a step.
    """

    def __init__(
        self, masters: MasterWeights, release: Release | None, accumulate: int
    ) -> None:
        self._masters = masters
        self._release = release
        self._accumulate = accumulate

    @contextlib.contextmanager
    def during(self, model: nn.Module, *, again: bool) -> Iterator[None]:
        """Take gradients of one backward pass in.

        Args:
            model: As the user calls it; DDP averages gradients before they are used.
            again: Another pass of this micro-batch came before. Both are added up in
                fp32.
        """
        alone = not ddp.is_data_parallel(model)
        masters, release = self._masters, self._release
        if again:
            masters.fold()
        if release is not None:
            release.begin(at_once=alone)
        else:
            masters.fold_in_backward(on=alone and self._accumulate > 1)
        try:
            yield
        finally:
            masters.fold_in_backward(on=False)
            if release is not None:
                release.pause()
        if again:
            masters.fold()
        if release is not None and not alone:
            release.use_all()

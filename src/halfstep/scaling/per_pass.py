"""The backward passes of one optimizer step, and the scales they run at.

In: losses, and how to run a backward pass. Out: unscaled gradients, and one flag. The
usual step has one loss scale, and its gradients are unscaled once, at the end; passes
with scales of their own, or that may be left out or repeated, are looked at one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.scaling import misuse
from halfstep.scaling.unscale import FoundInfReduction, reduction_groups
from halfstep.scaling.unscaled_gradients import UnscaledGradients, run_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from halfstep.scaling.per_loss import LossScalers


class BackwardPasses:
    """Runs the passes of each step in turn.

    Args:
        loss_scalers: By the name of the loss.
        drop: Leave out a pass that overflowed.
        retries: How often to run such a pass again at a lower scale first.
        group: Ranks that must agree.
    """

    def __init__(
        self,
        loss_scalers: LossScalers,
        *,
        drop: bool,
        retries: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.loss_scalers = loss_scalers
        self._drop = drop
        self._retries = retries
        self._group = group
        self._unscaled = UnscaledGradients(drop=drop)
        self._loss_name: str | None = None
        self.per_pass = drop or retries > 0
        """Each pass is looked at by itself, so each must be averaged over ranks."""

    @property
    def has_run(self) -> bool:
        """A backward pass has run since the last step."""
        return self._loss_name is not None

    @property
    def keeps_graphs(self) -> bool:
        """A graph is kept until its last try."""
        return self._retries > 0

    def run(
        self,
        name: str,
        backward: Callable[[bool], None],
        parameters: Sequence[Tensor],
        *,
        sync_grads: Callable[[], None],
    ) -> None:
        """Run one backward pass.

        Args:
            name: Of the loss.
            backward: Runs the pass of the scaled loss; told whether to keep the graph.
            parameters: Whose `.grad` it fills, once `run_pending` was called.
            sync_grads: Brings gradients there that lie elsewhere.

        Raises:
            UserError: If a named loss comes where passes are left out.
        """
        if name and self._drop:
            raise misuse.named_loss_with_drop(name)
        if (
            self._loss_name is not None
            and self._loss_name != name
            and not self.per_pass
        ):
            # The second loss of a program: from now on they are kept apart.
            sync_grads()
            self.per_pass = True
            filled = [p.grad for p in parameters if p.grad is not None]
            found_inf = self.loss_scalers.get(self._loss_name).unscale_(filled)
            found_inf = FoundInfReduction.start(
                found_inf, reduction_groups(filled, self._group)
            ).wait()
            self._accumulate(found_inf, parameters)
        self._loss_name = name
        if not self.per_pass:
            backward(False)  # noqa: FBT003
            return

        def run(keep: bool) -> None:
            backward(keep)
            sync_grads()

        scaler = self.loss_scalers.get(name)
        found_inf = run_pass(
            scaler, run, parameters, retries=self._retries, group=self._group
        )
        self._accumulate(found_inf, parameters)

    def _accumulate(self, found_inf: Tensor, parameters: Sequence[Tensor]) -> None:
        self.loss_scalers.record_found_inf(self._loss_name or "", found_inf)
        self._unscaled.accumulate(parameters, found_inf)

    def restore_grads(self) -> Tensor | None:
        """Put sums that were kept apart into `.grad`; return their flag, if any."""
        return self._unscaled.restore_grads() if self._unscaled.is_open else None

    def unscale_(self, gradients: Sequence[Tensor]) -> FoundInfReduction:
        """Unscale the gradients of all passes at once, and ask the other ranks."""
        name = self._loss_name or ""
        found_inf = self.loss_scalers.get(name).unscale_(gradients)
        if name:
            self.loss_scalers.record_found_inf(
                name, found_inf
            )  # what the ranks agree on is written there
        return FoundInfReduction.start(
            found_inf, reduction_groups(gradients, self._group)
        )

    @property
    def needs_only_found_inf(self) -> bool:
        """Gradients need not be unscaled to be judged; whoever uses them does it."""
        scaler = self.loss_scalers.get(self._loss_name or "")
        return (
            not self.per_pass
            and not self._unscaled.is_open
            and scaler.needs_only_found_inf
        )

    def reduce_found_inf(
        self, found_inf: Tensor, gradients: Sequence[Tensor]
    ) -> FoundInfReduction:
        """Take in what a look at scaled gradients found, and ask the other ranks."""
        if self._loss_name:
            self.loss_scalers.record_found_inf(self._loss_name, found_inf)
        return FoundInfReduction.start(
            found_inf, reduction_groups(gradients, self._group)
        )

    def num_dropped(self) -> Tensor | int:
        """Return how many passes of this step were left out."""
        return self._unscaled.num_dropped()

    @property
    def scale(self) -> Tensor:
        """The scale of the last pass, shape ()."""
        return self.loss_scalers.get(self._loss_name or "").state.scale

    def end_step(self) -> None:
        """Begin the next step."""
        self._unscaled.reset()
        self._loss_name = None

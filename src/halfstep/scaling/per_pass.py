"""The backward passes of one optimizer step, and the scales they run at.

In: losses, and how to run a backward pass. Out: unscaled gradients, and one flag. The
usual step has one loss scale, and its gradients are unscaled once, at the end; passes
with scales of their own, or that may be left out or repeated, are looked at one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.scaling import misuse
from halfstep.scaling.unscale import Agreement, groups_of
from halfstep.scaling.unscaled_gradients import Ledger, run_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from halfstep.scaling.per_loss import Scales


class Passes:
    """Runs the passes of each step in turn.

    Args:
        scales: By the name of the loss.
        drop: Leave out a pass that overflowed.
        retries: How often to run such a pass again at a lower scale first.
        group: Ranks that must agree.
    """

    def __init__(
        self,
        scales: Scales,
        *,
        drop: bool,
        retries: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.scales = scales
        self._drop = drop
        self._retries = retries
        self._group = group
        self._ledger = Ledger(drop=drop)
        self._name: str | None = None
        self.apart = drop or retries > 0
        """Each pass is looked at by itself, so each must be averaged over ranks."""

    @property
    def any_run(self) -> bool:
        """A backward pass has run since the last step."""
        return self._name is not None

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
        settle: Callable[[], None],
    ) -> None:
        """Run one backward pass.

        Args:
            name: Of the loss.
            backward: Runs the pass of the scaled loss; told whether to keep the graph.
            parameters: Whose `.grad` it fills, once `settle` was called.
            settle: Brings gradients there that lie elsewhere.

        Raises:
            UserError: If a named loss comes where passes are left out.
        """
        if name and self._drop:
            raise misuse.names_and_drop(name)
        if self._name is not None and self._name != name and not self.apart:
            # The second loss of a program: from now on they are kept apart.
            settle()
            self.apart = True
            filled = [p.grad for p in parameters if p.grad is not None]
            found = self.scales.known(self._name).unscale_(filled)
            found = Agreement.begin(found, groups_of(filled, self._group)).wait()
            self._enter(found, parameters)
        self._name = name
        if not self.apart:
            backward(False)  # noqa: FBT003
            return

        def run(keep: bool) -> None:
            backward(keep)
            settle()

        scaler = self.scales.known(name)
        found = run_pass(
            scaler, run, parameters, retries=self._retries, group=self._group
        )
        self._enter(found, parameters)

    def _enter(self, found: Tensor, parameters: Sequence[Tensor]) -> None:
        self.scales.note(self._name or "", found)
        self._ledger.enter(parameters, found)

    def show(self) -> Tensor | None:
        """Put sums that were kept apart into `.grad`; return their flag, if any."""
        return self._ledger.show() if self._ledger.is_open else None

    def unscale_(self, gradients: Sequence[Tensor]) -> Agreement:
        """Unscale the gradients of all passes at once, and ask the other ranks."""
        name = self._name or ""
        found = self.scales.known(name).unscale_(gradients)
        if name:
            self.scales.note(name, found)  # what the ranks agree on is written there
        return Agreement.begin(found, groups_of(gradients, self._group))

    @property
    def only_judged(self) -> bool:
        """Gradients need not be unscaled to be judged; whoever uses them does it."""
        scaler = self.scales.known(self._name or "")
        return not self.apart and not self._ledger.is_open and scaler.only_judges

    def judged(self, found: Tensor, gradients: Sequence[Tensor]) -> Agreement:
        """Take in what a look at scaled gradients found, and ask the other ranks."""
        if self._name:
            self.scales.note(self._name, found)
        return Agreement.begin(found, groups_of(gradients, self._group))

    def dropped(self) -> Tensor | int:
        """Return how many passes of this step were left out."""
        return self._ledger.dropped()

    @property
    def scale(self) -> Tensor:
        """The scale of the last pass, shape ()."""
        return self.scales.known(self._name or "").state.scale

    def close(self) -> None:
        """Begin the next step."""
        self._ledger.close()
        self._name = None

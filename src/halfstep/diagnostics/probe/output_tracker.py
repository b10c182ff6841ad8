"""Tracks the outputs of a model's modules, and the gradients of these outputs.

In: what each module was given and returned. Out: flags or statistics, noted in
`StepRecords`
under the names of all modules that returned the tensor. It is read once. For a flag on
a CPU it is not read where a finite later output implies that it is finite.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch import async_read
from halfstep.diagnostics.probe.nonfinite_flow import propagates_nonfinite
from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    from halfstep.diagnostics.probe.step_records import FlagOrStats, StepRecords

OUTSIDE = -1
"""torch's number of the backward pass under way, where there is none."""

MAX_PENDING = 4
"""Most outputs, and most gradients, kept alive until a later one shows them finite:
one more than the queries, keys and values that are computed from one input."""


class TrackedTensor:
    """One tensor that a module returned, and others perhaps passed on."""

    __slots__ = (
        "alive",
        "expects_grad",
        "flag_or_stats",
        "hook",
        "key",
        "places",
        "source",
        "version",
    )

    def __init__(
        self, tensor: Tensor, key: tuple[int, int], source: TrackedTensor | None
    ) -> None:
        self.key = key
        """Place of the module that made it, and which of its outputs it is."""
        self.alive = weakref.ref(tensor)
        # No version tells whether an inference tensor was written to.
        self.version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
        self.places: list[int] = []
        """Of the modules that returned it."""
        self.source = source
        """What it was computed from, where no inf and no NaN of that can be lost."""
        self.flag_or_stats: FlagOrStats = None
        """Its flag or statistics; None while it is pending."""
        self.expects_grad = tensor.grad_fn is not None
        """Whether a backward pass can give it a gradient."""
        self.hook: RemovableHandle | None = None
        """The hook that observes its gradient."""

    def is_hooked_alone(self) -> bool:
        """Say whether no hook of others could have changed its gradient."""
        hooks = None if self.hook is None else self.hook.hooks_dict_ref()
        return hooks is not None and len(hooks) == 1

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Say whether it is this tensor, not written to since.

        Nor given it a graph, as the older kind of checkpoint does.
        """
        return (
            self.alive() is tensor
            and self.version is not None
            and self.version == tensor._version  # noqa: SLF001
            and self.expects_grad == (tensor.grad_fn is not None)
        )


class OutputTracker:
    """Observes module outputs and their gradients."""

    def __init__(self, records: StepRecords, modules: int) -> None:
        """Take where flags and statistics are recorded.

        Args:
            records: Empty.
            modules: How many there are. The gradient of what module n returns has the
                number n + `modules`.
        """
        self._records = records
        self._modules = modules
        self._tracked: dict[int, TrackedTensor] = {}
        """Id of a tensor -> its record."""
        self._last: list[TrackedTensor] = []
        """New outputs of the previous module."""
        self._implied_finite: dict[tuple[int, int], bool] = {}
        """Key of an output -> whether the next output has always implied that it is
        finite. Learned first: something may write over one before the next is read,
        and then it cannot be read any more."""
        self._pending_outputs: list[tuple[TrackedTensor, Tensor]] = []
        """Pending until the next is read: each was computed from the one before."""
        self._pending_grads: list[tuple[TrackedTensor, Tensor]] = []
        """Pending until the gradient of the source is read."""

    def clear(self) -> None:
        """Forget all but what was learned."""
        self._tracked, self._last = {}, []
        self._pending_outputs, self._pending_grads = [], []

    def read_pending(self) -> None:
        """Read all outputs and gradients that are still pending."""
        self._read_pending_outputs(finite=False)
        pending, self._pending_grads = self._pending_grads, []
        for tracked, gradient in pending:
            self._record(self._names(tracked), self._records.measure(gradient))

    # Outputs

    def observe_output(
        self,
        place: int,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,  # noqa: ANN401
        arrived: Callable[[TrackedTensor, Tensor], None],
    ) -> None:
        """Look at what a module returned; ask for its gradient.

        Args:
            place: Of the module.
            module: Itself.
            args: Its positional arguments.
            output: Any value.
            arrived: Called with each gradient.
        """
        # A module that runs in a backward pass is run again by a checkpoint. What it
        # computes was seen; but only now may there be a graph for its gradients.
        recomputed = torch._C._current_graph_task_id() != OUTSIDE  # noqa: SLF001
        alone = type(output) is Tensor
        source = self._source(module, args) if alone else None
        fresh = []
        for n, tensor in enumerate((output,) if alone else tensors_in(output)):
            tracked = self._tracked.get(id(tensor))
            is_tracked = tracked is not None and tracked.is_unchanged(tensor)
            if tracked is None or not is_tracked:
                tracked = self._tracked[id(tensor)] = TrackedTensor(
                    tensor, (place, n), source
                )
                if tracked.expects_grad:
                    tracked.hook = tensor.register_hook(partial(arrived, tracked))
            tracked.places.append(place)
            if recomputed:
                continue
            self._records.order.setdefault(place)
            if not is_tracked:
                fresh.append((tracked, tensor))
            elif not any(tracked is pending for pending, _ in self._pending_outputs):
                self._records.record(place, tracked.flag_or_stats)
        if fresh:
            self._measure_outputs(source, fresh)

    def _source(self, module: nn.Module, args: tuple[Any, ...]) -> TrackedTensor | None:
        """Return a module's input, if a finite result implies that it is finite."""
        if self._records.full or not args or not propagates_nonfinite(module):
            return None
        tracked = self._tracked.get(id(args[0]))
        return (
            tracked if tracked is not None and tracked.is_unchanged(args[0]) else None
        )

    def _measure_outputs(
        self, source: TrackedTensor | None, fresh: list[tuple[TrackedTensor, Tensor]]
    ) -> None:
        """Read new outputs, or defer them until the next output is read."""
        for last in self._last:
            implied_finite = last is source and self._implied_finite.get(last.key, True)
            self._implied_finite[last.key] = implied_finite
        # Inference tensors do not tell what they were computed from.
        self._last = [item for item, _ in fresh if item.version is not None]
        follows = bool(self._pending_outputs) and self._pending_outputs[-1][0] is source
        if not follows:
            self._read_pending_outputs(finite=False)
        for tracked, tensor in fresh:
            implied_finite_before = (
                tracked.version is not None
                and self._implied_finite.get(tracked.key, False)
            )
            if (
                implied_finite_before
                and self._can_defer(tensor)
                and len(self._pending_outputs) < MAX_PENDING
            ):
                self._pending_outputs.append((tracked, tensor))
                continue
            tracked.flag_or_stats = self._records.measure(tensor)
            self._records.record(tracked.key[0], tracked.flag_or_stats)
            if follows:
                self._read_pending_outputs(finite=tracked.flag_or_stats is False)

    def _read_pending_outputs(self, *, finite: bool) -> None:
        """Record the pending outputs: as finite, or as they are read."""
        pending, self._pending_outputs = self._pending_outputs, []
        for tracked, tensor in pending:
            intact = tracked.version == tensor._version  # noqa: SLF001
            if not intact:  # it is not deferred again
                self._implied_finite[tracked.key] = False
            if finite or intact:  # else it is lost, and is not recorded
                tracked.flag_or_stats = not finite and self._records.measure(tensor)
                self._record(tracked.places, tracked.flag_or_stats)

    # Gradients

    def observe_grad(self, tracked: TrackedTensor, gradient: Tensor) -> None:
        """Read the gradient of an output, or defer it until that of its source."""
        for name in self._names(tracked):
            self._records.order.setdefault(name)
        source = tracked.source
        waits = (
            source is not None
            and source.expects_grad
            and self._can_defer(gradient)
            and tracked.is_hooked_alone()
            and source.is_hooked_alone()
        )
        if waits and len(self._pending_grads) < MAX_PENDING:
            self._pending_grads.append((tracked, gradient))
            return
        flag_or_stats = self._records.measure(gradient)
        self._record(self._names(tracked), flag_or_stats)
        if self._pending_grads:
            self._read_pending_grads(tracked, finite=flag_or_stats is False)

    def _read_pending_grads(self, source: TrackedTensor, *, finite: bool) -> None:
        """Record gradients deferred until that of a source, and so on from there."""
        pending = [item for item in self._pending_grads if item[0].source is source]
        self._pending_grads = [
            pair for pair in self._pending_grads if pair[0].source is not source
        ]
        for tracked, gradient in pending:
            flag_or_stats = not finite and self._records.measure(gradient)
            self._record(self._names(tracked), flag_or_stats)
            self._read_pending_grads(tracked, finite=flag_or_stats is False)

    # Both

    def _names(self, tracked: TrackedTensor) -> list[int]:
        return [place + self._modules for place in tracked.places]

    def _record(self, names: Iterable[int], flag_or_stats: FlagOrStats) -> None:
        for name in names:
            self._records.record(name, flag_or_stats)

    def _can_defer(self, tensor: Tensor) -> bool:
        """Say whether its flag is a bool on the host, so that reading can wait."""
        flags_on_host = not self._records.full and async_read.is_cpu(tensor.device)
        return flags_on_host and tensor.numel() > 0

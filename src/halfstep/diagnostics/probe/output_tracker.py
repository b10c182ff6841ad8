"""The tensors that a model's modules return, as they come by, and their gradients.

In: what each module was given and returned. Out: flags or statistics, noted in `Looks`
under the names of all modules that returned the tensor. It is read once; for a flag on
a CPU not at all, where what was computed from it vouches for it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch import async_read
from halfstep.diagnostics.probe.nonfinite_flow import carries
from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    from halfstep.diagnostics.probe.step_records import Found, Looks

OUTSIDE = -1
"""torch's number of the backward pass under way, where there is none."""

HELD = 4
"""Most outputs, and most gradients, that are kept alive until another vouches for them:
one more than the queries, keys and values that are computed from one input."""


class Met:
    """One tensor that a module returned, and others perhaps passed on."""

    __slots__ = (
        "alive",
        "awaited",
        "found",
        "hook",
        "key",
        "places",
        "source",
        "version",
    )

    def __init__(
        self, tensor: Tensor, key: tuple[int, int], source: Met | None
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
        self.found: Found = None
        """What a look at it has found; of one that is held, nothing yet."""
        self.awaited = tensor.grad_fn is not None
        """Whether its gradient will come by."""
        self.hook: RemovableHandle | None = None
        """That which looks at its gradient."""

    def is_hooked_alone(self) -> bool:
        """Say whether no hook of others could have changed its gradient."""
        hooks = None if self.hook is None else self.hook.hooks_dict_ref()
        return hooks is not None and len(hooks) == 1

    def is_still(self, tensor: Tensor) -> bool:
        """Say whether it is this tensor, and nobody has written to it since.

        Nor given it a graph, as the older kind of checkpoint does.
        """
        return (
            self.alive() is tensor
            and self.version is not None
            and self.version == tensor._version  # noqa: SLF001
            and self.awaited == (tensor.grad_fn is not None)
        )


class Comings:
    """Looks at what modules return, and at its gradients."""

    def __init__(self, looks: Looks, modules: int) -> None:
        """Take where findings are noted.

        Args:
            looks: Empty.
            modules: How many there are. The gradient of what module n returns has the
                number n + `modules`.
        """
        self._looks = looks
        self._modules = modules
        self._met: dict[int, Met] = {}
        """Id of a tensor -> what is known of it."""
        self._last: list[Met] = []
        """What the module before returned that had not come by."""
        self._vouched: dict[tuple[int, int], bool] = {}
        """Key of an output -> whether the next output of all has always vouched for
        it. Learned first: something may write over one before another comes by, and
        then nobody could read it any more."""
        self._outputs: list[tuple[Met, Tensor]] = []
        """Held until the next is read: each was computed from the one before."""
        self._gradients: list[tuple[Met, Tensor]] = []
        """Held until the gradient of the source is read."""

    def clear(self) -> None:
        """Forget all but what was learned."""
        self._met, self._last = {}, []
        self._outputs, self._gradients = [], []

    def settle(self) -> None:
        """Read what is still held."""
        self._settle_outputs(finite=False)
        held, self._gradients = self._gradients, []
        for met, gradient in held:
            self._note(self._names(met), self._looks.found(gradient))

    # Outputs

    def output(
        self,
        place: int,
        module: nn.Module,
        given: tuple[Any, ...],
        output: Any,  # noqa: ANN401
        arrived: Callable[[Met, Tensor], None],
    ) -> None:
        """Look at what a module returned; ask for its gradient.

        Args:
            place: Of the module.
            module: Itself.
            given: Its positional arguments.
            output: Any value.
            arrived: Called with each gradient.
        """
        # A module that runs in a backward pass is run again by a checkpoint. What it
        # computes was seen; but only now may there be a graph for its gradients.
        again = torch._C._current_graph_task_id() != OUTSIDE  # noqa: SLF001
        alone = type(output) is Tensor
        source = self._source(module, given) if alone else None
        fresh = []
        for n, tensor in enumerate((output,) if alone else tensors_in(output)):
            met = self._met.get(id(tensor))
            known = met is not None and met.is_still(tensor)
            if met is None or not known:
                met = self._met[id(tensor)] = Met(tensor, (place, n), source)
                if met.awaited:
                    met.hook = tensor.register_hook(partial(arrived, met))
            met.places.append(place)
            if again:
                continue
            self._looks.came.setdefault(place)
            if not known:
                fresh.append((met, tensor))
            elif not any(met is held for held, _ in self._outputs):
                self._looks.note(place, met.found)
        if fresh:
            self._see(source, fresh)

    def _source(self, module: nn.Module, given: tuple[Any, ...]) -> Met | None:
        """Return what a module was given, if its result vouches for that."""
        if self._looks.full or not given or not carries(module):
            return None
        met = self._met.get(id(given[0]))
        return met if met is not None and met.is_still(given[0]) else None

    def _see(self, source: Met | None, fresh: list[tuple[Met, Tensor]]) -> None:
        """Look at what a module returned, or hold it until the next output."""
        for last in self._last:
            vouched = last is source and self._vouched.get(last.key, True)
            self._vouched[last.key] = vouched
        # Of inference tensors nobody knows what they were computed from.
        self._last = [met for met, _ in fresh if met.version is not None]
        follows = bool(self._outputs) and self._outputs[-1][0] is source
        if not follows:
            self._settle_outputs(finite=False)
        for met, tensor in fresh:
            known = met.version is not None and self._vouched.get(met.key, False)
            if known and self._holds(tensor) and len(self._outputs) < HELD:
                self._outputs.append((met, tensor))
                continue
            met.found = self._looks.found(tensor)
            self._looks.note(met.key[0], met.found)
            if follows:
                self._settle_outputs(finite=met.found is False)

    def _settle_outputs(self, *, finite: bool) -> None:
        """Note what is held: as finite, or as it is read."""
        held, self._outputs = self._outputs, []
        for met, tensor in held:
            intact = met.version == tensor._version  # noqa: SLF001
            if not intact:  # it is not held again
                self._vouched[met.key] = False
            if finite or intact:  # else it is lost, and nothing is said of it
                met.found = not finite and self._looks.found(tensor)
                self._note(met.places, met.found)

    # Gradients

    def gradient(self, met: Met, gradient: Tensor) -> None:
        """Look at the gradient of an output, or hold it until that of its source."""
        for name in self._names(met):
            self._looks.came.setdefault(name)
        source = met.source
        waits = (
            source is not None
            and source.awaited
            and self._holds(gradient)
            and met.is_hooked_alone()
            and source.is_hooked_alone()
        )
        if waits and len(self._gradients) < HELD:
            self._gradients.append((met, gradient))
            return
        found = self._looks.found(gradient)
        self._note(self._names(met), found)
        if self._gradients:
            self._settle_gradients(met, finite=found is False)

    def _settle_gradients(self, source: Met, *, finite: bool) -> None:
        """Note what was held until the gradient of a source, and so on from there."""
        held = [(met, value) for met, value in self._gradients if met.source is source]
        self._gradients = [
            pair for pair in self._gradients if pair[0].source is not source
        ]
        for met, gradient in held:
            found = not finite and self._looks.found(gradient)
            self._note(self._names(met), found)
            self._settle_gradients(met, finite=found is False)

    # Both

    def _names(self, met: Met) -> list[int]:
        return [place + self._modules for place in met.places]

    def _note(self, names: Iterable[int], found: Found) -> None:
        for name in names:
            self._looks.note(name, found)

    def _holds(self, tensor: Tensor) -> bool:
        """Say whether a flag of it is known as soon as it is read, and there is one."""
        here = not self._looks.full and async_read.on_host(tensor.device)
        return here and tensor.numel() > 0

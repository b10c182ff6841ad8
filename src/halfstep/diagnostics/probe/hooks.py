"""How a probe is attached: hooks on modules, on gradients, and at a backward's end.

In: a model. Out: each tensor that comes by, once, noted in `StepRecords` under its
names;
inside torch.compile, operations in the graph that do so.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from halfstep.diagnostics.probe import compiled
from halfstep.diagnostics.probe.output_tracker import (
    OUTSIDE,
    OutputTracker,
    TrackedTensor,
)
from halfstep.diagnostics.probe.step_records import StepRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from halfstep.numerics.formats import FloatFormat


class Hooks:
    """Shows what comes by in a model to `records`, from now until `detach`."""

    def __init__(
        self, model: nn.Module, casts: tuple[FloatFormat, ...], *, full: bool
    ) -> None:
        """Attach to every module.

        Args:
            model: Not wrapped.
            casts: Of the statistics.
            full: Statistics, not flags.
        """
        self.model = model
        self.modules = modules_of(model)
        self.records = StepRecords(casts, full=full)
        self.on = True
        """Whether it is attached and not paused. Graphs of torch.compile are guarded
        by it: without a probe they are compiled anew, without a trace of it."""
        self.looking = True
        """Whether anything is looked at in this step."""
        self.traced = False
        """A graph of torch.compile with flags in it has run in this step."""
        self._graph_reported = False
        """A graph of torch.compile has reported a tensor in this step."""
        owners = (
            (path, module, own)
            for path, module in self.modules
            for own in module._parameters  # noqa: SLF001
        )
        self._parameters = [
            (f"{path}.{own}" if path else own, module, own)
            for path, module, own in owners
        ]
        paths = [path or "model" for path, _ in self.modules]
        self.names: tuple[str, ...] = (
            *(f"{path}:output" for path in paths),
            *(f"{path}:grad" for path in paths),
            *(f"{name}:grad" for name, _, _ in self._parameters),
        )
        """Number -> name."""
        parameters = list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        count = len(self.modules)
        self._tracker = OutputTracker(self.records, count)
        shape = (count,), compiled.UNSEEN
        self.flags = (
            torch.full(*shape, device=self.device),
            torch.full(*shape, device=self.device),
        )
        """Of outputs and of their gradients, written to by graphs."""
        self._who = compiled.register(self) if full else 0
        self._queued = self._parameters_seen = False
        _attached.add(self)
        self._handles = [
            module.register_forward_hook(self._hook(place))
            for place, (_, module) in enumerate(self.modules)
        ]

    @property
    def attached(self) -> bool:
        """Whether `detach` was not called."""
        return bool(self._handles)

    def blind(self, seen: Container[int]) -> str | None:
        """Return the path of what was not seen at all, though it may have run.

        Args:
            seen: Numbers of names.
        """
        if not any(place in seen for place in range(len(self.modules))):
            return "the model"
        for path, module in self.modules:
            if not _is_compiled(module):
                continue
            inside = [
                place
                for place, (inner, _) in enumerate(self.modules)
                if inner.startswith(f"{path}.")
            ]
            if inside and not any(place in seen for place in inside):
                return repr(path)
        return None

    def detach(self) -> None:
        """Take all hooks away."""
        self.on = False
        _attached.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._tracker.clear()

    def begin(self, *, looking: bool) -> None:
        """Forget what was seen; begin a step."""
        self.looking = looking
        self.records.clear()
        self._tracker.clear()
        self._queued = self._parameters_seen = self._graph_reported = False
        if self.traced:
            for flags in self.flags:
                flags.fill_(compiled.UNSEEN)
        self.traced = False

    def finish(self) -> None:
        """Look at the gradients of parameters, if a graph has run the backward pass.

        Then no hook says that it has ended. Where nothing has run it, they are those
        of the step before, which were reported.
        """
        self._tracker.read_pending()
        ran = self.traced or self._graph_reported
        if self.on and self.looking and ran and not self._parameters_seen:
            self._measure_parameter_grads()

    def at_run_time(self, name: int, value: Tensor) -> None:
        """Be shown a tensor by a graph."""
        if self.looking:
            self._graph_reported = True
            self.records.record(name, self.records.measure(value))

    def _hook(self, place: int) -> Callable[[nn.Module, Any, Any], Any]:
        names = place, place + len(self.modules)
        own = self.modules[place][1]

        def seen(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ANN401
            if module is not own:  # a copy brings its hooks along
                return None
            if torch.compiler.is_compiling():
                if not self.on:
                    return None
                if not self._who:
                    self.traced = True
                return compiled.watched(output, self.flags, place, self._who, names)
            if self.on and self.looking:
                self._reset_after_error()
                self._tracker.observe_output(
                    place, module, args, output, self._on_output_grad
                )
            return None

        return seen

    def _on_output_grad(self, tracked: TrackedTensor, gradient: Tensor) -> None:
        """Look at the gradient of an output."""
        if self.on and self.looking:
            self._tracker.observe_grad(tracked, gradient)
            self._queue_end_of_backward()

    def _queue_end_of_backward(self) -> None:
        """Look at the gradients of parameters once the backward pass has ended."""
        if not self._queued:
            self._queued = True
            self._queue_callback(self._ended)

    def _reset_after_error(self) -> None:
        """Forget that a backward pass was to end, if an error has ended it."""
        if self._queued and torch._C._current_graph_task_id() == OUTSIDE:  # noqa: SLF001
            self._queued = False
            self._tracker.read_pending()

    def _ended(self) -> None:
        # DDP and FSDP have asked as well, perhaps later: they finish gradients first.
        self._queue_callback(self._measure_parameter_grads)

    @staticmethod
    def _queue_callback(call: Callable[[], None]) -> None:
        engine = Variable._execution_engine  # noqa: SLF001
        engine.queue_callback(call)

    def _measure_parameter_grads(self) -> None:
        self._queued, self._parameters_seen = False, True
        self._tracker.read_pending()
        first = 2 * len(self.modules)
        grads = [
            (number, gradient)
            for number, (_, module, own) in enumerate(self._parameters, first)
            if (parameter := module._parameters.get(own)) is not None  # noqa: SLF001
            and (gradient := parameter.grad) is not None
        ]
        self.records.measure_all(grads)


_attached: weakref.WeakSet[Hooks] = weakref.WeakSet()


@contextlib.contextmanager
def all_paused() -> Iterator[None]:
    """Let no probe of any model look at anything inside."""
    before = [(hooks, hooks.on) for hooks in _attached]
    for hooks, _ in before:
        hooks.on = False
    try:
        yield
    finally:
        for hooks, on in before:
            hooks.on = on and hooks.attached


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules by path, each once, parts before the whole: as they end.

    Scripted parts are left out: they cannot be hooked.
    """
    modules: list[tuple[str, nn.Module]] = []
    visited: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        visited.add(id(module))
        for name, child in module.named_children():
            if id(child) not in visited and not isinstance(
                child, torch.jit.ScriptModule
            ):
                visit(f"{path}.{name}" if path else name, child)
        modules.append((path, module))

    visit("", model)
    return modules


def _is_compiled(module: nn.Module) -> bool:
    """Say whether torch.compile runs a module."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None  # noqa: SLF001

"""The largest number at each module's inputs and outputs, forward and backward.

And the module that first made something that is not finite; or the operation, where a
later one hides it: x * x may be inf and x / inf is 0, and then all that crosses the
boundaries of modules is finite, and the gradients are wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

LOSS = "loss"
"""Stands for what comes after the model's forward pass."""
BATCH = "batch"
"""Stands for what comes before it."""


@dataclass(frozen=True)
class Crossing:
    """Tensors that crossed a module's boundary at one moment."""

    path: str
    """Of the module; "" is the model."""
    side: str
    """"input" or "output"; backward, where the gradient's tensor was forward."""
    tensor: int
    """The same for crossings of one and the same gradient; 0 forward."""
    peak: float
    """Largest absolute value; inf or NaN where one is."""

    @property
    def finite(self) -> bool:
        """It holds neither inf nor NaN."""
        return math.isfinite(self.peak)


@dataclass(frozen=True)
class Trace:
    """What crossed boundaries in one pass, in the order of time."""

    forward: tuple[Crossing, ...]
    backward: tuple[Crossing, ...]

    def peaks(self) -> dict[str, float]:
        """Return the largest output of each module, by its path."""
        return _largest(self.forward)

    def gradient_peaks(self) -> dict[str, float]:
        """Return the largest gradient of each module's outputs, by its path."""
        return _largest(self.backward)


def _largest(crossings: tuple[Crossing, ...]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for one in crossings:
        if one.side == "output" and not math.isnan(peaks.get(one.path, 0.0)):
            higher = max(peaks.get(one.path, 0.0), one.peak)
            peaks[one.path] = math.nan if math.isnan(one.peak) else higher
    return peaks


class Boundaries:
    """Observes one forward and backward pass; nothing waits for the device until read.

    Hooks on tensors, not backward hooks of modules: those put a function of their own
    into the graph, and what changes in place then fails. What is computed again for the
    backward pass, as under activation checkpointing, is not read twice.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> with Boundaries(model) as boundaries:
        ...     out = model(torch.tensor([2.0, -1.0]))
        >>> boundaries.trace().peaks()
        {'0': 2.0, '': 2.0}
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._forward: list[tuple[str, str, int, Tensor]] = []
        self._backward: list[tuple[str, str, int, Tensor]] = []
        self._keys: dict[tuple[object, int], int] = {}
        self._ended = False

    def __enter__(self) -> Self:
        for path, module in self._model.named_modules():
            before = module.register_forward_pre_hook(
                self._entering(path), with_kwargs=True
            )
            self._handles += [before, module.register_forward_hook(self._leaving(path))]
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._keys.clear()

    def end_forward(self) -> None:
        """Take note that the loss is there: what runs now is computed again."""
        self._ended = True

    def trace(self) -> Trace:
        """Return what was seen. Waits for the device."""
        return Trace(_read(self._forward), _read(self._backward))

    def _entering(self, path: str) -> Callable[..., None]:
        def look(_module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            self._take(path, "input", (args, kwargs))

        return look

    def _leaving(self, path: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: object, output: object) -> None:
            self._take(path, "output", output)

        return look

    def _take(self, path: str, side: str, value: object) -> None:
        """Take down a module's inputs or outputs, and ask for their gradients."""
        for tensor in tensors_in(value):
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                continue
            if not self._ended:
                self._forward.append((path, side, 0, _peak(tensor)))
            if tensor.requires_grad and torch.is_grad_enabled():
                self._watch(tensor, path, side)

    def _watch(self, tensor: Tensor, path: str, side: str) -> None:
        def look(gradient: Tensor) -> None:
            if gradient.layout == torch.strided:
                self._backward.append((path, side, key, _peak(gradient)))

        node = tensor.grad_fn
        # Held: where nobody holds a node, an old torch makes a new object for it.
        name = (tensor, -1) if node is None else (node, tensor.output_nr)
        key = self._keys.setdefault(name, len(self._keys) + 1)
        self._handles.append(tensor.register_hook(look))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _peak(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, float64 on the tensor's device, shape ()."""
    values = tensor.detach()
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return torch.stack(torch.aminmax(values)).abs().amax().double()


def _read(seen: list[tuple[str, str, int, Tensor]]) -> tuple[Crossing, ...]:
    if not seen:
        return ()
    first = seen[0][3].device
    peaks = torch.stack([peak.to(first) for *_, peak in seen]).tolist()
    return tuple(
        Crossing(path, side, key, peak)
        for (path, side, key, _), peak in zip(seen, peaks, strict=True)
    )


def first_forward(trace: Trace, right: Trace) -> str | None:
    """Return the module whose own code first made inf or NaN in a forward pass.

    Args:
        trace: Of the pass.
        right: Of the same pass in fp32. Where that holds inf too, as masks do, the
            format is not to blame.

    Returns:
        A path, "" for the model's own code between its modules, or `BATCH`; None where
        all is finite.
    """
    same = len(trace.forward) == len(right.forward)
    for number, one in enumerate(trace.forward):
        if one.finite or (same and not right.forward[number].finite):
            continue
        if one.side == "output":
            return one.path
        return BATCH if not one.path else _parent(one.path)
    return None


def first_backward(trace: Trace, right: Trace) -> str | None:
    """Return the module whose backward pass first made inf or NaN.

    Of several modules that one tensor went into, the one that holds them all: autograd
    shows the sum of what they gave.

    Args:
        trace: Of the pass.
        right: Of the same pass in fp32; a gradient that is not finite there either is
            not the format's fault.

    Returns:
        A path, "" for the model's own code, or `LOSS` for what comes after it; None
        where all is finite.
    """
    wrong = {one.path for one in right.backward if not one.finite}
    bad = [one for one in trace.backward if not one.finite and one.path not in wrong]
    if not bad:
        return None
    group = [one for one in bad if one.tensor == bad[0].tensor]
    takers = [one.path for one in group if one.side == "input"]
    if takers:
        return _together(takers)
    givers = sorted((one.path for one in group), key=len)
    return LOSS if not givers[0] else _parent(givers[0])


def _together(paths: list[str]) -> str:
    """Return the deepest of nested modules, or the one around several."""
    deepest = max(paths, key=lambda path: path.count(".") + bool(path))
    if all(_holds(path, deepest) for path in paths):
        return deepest
    around = deepest
    while not all(_holds(around, path) or _holds(path, around) for path in paths):
        around = _parent(around)
    return around


def _holds(outer: str, inner: str) -> bool:
    return not outer or outer == inner or inner.startswith(f"{outer}.")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


_EMPTY = "empty"
"""In the names of operations that give memory as it is, which may hold anything."""


@dataclass(frozen=True)
class Hidden:
    """An operation that made inf or NaN, which did not come out of its module."""

    module: str
    """Path; "" is the model's own code, "loss" comes after the model."""
    op: str
    reaches: float
    """Its largest result in fp32; NaN where fp32 has no such operation."""


class OpPeaks(DispatchMode):
    """Takes down the largest result of each operation; waits for nothing until read.

    The largest, not the largest magnitude: a mask of -inf is meant.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._peaks: list[tuple[str, str, Tensor]] = []

    def __enter__(self) -> Self:
        for path, module in self._model.named_modules():
            enter, leave = self._entering(path), self._leaving
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        while self._handles:
            self._handles.pop().remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._stack.append(path)

        return enter

    def _leaving(self, *_: object) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- an overload of an operation
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and look at what it gives."""
        del types
        out = func(*args, **(kwargs or {}))
        name = str(func.__name__).partition(".")[0]
        if _EMPTY not in name:
            where = self._stack[-1] if self._stack else LOSS
            for tensor in tensors_in(out):
                if _is_read(tensor):
                    self._peaks.append((where, name, tensor.detach().amax().double()))
        return out

    def results(self) -> dict[tuple[str, str, int], float]:
        """Return module, operation, and its number there -> its largest result."""
        seen: Counter[tuple[str, str]] = Counter()
        peaks = {}
        for where, name, peak in self._peaks:
            peaks[where, name, seen[where, name]] = peak.item()
            seen[where, name] += 1
        return peaks


def _is_read(tensor: Tensor) -> bool:
    wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return wide and tensor.layout == torch.strided and tensor.numel() > 0


def first_hidden(
    low: Mapping[tuple[str, str, int], float],
    right: Mapping[tuple[str, str, int], float],
) -> Hidden | None:
    """Return the first operation that is not finite in a format alone.

    Args:
        low: Results of a forward pass in the format, in the order of time.
        right: Of the same pass in fp32.
    """
    for key, peak in low.items():
        reference = right.get(key)
        if peak < torch.inf or (reference is not None and not reference < torch.inf):
            continue
        return Hidden(*key[:2], torch.nan if reference is None else reference)
    return None

"""Operations whose inf or NaN no module's output shows, for a later one hides it.

In: one forward pass in a format, and the same in fp32. Out: the first operation that
is not finite in the format alone, with the module that ran it.

Why: x * x may be inf and x / inf is 0. Then all that crosses the boundaries of modules
is finite, and the gradients are wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.diagnostics.preflight.module_ranges import LOSS
from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

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

"""Small programs that are run under torch.autocast and under a region of ours.

In: a program, and what opens a region. Out: what the program gives, or its refusal.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

torch_only = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"torch was seen to do so in 2.13, this is {torch.__version__}",
)
"""Marks twins, in which torch.autocast goes wrong."""

Make = Any
"""Opens a region: torch.autocast's arguments but the device."""


@dataclass(frozen=True)
class Case:
    """A program, what torch makes of it, and what is right."""

    name: str
    program: Callable[[Make], object]
    torchs: object
    right: object


EYE = torch.eye(4)


def linear() -> nn.Linear:
    """Return a layer whose output, of `EYE`, is its weight, all of it far from zero."""
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(16.0).view(4, 4) + 1)
    return layer


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Say whether two tensors are equal to the bit, dtype included; None is not."""
    both = left is not None and right is not None
    return both and left.dtype == right.dtype and torch.equal(left, right)


class Watch(TorchDispatchMode):
    """Takes down the operations that reach torch's dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def patched() -> bool:
    """Whether torch is patched, as it is while a context is open in any thread."""
    return hasattr(torch._ops.key_extractor, "__wrapped__")


def outcome(program: Callable[[Make], object], make: Make) -> object:
    """Return what a program gives, or that torch refused it."""
    try:
        return program(make)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"


def autocast_state(device: str = "cpu") -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )


Contexts = tuple[torch.dtype | None, ...]
"""The dtype of each context, outermost first; None turns autocast off."""


@contextmanager
def entered(contexts: Contexts) -> Iterator[None]:
    with ExitStack() as stack:
        for dtype in contexts:
            stack.enter_context(torch.autocast("cpu", dtype, dtype is not None))
        yield

"""Frames: in force where a context is open, and where its forward pass is run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep import custom_bwd, custom_fwd
from halfstep.casting import active_context
from halfstep.casting.active_context import CastContext, OpCast
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import Policy


def frame(name: str, cache: CastCache | None = None) -> CastContext:
    policy = Policy.parse(f"torch + op:{name}=fp32")
    return CastContext(
        policy, {name: OpCast("fp32", 0, is_torch_default=False)}, cache, set()
    )


A, B, C = (frame(name) for name in ("softmax", "gelu", "exp"))
NAMES = {id(A): "A", id(B): "B", id(C): "C", id(None): "-"}


def name(found: CastContext | None) -> str:
    return NAMES[id(found)]


@contextmanager
def region(opened: CastContext | None, device: str = "cpu") -> Iterator[None]:
    pushed = active_context.push(device, opened)
    try:
        yield
    finally:
        active_context.pop(pushed)


class Ask(torch.autograd.Function):
    """The identity, which notes the frame of its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        seen.append(name(active_context.active("cpu")))
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(name(active_context.active("cpu")))
        return grad, None


class AskAgain(Ask):
    forward = staticmethod(custom_fwd(Ask.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Ask.backward, device_type="cpu"))


def ask(x: Tensor, seen: list[str], function: type[Ask] = Ask) -> Tensor:
    return function.apply(x, seen)  # type: ignore[no-untyped-call]


def start() -> Tensor:
    """Return a number to begin with."""
    return torch.ones((), requires_grad=True)


def backward(*outs: Tensor) -> None:
    torch.autograd.backward(outs)


def test_devices_have_their_own() -> None:
    """Law: a region on one device is none on another."""
    with region(A), region(B, "cuda"):
        assert name(active_context.active("cpu")) == "A"
        assert name(active_context.active("cuda")) == "B"
        assert active_context.active("mps") is None
    assert active_context.active("cuda") is None


@pytest.mark.parametrize("around", [None, C])
def test_a_backward_pass(around: CastContext | None) -> None:
    """Law: a backward pass runs under no frame, a decorated one under its forward's.

    The context around it has no say.
    """
    seen: list[str] = []
    for function in (Ask, AskAgain):
        x = ask(start(), seen, function)
        with region(A):
            x = ask(x, seen, function)
            with region(B):
                x = ask(x, seen, function)
            x = ask(x, seen, function)
        assert seen == ["-", "A", "B", "A"]
        seen.clear()
        with region(around):
            backward(x)
        assert seen == (["-"] * 4 if function is Ask else ["A", "B", "A", "-"])
        seen.clear()

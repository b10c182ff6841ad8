"""A context with a policy whose block torch.compile cannot trace to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast

if TYPE_CHECKING:
    from collections.abc import Callable

BF16_SOFTMAX = "torch + op:softmax=low"


def broken(x: Tensor) -> Tensor:
    """Break the graph in a context."""
    with autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX):
        y = x @ x
        torch._dynamo.graph_break()
        return (y @ x).softmax(-1)


def broken_in_two(x: Tensor) -> Tensor:
    """Break the graph in a context inside another."""
    with autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX):
        with autocast("cpu", torch.bfloat16, policy="lean"):
            torch._dynamo.graph_break()
            y = x @ x
        return y.softmax(-1)


@autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX)
def decorated(x: Tensor) -> Tensor:
    """Break the graph in a function that a context decorates."""
    torch._dynamo.graph_break()
    return (x @ x).softmax(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [broken, broken_in_two, decorated])
def test_graph_break(program: Callable[[Tensor], Tensor], backend: str) -> None:
    """Law: the block runs as in eager mode, and leaves no context behind."""
    torch._dynamo.reset()
    x = torch.randn(4, 4)
    expected = program(x)
    assert expected.dtype == torch.bfloat16
    compiled = torch.compile(program, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert active_context.active("cpu") is None
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(program, backend=backend, fullgraph=True)(x)
    assert active_context.active("cpu") is None
    assert not torch.is_autocast_enabled("cpu")

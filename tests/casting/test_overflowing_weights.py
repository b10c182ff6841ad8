"""Weights that a 16-bit format cannot hold are refused by name."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.session.session import Session

FITS, OVERFLOWS = 65519.0, 65520.0
"""From half-way between fp16's largest number and 65536 on, rounding gives inf."""


class Net(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))


def prepared(model: nn.Module, level: str, dtype: str, **more: Any) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return hs.prepare(model, optimizer, level, dtype=dtype, **more)


def put(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


@pytest.mark.parametrize("value", [OVERFLOWS, -1e5, 3e38])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_weight_beyond_fp16(level: str, value: float) -> None:
    """Law: it is named with its size and the cures, and each cure holds it."""
    model = Net()
    put(model.head.weight, value)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as caught:
        prepared(model, level, "fp16")
    assert str(caught.value) == (
        f"parameter 'head.weight' reaches {abs(value):g}, and fp16 holds numbers up to "
        "65504: it would become inf. Use dtype='bf16' or the rule 'module:head=fp32'."
    )
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    bare = Net()
    put(bare.gain, value)
    # Of a parameter of the model itself, only what helps is said.
    with pytest.raises(UserError, match=r" inf\. Use dtype='bf16'\.$"):
        prepared(bare, level, "fp16")
    for dtype, policy in (("bf16", "lean"), ("fp16", "lean + module:head=fp32")):
        twin = copy.deepcopy(model)
        session = prepared(twin, level, dtype, policy=policy)
        assert twin.head.weight.isfinite().all()
        assert session.weights()["head.weight"].isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_fits_and_what_stays(level: str) -> None:
    """Law: a number that rounds to 65504, inf itself, and fp32 weights are let in."""
    model = Net()
    put(model.head.weight, FITS)
    put(model.head.bias, torch.inf)
    if level != "O3":
        put(model.norm.weight, 1e5)
    prepared(model, level, "fp16")
    if level in {"O2", "O3"}:
        assert model.head.weight.max() == 65504


def test_buffers() -> None:
    """Law: at O3 one that becomes inf is warned of, at O2 it stays."""
    model = Net()
    put(model.table, -1e9)
    with pytest.warns(
        UserWarning, match="^buffer 'table' reaches 1e\\+09 and becomes "
    ):
        prepared(copy.deepcopy(model), "O3", "fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(model, "O2", "fp16")
    assert model.table[0] == -1e9


def test_bf16_has_a_limit_too() -> None:
    """Law: fp32 goes a little beyond bf16's largest number, and O1 holds it."""
    model = Net()
    put(model.head.weight, torch.finfo(torch.float32).max)
    with pytest.raises(UserError) as caught:
        prepared(model, "O2", "bf16")
    assert str(caught.value) == (
        "parameter 'head.weight' reaches 3.40282e+38, and bf16 holds numbers up to "
        "3.38953e+38: it would become inf. Use level='O1' or the rule "
        "'module:head=fp32'."
    )
    prepared(model, "O1", "bf16")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_state_beyond_fp16(level: str) -> None:
    """Law: a session refuses such a state, and stays as it was."""
    wide = Net()
    put(wide.head.weight, 1e5)
    state = prepared(wide, "O1", "bf16").state_dict()
    session = prepared(Net(), level, "fp16")
    before = copy.deepcopy(session.weights())
    with pytest.raises(UserError, match=r"^parameter 'head\.weight' reaches 100000, "):
        session.load_state_dict(state)
    torch.testing.assert_close(session.weights(), before, rtol=0, atol=0)
    other = prepared(Net(), level, "bf16")
    other.load_state_dict(state)
    assert other.weights()["head.weight"][0, 0] == pytest.approx(1e5, rel=2**-8)

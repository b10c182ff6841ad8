"""The operations that `halfstep bench autocast` measures.

In: a size, a device. Out: calls without arguments, each of one operation on operands
that are there already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

if TYPE_CHECKING:
    from collections.abc import Callable

Call: TypeAlias = "Callable[[], object]"

_CHANNELS = 16


def stock_operations(size: int, device: str) -> dict[str, Call]:
    """Return calls of all kinds that torch's table knows, and some that it does not.

    Args:
        size: Rows and columns; images are `size` pixels wide, in 16 channels.
        device: "cpu" or "cuda".
    """

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    x, y, overwritten = (draw(size, size) for _ in range(3))
    weight, bias = nn.Parameter(draw(size, size)), nn.Parameter(draw(size))
    gain = nn.Parameter(draw(size))
    image = draw(1, _CHANNELS, size, size)
    filters = nn.Parameter(draw(_CHANNELS, _CHANNELS, 3, 3))
    labels = torch.randint(size, (size,), device=device)
    return {
        "linear": lambda: F.linear(x, weight, bias),
        "conv2d": lambda: F.conv2d(image, filters, padding=1),
        "mm": lambda: torch.mm(x, y),
        "layer_norm": lambda: F.layer_norm(x, (size,), gain, bias),
        "softmax": lambda: F.softmax(x, -1),
        "cross_entropy": lambda: F.cross_entropy(x, labels),
        "mse_loss": lambda: F.mse_loss(x, y),
        "x + y": lambda: x + y,
        "x * 2.0": lambda: x * 2.0,
        "relu_": lambda: torch.relu_(overwritten),
    }


@dataclass(frozen=True)
class RuledOp:
    """An operation that a rule takes from torch, and what one would write instead."""

    rule: str
    call: Call
    """The operation as the model calls it."""
    by_hand: Call
    """The same under torch.autocast, made to run as the rule says."""


def ruled_operations(size: int, device: str, low_dtype: torch.dtype) -> list[RuledOp]:
    """Return operations under rules that change how they run on the device.

    Nothing learns here: a cache of casts would spare ours what is cast by hand.

    Args:
        size: Rows and columns.
        device: "cpu" or "cuda", whose tables differ.
        low_dtype: The 16-bit dtype of the autocast context.
    """
    x, y, weight = (torch.randn(size, size, device=device) for _ in range(3))
    vector = torch.randn(size, device=device)
    narrow = x.to(low_dtype)
    shape = (size,)

    def linear_by_hand() -> object:
        with torch.autocast(device, enabled=False):
            return F.linear(narrow.float(), weight)

    def norm_by_hand() -> object:
        with torch.autocast(device, enabled=False):
            return F.layer_norm(x.to(low_dtype), shape)

    def low_sum() -> object:
        return x.to(low_dtype) + y.to(low_dtype)

    def low_mv() -> object:
        return torch.mv(x.to(low_dtype), vector.to(low_dtype))

    cases = [
        RuledOp("op:gelu=fp32", lambda: F.gelu(narrow), lambda: F.gelu(narrow.float())),
        RuledOp("op:add=low", lambda: x + y, low_sum),
        RuledOp("op:linear=fp32", lambda: F.linear(narrow, weight), linear_by_hand),
    ]
    if device == "cuda":
        cases.append(
            RuledOp("op:layer_norm=low", lambda: F.layer_norm(x, shape), norm_by_hand)
        )
    else:
        cases += [
            RuledOp(
                "op:layer_norm=fp32",
                lambda: F.layer_norm(narrow, shape),
                lambda: F.layer_norm(narrow.float(), shape),
            ),
            RuledOp("op:mv=low", lambda: torch.mv(x, vector), low_mv),
        ]
    return cases

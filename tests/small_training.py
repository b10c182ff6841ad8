"""Runs of `halfstep train` that take a moment: a small size, few texts, no figures.

In: pytest's patches. Out: texts whose characters tell their class, and what compares
states.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep import machine
from halfstep.train import text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def small_and_measured(patch: pytest.MonkeyPatch) -> None:
    """Add a size that trains in a moment; plant rates that warn of nothing."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    patch.setitem(text.SIZES, "mini", shape | {"intermediate_size": 64})
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    patch.setattr(machine, "gemm_rates", lambda *_, **__: rates)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sum in one order, which depends on how many threads share a sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def letters(
    count: int, *alphabets: str, lengths: tuple[int, int]
) -> list[tuple[str, int]]:
    """Return texts and their classes, which take turns: each has an alphabet.

    Args:
        count: How many texts.
        alphabets: The characters of each class.
        lengths: The shortest text and the longest.
    """
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    rows = []
    for number in range(count):
        label = number % len(alphabets)
        size = draw.randint(*lengths)
        rows.append(("".join(draw.choices(alphabets[label], k=size)), label))
    return rows


def same(one: Any, other: Any) -> bool:
    """Say whether two nested states are equal to the bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

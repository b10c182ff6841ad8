"""How models are split, compiled and spared: what can be, and what is refused."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import T5Config, T5ForTokenClassification

from halfstep.distributed.process_group import World
from halfstep.errors import UserError
from halfstep.machine.recommendation import resolve
from halfstep.train import parallelize
from halfstep.train.config import TrainConfig

TWO = World(0, 2, torch.device("cpu"))


@pytest.fixture
def _two_processes() -> Iterator[None]:
    """Be one of two processes that do not wait for each other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def lay_out(
    model: nn.Module, world: World = TWO, level: str = "O0", **more: Any
) -> None:
    choice = resolve(level, "auto", "cpu")
    parallelize.parallelize_model(model, TrainConfig(**more), choice, world)


class Block(nn.Module):
    """A layer, and a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Nested(nn.Module):
    """A list of blocks that hold lists; a list of lists; one layer in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        pairs = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2)]
        self.pairs = nn.ModuleList(pairs)
        self.again = nn.ModuleList([self.blocks[0], self.blocks[1]])
        self.head = nn.Linear(4, 2)


@pytest.mark.usefixtures("_two_processes")
def test_lists_in_lists() -> None:
    """Law: blocks inside blocks, lists of lists and shared blocks can be split.

    So can a T5, whose blocks hold lists of layers.
    """
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    t5 = T5ForTokenClassification(T5Config(vocab_size=16, **shape))
    model = Nested()
    for each in (t5, model):
        lay_out(each, parallel="fsdp2")
        assert all(isinstance(param, DTensor) for param in each.parameters())
    inner = model.blocks[0]
    assert isinstance(inner, Block)
    # Each is gathered by itself: the outer block's own group holds its first layer.
    for module in (model, inner, inner.more[0]):
        assert type(module).__name__.startswith("FSDP"), type(module)


def test_one_process_cannot_split() -> None:
    """Law: fsdp2 in one process is refused, with what would be right."""
    alone = World(0, 1, torch.device("cpu"))
    with pytest.raises(UserError, match="there is one; start several with torchrun"):
        lay_out(nn.Linear(2, 2), alone, parallel="fsdp2")


def test_16_bits_without_masters_cannot_be_split() -> None:
    """Law: a level that stores 16 bits alone is rejected with fsdp2, by its flag."""
    with pytest.raises(UserError, match="--level O3 does not go with --parallel fsdp2"):
        lay_out(nn.Linear(2, 2), level="O3", parallel="fsdp2")


def test_a_model_that_cannot_recompute() -> None:
    """Law: a model without checkpointing is named."""
    with pytest.raises(UserError, match="--recompute: Linear of transformers does not"):
        lay_out(nn.Linear(2, 2), recompute=True)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without a C++ compiler --compile is refused on a CPU."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="--compile needs a C\\+\\+ compiler"):
        lay_out(nn.Linear(2, 2), compile=True)

"""Messages of many tensors: what goes in comes out, in one piece, in kept memory."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from processes import group_of_one
from ranks import counted
from torch import Tensor, nn

from halfstep.distributed import bucketed_all_reduce, ddp

KINDS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Return a group of this process alone: means are then what they are taken of."""
    with group_of_one():
        yield dist.group.WORLD


@pytest.mark.parametrize("num_summed", [1, 4])
def test_one_rank(
    group: dist.ProcessGroup, num_summed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: over one rank a mean is the gradient, rounded to what it travels in."""
    # Many messages take turns in memory.
    monkeypatch.setattr(bucketed_all_reduce, "BUCKET_BYTES", 40)
    wires: dict[Tensor, torch.dtype] = {}
    for numel in range(1, 20):
        param = nn.Parameter(torch.zeros(numel))
        param.grad = torch.randn(numel)
        wires[param] = KINDS[numel % 3]
    before = [p.grad.clone() for p in wires if p.grad is not None]
    averager = bucketed_all_reduce.BucketedAllReduce()
    with counted() as calls:
        averager.mean_(wires, group, num_summed=num_summed)
    # fp32: 3 and 6 numbers together, 9 to 18 alone; bf16: 1, 4 and 7; fp16: 2, 5 and 8.
    assert len(calls) == 5 + 5 + 4
    places = [t.data_ptr() for t in averager._buffers.values()]
    for (each, wire), old in zip(wires.items(), before, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, old.to(wire).float())
    averager.mean_(wires, group, num_summed=num_summed)
    assert [t.data_ptr() for t in averager._buffers.values()] == places


def test_layouts(group: dist.ProcessGroup) -> None:
    """Law: a gradient may lie in memory in any order, or be sparse."""
    param = nn.Parameter(torch.zeros(2, 3, 4, 5))
    dense = torch.randn(2, 3, 4, 5)
    param.grad = dense.to(memory_format=torch.channels_last)
    thin = nn.Parameter(torch.zeros(4, 2))
    thin.grad = torch.eye(4, 2).to_sparse(1)
    lone = nn.Parameter(torch.zeros(3))
    wires: dict[Tensor, torch.dtype] = dict.fromkeys([param, thin, lone], torch.float32)
    bucketed_all_reduce.BucketedAllReduce().mean_(wires, group)
    assert torch.equal(param.grad, dense)
    assert thin.grad is not None
    assert torch.equal(thin.grad, torch.eye(4, 2))
    assert lone.grad is None  # nobody has one


def test_headroom_saves_a_sum(group: dist.ProcessGroup) -> None:
    """Law: a sum of 4 numbers that fp16 can hold travels in fp16, with num_summed 4."""
    for num_summed, expected in ((1, float("inf")), (4, 4 * 65504.0)):
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.tensor([4 * 65504.0])
        wires: dict[Tensor, torch.dtype] = {param: torch.float16}
        bucketed_all_reduce.BucketedAllReduce().mean_(
            wires, group, num_summed=num_summed
        )
        assert param.grad.item() == expected


def test_first_rank(group: dist.ProcessGroup) -> None:
    """Law: any dtype and layout travels; the first rank's own stay as they are."""
    held = [
        torch.arange(6, dtype=torch.int16),
        torch.randn(2, 3).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([-0.0, torch.nan]),
        torch.empty(0),
    ]
    before = [tensor.clone() for tensor in held]
    bucketed_all_reduce.broadcast_(group, held)
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)
        )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("group")
def test_wrapper() -> None:
    """Law: DDP is found inside what torch.compile returns, and nowhere else."""
    plain = nn.Linear(2, 2)
    assert ddp.find_ddp(plain) is None
    inner = nn.parallel.DistributedDataParallel(plain)
    assert ddp.find_ddp(inner) is inner
    assert ddp.find_ddp(torch.compile(inner)) is inner
    assert ddp.find_ddp(nn.Sequential(inner)) is None
    assert ddp.find_ddp(torch.compile(plain)) is None

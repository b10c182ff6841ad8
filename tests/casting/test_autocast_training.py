"""Training under regions: torch's numbers to the bit, alone and under DDP.

Started by `run_ranks`, this file is the program of one process; it writes what it saw.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from halfstep.casting.autocast_mode import autocast
from halfstep.distributed import process_group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def exact(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        normal = checkpoint(self.norm, hidden, use_reentrant=False)
        out: Tensor = self.head(normal)
        self.seen += [hidden.dtype, normal.dtype, out.dtype]
        return out.float()


POLICIES = {
    "torch": [BF16, BF16, BF16],
    "lean": [BF16, BF16, BF16],
    "lean + module:head=fp32": [BF16, BF16, FP32],
    "torch + op:linear=fp32": [FP32, FP32, FP32],
    "torch + type:LayerNorm=fp32": [BF16, FP32, BF16],
}
X = torch.linspace(-1, 1, 64).view(8, 8)


def gradients(policy: str, rows: slice, *, wrap: bool) -> dict[str, Any]:
    """Return dtypes and gradients after two micro-batches, the first unsynchronised."""
    net = Net()
    model: Any = DistributedDataParallel(net) if wrap else net
    about_modules = "module:" in policy or "type:" in policy
    region = autocast("cpu", policy=policy, model=net if about_modules else None)
    for waits in (True, False):
        with model.no_sync() if wrap and waits else contextlib.nullcontext():
            with region:
                loss = model(X[rows]).square().mean()
            loss.backward()
    grads = {name: param.grad for name, param in net.named_parameters()}
    return {"seen": net.seen, "gradients": grads}


def process(folder: Path) -> None:
    with process_group.join("cpu") as world:
        rows = slice(4 * world.rank, 4 * world.rank + 4)
        found = {policy: gradients(policy, rows, wrap=True) for policy in POLICIES}
        assert not torch.is_autocast_enabled("cpu")
        torch.save(found, folder / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Sum as the two processes do: 16-bit sums differ with the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("policy", POLICIES)
def test_under_ddp(ranks: list[dict[str, Any]], policy: str) -> None:
    """Law: DDP leaves a policy in force; its gradients are the mean of both halves."""
    first, second = (rank[policy] for rank in ranks)
    alone = [gradients(policy, slice(start, start + 4), wrap=False) for start in (0, 4)]
    for found in (first, second, *alone):
        assert found["seen"] == POLICIES[policy] * 2
    exact(first["gradients"], second["gradients"])
    for name, gradient in first["gradients"].items():
        mean = sum(half["gradients"][name] for half in alone) / 2
        # fp32 sums, in another order.
        torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    process(Path(sys.argv[1]))

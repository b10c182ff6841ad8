"""Lightning's Trainer and Fabric under DDP: ranks stay alike, and skip together."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forks import run_ranks
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from tests.compat.test_lightning import SCALE, STEPS, Module, batches, net, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfstep.compat.lightning import FabricMixedPrecision, MixedPrecision
from halfstep.testing import overflow_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = ("O1 bf16", "O2 bf16", "O2 fp16")
ACCUMULATE = 2


def half(rank: int) -> list[tuple[Tensor, Tensor]]:
    part = slice(8 * rank, 8 * rank + 8)
    return [(x[part], y[part]) for x, y in batches()]


def by_trainer(case: str, rank: int, overflow: bool) -> dict[str, Any]:
    class Ranked(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(half(rank), batch_size=None)  # type: ignore[arg-type]

    level, dtype = case.split()
    plugin = MixedPrecision(level, dtype=dtype, loss_scale=SCALE[dtype])
    module = Ranked()
    with torch.no_grad():
        module.net[0].weight += rank / 3  # DDP gives out the first rank's
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
    context: Any = contextlib.nullcontext()
    if overflow and rank:
        context = overflow_in_backward(module, at=3)
    with context:
        trainer(
            plugin,
            devices=2,
            strategy=strategy,
            accumulate_grad_batches=ACCUMULATE,
            use_distributed_sampler=False,
        ).fit(module)
    return {"weights": module.net.state_dict(), **plugin.state_dict()}


def by_fabric(case: str, rank: int, overflow: bool) -> dict[str, Any]:
    level, dtype = case.split()
    plugin = FabricMixedPrecision(level, dtype=dtype, loss_scale=SCALE[dtype])
    strategy = FabricDDP(cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    network = net()
    with torch.no_grad():
        network[0].weight += rank / 3
    optimizer: Any = torch.optim.AdamW(network.parameters(), 3e-3)
    model, optimizer = fabric.setup(network, optimizer)
    context: Any = contextlib.nullcontext()
    if overflow and rank:
        context = overflow_in_backward(model, at=3)
    with context:
        for index, (x, y) in enumerate(half(rank)):
            last = (index + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
                fabric.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": network.state_dict(), **plugin.state_dict()}


WAYS: dict[str, Callable[[str, int, bool], dict[str, Any]]] = {
    "trainer": by_trainer,
    "fabric": by_fabric,
}


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    rank = TorchElasticEnvironment().global_rank()
    seen = {
        (way, case, overflow): run(case, rank, overflow)
        for way, run in WAYS.items()
        for case in CASES
        for overflow in (False, True)
    }
    torch.save(seen, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, str(folder), timeout=300)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:fp16 .*emulate")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_ranks(ranks: list[dict[Any, Any]], way: str, case: str) -> None:
    """Law: ranks end with the same bits, near to one process with whole batches.

    An overflow on one rank skips the step on both.
    """
    for overflow in (False, True):
        one, other = (rank[way, case, overflow] for rank in ranks)
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name])
        attempts = STEPS // ACCUMULATE
        assert one["steps"] == other["steps"] == {"0": (attempts, int(overflow))}
        assert one["loss_scale"]["scale"] == other["loss_scale"]["scale"]
    level, dtype = case.split()
    plugin = MixedPrecision(level, dtype=dtype, loss_scale=SCALE[dtype])
    module = Module()
    trainer(plugin, accumulate_grad_batches=ACCUMULATE).fit(module)
    expected = module.net.state_dict()
    for name, weight in ranks[0][way, case, False]["weights"].items():
        torch.testing.assert_close(weight, expected[name], rtol=0.05, atol=2e-3)


if __name__ == "__main__":
    main(sys.argv[1])

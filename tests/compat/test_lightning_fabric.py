"""Lightning's Fabric at halfstep's levels; it and the Trainer under DDP, too."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from ranks import cases, saw, start
from small_training import same
from tests.compat.test_lightning import (
    SCALE,
    STEPS,
    Module,
    batches,
    net,
    plugin_for,
    trainer,
    weights_of_session,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import halfstep as hs
from halfstep.compat.lightning import FabricMixedPrecision
from halfstep.scaling import ScaleRule
from halfstep.testing import assert_unchanged, overflow_in_backward

pytestmark = pytest.mark.numeric
KINDS = ("O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16")


class Run:
    def __init__(self, case: str, *, optimizer_later: bool = False) -> None:
        self.plugin = plugin_for(case, FabricMixedPrecision)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=[self.plugin])
        self.net = net()
        self.model: Any
        self.optimizer: Any
        if optimizer_later:
            self.model = self.fabric.setup_module(self.net)
            optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
            self.optimizer = self.fabric.setup_optimizers(optimizer)
        else:
            optimizer = torch.optim.AdamW(self.net.parameters(), 3e-3)
            self.model, self.optimizer = self.fabric.setup(self.net, optimizer)

    def state(self) -> dict[str, Any]:
        model, optimizer = self.model, self.optimizer
        return {"model": model, "optimizer": optimizer, "precision": self.plugin}

    def backward(self, batch: tuple[Tensor, Tensor], accumulate: int = 1) -> float:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.fabric.backward(loss / accumulate)
        return loss.item()

    def train(self, data: list[tuple[Tensor, Tensor]], accumulate: int = 1) -> None:
        for number, batch in enumerate(data):
            self.backward(batch, accumulate)
            if (number + 1) % accumulate == 0:
                self.fabric.clip_gradients(self.net, self.optimizer, max_norm=0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("optimizer_later", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", KINDS)
def test_as_a_session(case: str, accumulate: int, *, optimizer_later: bool) -> None:
    """Law: with clipping and accumulation, the weights are those of a session."""
    expected = weights_of_session(*case.split(), accumulate)
    run = Run(case, optimizer_later=optimizer_later)
    run.train(batches(), accumulate)
    for name, weight in run.net.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    assert run.plugin.last_step.step == STEPS // accumulate


@pytest.mark.parametrize("case", KINDS)
def test_overflow(case: str) -> None:
    """Law: an overflow changes nothing and is reported, from the first step on."""
    for num_before in (0, 3):
        run = Run(case)
        run.train(batches()[:num_before])
        with overflow_in_backward(run.model):
            run.backward(batches()[num_before])
        with assert_unchanged(run.net):
            run.optimizer.step()
        assert run.plugin.last_step.found_inf_in == ("0.weight",)
        run.optimizer.zero_grad()
        run.train(batches()[num_before:])
        assert run.plugin.last_step.applied
        expected = 512 if "fp16" in case else 1
        assert run.plugin.last_step.scale == expected


@pytest.mark.parametrize("case", KINDS)
def test_resume(case: str, tmp_path: Path) -> None:
    """Law: saved in fp32 and loaded before the first step, a run goes on to the bit."""
    run = Run(case)
    run.train(batches())
    run.fabric.save(tmp_path / "state.ckpt", run.state())
    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)
    assert {v.dtype for v in saved["model"].values()} == {torch.float32}
    other = Run(case)
    other.fabric.load(tmp_path / "state.ckpt", other.state())
    for each in (run, other):
        each.train(batches())
    assert same(dict(run.net.state_dict()), dict(other.net.state_dict()))
    one, two = (r.optimizer.state_dict()["state"] for r in (run, other))
    assert all(same(one[number], two[number]) for number in one | two)
    assert run.plugin.state_dict() == other.plugin.state_dict()


@pytest.mark.parametrize("optimizer_later", [False, True])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_cleared_before_the_first_step(
    num_batches: int, *, optimizer_later: bool
) -> None:
    """Law: `zero_grad` counts also before the plugin has met the optimizer."""
    run = Run("O2 bf16", optimizer_later=optimizer_later)
    expected = Run("O2 bf16")
    for batch in batches()[:num_batches]:
        run.backward(batch)
    run.optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"AdamW\.step\(\) changed nothing: No grad"):
        run.optimizer.step()
    for each in (run, expected):
        each.train(batches())
    assert same(dict(run.net.state_dict()), dict(expected.net.state_dict()))


def pair(level: str, scale: Any) -> tuple[FabricMixedPrecision, Fabric, list[Any]]:
    """Return two models with their optimizers; in each, two layers are tied."""
    plugin = FabricMixedPrecision(level, dtype="fp16", loss_scale=scale)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    parts = []
    for _ in range(2):
        network = net().append(nn.Linear(1, 1))
        network.append(network[4])
        optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
        parts.append(fabric.setup(network, optimizer))
        assert network[4].weight is network[5].weight
    return plugin, fabric, parts


def test_two_models() -> None:
    """Law: models that take turns have one plugin; tied weights stay tied."""
    plugin, fabric, models = pair("O2", SCALE["fp16"])
    for x, y in batches():
        for model, optimizer in models:
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    (one, _), (other, _) = models
    assert same(dict(one.state_dict()), dict(other.state_dict()))
    assert plugin.state_dict()["steps"] == {"0": (STEPS, 0), "1": (STEPS, 0)}


def test_low_precision_throughout() -> None:
    """Law: O3 casts inputs, and returns fp32."""
    run = Run("O3 bf16")
    before = run.backward(batches()[0])
    run.train(batches())
    assert run.model(batches()[0][0]).dtype == torch.float32
    assert {p.dtype for p in run.net.parameters()} == {torch.bfloat16}
    assert run.backward(batches()[0]) < before


def test_closure_is_rejected() -> None:
    """Law: a step with a closure ends in one line."""
    run = Run("O1 bf16")
    with pytest.raises(hs.UserError, match=r"takes no closure here: compute the grad"):
        run.optimizer.step(lambda: None)


@pytest.mark.parametrize("optimizer_later", [False, True])
@pytest.mark.parametrize("case", KINDS)
def test_backward_without_fabric(case: str, *, optimizer_later: bool) -> None:
    """Law: a step raises, also where Fabric does not see the forward pass."""
    run = Run(case, optimizer_later=optimizer_later)
    with run.fabric.autocast():
        loss = run.net[0](batches()[0][0]).mean()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"call fabric\.backward\(loss\)"):
        run.optimizer.step()


def test_clipping_an_overflow() -> None:
    """Law: Fabric's clipping raises, or leaves the step to be skipped, as asked."""
    run = Run("O2 bf16")
    with overflow_in_backward(run.model):
        run.backward(batches()[0])
    with pytest.raises(RuntimeError, match="is non-finite"):
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    run.fabric.clip_gradients(
        run.model, run.optimizer, max_norm=1.0, error_if_nonfinite=False
    )
    with assert_unchanged(run.net):
        run.optimizer.step()
    assert run.plugin.last_step.skipped


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scale_moves_in_a_window(level: str) -> None:
    """Law: gradients that one optimizer accumulates follow the scale of the others."""
    ends = []
    growing = ScaleRule(init_scale=2.0, growth_interval=1, max_scale=2.0**9)
    for scale in (growing, 2.0):
        plugin, fabric, ((one, steps), (other, rare)) = pair(level, scale)
        for number, (x, y) in enumerate(batches()):
            fabric.backward(nn.functional.mse_loss(other(x), y))
            fabric.backward(nn.functional.mse_loss(one(x), y))
            steps.step()
            steps.zero_grad()
            if number % 3 == 2:
                rare.step()
                rare.zero_grad()
        assert plugin.last_step.scale == (512 if scale is growing else 2)
        ends.append(other.state_dict())
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-3, atol=1e-4)


RANKED = ("O1 bf16", "O2 bf16", "O2 fp16")
ACCUMULATE = 2


def half(rank: int) -> list[tuple[Tensor, Tensor]]:
    part = slice(8 * rank, 8 * rank + 8)
    return [(x[part], y[part]) for x, y in batches()]


def planted(model: nn.Module, bad: bool) -> Any:
    return overflow_in_backward(model, at=3) if bad else contextlib.nullcontext()


def by_trainer(_: object, case: str, overflow: bool) -> dict[str, Any]:
    rank = dist.get_rank()

    class Ranked(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(half(rank), batch_size=None)  # type: ignore[arg-type]

    plugin, module = plugin_for(case), Ranked()
    with torch.no_grad():
        module.net[0].weight += rank / 3  # DDP gives out the first rank's
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
    with planted(module, overflow and rank > 0):
        trainer(
            plugin,
            devices=2,
            strategy=strategy,
            accumulate_grad_batches=ACCUMULATE,
            use_distributed_sampler=False,
        ).fit(module)
    return {"weights": module.net.state_dict(), **plugin.state_dict()}


def by_fabric(_: object, case: str, overflow: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    plugin = plugin_for(case, FabricMixedPrecision)
    strategy = FabricDDP(cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    network = net()
    with torch.no_grad():
        network[0].weight += rank / 3
    optimizer: Any = torch.optim.AdamW(network.parameters(), 3e-3)
    model, optimizer = fabric.setup(network, optimizer)
    with planted(model, overflow and rank > 0):
        for index, (x, y) in enumerate(half(rank)):
            last = (index + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
                fabric.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": network.state_dict(), **plugin.state_dict()}


RUNS = list(itertools.product(RANKED, (False, True)))
CASES = cases(by_trainer, *RUNS) | cases(by_fabric, *RUNS)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("case", RANKED)
@pytest.mark.parametrize("way", ["by_trainer", "by_fabric"])
def test_ranks(way: str, case: str) -> None:
    """Law: ranks end with the same bits, near to one process with whole batches.

    An overflow on one rank skips the step on both.
    """
    ranks = start(2, ("tests.compat.test_lightning_fabric",))
    for overflow in (True, False):
        one, other = saw(ranks, f"{way} {(case, overflow)}")
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name])
        attempts = STEPS // ACCUMULATE
        assert one["steps"] == other["steps"] == {"0": (attempts, int(overflow))}
        assert one["loss_scale"]["scale"] == other["loss_scale"]["scale"]
    module = Module()
    trainer(plugin_for(case), accumulate_grad_batches=ACCUMULATE).fit(module)
    expected = module.net.state_dict()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, expected[name], rtol=0.05, atol=2e-3)

"""Lightning's Trainer and Fabric train at halfstep's levels, and skip as sessions do."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.compat.lightning import FabricMixedPrecision, MixedPrecision
from halfstep.scaling import ScaleRule
from halfstep.testing import overflow_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:fp16 .*emulate"),
]
STEPS = 12
SCALE = {"fp16": ScaleRule(init_scale=2.0**10), "bf16": "none"}
"""A first loss scale that does not overflow."""


def net() -> nn.Sequential:
    """Return the same small network each time; a norm stays in fp32 at O2."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the same batches each time."""
    inputs = torch.randn(STEPS, 16, 8, generator=torch.Generator().manual_seed(1))
    return [(x, x.sin().sum(-1, keepdim=True) / 4) for x in inputs]


class Module(LightningModule):
    """A regression. `make` returns what `configure_optimizers` is to return."""

    def __init__(self, make: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = net()
        self.losses: list[float] = []
        self._make = make or (lambda params: torch.optim.AdamW(params, 3e-3))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


def trainer(*plugins: MixedPrecision, **options: Any) -> Trainer:
    """Return a quiet Trainer on the CPU."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
    }
    return Trainer(plugins=list(plugins), **(defaults | options))


def trained(*plugins: MixedPrecision, **options: Any) -> Module:
    """Return a module after one epoch."""
    module = Module()
    trainer(*plugins, **options).fit(module)
    return module


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Say whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.parametrize(("level", "word"), [("O0", "32-true"), ("O1", "bf16-mixed")])
def test_as_lightning_itself(level: str, word: Any) -> None:
    """Law: where the arithmetic is the same, so is every loss, to the bit."""
    expected = trained(precision=word)
    assert trained(MixedPrecision(level)).losses == expected.losses


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_as_a_session(level: str, dtype: str, accumulate: int) -> None:
    """Law: with clipping and accumulation, the weights are those of a session."""
    model = net()
    session = hs.prepare(
        model,
        torch.optim.AdamW(model.parameters(), 3e-3),
        level,
        dtype=dtype,
        loss_scale=SCALE[dtype],
        clip_grad_norm=0.5,
        accumulate=accumulate,
    )
    for x, y in batches():
        with session.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()
    plugin = MixedPrecision(level, dtype=dtype, loss_scale=SCALE[dtype])
    module = trained(plugin, gradient_clip_val=0.5, accumulate_grad_batches=accumulate)
    expected, weights = session.weights(), module.net.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    assert plugin.last_step.scale == (1024 if dtype == "fp16" else 1)
    assert plugin.last_step.step == STEPS // accumulate


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_as_accurate_as_fp32(level: str) -> None:
    """Law: at each level the loss ends where it does in fp32, within noise."""
    expected = trained(precision="32-true", max_epochs=4).losses[-1]
    losses = trained(MixedPrecision(level), max_epochs=4).losses
    assert losses[-1] < losses[0] / 2
    assert losses[-1] == pytest.approx(expected, rel=0.1)


class OverflowAt(Callback):
    """Makes the gradients of one batch inf."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.rates: list[float] = []
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.context = overflow_in_backward(pl_module)
        if batch_idx == self.at:
            self.before = copy.deepcopy(pl_module.state_dict())
            self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
            self.context.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        self.seen.append({name: float(value) for name, value in metrics.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if batch_idx == self.at:
            self.context.__exit__(None, None, None)
            self.report = trainer.precision_plugin.last_step.read()
            assert same(self.before, pl_module.state_dict())
            state = trainer.optimizers[0].state_dict()["state"]
            assert all(same(self.state[number], state[number]) for number in state)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("case", ["O1 bf16", "O1 fp16", "O2 fp16"])
def test_overflow(case: str, algorithm: str) -> None:
    """Law: an overflow changes nothing, is reported, and holds the LR schedule.

    Under a fused optimizer, which Lightning's own plugin does not clip.
    """

    def make(params: Any) -> Any:
        optimizer = torch.optim.AdamW(params, 3e-3, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    level, dtype = case.split()
    module, callback = Module(make), OverflowAt(5)
    run = trainer(
        MixedPrecision(level, dtype=dtype, loss_scale=SCALE[dtype]),
        callbacks=[callback],
        gradient_clip_val=0.5,
        gradient_clip_algorithm=algorithm,
    )
    run.fit(module)
    assert callback.report.skipped
    assert callback.report.found_inf_in == ("net.0.weight",)
    expected = [3e-3 * 0.5 ** (i + (i < 5)) for i in range(STEPS)]
    assert callback.rates[:-1] == pytest.approx(expected[:-1])
    skipped = [metrics["halfstep/steps_skipped"] for metrics in callback.seen]
    assert skipped == [0.0] * 5 + [1.0] * 7
    if dtype == "fp16":
        scales = [metrics["halfstep/loss_scale"] for metrics in callback.seen]
        assert scales == [1024.0] * 6 + [512.0] * 6
    assert run.global_step == STEPS  # attempts, as Lightning counts

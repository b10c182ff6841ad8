"""Lightning's Trainer trains at halfstep's levels, and skips as sessions do."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from small_training import same
from torch import Tensor, nn
from torch.utils.data import DataLoader
from weight_averages import DocumentedAverage

import halfstep as hs
from halfstep.compat.lightning import MixedPrecision
from halfstep.scaling import ScaleRule
from halfstep.testing import overflow_in_backward

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
STEPS = 12
SCALE = {"fp16": ScaleRule(init_scale=2.0**10), "bf16": "none"}
"""A first loss scale that does not overflow."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(STEPS, 16, 8, generator=torch.Generator().manual_seed(1))
    return [(x, x.sin().sum(-1, keepdim=True) / 4) for x in inputs]


class Module(LightningModule):
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


def plugin_for(case: str, kind: Any = MixedPrecision) -> Any:
    level, dtype = case.split()
    return kind(level, dtype=dtype, loss_scale=SCALE[dtype])


def with_schedule(optimizer: torch.optim.Optimizer) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trained(*plugins: MixedPrecision, **options: Any) -> Module:
    module = Module()
    trainer(*plugins, **options).fit(module)
    return module


@pytest.mark.parametrize(("level", "word"), [("O0", "32-true"), ("O1", "bf16-mixed")])
def test_as_lightning_itself(level: str, word: Any) -> None:
    """Law: where the arithmetic is the same, so is every loss, to the bit."""
    expected = trained(precision=word)
    assert trained(MixedPrecision(level)).losses == expected.losses


def weights_of_session(level: str, dtype: str, accumulate: int) -> dict[str, Tensor]:
    model = net()
    session = hs.prepare(
        *(model, torch.optim.AdamW(model.parameters(), 3e-3), level),
        dtype=dtype,
        loss_scale=SCALE[dtype],
        clip_grad_norm=0.5,
        accumulate=accumulate,
    )
    for x, y in batches():
        with session.autocast():
            output = model(x)
        session.backward(nn.functional.mse_loss(output.float(), y))
        session.step()
    return session.weights()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_as_a_session(level: str, dtype: str, accumulate: int) -> None:
    """Law: with clipping and accumulation, the weights are those of a session."""
    expected = weights_of_session(level, dtype, accumulate)
    plugin = plugin_for(f"{level} {dtype}")
    module = trained(plugin, gradient_clip_val=0.5, accumulate_grad_batches=accumulate)
    for name, weight in module.net.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    assert plugin.last_step.scale == (1024 if dtype == "fp16" else 1)
    assert plugin.last_step.step == STEPS // accumulate


class OverflowAt(Callback):
    """Makes one step of a run overflow, which must change nothing."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.rates: list[float] = []
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.planted = trainer.global_step == self.at
        if self.planted:
            self.context = overflow_in_backward(pl_module)
            self.before = copy.deepcopy(pl_module.state_dict())
            self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
            self.context.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        self.seen.append({name: float(value) for name, value in metrics.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if self.planted:
            self.context.__exit__(None, None, None)
            self.report = trainer.precision_plugin.last_step.read()
            assert same(self.before, pl_module.state_dict())
            state = trainer.optimizers[0].state_dict()["state"]
            assert all(same(self.state[number], state[number]) for number in state)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("case", ["O1 bf16", "O1 fp16", "O2 fp16"])
def test_overflow(case: str, algorithm: str) -> None:
    """Law: an overflow changes nothing, is reported, and holds the LR schedule."""
    module = Module(
        lambda params: with_schedule(torch.optim.AdamW(params, 3e-3, fused=True))
    )
    callback = OverflowAt(5)
    run = trainer(
        plugin_for(case),
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
    if "fp16" in case:
        scales = [metrics["halfstep/loss_scale"] for metrics in callback.seen]
        assert scales == [1024.0] * 6 + [512.0] * 6
    assert run.global_step == STEPS  # attempts, as Lightning counts


def states_of(run: Trainer) -> list[dict[str, Any]]:
    return [*run.optimizers[0].state_dict()["state"].values()]


@pytest.mark.parametrize("case", ["O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16"])
def test_resume(case: str, tmp_path: Path) -> None:
    """Law: a checkpoint holds fp32 weights and plain values; it resumes to the bit."""

    def fit(epochs: int, path: str | None = None) -> tuple[Module, Trainer]:
        module = Module()
        callbacks = [OverflowAt(5)]
        run = trainer(plugin_for(case), max_epochs=epochs, callbacks=callbacks)
        run.fit(module, ckpt_path=path, weights_only=True)
        return module, run

    path = str(tmp_path / "half.ckpt")
    _, first = fit(1)
    first.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    if "O3" not in case:
        assert {v.dtype for v in saved["state_dict"].values()} == {torch.float32}
        weight = saved["state_dict"]["net.0.weight"]
        assert not torch.equal(weight, weight.bfloat16().float())
    resumed_module, resumed = fit(2, path)
    module, whole = fit(2)
    assert same(module.state_dict(), resumed_module.state_dict())
    for one, other in zip(states_of(whole), states_of(resumed), strict=True):
        assert same(one, other)
    assert module.losses[STEPS:] == resumed_module.losses
    state = whole.precision_plugin.state_dict()
    assert state == resumed.precision_plugin.state_dict()
    assert state["steps"] == {"0": (2 * STEPS, 1)}


class Gan(Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order = order
        self.other = net()

    def training_step(self, batch: Any, index: int) -> None:
        one, other = self.optimizers()
        x, y = batch

        def loss_of(model: nn.Module) -> Tensor:
            return nn.functional.mse_loss(model(x), y)

        if self.order == "in turn":
            for optimizer in (one, other):
                self.toggle_optimizer(optimizer)
                # Without toggling it would leave gradients in the other network.
                loss = loss_of(self.net) + loss_of(self.other)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
        else:
            self.manual_backward(loss_of(self.net))
            self.manual_backward(loss_of(self.other))
            for optimizer in (one, other):
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
        self.losses.append(loss_of(self.net).item())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(each.parameters(), 3e-3)
            for each in (self.net, self.other)
        ]


@pytest.mark.parametrize("order", ["in turn", "at the end"])
@pytest.mark.parametrize("case", ["O1 bf16", "O2 fp16"])
def test_manual_optimization(case: str, order: str) -> None:
    """Law: optimizers in turn step alike, counted each; one overflow skips one step.

    Both networks begin alike, so they end alike. Where both backward passes come first,
    the scale must not move between the two steps.
    """
    level, dtype = case.split()
    rule = (
        ScaleRule(init_scale=2.0**8, growth_interval=4) if dtype == "fp16" else "none"
    )
    plugin = MixedPrecision(level, dtype=dtype, loss_scale=rule)
    module = Gan(order)
    run = trainer(plugin)
    run.fit(module)
    assert same(module.net.state_dict(), module.other.state_dict())
    assert module.losses[-1] < module.losses[0] / 2
    assert run.global_step == 2 * STEPS
    assert plugin.state_dict()["steps"] == {"0": (STEPS, 0), "1": (STEPS, 0)}
    module, plugin = Gan(order), MixedPrecision(level, dtype=dtype, loss_scale=rule)
    with overflow_in_backward(module.other, at=3):
        trainer(plugin).fit(module)
    assert plugin.state_dict()["steps"] == {"0": (STEPS, 0), "1": (STEPS, 1)}


class ByHand(Module):
    def __init__(self, backward: Callable[[LightningModule, Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._backward = backward

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self._backward(self, nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        optimizer.step()


@pytest.mark.parametrize(
    "case", ["O0 bf16", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16"]
)
def test_steps_without_effect(case: str) -> None:
    """Law: a step that has no gradient, or only others' gradients, is not silent."""
    with pytest.raises(RuntimeError, match=r"self\.manual_backward\(loss\)"):
        trainer(plugin_for(case)).fit(ByHand(lambda _, loss: loss.backward()))

    def clear(module: LightningModule, loss: Tensor) -> None:
        module.manual_backward(loss)
        module.optimizers().zero_grad()

    with pytest.warns(
        UserWarning, match=r"AdamW.step\(\) changed nothing: No gradient"
    ):
        trainer(plugin_for(case)).fit(ByHand(clear))


class Mixture(Gan):
    """Two networks; `order` says which calls make and use their gradients."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()[1]
        params = [*self.other.parameters()]

        def loss_of(model: nn.Module) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def assign() -> None:
            grads = torch.autograd.grad(loss_of(self.other), params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

        def edit() -> None:
            for param in params:
                param.grad.mul_(0.5)

        calls = {
            "other's": lambda: self.manual_backward(loss_of(self.net)),
            "manual": lambda: self.manual_backward(loss_of(self.other)),
            "plain": lambda: loss_of(self.other).backward(),
            "assign": assign,
            "edit": edit,
            "clear": optimizer.zero_grad,
            "step": optimizer.step,
        }
        for name in self.order.split(", "):
            calls[name]()
        optimizer.zero_grad()


FOREIGN = r"another backward pass: call self\.manual_backward"
TWICE = r"^optimizer\.step\(\) was called without a backward pass"


@pytest.mark.parametrize(
    ("order", "case", "message"),
    [
        ("other's, plain, step", "O1 fp16", FOREIGN),
        ("other's, plain, step", "O2 fp16", FOREIGN),
        ("manual, plain, step", "O1 fp16", FOREIGN),
        ("manual, plain, step", "O2 fp16", FOREIGN),
        ("assign, step", "O1 fp16", FOREIGN),
        ("assign, step", "O1 bf16", ""),
        ("assign, step", "O2 bf16", ""),
        ("manual, step, step", "O1 bf16", TWICE),
        ("manual, step, step", "O2 fp16", TWICE),
        ("plain, clear, manual, step", "O1 fp16", ""),
        ("other's, manual, manual, edit, step", "O1 fp16", ""),
    ],
)
def test_gradients_of_two_optimizers(order: str, case: str, message: str) -> None:
    """Law: a step refuses gradients that are unscaled or used, and no others."""
    module = Mixture(order)
    before = module.other[0].weight.detach().clone()
    if message:
        with pytest.raises(RuntimeError, match=message):
            trainer(plugin_for(case)).fit(module)
    else:
        trainer(plugin_for(case)).fit(module)
        assert not torch.equal(module.other[0].weight, before)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_evaluation(level: str) -> None:
    """Law: validation, test and prediction run in the level's formats.

    Before, while and after training; afterwards weights are fp32 where there is an fp32
    value.
    """
    dtypes = set()

    class Evaluated(Module):
        def evaluate(self, batch: Any, index: int) -> Tensor:
            dtypes.add(self.net[0](batch[0]).dtype)
            return self.net(batch[0])

        validation_step = test_step = predict_step = evaluate

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

        test_dataloader = predict_dataloader = val_dataloader

    module = Evaluated()
    run = trainer(MixedPrecision(level), num_sanity_val_steps=0)
    before = copy.deepcopy(module.state_dict())
    run.validate(module, verbose=False)
    if level != "O3":
        assert same(before, module.state_dict())
    run.fit(module)
    weights = copy.deepcopy(module.state_dict())
    run.test(module, verbose=False)
    run.predict(module)
    assert dtypes == {torch.bfloat16}
    assert same(weights, module.state_dict())
    if level != "O3":
        assert next(module.parameters()).dtype == torch.float32
        assert module.net(torch.ones(8)).dtype == torch.float32


def test_hooks_see_unscaled_gradients() -> None:
    """Law: a hook before the step sees gradients unscaled, and may change them."""
    norms = []

    class Halve(Callback):
        def on_before_optimizer_step(
            self, trainer: Any, pl_module: Any, optimizer: Any
        ) -> None:
            params = optimizer.param_groups[0]["params"]
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in params])))
            for param in params:
                param.grad /= 2

    module = Module(lambda params: torch.optim.SGD(params, 0.1))
    plugin = MixedPrecision("O2", dtype="fp16", loss_scale=1024.0)
    with pytest.warns(UserWarning, match=r"O2 fp16 are in optimizer.param_groups"):
        trainer(plugin, callbacks=[Halve()]).fit(module)
    half = Module(lambda params: torch.optim.SGD(params, 0.05))
    trainer(MixedPrecision("O2", dtype="fp16", loss_scale=1024.0)).fit(half)
    assert max(norms) < 10
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, half.state_dict()[name])


def test_rejected() -> None:
    """Law: what cannot work ends in one line that says what would."""
    with pytest.raises(hs.UserError, match=r"level='O4' is not a level"):
        MixedPrecision("O4")
    with pytest.raises(hs.UserError, match=r"fp32 training is level O0"):
        MixedPrecision("O1", dtype="fp32")
    module = Module(torch.optim.LBFGS)
    with pytest.raises(hs.UserError, match=r"LBFGS evaluates the model inside"):
        trainer(MixedPrecision("O1")).fit(module)
    thaw = trainer(MixedPrecision("O2"), callbacks=[BackboneFinetuning()])
    module = Module()
    module.backbone = module.net[0]
    with pytest.raises(hs.UserError, match=r"BackboneFinetuning at O2 bf16: .* use O1"):
        thaw.fit(module)
    trained_before = trained(MixedPrecision("O2"))
    with pytest.raises(hs.UserError, match=r"at O2 bf16, and this plugin is for O1"):
        trainer(MixedPrecision("O1")).fit(trained_before)
    with pytest.raises(
        hs.UserError, match=r"\['scale'\], and was not saved by halfstep"
    ):
        MixedPrecision("O1").load_state_dict({"scale": 1.0})
    with pytest.raises(hs.UserError, match=r"step\(\) takes no foo here"):
        MixedPrecision("O1").optimizer_step(None, Module(), lambda: None, foo=1)


def test_scale_of_lightnings_own_checkpoint() -> None:
    """Law: a run that began with "16-mixed" keeps its loss scale."""
    plugin = MixedPrecision("O1", dtype="fp16", loss_scale=SCALE["fp16"])
    state = torch.amp.GradScaler("cpu", init_scale=4.0)
    state.scale(torch.ones(()))
    plugin.load_state_dict(state.state_dict())
    trainer(plugin).fit(Module())
    assert plugin.last_step.applied
    assert plugin.last_step.scale == 4.0


def test_schedule_after_resuming(tmp_path: Path) -> None:
    """Law: a schedule waits for the next applied step also where a run goes on."""
    rates = []
    for path in (None, str(tmp_path / "first.ckpt")):
        callback = OverflowAt(STEPS if path else 0)
        run = trainer(MixedPrecision("O2"), max_epochs=2 if path else 1)
        run.callbacks.append(callback)
        module = Module(lambda params: with_schedule(torch.optim.SGD(params, 0.5)))
        run.fit(module, ckpt_path=path, weights_only=True)
        run.save_checkpoint(tmp_path / "first.ckpt")
        rates.append(callback.rates)
    assert rates[0][:2] == [0.5, 0.25]
    assert rates[1][0] == rates[0][-1]


@pytest.mark.parametrize("hidden", [False, True])
def test_weights_written_by_a_callback(*, hidden: bool) -> None:
    """Law: what a callback writes into weights at the end is what is left of them."""

    class Write(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            for param in pl_module.parameters():
                (param.data if hidden else param.detach()).fill_(0.25)

    module = Module()
    trainer(MixedPrecision("O2"), callbacks=[Write()]).fit(module)
    assert all((weight == 0.25).all() for weight in module.state_dict().values())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_average_of_weights(level: str) -> None:
    """Law: the documented average is that of the master weights, kept by a callback.

    A copy that is made when the weights are in 16 bits says so.
    """

    class Average(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.average = DocumentedAverage(pl_module)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            words = "loses small updates"
            is_low = level == "O2"
            with pytest.warns(UserWarning, match=words) if is_low else nullcontext():
                copy.deepcopy(pl_module)
            copy.deepcopy(pl_module)  # said once

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.average.update(pl_module.state_dict(), trainer.optimizers[0])

    callback, module = Average(), Module()
    trainer(MixedPrecision(level), callbacks=[callback], max_epochs=20).fit(module)
    callback.average.assert_exact()
    copy.deepcopy(module)  # in fp32 again

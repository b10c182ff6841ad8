"""The adapters for Lightning, Accelerate and transformers, beside the libraries alone.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.adapters [--write FILE]

The first table runs programs of `examples` as `benchmarks.examples` does. The second
trains four steps in fp16 with a fused AdamW, with an inf in the gradients of the third,
and asks each library whether that step was skipped.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import accelerate  # noqa: E402
import lightning  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from benchmarks import examples  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins import MixedPrecision as TheirFabric  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision as TheirPlugin  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim.lr_scheduler import LinearLR, LRScheduler  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from halfstep.compat import accelerate as our_accelerate  # noqa: E402
from halfstep.compat import transformers as our_transformers  # noqa: E402
from halfstep.compat.lightning import (  # noqa: E402
    FabricMixedPrecision,
    MixedPrecision,
)
from halfstep.scaling import ScaleRule  # noqa: E402
from halfstep.testing import overflow_in_backward  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, BAD_STEP, SCALE, ROUNDS = 4, 3, 1024.0, 5
FOLDERS = ("lightning_trainer", "fabric", "accelerate", "transformers_trainer")
INPUTS = torch.randn(STEPS, 16, 8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Step:
    """What is known after one optimizer step."""

    flag: bool | None
    """Whether the library says that the step was skipped; None: it does not say."""
    weights: Tensor
    lr: float


class Net(lightning.LightningModule):
    """A small network, and what a Trainer asks of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(batch[0])

    def loss(self, inputs: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self.net(inputs).float(), inputs[:, :1].sin())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the loss, as the models of transformers do."""
        return self.loss(inputs)

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Return a fused optimizer and a schedule that follows its steps."""
        optimizer, schedule = optimizer_of(self)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return a fused AdamW and a schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, 10)


def flat(model: nn.Module) -> Tensor:
    """Return all weights as one tensor."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def torch_scaler() -> torch.amp.GradScaler:
    """Return the scaler that a library makes on a GPU, for this CPU."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def run_accelerate(ours: bool) -> list[Step]:
    """Train as Accelerate's documentation does."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001
    library = our_accelerate if ours else accelerate
    handler = accelerate.utils.GradScalerKwargs(init_scale=SCALE)
    accelerator = library.Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]
    )
    if not ours:  # on a CPU it makes none
        accelerator.native_amp, accelerator.scaler = True, torch_scaler()
    model = Net()
    optimizer, schedule = optimizer_of(model)
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    steps = []
    with overflow_in_backward(model, at=BAD_STEP):
        for inputs in INPUTS:
            accelerator.backward(prepared(inputs))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            flag = accelerator.optimizer_step_was_skipped
            steps.append(Step(flag, flat(model), schedule.get_last_lr()[0]))
    return steps


def run_fabric(ours: bool) -> list[Step]:
    """Train as Fabric's documentation does; a schedule is the program's own."""
    rule = ScaleRule(init_scale=SCALE)
    plugin = FabricMixedPrecision("O1", dtype="fp16", loss_scale=rule)
    theirs = TheirFabric("16-mixed", "cpu", torch_scaler())
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin if ours else theirs])
    model = Net()
    optimizer, schedule = optimizer_of(model)
    prepared, optimizer = fabric.setup(model, optimizer)
    steps = []
    with overflow_in_backward(model, at=BAD_STEP):
        for inputs in INPUTS:
            fabric.backward(prepared(inputs))
            optimizer.step()
            optimizer.zero_grad()
            flag = plugin.last_step.skipped if ours else None
            if not flag:
                schedule.step()
            steps.append(Step(flag, flat(model), schedule.get_last_lr()[0]))
    return steps


def run_trainer(ours: bool) -> list[Step]:
    """Train with Lightning's Trainer."""
    steps = []
    rule = ScaleRule(init_scale=SCALE)
    plugin = MixedPrecision("O1", dtype="fp16", loss_scale=rule)

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            flag = plugin.last_step.skipped if ours else None
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            steps.append(Step(flag, flat(model), lr))

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[plugin if ours else TheirPlugin("16-mixed", "cpu", torch_scaler())],
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    with overflow_in_backward(model, at=BAD_STEP):
        trainer.fit(model, DataLoader(TensorDataset(INPUTS.flatten(0, 1)), 16))
    return steps


def run_transformers(ours: bool) -> list[Step]:
    """Train with transformers' Trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001
    steps = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            flag = trainer.accelerator.optimizer_step_was_skipped
            lr = trainer.lr_scheduler.get_last_lr()[0]
            steps.append(Step(flag, flat(model), lr))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"loss": self.net(inputs)}

    model = Loss()
    kind = our_transformers.Trainer if ours else transformers.Trainer
    trainer = kind(
        model,
        transformers.TrainingArguments(
            tempfile.mkdtemp(),
            fp16=True,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-2,
            num_train_epochs=1,
            per_device_train_batch_size=16,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=[{"inputs": row} for row in INPUTS.flatten(0, 1)],
        callbacks=[Watch()],
    )
    trainer.accelerator.scaler_handler = accelerate.utils.GradScalerKwargs(
        init_scale=SCALE
    )
    if not ours:  # on a CPU it makes none
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch_scaler()
    with overflow_in_backward(model, at=BAD_STEP):
        trainer.train()
    return steps


RUNS: dict[str, Callable[[bool], list[Step]]] = {
    "Lightning Trainer": run_trainer,
    "Lightning Fabric": run_fabric,
    "Accelerate": run_accelerate,
    "transformers Trainer": run_transformers,
}


def skipped_row(name: str, ours: bool) -> str:
    """Return the row of one library about the step that overflows."""
    steps = RUNS[name](ours)
    before, bad = steps[BAD_STEP - 2 : BAD_STEP]
    flags = " ".join(
        "-" if step.flag is None else str(bool(step.flag)) for step in steps
    )
    words = (
        name,
        "halfstep" if ours else "alone",
        flags,
        "unchanged" if torch.equal(before.weights, bad.weights) else "changed",
        "waits" if before.lr == bad.lr else "moves",
    )
    return f"| {' | '.join(words)} |"


OVERFLOW = f"""
fp16, `AdamW(fused=True)`, loss scale {SCALE:g}, {STEPS} steps, an inf in the gradients
of step {BAD_STEP}. On a CPU, Accelerate and transformers scale no loss. For the rows
"alone" they are given `torch.amp.GradScaler("cpu")`, as they make one on a GPU.

| library | | flag after steps 1 to {STEPS} | weights, step 3 | schedule, step 3 |
|---|---|---|---|---|
"""
DASH = """
The flag is the library's own word for "this step was skipped"
(`accelerator.optimizer_step_was_skipped`), or the plugin's `last_step.skipped`. A dash:
the library has no such flag. In Fabric the program steps the schedule, by the flag.
"""


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file to write in place of printing")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    libraries = "".join(
        f", {library.__name__} {library.__version__}"
        for library in (lightning, accelerate, transformers)
    )
    skips = [skipped_row(name, ours) for name in RUNS for ours in (False, True)]
    columns = [examples.columns(each, ROUNDS) for each in FOLDERS]
    rows = [f"| {name} | {before} | {after} |" for name, before, _, after in columns]
    today = dt.datetime.now(tz=dt.UTC).date()
    text = (
        f"# {today}: the adapters\n\n"
        f"{examples.heading('adapters', ROUNDS, libraries)}\n\n"
        "## The same program\n\n"
        "| example | before | with the adapter |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n## A step that overflows\n"
        + OVERFLOW
        + "\n".join(skips)
        + "\n"
        + DASH
    )
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

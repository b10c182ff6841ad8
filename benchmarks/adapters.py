"""The adapters for Lightning, Accelerate and transformers, beside the libraries alone.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.adapters [--width N] [--batch N] [--rounds N] [--write FILE]

The first table times steps in bf16 of three linear layers of WIDTH x WIDTH with AdamW:
each library and form in a process of its own, in turn. The second trains four steps in
fp16 with an inf in the gradients of the third, and asks each library whether that step
was skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import accelerate
import lightning
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from benchmarks import page
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as TheirFabric
from lightning.pytorch.plugins import MixedPrecision as TheirPlugin
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from halfstep.bench.measure import Times
from halfstep.bench.worker_process import WorkerProcess
from halfstep.compat import accelerate as our_accelerate
from halfstep.compat import transformers as our_transformers
from halfstep.compat.lightning import FabricMixedPrecision, MixedPrecision
from halfstep.scaling import ScaleRule
from halfstep.testing import overflow_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, BAD_STEP, SCALE = 4, 3, 1024.0
WARM_UP, LAYERS = 3, 3
FORMS = {False: "alone", True: "halfstep"}


@dataclass(frozen=True)
class Step:
    """What is known after one optimizer step."""

    flag: bool | None
    """Whether the library says that the step was skipped; None: it does not say."""
    weights: Tensor
    lr: float


class Net(lightning.LightningModule):
    """Linear layers, and what a Trainer asks of them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        between = [each for layer in layers for each in (layer, nn.GELU())]
        self.net = nn.Sequential(*between[:-1])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self(batch[0])["loss"]

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss, as the models of transformers do."""
        outputs = self.net(inputs).float()
        targets = inputs[:, : outputs.shape[1]].sin()
        return {"loss": nn.functional.mse_loss(outputs, targets)}

    def configure_optimizers(self) -> Any:  # noqa: ANN401
        """Return a fused optimizer and a schedule that follows its steps."""
        optimizer, schedule = optimizer_of(self)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return a fused AdamW and a schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, 10)


def torch_scaler() -> torch.amp.GradScaler:
    """Return the scaler that a library makes on a GPU, for this CPU."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


@dataclass
class Job:
    """What a library trains, and what is noted after each step."""

    dtype: str
    level: str
    batches: Tensor
    """(steps, batch, features)."""
    model: Net
    steps: list[Step] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def is_fp16(self) -> bool:
        """Whether gradients overflow in it, and weights are noted."""
        return self.dtype == "fp16"

    def note(self, flag: bool | None, lr: float) -> None:
        """Note the time, or what a step did."""
        self.times.append(time.perf_counter())
        if self.is_fp16:
            weights = [p.detach().float().flatten() for p in self.model.parameters()]
            self.steps.append(Step(flag, torch.cat(weights), lr))

    def plugin(self, kind: Any) -> Any:  # noqa: ANN401
        """Return halfstep's plugin for Lightning, of a class."""
        rule = ScaleRule(init_scale=SCALE) if self.is_fp16 else "auto"
        return kind(self.level, dtype=self.dtype, loss_scale=rule)

    def their_plugin(self, kind: Any) -> Any:  # noqa: ANN401
        """Return Lightning's plugin of a class."""
        if self.is_fp16:
            return kind("16-mixed", "cpu", torch_scaler())
        return kind("bf16-mixed", "cpu")


def run_accelerate(ours: bool, job: Job) -> None:
    """Train as Accelerate's documentation does."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001
    handler = accelerate.utils.GradScalerKwargs(init_scale=SCALE)
    library: Any = our_accelerate if ours else accelerate
    level = {"level": job.level} if ours else {}
    accelerator = library.Accelerator(
        cpu=True, mixed_precision=job.dtype, kwargs_handlers=[handler], **level
    )
    if job.is_fp16 and not ours:  # on a CPU it makes none
        accelerator.native_amp, accelerator.scaler = True, torch_scaler()
    optimizer, schedule = optimizer_of(job.model)
    model, optimizer, schedule = accelerator.prepare(job.model, optimizer, schedule)
    for inputs in job.batches:
        accelerator.backward(model(inputs)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        job.note(accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0])


def run_fabric(ours: bool, job: Job) -> None:
    """Train as Fabric's documentation does; a schedule is the program's own."""
    plugin = job.plugin(FabricMixedPrecision) if ours else job.their_plugin(TheirFabric)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    optimizer, schedule = optimizer_of(job.model)
    model, optimizer = fabric.setup(job.model, optimizer)
    for inputs in job.batches:
        fabric.backward(model(inputs)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        flag = plugin.last_step.skipped if ours else None
        if not flag:
            schedule.step()
        job.note(flag, schedule.get_last_lr()[0])


def run_trainer(ours: bool, job: Job) -> None:
    """Train with Lightning's Trainer."""
    plugin = job.plugin(MixedPrecision) if ours else job.their_plugin(TheirPlugin)

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            flag = plugin.last_step.skipped if ours else None
            job.note(flag, trainer.optimizers[0].param_groups[0]["lr"])

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[plugin],
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(job.model, DataLoader(TensorDataset(job.batches), batch_size=None))


def run_transformers(ours: bool, job: Job) -> None:
    """Train with transformers' Trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            flag = trainer.accelerator.optimizer_step_was_skipped
            job.note(flag, trainer.lr_scheduler.get_last_lr()[0])

    kind: Any = our_transformers.Trainer if ours else transformers.Trainer
    level = {"level": job.level} if ours else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            job.model,
            transformers.TrainingArguments(
                folder,
                fp16=job.is_fp16,
                bf16=not job.is_fp16,
                use_cpu=True,
                optim="adamw_torch_fused",
                learning_rate=1e-2,
                num_train_epochs=1,
                per_device_train_batch_size=1,
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
            ),
            data_collator=lambda items: items[0],
            train_dataset=[{"inputs": inputs} for inputs in job.batches],
            callbacks=[Watch()],
            **level,
        )
        trainer.accelerator.scaler_handler = accelerate.utils.GradScalerKwargs(
            init_scale=SCALE
        )
        if job.is_fp16 and not ours:  # on a CPU it makes none
            trainer.accelerator.native_amp = True
            trainer.accelerator.scaler = torch_scaler()
        trainer.train()


RUNS: dict[str, Callable[[bool, Job], None]] = {
    "Lightning Trainer": run_trainer,
    "Lightning Fabric": run_fabric,
    "Accelerate": run_accelerate,
    "transformers Trainer": run_transformers,
}


def random_batches(*shape: int) -> Tensor:
    """Return the same random batches each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def worker(
    library: str, ours: bool, level: str, width: int, batch: int, steps: int
) -> Callable[[object], dict[str, float]]:
    """Return what times steps of one library, in a process of its own."""
    warnings.simplefilter("ignore")
    batches = random_batches(WARM_UP + steps, batch, width)

    def answer(_: object) -> dict[str, float]:
        job = Job("bf16", level, batches, Net((width,) * (LAYERS + 1)))
        RUNS[library](ours, job)
        ends = job.times[WARM_UP - 1 :]
        pairs = itertools.pairwise(ends)
        return {"seconds": statistics.median(end - start for start, end in pairs)}

    return answer


def step_times(task: dict[str, Any], rounds: int) -> list[str]:
    """Return the rows of the table of step times, measured in turn.

    Args:
        task: Arguments of `worker` but `library` and `ours`.
        rounds: Times that each library and form is measured.
    """
    with contextlib.ExitStack() as stack:
        processes = {}
        for library, ours in itertools.product(RUNS, FORMS):
            mine = {"library": library, "ours": ours, **task}
            process = WorkerProcess(library, "benchmarks.adapters", mine)
            processes[library, ours] = stack.enter_context(process)
        seconds: dict[tuple[str, bool], list[float]] = {key: [] for key in processes}
        for _ in range(rounds):
            for key, process in processes.items():
                seconds[key].append(process.request()["seconds"])
    return [row(library, seconds) for library in RUNS]


def row(library: str, seconds: dict[tuple[str, bool], list[float]]) -> str:
    """Return the row of one library, from the seconds of a step in each round."""
    times = Times({form: seconds[library, ours] for ours, form in FORMS.items()})
    alone, halfstep = (times.median(form, 1e3) for form in FORMS.values())
    ratio, spread = (f("halfstep", "alone") for f in (times.ratio, times.spread))
    return f"| {library} | {alone:.1f} | {halfstep:.1f} | {ratio:.2f} | {spread:.2f} |"


def skipped_row(name: str, ours: bool) -> str:
    """Return the row of one library about the step that overflows."""
    job = Job("fp16", "O1", random_batches(STEPS, 16, 8), Net((8, 16, 1)))
    with overflow_in_backward(job.model, at=BAD_STEP):
        RUNS[name](ours, job)
    before, bad = job.steps[BAD_STEP - 2 : BAD_STEP]
    flags = " ".join(
        "-" if step.flag is None else str(bool(step.flag)) for step in job.steps
    )
    words = (
        name,
        FORMS[ours],
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
    flags = page.parser(__doc__)
    flags.add_argument("--width", type=int, default=2048, help="of a linear layer")
    flags.add_argument("--batch", type=int, default=512, help="rows of a step")
    flags.add_argument("--steps", type=int, default=20, help="timed in each round")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--level", default="O2", help="of halfstep's steps")
    given = flags.parse_args()
    warnings.simplefilter("ignore")
    versions = "".join(
        f", {library.__name__} {library.__version__}"
        for library in (lightning, accelerate, transformers)
    )
    keys = ("level", "width", "batch", "steps")
    times = step_times({key: getattr(given, key) for key in keys}, given.rounds)
    skips = [skipped_row(name, ours) for name in RUNS for ours in FORMS]
    command = (
        f"python -m benchmarks.adapters --width {given.width} --batch {given.batch} "
        f"--steps {given.steps} --rounds {given.rounds} --level {given.level}"
    )
    conditions = (
        f"bf16, {LAYERS} linear layers of {given.width} x {given.width}, "
        f"batch {given.batch}, `AdamW(fused=True)`; halfstep at {given.level}. "
        f"Milliseconds of a step, medians of {given.rounds} rounds of {given.steps} "
        "steps, a process each, in turn. The ratio is taken within a round; +- is half "
        "of its interquartile range. transformers clips gradients by default, the "
        "others do not.\n"
    )
    lines = (
        f"{page.head('the adapters', command, versions)}.",
        "\n## A step\n",
        conditions,
        "| library | alone, ms | halfstep, ms | ratio | +- |",
        "|---|---|---|---|---|",
        *times,
        "\n## A step that overflows",
        OVERFLOW + "\n".join(skips),
        DASH,
    )
    page.write("\n".join(lines), given.write)


if __name__ == "__main__":
    main()

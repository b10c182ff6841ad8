"""Other libraries beside torch.amp and halfstep, in the workloads of `halfstep bench`.

Run it from the root of the repository, where the tests' requirements are installed:

    python -m benchmarks.libraries recipe|encoder|decoder|conv [flags of halfstep bench]

A library is used as its documentation shows it, without further tuning. What it saves
and casts is not counted. torchao's optimizers take the place of AdamW.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import cli
from halfstep.bench import commands, loops, training
from halfstep.bench.loops import Candidate, Loop, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORKLOADS = ("recipe", "encoder", "decoder", "conv")


def accelerate(task: Task) -> Loop:
    """Return a loop over Hugging Face Accelerate."""
    accelerator: Any = import_module("accelerate").Accelerator(
        mixed_precision=task.work.dtype,
        cpu=task.work.device == "cpu",
        gradient_accumulation_steps=task.work.accumulate,
    )
    model, optimizer = accelerator.prepare(task.model, task.optimizer)

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = task.loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    return Loop(model, optimizer, passes)


def fabric(task: Task, *, kind: str) -> Loop:
    """Return a loop over Lightning Fabric: "mixed" is autocast, "true" all 16 bits."""
    number = {"bf16": "bf16", "fp16": "16"}[task.work.dtype]
    library: Any = import_module("lightning_fabric").Fabric(
        accelerator=task.work.device, devices=1, precision=f"{number}-{kind}"
    )
    model, optimizer = library.setup(task.model, task.optimizer)

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            loss = task.loss_of(model, batch)
            library.backward(loss / len(batches))
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, optimizer, passes, update)


def trainer(task: Task) -> Loop:
    """Return a loop over transformers' Trainer, without logging, clipping, schedule.

    `Trainer.train` runs in a thread of its own, and waits for the batches of each step.
    """
    batches_in: queue.Queue[Any] = queue.Queue()
    losses: queue.Queue[Tensor | Exception] = queue.Queue()
    folder = tempfile.TemporaryDirectory()
    transformers: Any = import_module("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> object:
            return iter(batches_in.get, None)  # without end

        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:  # noqa: ANN401
            self.loss = task.loss_of(model, inputs)
            return self.loss

    class Report(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            losses.put(worker.loss)

    settings = transformers.TrainingArguments(
        output_dir=folder.name,
        use_cpu=task.work.device == "cpu",
        **{task.work.dtype: True},
        max_steps=2**31 - 1,
        gradient_accumulation_steps=task.work.accumulate,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    worker = Trainer(
        task.model,
        settings,
        optimizers=(task.optimizer, None),
        callbacks=[Report()],
    )
    worker.model_accepts_loss_kwargs = False  # so that it divides by `accumulate`

    def train() -> None:
        try:
            with folder:
                worker.train()
        except Exception as error:  # noqa: BLE001 -- raised by `passes`
            losses.put(error)

    threading.Thread(target=train, daemon=True).start()

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            batches_in.put(batch)
        loss = losses.get()
        if isinstance(loss, Exception):
            raise loss
        return loss

    return Loop(task.model, task.optimizer, passes)


def torchao(name: str) -> Callable[[Task], Task]:
    """Return what replaces the optimizer of a task by one of `torchao.optim`."""

    def change(task: Task) -> Task:
        make = getattr(import_module("torchao.optim"), name)
        lr = task.optimizer.param_groups[0]["lr"]
        return replace(task, optimizer=make(task.model.parameters(), lr=lr))

    return change


_8BIT, _4BIT = torchao("AdamW8bit"), torchao("AdamW4bit")
CANDIDATES = {
    "accelerate": Candidate("Hugging Face Accelerate", accelerate),
    "fabric-mixed": Candidate("Lightning Fabric, mixed", fabric, {"kind": "mixed"}),
    "fabric-true": Candidate("Lightning Fabric, true", fabric, {"kind": "true"}),
    "trainer": Candidate("transformers' Trainer", trainer),
    "torchao-8bit": Candidate("torchao's AdamW8bit", loops.plain, change=_8BIT),
    "torchao-4bit": Candidate("torchao's AdamW4bit", loops.plain, change=_4BIT),
    "O2-8bit": Candidate(
        "halfstep: O2, and AdamW8bit", loops.session, {"level": "O2"}, change=_8BIT
    ),
}
"""Name -> candidate."""


def add(name: str) -> None:
    """Add the candidates to a workload."""
    benches = import_module(f"halfstep.bench.{commands.BENCHES[name].module}").BENCHES
    bench: Any = commands.load(name)
    kinds = {**bench.kinds, **CANDIDATES}
    module = "benchmarks.libraries"
    program = f"python -m {module}"
    benches[name] = replace(bench, kinds=kinds, module=module, program=program)


def worker(bench: str, candidate: str, settings: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the function that answers requests for one candidate.

    A tiny step first: what the library imports and compiles is no memory of the
    candidate's. torchao quantizes states of 4,096 numbers or more.
    """
    add(bench)
    if candidate in CANDIDATES:
        work = Namespace(**settings)
        tiny = nn.Linear(64, 64).to(work.device)
        adam = torch.optim.AdamW(tiny.parameters())
        task = Task(tiny, adam, lambda model, batch: model(*batch).sum(), work)
        batch = (torch.ones(1, 64, device=work.device),)
        CANDIDATES[candidate].loop(task).step([batch] * work.accumulate)
    return training.worker(bench, candidate, settings)


if __name__ == "__main__":
    for workload in WORKLOADS:
        add(workload)
    sys.exit(cli.run(["bench", *sys.argv[1:]]))

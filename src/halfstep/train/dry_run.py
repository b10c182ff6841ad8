"""`halfstep train --check`: runs a few steps and estimates the whole run.

Writes nothing to --out; the read and tokenized data stay in the cache.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.diagnostics.preflight import check
from halfstep.distributed import process_group
from halfstep.errors import UserError
from halfstep.fast_dropout import use_fast_dropout
from halfstep.machine import hardware
from halfstep.reporting.table import Cell, Table, format_count
from halfstep.train import checkpointing, parallelize, param_groups
from halfstep.train.data_checks import data_findings
from halfstep.train.plan import Timers
from halfstep.train.result import RunResult, portable_model
from halfstep.train.step_dataset import iterate_steps, padding_fraction
from halfstep.train.tasks import EVAL_BATCH, collect_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from halfstep.diagnostics.preflight import CheckReport
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.result import PreparedRun

_STEPS = 8
_MAX_SECONDS = 15.0  # after this, no further step is started
_NUM_EVAL_TEXTS = 2 * EVAL_BATCH
_WARM_UP = 3  # steps that also allocate, compile and fill caches
_WEIGHT_BYTES = 4
_TIMED = 3  # timed steps per level in `check`; the run's own steps are timed above


def dry_run(ready: PreparedRun) -> RunResult:
    """Train a few steps, evaluate some of the dev split, and estimate the run."""
    trainer, network = ready.trainer, ready.network
    job, session, folder = trainer.job, trainer.session, trainer.folder
    plan, config, total = job.plan, job.plan.config, job.plan.total_steps
    free_bytes = _free_bytes(folder)
    num_steps = min(_STEPS, total)
    source = iterate_steps(job.steps, 1, num_steps, workers=0, pin=False)
    times, skipped, loss = [], 0, 0.0
    began = time.perf_counter()
    for work in source:
        # In a run, workers prefetch the input, or it takes 0.1% of the step.
        record = trainer.train_step(work, Timers({"input": 0.0}))
        times.append(1 / record["examples_per_s"] * work.size)
        skipped, loss = record["skipped_total"], record["loss"]
        if process_group.broadcast_object(time.perf_counter() - began > _MAX_SECONDS):
            break
    step = statistics.median(times[_WARM_UP:] or times)
    # A whole dev split can take minutes; the longest texts need the most memory.
    eval_texts = job.encoded["dev"].longest(_NUM_EVAL_TEXTS)
    eval_job = replace(job, encoded={"dev": eval_texts})
    dev_loss = collect_outputs(session, eval_job, "dev").loss
    params = [*network.model.parameters()]
    num_params = sum(param.numel() for param in params)
    num_trainable = sum(param.numel() for param in params if param.requires_grad)
    # fp32 weights, two moments of each trainable one, and a linear model's buffers.
    size = _WEIGHT_BYTES * (num_params + 2 * num_trainable)
    size += sum(buffer.nbytes for buffer in network.model.buffers())
    keep, free = config.keep, f"{free_bytes / 2**30:.1f} GiB are free"
    if (keep + 2) * size > free_bytes:
        raise UserError(
            f"--out {folder.path}: {keep} checkpoints, the best one and one that is "
            f"being written need about {(keep + 2) * size / 2**30:.1f} GiB; {free}. "
            "Free some, or lower --keep."
        )
    corpus, lengths, batch = job.corpus, job.encoded["train"].lengths, config.batch_size
    peak = hardware.peak_memory(trainer.world.device) / 2**20
    where = "allocated by torch on the GPU of" if plan.device == "cuda" else "in"
    duration = timedelta(seconds=round(step * total))
    eval_count = format_count(len(eval_texts), "dev text")
    epochs = format_count(plan.order.epochs, "epoch")
    first = f"loss {loss:.3f}, {skipped} of {len(times)} skipped"
    cut = f"longest {int(lengths.max())}, cut after {job.longest}"
    rows: tuple[tuple[Cell, ...], ...] = (
        ("level", f"{session.choice}: {session.choice.reason}"),
        ("data", f"{corpus.sizes} {trainer.task.description(corpus)}"),
        ("tokens", f"median {float(np.median(lengths)):.0f}, {cut}"),
        ("padding", f"{padding_fraction(lengths, plan.order):.1%} of the last epoch"),
        ("parameters", f"{num_params / 1e6:.1f} million"),
        ("steps", f"{total} of {format_count(batch, 'text')}, in {epochs}"),
        ("a step", f"{step * 1000:.0f} ms, {batch / step:.0f} texts a second"),
        ("training", f"about {duration} h:min:s, without evaluation"),
        ("memory", f"peak so far {peak:.0f} MiB, {where} the first process"),
        ("checkpoints", f"about {size / 2**20:.0f} MiB each; {free}"),
        ("first steps", f"{first}; then {dev_loss:.3f} on {eval_count}"),
    )
    notes = list(data_findings(trainer))
    if len(times) < num_steps:
        notes.append(f"Only {len(times)} of {num_steps} steps were run: they are slow.")
    if folder.steps() or folder.metrics.exists():
        notes.append(
            f"{folder.path} holds a run already: add --resume to go on with it, "
            "--overwrite to replace it, or choose another --out."
        )
    table = Table("Estimate of this run", ("what", "value"), rows, tuple(notes))
    summary: dict[str, Any] = {"step_seconds": step, "steps": total, "skipped": skipped}
    weights = ready.full_weights()  # a collective call
    report = checkpointing.run_on_first_rank(
        trainer.world, lambda: check_first_batch(ready, weights)
    )
    tables = (table,) if report is None else (table, *report.tables())
    if report is not None:
        summary["verdict"] = report.verdict
    process_group.barrier()
    return RunResult(summary, tables, folder, trainer.examples)


def _free_bytes(folder: RunFolder) -> int:
    """Return the free bytes where --out would be written; raise if it cannot be."""
    parents = itertools.chain([folder.path], folder.path.absolute().parents)
    existing = next(path for path in parents if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        message = f"--out {folder.path}: {existing} cannot be written; choose another."
        raise UserError(message)
    if existing == folder.path and not (folder.path / "config.json").exists():
        folder.check_no_foreign_files()
    return shutil.disk_usage(Path(existing)).free


def check_first_batch(ready: PreparedRun, weights: Mapping[str, Tensor]) -> CheckReport:
    """Run `halfstep.check` on the first batch.

    The model is the run's in fp32, not compiled or sharded, with its frozen parameters
    and activation checkpointing.
    """
    trainer = ready.trainer
    job, world, session = trainer.job, trainer.world, trainer.session
    config = job.plan.config
    step_batch = job.steps[1]
    share = world.size * session.accumulate / step_batch.weight
    batch = {name: one.to(world.device) for name, one in step_batch.parts[0].items()}

    def loss_fn(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return job.loss_sum(model, part) * share

    # A fresh copy of the run's model with its current weights.
    model: nn.Module = portable_model(ready.network, weights).to(world.device).train()
    param_groups.freeze(model, config.frozen)
    use_fast_dropout(model)
    if config.recompute:
        parallelize.checkpoint_activations(model)
    return check(
        model,
        loss_fn,
        batch,
        level=session.choice,
        policy=config.policy,
        optimizer=param_groups.make_optimizer(model, config, job.plan.lr),
        master=config.master_weights,
        steps=_TIMED,
    )

"""`halfstep train --check`: a few steps of a run, and what the whole of it would be.

In: a run that stands at its first step. Out: tables of the plan, its time and memory,
and of what the first batch says of level and format. Nothing is written in --out; what
was read and tokenised stays in the cache.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.diagnostics.doctor import RunFacts, examine, run_reader
from halfstep.distributed import process_group
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.reporting.table import Cell, Table, count
from halfstep.train.data_checks import data_findings, repeats
from halfstep.train.evaluate import EVAL_BATCH, noted
from halfstep.train.preflight_batch import foresee
from halfstep.train.result import Result
from halfstep.train.step_dataset import feed, padded_share
from halfstep.train.timers import Clock

if TYPE_CHECKING:
    from halfstep.train.config import TrainConfig
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.result import Ready

_STEPS = 8
_LONGEST = 15.0  # seconds after which fewer must do
_JUDGED = 2 * EVAL_BATCH
_WARM_UP = 3  # steps that also allocate, compile and fill caches
_WEIGHT_BYTES = 4


def rehearse(ready: Ready, config: TrainConfig, folder: RunFolder) -> Result:
    """Train a few steps, judge some of the dev split, and say what a run would be.

    Args:
        ready: Its trainer is before its first step.
        config: The run's settings.
        folder: Where a run would write; held to be possible, not touched.

    Raises:
        UserError: If the folder could not take a run.
    """
    room = _room(folder)
    trainer, network = ready.trainer, ready.network
    job, session = trainer.job, trainer.session
    plan, total = job.plan, job.plan.total_steps
    meant = min(_STEPS, total)
    source = feed(job.steps, 1, meant, workers=0, pin=False)
    times, skipped, loss = [], 0, 0.0
    began = time.perf_counter()
    for work in source:
        clock = Clock()
        with clock.time("input"):
            pass  # a run prepares it ahead, or in a thousandth of the step
        record = trainer.train_step(work, clock)
        times.append(1 / record["examples_per_s"] * work.size)
        skipped, loss = record["skipped_total"], record["loss"]
        if process_group.same_everywhere(time.perf_counter() - began > _LONGEST):
            break
    step = statistics.median(times[_WARM_UP:] or times)
    # A large dev split takes minutes; the longest texts take the most memory.
    few = job.encoded["dev"].longest(_JUDGED)
    _, dev_loss = noted(
        session,
        job.task,
        few,
        trainer.world,
        pad_id=job.pad_id,
        multiple=job.multiple,
    )
    numbers = sum(param.numel() for param in network.model.parameters())
    learn = sum(p.numel() for p in network.model.parameters() if p.requires_grad)
    # Weights in fp32, and two moments of each that learns.
    size = _WEIGHT_BYTES * (numbers + 2 * learn)
    kept = (plan.keep + 2) * size
    if kept > room:
        message = (
            f"--out {folder.path}: {plan.keep} checkpoints, the best one and one that "
            f"is being written need about {kept / 2**30:.1f} GiB; there are "
            f"{room / 2**30:.1f}. Free some, or lower --keep."
        )
        raise UserError(message)
    corpus, lengths = job.corpus, job.encoded["train"].lengths
    batch, free = plan.order.batch_size, f"{room / 2**30:.1f} GiB are free"
    middle, most = float(np.median(lengths)), int(lengths.max())
    peak = hardware.peak_memory(trainer.world.device) / 2**20
    held = "allocated by torch on the GPU of" if job.plan.device == "cuda" else "in"
    judged, epochs = count(len(few), "dev text"), count(plan.order.epochs, "epoch")
    first = f"loss {loss:.3f}, {skipped} of {len(times)} skipped"
    rows: tuple[tuple[Cell, ...], ...] = (
        ("level", f"{session.choice}: {session.choice.reason}"),
        ("data", f"{corpus.sizes}; {count(len(corpus.labels), 'label')}"),
        ("tokens", f"median {middle:.0f}, longest {most}, cut after {job.longest}"),
        ("padding", f"{padded_share(lengths, plan.order):.1%} of what is computed"),
        ("parameters", f"{numbers / 1e6:.1f} million"),
        ("steps", f"{total} of {count(batch, 'text')}, in {epochs}"),
        ("a step", f"{step * 1000:.0f} ms, {batch / step:.0f} texts a second"),
        ("training", f"{_duration(step * total)}, evaluation apart"),
        ("memory", f"{peak:.0f} MiB at most so far, {held} the first process"),
        ("checkpoints", f"about {size / 2**20:.0f} MiB each; {free}"),
        ("first steps", f"{first}; then {dev_loss:.3f} on {judged}"),
    )
    notes = list(data_findings(trainer))
    told = RunFacts(splits=run_reader.splits_of(repeats(corpus)))
    notes += map(str, examine(told))
    if len(times) < meant:
        notes.append(f"{len(times)} of {meant} steps were made: they take long.")
    if folder.steps() or folder.metrics.exists():
        notes.append(
            f"{folder.path} holds a run already: add --resume to go on with it, "
            "--overwrite to replace it, or choose another --out."
        )
    table = Table("What this run would be", ("what", "value"), rows, tuple(notes))
    summary: dict[str, Any] = {"step_seconds": step, "steps": total, "skipped": skipped}
    report = foresee(ready, config)
    tables = (table,) if report is None else (table, *report.tables())
    if report is not None:
        summary["verdict"] = report.verdict
    process_group.wait_for_all()
    return Result(summary, tables, folder, trainer.examples)


def _room(folder: RunFolder) -> int:
    """Return the bytes that are free where a run would write.

    Raises:
        UserError: If nothing could be written there, or files of others are there.
    """
    parents = itertools.chain([folder.path], folder.path.absolute().parents)
    there = next(path for path in parents if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        message = f"--out {folder.path}: {there} cannot be written; choose another."
        raise UserError(message)
    if there == folder.path and not (folder.path / "config.json").exists():
        folder.refuse_foreign()
    return shutil.disk_usage(Path(there)).free


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"about {hours} h {minutes} min"
    return f"about {minutes} min {rest} s" if minutes else f"about {rest} s"

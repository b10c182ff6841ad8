"""`halfstep bench recipe`: torch's recipe on automatic mixed precision, by everybody.

In: flags. Out: a table. A few large linear layers with ReLU between them, mean squared
error, SGD: memory traffic counts as much as matrix products. Every contender is a
process of its own, since allocator settings are per process; they take turns.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from halfstep.bench import measure, recipe_loops, worker_process
from halfstep.machine import hardware
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

BASELINES = ("torch.amp", "torch.amp-kept", "pure")
"""torch.amp as people run it; with memory kept; and the speed limit."""

KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
"""glibc keeps all memory it has once had, up to a TiB: large tensors are not mapped
afresh, page by page, each time."""

_WARM_UP = 2
"""Steps before the first turn: the second finds all state made."""
_MIB = 2**20

_COLUMNS = (
    "contender",
    "ms a step",
    *(f"x {name}" for name in BASELINES),
    "+-",
    "peak MiB",
    "loss",
    "not run",
)
_PEAK = {
    "cpu": "resident, above what imports and a step of width 8 left; with batches",
    "cuda": "allocated by torch on the GPU, with batches",
}


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders in turn; return their medians.

    Raises:
        UserError: If cuda is asked for and there is none, or a contender fails.
    """
    device = measure.pick_device(arguments.device)
    work = recipe_loops.Workload(
        device,
        arguments.dtype,
        arguments.layers,
        arguments.width,
        arguments.batch,
        arguments.accumulate,
        arguments.optimizer,
    )
    hardware.gemm_rates(device)  # measured once, here, and not in some contender's time
    missing = {name: why_absent(name, work) for name in arguments.contenders}
    present = [name for name, why in missing.items() if why is None]
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(start(name, work)) for name in present}
        refusals = warm_up(started)
        last: dict[str, dict[str, Any]] = {}

        def turn(name: str) -> float:
            last[name] = started[name].request(arguments.steps)
            seconds: float = last[name]["seconds"]
            return seconds

        turns = {name: partial(turn, name) for name in started if name not in refusals}
        times = measure.take_turns(turns, arguments.rounds)
    why_not = {name: why for name, why in missing.items() if why is not None}
    why_not |= dict.fromkeys(refusals, "refused")
    blank: tuple[Cell, ...] = (None,) * (len(_COLUMNS) - 2)
    rows = [
        (name, *blank, why_not[name])
        if name in why_not
        else (name, *cells(times, name, last[name]), None)
        for name in arguments.contenders
    ]
    steps = _WARM_UP + arguments.rounds * arguments.steps
    notes = (
        f"{measure.in_turn(arguments.rounds)}; {measure.SPREAD} to {BASELINES[0]}",
        "torch.amp, accelerate, fabric: as their documentation shows them; O: halfstep",
        f"kept: GLIBC_TUNABLES={_keep_memory_env(os.environ)['GLIBC_TUNABLES']}",
        "pure: weights, gradients and updates in 16 bits, no masters, no loss scale",
        f"peak: {_PEAK[device]}",
        f"loss: of the last micro-batch of {steps} steps; same weights and batches",
        "a process each, with " + _environment_text(worker_process.PASSIVE_WAIT),
        *(f"{name} refused: {text}" for name, text in refusals.items()),
        *unmeasured(times, why_not),
        *versions(present),
        *measure.conditions("recipe", device, arguments),
    )
    return [Table("Mixed precision recipe", _COLUMNS, tuple(rows), notes)]


def why_absent(name: str, work: recipe_loops.Workload) -> str | None:
    """Return why a contender cannot run here; None if it can."""
    contender = recipe_loops.CONTENDERS[name]
    if contender.package and find_spec(contender.package) is None:
        return "not installed"
    if contender.keeps_memory and work.device != "cpu":
        return "of CPU memory only"
    if contender.keeps_memory and platform.libc_ver()[0] != "glibc":
        return "of glibc only"
    if work.device == "cpu" and work.dtype == "fp16" and not contender.cpu_fp16:
        return "no fp16 on a CPU"
    return None


def start(name: str, work: recipe_loops.Workload) -> worker_process.WorkerProcess:
    """Start a contender's process."""
    environment = (
        _keep_memory_env(os.environ)
        if recipe_loops.CONTENDERS[name].keeps_memory
        else {}
    )
    task = asdict(work) | {"contender": name}
    return worker_process.WorkerProcess(
        name, "halfstep.bench.recipe_loops", task, environment
    )


def _keep_memory_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Add our tunables to those that are set; the last of a name counts."""
    tunables = environment.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{tunables}:{KEEP_MEMORY}" if tunables else KEEP_MEMORY}


def warm_up(started: Mapping[str, worker_process.WorkerProcess]) -> dict[str, str]:
    """Let each contender take its first steps; return who refuses, and the words."""
    refusals = {}
    for name, process in started.items():
        refused = process.request(_WARM_UP)["refused"]
        if refused is not None:
            refusals[name] = refused
        measure.progress(f"{name}: {'refused' if refused else 'ready'}")
    return refusals


def cells(times: measure.Times, name: str, last: Mapping[str, Any]) -> tuple[Cell, ...]:
    """Return a row but for its first cell and its last.

    Args:
        times: Of all contenders.
        name: Of this one.
        last: Its last answer.
    """
    ratios = (
        times.ratio(name, base) if base in times.rounds else None for base in BASELINES
    )
    first = BASELINES[0]
    return (
        times.median(name) * 1e3,
        *ratios,
        times.spread(name, first) if first in times.rounds else None,
        last["peak_bytes"] / _MIB,
        last["loss"],
    )


def unmeasured(times: measure.Times, why_not: Mapping[str, str]) -> list[str]:
    """Return a note on each baseline that did not run, so that its column is empty.

    Args:
        times: Of all that ran.
        why_not: Contender that was asked for, and did not run -> why.
    """
    notes = []
    for name in BASELINES:
        if name not in times.rounds:
            why = why_not.get(name, "not among --contenders")
            spread = " and +-" if name == BASELINES[0] else ""
            notes.append(f"x {name}{spread}: empty, since {name} did not run: {why}")
    return notes


def versions(names: Iterable[str]) -> list[str]:
    """Return a note on which peers were measured, if any were."""
    packages = {recipe_loops.CONTENDERS[name].package for name in names}
    texts = [_version(package) for package in sorted(filter(None, packages))]
    return [", ".join(texts)] if texts else []


def _version(package: str) -> str:
    """Return the version of an importable package, by the name it was installed as.

    Why: `lightning_fabric` may have come with `lightning-fabric`, with
    `pytorch-lightning`, or with neither's metadata.
    """
    distributions = metadata.packages_distributions().get(package, ())
    names = [f"{name} {metadata.version(name)}" for name in sorted({*distributions})]
    return " and ".join(names) or f"{package} of unknown version"


def _environment_text(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())

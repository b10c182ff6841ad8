"""`halfstep bench recipe` and `bench accumulate`: steps of torch's recipe network.

A few large linear layers with ReLU and mean squared error, so that memory traffic
matters as much as matmuls. Each contender has its own process, because allocator
settings are per process; they take turns.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import contenders, loops, measure
from halfstep.bench.measure import MIB
from halfstep.bench.worker_process import (
    PASSIVE_WAIT,
    WorkerProcess,
    peak_resident,
    resident,
)
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.numerics import formats

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from halfstep.bench.contenders import StepContender
    from halfstep.bench.loops import Batches, Loop
    from halfstep.reporting.table import Table

BASELINES = ("torch.amp", f"torch.amp{contenders.MEMORY_HELD_SUFFIX}", "pure")
"""torch.amp as usually run; the same without releasing memory; and the speed limit."""

KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
"""Makes glibc keep all memory up to a TiB, instead of mapping large tensors anew, page
by page, each time."""

_WARM_UP = 2
"""Steps before the first turn: the first one initializes all state."""
_SMALL = 8  # at this width, nearly all memory belongs to libraries
_PEAK = {
    "cpu": "resident, above what imports and a step of width 8 left; with batches",
    "cuda": "allocated by torch on the GPU, with batches",
}


@dataclass(frozen=True)
class Workload(loops.Workload):
    """What every contender trains."""

    optimizer: str = "sgd"
    """Key of `MOMENTUM`."""
    lr: float | None = None
    """None: chosen so that the loss falls at any size."""


def recipe(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders of `bench recipe`."""
    device = measure.pick_device(arguments.device)
    work = measure.from_flags(Workload, arguments, device=device, lr=None)
    names = {name: contenders.RECIPE[name] for name in arguments.contenders}
    steps, rounds = arguments.steps, arguments.rounds
    times, answers, absent = measure_steps(names, work, steps, rounds)
    first = BASELINES[0]
    rows = [
        {
            "contender": name,
            "ms a step": times.median(name, 1e3),
            **{f"x {base}": times.ratio(name, base) for base in BASELINES},
            "+-": times.spread(name, first),
            "peak MiB": answers[name]["peak_bytes"] / MIB if name in answers else None,
            "loss": answers[name]["loss"] if name in answers else None,
            "not run": absent[name].partition(":")[0] if name in absent else None,
        }
        for name in names
    ]
    why_not = {name: absent.get(name, "not among --contenders") for name in BASELINES}
    tunables = keep_memory(os.environ)["GLIBC_TUNABLES"]
    notes = (
        f"{measure.in_turn(rounds)}; {measure.SPREAD} to {first}",
        "torch.amp, accelerate, fabric: as their documentation shows them; O: halfstep",
        f"kept: GLIBC_TUNABLES={tunables}",
        "pure: weights, gradients and updates in 16 bits, no master weights, no scale",
        *_step_notes(device, _WARM_UP + rounds * steps),
        *(f"{name} {why}" for name, why in absent.items() if ": " in why),
        *(
            f"x {name}{' and +-' if name == first else ''}: empty, since {name} did "
            f"not run: {why_not[name].partition(':')[0]}"
            for name in BASELINES
            if name not in times.rounds
        ),
        *versions(names[name].package for name in times.rounds),
        *measure.conditions("recipe", device, arguments),
    )
    return [measure.table("Mixed precision recipe", rows, notes)]


def accumulate(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders of `bench accumulate`."""
    device = measure.pick_device(arguments.device)
    work = measure.from_flags(
        Workload, arguments, device=device, optimizer="sgd", lr=1e-3
    )
    names, rounds = contenders.ACCUMULATE, arguments.rounds
    times, answers, _ = measure_steps(names, work, 1, rounds)
    first = BASELINES[0]
    rows = [
        {
            "contender": name,
            "ms a step": times.median(name, 1e3),
            f"x {first}": times.ratio(name, first),
            "+-": times.spread(name, first),
            "peak MiB": answers[name]["peak_bytes"] / MIB,
            "weights cast": answers[name]["casts"],
            "loss": answers[name]["loss"],
        }
        for name in names
    ]
    notes = (
        f"{measure.in_turn(rounds)}; {measure.SPREAD}",
        "weights cast: how often one step writes a weight or bias in 16 bits",
        *_step_notes(device, _WARM_UP + rounds),
        *measure.conditions("accumulate", device, arguments),
    )
    return [measure.table("Gradient accumulation", rows, notes)]


def _step_notes(device: str, steps: int) -> list[str]:
    passive = " ".join(f"{name}={value}" for name, value in PASSIVE_WAIT.items())
    return [
        f"peak: {_PEAK[device]}",
        f"loss: of the last micro-batch of {steps} steps; same weights and batches",
        f"a process each, with {passive}",
    ]


def measure_steps(
    names: Mapping[str, StepContender], work: Workload, steps: int, rounds: int
) -> tuple[measure.Times, dict[str, dict[str, Any]], dict[str, str]]:
    """Time contenders in turn, each in its process.

    Returns:
        Their times; name -> last answer, for those that ran; name -> reason, for the
        others.
    """
    hardware.gemm_rates(
        work.device
    )  # measured once here rather than in a contender's time
    absent = {name: why_absent(name, each, work) for name, each in names.items()}
    reasons = {name: why for name, why in absent.items() if why is not None}
    answers: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(_start(name, each, work))
            for name, each in names.items()
            if name not in reasons
        }
        for name, process in processes.items():
            refused = process.request(_WARM_UP)["refused"]
            if refused is not None:
                reasons[name] = f"rejected: {refused}"
            measure.progress(f"{name}: {'ready' if refused is None else 'rejected'}")

        def turn(name: str) -> float:
            answers[name] = processes[name].request(steps)
            seconds: float = answers[name]["seconds"]
            return seconds

        turns = {name: partial(turn, name) for name in processes if name not in reasons}
        return measure.take_turns(turns, rounds), answers, reasons


def why_absent(name: str, contender: StepContender, work: Workload) -> str | None:
    """Return why a contender cannot run here; None if it can."""
    keeps_memory = name.endswith(contenders.MEMORY_HELD_SUFFIX)
    if contender.package and find_spec(contender.package) is None:
        return "not installed"
    if keeps_memory and work.device != "cpu":
        return "of CPU memory only"
    if keeps_memory and platform.libc_ver()[0] != "glibc":
        return "of glibc only"
    if work.device == "cpu" and work.dtype == "fp16" and contender.package:
        return "no fp16 on a CPU"
    return None


def _start(name: str, contender: StepContender, work: Workload) -> WorkerProcess:
    keeps_memory = name.endswith(contenders.MEMORY_HELD_SUFFIX)
    environment = keep_memory(os.environ) if keeps_memory else {}
    task = {"contender": asdict(contender), "work": asdict(work)}
    return WorkerProcess(name, __name__, task, PASSIVE_WAIT | environment)


def keep_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Append our tunables to those set; glibc uses the last value of a name."""
    tunables = environment.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{tunables}:{KEEP_MEMORY}" if tunables else KEEP_MEMORY}


def versions(packages: Iterable[str | None]) -> list[str]:
    """Return a note on the versions of packages, by distribution name.

    `lightning_fabric` may belong to `lightning-fabric`, to `pytorch-lightning`, or to
    no distribution with metadata.
    """
    texts = []
    for package in sorted({each for each in packages if each}):
        names = {*metadata.packages_distributions().get(package, ())}
        text = " and ".join(
            f"{name} {metadata.version(name)}" for name in sorted(names)
        )
        texts.append(text or f"{package} of unknown version")
    return [", ".join(texts)] if texts else []


# In a contender's process


MOMENTUM = {"sgd": 0.0, "sgd-momentum": 0.9, "adamw": 0.0}


def make_optimizer(
    parameters: Iterable[Tensor], work: Workload
) -> torch.optim.Optimizer:
    """Return the optimizer of the workload, with torch's defaults.

    A mean over all outputs has such small gradients that no loss would move at usual
    learning rates, and contenders that do nothing would go unnoticed. So SGD's rate is
    scaled by the largest curvature, about (1 + sqrt(width / batch))**2 / width.
    """
    if work.optimizer == "adamw":
        # Updates of about 0.1% of a weight, as in healthy training.
        return torch.optim.AdamW(parameters, work.lr or 0.05 / work.width)
    momentum = MOMENTUM[work.optimizer]
    curvature = (1 + math.sqrt(work.width / work.batch)) ** 2 / work.width
    lr = work.lr or 0.06 * (1 - momentum) / curvature
    return torch.optim.SGD(parameters, lr, momentum)


def make_loop(contender: StepContender, work: Workload) -> Loop:
    """Build a contender's loop; all start from the same weights."""
    model = loops.make_network(work, seed=1)
    optimizer = make_optimizer(model.parameters(), work)
    return loops.MAKERS[contender.loop](model, optimizer, work, **contender.settings)


class StepServer:
    """Runs one contender: the first request builds it, each request runs steps."""

    def __init__(self, contender: StepContender, work: Workload) -> None:
        """Run tiny steps, so that libraries do not count as the contender's memory.

        torch imports parts of itself in a first step.
        """
        self._contender, self._work = contender, work
        if contender.package:
            import_module(contender.package)
        small = replace(work, width=_SMALL, batch=1)
        plain = make_loop(contenders.RECIPE["fp32"], small)
        weight_casts(plain, loops.draw_batches(small))
        self._memory_before = resident(work.device)
        self._batches = loops.draw_batches(work)
        self._loop: Loop | None = None
        self._casts: int | None = None

    def answer(self, steps: int) -> dict[str, Any]:
        """Run steps, at least one; return seconds per step, the loss, and peak memory.

        The first call warms up, and counts casts in its last step. If the contender
        does not support the work, the answer is the reason in "refused".
        """
        device = self._work.device
        if self._loop is None:
            try:
                self._loop = make_loop(self._contender, self._work)
            except UserError as error:
                return {"refused": str(error)}
            return self._warm_up(self._loop, steps)
        run = partial(_take_steps, self._loop, self._batches, steps)
        loss, seconds = measure.timed(run, device)
        return {
            "refused": None,
            "seconds": seconds / steps,
            "loss": loss.item(),
            "peak_bytes": peak_resident(device) - self._memory_before,
            "casts": self._casts,
        }

    def _warm_up(self, loop: Loop, steps: int) -> dict[str, Any]:
        _take_steps(loop, self._batches, steps - 1)
        self._casts = weight_casts(loop, self._batches)
        return {"refused": None}


def _take_steps(loop: Loop, batches: Batches, steps: int) -> Tensor:
    for _ in range(steps):
        loss = loop.step(batches)
    return loss


def worker(contender: dict[str, Any], work: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the function that answers requests for one contender."""
    return StepServer(contenders.StepContender(**contender), Workload(**work)).answer


def weight_casts(loop: Loop, batches: Batches) -> int:
    """Run one step; return how many times it writes a weight in 16 bits."""

    def cached() -> int:
        return loop.casts() if isinstance(loop, loops.SessionLoop) else 0

    before = cached()
    low = [weight for weight in loop.model.parameters() if formats.is_low(weight.dtype)]
    versions = [weight._version for weight in low]  # noqa: SLF001
    with _CastCounter(loop.model.parameters()) as counter:
        loop.step(batches)
    # Kernels that round masters into weights bypass the dispatcher.
    written = sum(
        weight._version != version  # noqa: SLF001
        for weight, version in zip(low, versions, strict=True)
    )
    casts: int = counter.count + written + cached() - before
    return casts


class _CastCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts casts of weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {id(weight) for weight in weights}
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.ops.aten._to_copy.default:  # noqa: SLF001
            self.count += id(args[0]) in self._weights
        return func(*args, **(kwargs or {}))

"""The contenders of `halfstep bench recipe`: each trains the same network its own way.

In: a name and the work. Out: a loop; and, as a program, a process that takes turns. A
peer is used as its own documentation shows it, and not tuned further.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import accumulate, measure, worker_process
from halfstep.bench.loops import PlainLoop, SessionLoop
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.bench.accumulate import Batches


_SMALL = 8  # a width at which all memory is that of libraries


@dataclass(frozen=True)
class Workload(accumulate.Workload):
    """What every contender trains, and with what."""

    optimizer: str
    """Of `OPTIMIZERS`."""


class Loop(Protocol):
    """A model that learns."""

    def step(self, batches: Batches) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""


Maker = Callable[[nn.Module, torch.optim.Optimizer, Workload], Loop]


@dataclass(frozen=True)
class Contender:
    """One way to train."""

    make: Maker
    """From an fp32 model on its device, its optimizer and the work."""
    package: str | None = None
    """What it needs besides torch."""
    keeps_memory: bool = False
    """The C library's allocator gives no memory back to the system."""
    cpu_fp16: bool = True
    """It can train in fp16 on a CPU."""


def _rate(work: Workload, momentum: float) -> float:
    """Return a learning rate of SGD at which the loss falls, at any size.

    Why: a mean over all outputs has gradients so small that at a usual rate no loss
    would move, and contenders that do nothing at all would look like the others. The
    largest curvature of such a network is some (1 + sqrt(width / batch))**2 / width.
    """
    curvature = (1 + math.sqrt(work.width / work.batch)) ** 2 / work.width
    return 0.06 * (1 - momentum) / curvature


def make_optimizer(model: nn.Module, work: Workload) -> torch.optim.Optimizer:
    """Return the optimizer of the work, as torch makes it by default."""
    parameters = model.parameters()
    if work.optimizer == "adamw":
        # About a thousandth of a weight, as in healthy training.
        return torch.optim.AdamW(parameters, 0.05 / work.width)
    momentum = OPTIMIZERS[work.optimizer]
    return torch.optim.SGD(parameters, _rate(work, momentum), momentum)


OPTIMIZERS = {"sgd": 0.0, "sgd-momentum": 0.9, "adamw": 0.0}
"""Word for the flag -> momentum of SGD."""


class ManualLoop:
    """16-bit weights and fp32 master weights, written by hand.

    Copy gradients up, step, copy weights down; without masters, step on the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        work: Workload,
        *,
        masters: bool,
    ) -> None:
        """Turn the model to 16 bits; with masters, give the optimizer those.

        Args:
            model: In fp32.
            optimizer: Over its parameters, without state.
            work: Tells device, dtype and micro-batches.
            masters: Keep fp32 copies; otherwise pure 16 bits, and no loss scale.
        """
        self._model, self._optimizer = model, optimizer
        self._dtype = formats.parse(work.dtype).dtype
        self._pairs: list[tuple[Tensor, Tensor]] = []
        if masters:
            (group,) = optimizer.param_groups
            originals = [p.detach().clone() for p in group["params"]]
            self._pairs = list(zip(group["params"], originals, strict=True))
            group["params"] = originals
        model.to(self._dtype)
        fp16 = masters and self._dtype == torch.float16
        self._scaler = torch.amp.GradScaler(work.device, enabled=fp16)

    def step(self, batches: Batches) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for inputs, targets in batches:
            outputs = self._model(inputs.to(self._dtype))
            loss = F.mse_loss(outputs, targets.to(self._dtype))
            self._scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        for weight, master in self._pairs:
            if weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
        return loss.detach()


class AccelerateLoop:
    """A loop over Hugging Face Accelerate."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload
    ) -> None:
        """Let it prepare both."""
        self._accelerator: Any = import_module("accelerate").Accelerator(
            mixed_precision=work.dtype,
            cpu=work.device == "cpu",
            gradient_accumulation_steps=work.accumulate,
        )
        prepared = self._accelerator.prepare(model, optimizer)
        self._model, self._optimizer = prepared

    def step(self, batches: Batches) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for batch in batches:
            with self._accelerator.accumulate(self._model):
                loss = accumulate.loss_of(self._model, batch)
                self._accelerator.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()
        return loss.detach()


class FabricLoop:
    """A loop over Lightning Fabric."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        work: Workload,
        *,
        pure_low: bool,
    ) -> None:
        """Let it set up both.

        Args:
            model: In fp32.
            optimizer: Over its parameters.
            work: Tells device and dtype.
            pure_low: Everything in 16 bits, without masters; otherwise its autocast.
        """
        number = {"bf16": "bf16", "fp16": "16"}[work.dtype]
        self._fabric: Any = import_module("lightning_fabric").Fabric(
            accelerator=work.device,
            devices=1,
            precision=f"{number}-{'true' if pure_low else 'mixed'}",
        )
        self._model, self._optimizer = self._fabric.setup(model, optimizer)

    def step(self, batches: Batches) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for batch in batches:
            loss = accumulate.loss_of(self._model, batch)
            self._fabric.backward(loss / len(batches))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _plain(*, low: bool) -> Maker:
    def make(
        model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload
    ) -> Loop:
        dtype = formats.parse(work.dtype).dtype if low else None
        return PlainLoop(model, optimizer, accumulate.loss_of, work.device, dtype)

    return make


def _session(level: str, **settings: Any) -> Maker:  # noqa: ANN401 -- those of prepare
    def make(
        model: nn.Module, optimizer: torch.optim.Optimizer, work: Workload
    ) -> Loop:
        session = prepare(
            model,
            optimizer,
            level,
            dtype=work.dtype,
            accumulate=work.accumulate,
            **settings,
        )
        return SessionLoop(session, accumulate.loss_of)

    return make


def _manual(*, masters: bool) -> Maker:
    return lambda model, optimizer, work: ManualLoop(
        model, optimizer, work, masters=masters
    )


def _fabric(*, pure_low: bool) -> Contender:
    return Contender(
        lambda model, optimizer, work: FabricLoop(
            model, optimizer, work, pure_low=pure_low
        ),
        package="lightning_fabric",
        cpu_fp16=False,
    )


CONTENDERS = {
    "fp32": Contender(_plain(low=False)),
    "torch.amp": Contender(_plain(low=True)),
    "torch.amp-kept": Contender(_plain(low=True), keeps_memory=True),
    "accelerate": Contender(AccelerateLoop, package="accelerate", cpu_fp16=False),
    "fabric-mixed": _fabric(pure_low=False),
    "fabric-true": _fabric(pure_low=True),
    "naive-O2": Contender(_manual(masters=True)),
    "pure": Contender(_manual(masters=False)),
    "O1": Contender(_session("O1")),
    "O2": Contender(_session("O2")),
    "O2-kept": Contender(_session("O2"), keeps_memory=True),
    "O2-split": Contender(_session("O2", master="split")),
    "O2-kahan": Contender(_session("O2", master="kahan")),
    "O2-stochastic": Contender(_session("O2", master="stochastic")),
    "O3": Contender(_session("O3")),
}
"""Word for the flag -> what trains."""


def make_loop(name: str, work: Workload) -> Loop:
    """Return a contender; all begin with the same weights."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(work.device)
    return CONTENDERS[name].make(model, make_optimizer(model, work), work)


class StepServer:
    """Serves one contender: the first request builds it, each later one runs steps."""

    def __init__(self, name: str, work: Workload) -> None:
        """Import what it needs, so that libraries do not count as its memory.

        torch imports parts of itself in a first step, so a small one is taken.
        """
        self._name, self._work = name, work
        package = CONTENDERS[name].package
        if package:
            import_module(package)
        small = replace(work, width=_SMALL, batch=1)
        make_loop("fp32", small).step(accumulate.draw_batches(small))
        self._before = worker_process.resident(work.device)
        self._batches = accumulate.draw_batches(work)
        self._loop: Loop | None = None

    def answer(self, steps: int) -> dict[str, Any]:
        """Take steps, at least one; return seconds a step, the loss, and the peak.

        A contender that cannot do the work says so instead, in "refused".
        """
        if self._loop is None:
            try:
                self._loop = make_loop(self._name, self._work)
            except UserError as error:
                return {"refused": str(error)}
        loop = self._loop
        loss, seconds = measure.timed(
            lambda: _steps(loop, self._batches, steps), self._work.device
        )
        peak = worker_process.peak_resident(self._work.device) - self._before
        result = {"seconds": seconds / steps, "loss": loss.item(), "peak_bytes": peak}
        return {"refused": None} | result


def _steps(loop: Loop, batches: Batches, steps: int) -> Tensor:
    for _ in range(steps):
        loss = loop.step(batches)
    return loss


def main(words: Sequence[str]) -> None:
    """Be a contender: one argument, the name and the work as JSON."""
    task = json.loads(words[0])
    name = task.pop("contender")
    worker_process.serve(StepServer(name, Workload(**task)).answer)


if __name__ == "__main__":
    main(sys.argv[1:])

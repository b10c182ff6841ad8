"""`halfstep bench scaler`: overhead of a GradScaler in an optimizer step.

torch's scaler, halfstep's, and the optimizer alone take turns on the same gradients;
the overhead is the difference to the optimizer alone in the same round.

An optimizer's own step is long and noisy compared with that. For optimizers that are
not fused, a scaler does the same whatever the step is (unscale, decide on the host
whether to step, update its scale); so the row of an optimizer whose step does nothing
counts. A fused optimizer unscales in its kernel, so only the difference is measurable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from halfstep.bench import commands, measure
from halfstep.bench.optimizer import LR
from halfstep.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from halfstep.reporting.table import Cell, Table

TARGETS = {"1000x16": 0.5, "3x4096": 1.0}
"""Shape -> maximum overhead relative to torch's. Many small tensors cost Python time,
which can be saved; a few large ones cost memory traffic, which cannot."""
_MICRO = 1e6


class NoOpOptimizer(Optimizer):
    """An optimizer whose step does nothing; it has state as if with momentum."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            self.state[parameter] = {"momentum_buffer": torch.zeros(())}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "none": NoOpOptimizer,
    "sgd": partial(SGD, lr=LR, foreach=True),
    "adamw": partial(AdamW, lr=LR, foreach=True),
    "sgd-fused": partial(SGD, lr=LR, fused=True),
    "adamw-fused": partial(AdamW, lr=LR, fused=True),
}
_NOISY = ("sgd", "adamw")  # see the row of "none" for their overhead


@dataclass(frozen=True)
class Gradients:
    """Parameters whose gradients can be reset.

    Each step unscales gradients in place. Without a reset they would underflow to 0,
    and arithmetic on subnormal numbers is slow.
    """

    parameters: list[Tensor]
    _source: list[Tensor]

    @classmethod
    def draw(cls, shape: str, device: str) -> Gradients:
        """Draw gradients of a shape such as "1000x16": 1,000 tensors of 16 x 16."""
        count, size = map(int, shape.split("x"))
        torch.manual_seed(0)
        source = [torch.randn(size, size, device=device) for _ in range(count)]
        parameters = [torch.zeros_like(each, requires_grad=True) for each in source]
        for parameter, gradient in zip(parameters, source, strict=True):
            parameter.grad = gradient.clone()
        return cls(parameters, source)

    def reset(self) -> None:
        """Restore the original gradients."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(grads, self._source)


def tables(arguments: Namespace) -> list[Table]:
    """Measure each optimizer on each shape."""
    rows: list[dict[str, Cell]] = []
    for shape in arguments.shapes:
        gradients = Gradients.draw(shape, arguments.device)
        for name in arguments.optimizer:
            optimizer = OPTIMIZERS[name](gradients.parameters)
            what = f"{shape}, {name}"
            times = take_times(gradients, optimizer, arguments, what)
            target = None if name in _NOISY else TARGETS.get(shape)
            cells = _cells(times, target)
            rows.append({"gradients": shape, "optimizer": name} | cells)
            measure.progress(f"{what}: done")
    notes = (
        "bare us: microseconds of a step of the optimizer alone",
        "torch us, halfstep us: what scale, step and update add to it",
        "none: its step does nothing; this row counts for sgd and adamw, not fused",
        "x torch -: the difference is lost in the noise of the optimizer's own step",
        "gradients: number x rows and columns, fp32, finite, reset before each step",
        f"{measure.in_turn(arguments.rounds)}; x torch: of what they add, by medians",
        "step x torch, +-, result: of whole steps, the optimizer's own part included",
    )
    return [measure.table("GradScaler", rows, notes)]


def _cells(times: measure.Times, target: float | None) -> dict[str, Cell]:
    theirs = times.excess("torch", "bare", _MICRO) or 0.0
    ours = times.excess("halfstep", "bare", _MICRO) or 0.0
    ratio = ours / theirs if min(ours, theirs) > 0 else None
    return {
        "bare us": times.median("bare", _MICRO),
        "torch us": theirs,
        "halfstep us": ours,
        "x torch": ratio,
        "step x torch": times.ratio("halfstep", "torch"),
        "+-": times.spread("halfstep", "torch"),
        "result": times.result("halfstep", "torch"),
        "target": target,
        "within": measure.within(ratio, target),
    }


def take_times(
    gradients: Gradients, optimizer: Optimizer, arguments: Namespace, what: str = ""
) -> measure.Times:
    """Time the optimizer alone and with each scaler, in turn."""
    device = arguments.device
    loss = torch.ones((), device=device)

    def scaled(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    steps: dict[str, Any] = {
        "bare": optimizer.step,
        "torch": partial(scaled, torch.amp.GradScaler(device)),
        "halfstep": partial(scaled, GradScaler(device)),
    }

    def turn(name: str, calls: int) -> float:
        """Return the mean seconds per step, each on reset gradients."""
        taken = 0.0
        for _ in range(calls):
            gradients.reset()
            taken += measure.timed(steps[name], device)[1]
        return taken / calls

    for name in steps:
        turn(name, 1)  # initializes state
    calls = measure.calls_per_turn(arguments.calls, turn("torch", 3))
    turns = {name: partial(turn, name, calls) for name in steps}
    return measure.take_turns(turns, arguments.rounds, what)


BENCHES = {
    "scaler": commands.Bench(
        tables,
        "Time scaling, unscaling, the inf check and the update of the loss scale with "
        "torch's GradScaler and with halfstep's, for several optimizers.",
        {
            "shapes": commands.flag(
                "N gradients of M x M",
                ["1000x16", "3x4096"],
                commands.shapes,
                "NxM,NxM",
            ),
            "optimizer": commands.names(OPTIMIZERS, "none", "sgd", "adamw-fused"),
            "calls": commands.flag("steps in a round, fewer of slow ones", 50),
            "device": commands.DEVICE,
            "rounds": commands.rounds(21),
        },
    )
}

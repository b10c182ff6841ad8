"""`halfstep bench scaler`: what a GradScaler adds to a step of the optimizer.

In: flags. Out: a table. torch's scaler, ours, and the bare optimizer take turns on the
same gradients; what a scaler adds is its step less the bare one of the same round.

An optimizer's own step is long and noisy beside that. So the rows that count for
optimizers that are not fused have one whose step does nothing: such a scaler unscales,
decides on the host whether to step, and moves its scale, whatever the step is. A fused
optimizer unscales in its kernel; there the difference is all that can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from halfstep.bench import measure
from halfstep.reporting.table import Cell, Table
from halfstep.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TARGETS = {"1000x16": 0.5, "3x4096": 1.0}
"""Shape -> most that ours may add, over what torch's adds: many small tensors cost
Python, which can be saved; a few large ones cost memory traffic, which cannot."""

_NOISY = ("sgd", "adamw")  # what a scaler adds is read in the row of "none"
_LR = 1e-3
_TURN = 0.05
"""Seconds after which a turn has lasted long enough, whatever --calls says."""
_MICRO = 1e6

_COLUMNS = (
    "gradients",
    "optimizer",
    "bare us",
    "torch us",
    "halfstep us",
    "x torch",
    "target",
    "within",
)


class NoOpOptimizer(torch.optim.Optimizer):
    """An optimizer whose step does nothing; it holds state as one with momentum."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            self.state[parameter] = {"momentum_buffer": torch.zeros(())}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


Maker: TypeAlias = "Callable[[list[Tensor]], torch.optim.Optimizer]"

OPTIMIZERS: dict[str, Maker] = {
    "none": NoOpOptimizer,
    "sgd": partial(torch.optim.SGD, lr=_LR, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=_LR, foreach=True),
    "sgd-fused": partial(torch.optim.SGD, lr=_LR, fused=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=_LR, fused=True),
}
"""Word for the flag -> what makes it."""


@dataclass(frozen=True)
class Setup:
    """Where and how long to measure."""

    device: str
    """"cpu" or "cuda"."""
    calls: int
    """Steps in one turn, at most."""
    rounds: int
    """Turns of each contender."""


@dataclass(frozen=True)
class Gradients:
    """Parameters whose gradients can be had again as a backward pass left them.

    Why: each step unscales them in place. Left alone they would soon be 0, and numbers
    on the way there are slow.
    """

    parameters: list[Tensor]
    _source: list[Tensor]

    @classmethod
    def draw(cls, shape: str, device: str) -> Gradients:
        """Make those of a shape such as "1000x16": 1,000 tensors of 16 x 16."""
        count, size = map(int, shape.split("x"))
        torch.manual_seed(0)
        source = [torch.randn(size, size, device=device) for _ in range(count)]
        parameters = [torch.zeros_like(each, requires_grad=True) for each in source]
        for parameter, gradient in zip(parameters, source, strict=True):
            parameter.grad = gradient.clone()
        return cls(parameters, source)

    def reset(self) -> None:
        """Write the original gradients again."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(grads, self._source)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Measure each optimizer on each shape.

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    device = measure.pick_device(arguments.device)
    setup = Setup(device, arguments.calls, arguments.rounds)
    rows: list[tuple[Cell, ...]] = []
    for shape in arguments.shapes:
        gradients = Gradients.draw(shape, device)
        for name in arguments.optimizer:
            times = take_times(
                gradients,
                OPTIMIZERS[name](gradients.parameters),
                setup,
                f"{shape}, {name}",
            )
            target = None if name in _NOISY else TARGETS.get(shape)
            rows.append((shape, name, *_cells(times, target)))
            measure.progress(f"{shape}, {name}: done")
    notes = (
        "bare us: microseconds of a step of the optimizer alone",
        "torch us, halfstep us: what scale, step and update add to it",
        "none: its step does nothing; this row counts for sgd and adamw, not fused",
        "x torch -: the difference is lost in the noise of the optimizer's own step",
        "gradients: number x rows and columns, fp32, finite, refilled before each step",
        f"{measure.in_turn(setup.rounds)}; x torch: of the medians",
        *measure.conditions("scaler", device, arguments),
    )
    return [Table("GradScaler", _COLUMNS, tuple(rows), notes)]


def _cells(times: measure.Times, target: float | None) -> tuple[Cell, ...]:
    """Return a row but for its first two cells."""
    torchs, ours = (times.excess(name, "bare") for name in ("torch", "halfstep"))
    ratio = ours / torchs if min(ours, torchs) > 0 else None
    return (
        times.median("bare") * _MICRO,
        torchs * _MICRO,
        ours * _MICRO,
        ratio,
        target,
        None if target is None or ratio is None else ratio <= target,
    )


def take_times(
    gradients: Gradients, optimizer: torch.optim.Optimizer, setup: Setup, what: str = ""
) -> measure.Times:
    """Let the bare optimizer and both scalers step in turn."""
    loss = torch.ones((), device=setup.device)

    def scaled(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    optimizer_step: Any = optimizer.step
    steps: dict[str, Callable[[], None]] = {
        "bare": optimizer_step,
        "torch": partial(scaled, torch.amp.GradScaler(setup.device)),
        "halfstep": partial(scaled, GradScaler(setup.device)),
    }
    for step in steps.values():
        turn(gradients, step, 1, setup.device)  # what is made once is made here
    once = turn(gradients, steps["torch"], 3, setup.device)
    calls = max(1, min(setup.calls, int(_TURN / once)))
    turns = {
        name: partial(turn, gradients, step, calls, setup.device)
        for name, step in steps.items()
    }
    return measure.take_turns(turns, setup.rounds, what)


def turn(
    gradients: Gradients, step: Callable[[], None], calls: int, device: str
) -> float:
    """Return the seconds of one step among some, each on gradients written anew."""
    taken = 0.0
    for _ in range(calls):
        gradients.reset()
        taken += measure.timed(step, device)[1]
    return taken / calls

"""`halfstep bench accumulate`: several micro-batches to a step of the optimizer.

In: flags. Out: a table of time, memory and casts of weights. The network is that of
torch's recipe on automatic mixed precision: linear layers with ReLU between them, mean
squared error, SGD. Contenders take turns in one process; for memory each runs two
steps more in a process of its own, to which this module is the program.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import journal, measure
from halfstep.bench.loops import Loop, PlainLoop, SessionLoop
from halfstep.machine import hardware
from halfstep.numerics import formats
from halfstep.reporting.table import Cell, Table
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

BASELINE = "torch.amp"
CONTENDERS = {
    BASELINE: None,
    "O1 torch": ("O1", "torch"),
    "O1 lean": ("O1", "lean"),
    "O2 lean": ("O2", "lean"),
}
"""Name -> level and policy of a Session; None: torch.autocast and GradScaler."""

Batches = list[tuple[Tensor, Tensor]]

_COLUMNS = (
    "contender",
    "ms a step",
    f"x {BASELINE}",
    "+-",
    "peak MiB",
    "weights cast",
    "loss",
)
_PEAK = {
    "cpu": "resident, libraries included",
    "cuda": "allocated by torch on the GPU",
}
_LR = 1e-3
_SMALL = 8  # a width at which all memory is that of libraries
_MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """What every contender trains, and where."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"bf16" or "fp16"."""
    layers: int
    width: int
    """Inputs and outputs of each layer."""
    batch: int
    """Examples of one micro-batch."""
    accumulate: int
    """Micro-batches of one step."""


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders in turn; return their medians.

    Raises:
        UserError: If cuda is asked for and there is none, or a contender fails.
    """
    device = measure.pick_device(arguments.device)
    work = Workload(
        device,
        arguments.dtype,
        arguments.layers,
        arguments.width,
        arguments.batch,
        arguments.accumulate,
    )
    peaks = {name: _peak_in_subprocess(name, work) for name in CONTENDERS}
    least = _peak_in_subprocess(BASELINE, replace(work, width=_SMALL, batch=1))
    batches = draw_batches(work)
    loops = {name: make_loop(name, work) for name in CONTENDERS}
    for loop in loops.values():
        loop.step(batches)  # what is made once is made here
    casts = {name: weight_casts(loop, batches) for name, loop in loops.items()}
    losses: dict[str, Tensor] = {}

    def turn(name: str) -> float:
        losses[name], took = measure.timed(lambda: loops[name].step(batches), device)
        return took

    turns = {name: partial(turn, name) for name in loops}
    times = measure.take_turns(turns, arguments.rounds)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            name,
            times.median(name) * 1e3,
            times.ratio(name, BASELINE),
            times.spread(name, BASELINE),
            peaks[name] / _MIB,
            casts[name],
            losses[name].item(),
        )
        for name in CONTENDERS
    )
    peak_note = (
        f"peak: {_PEAK[device]}, by a process of its own in its first two steps; "
        f"{least / _MIB:.0f} MiB for width {_SMALL}"
    )
    notes = (
        f"{measure.in_turn(arguments.rounds)}; {measure.SPREAD}",
        f"{BASELINE} runs beside kernels of ours, whose price `bench autocast` tells",
        peak_note,
        "weights cast: how often one step writes a weight or bias in 16 bits",
        f"loss: of the last micro-batch after {arguments.rounds + 2} steps",
        *measure.conditions("accumulate", device, arguments),
    )
    return [Table("Gradient accumulation", _COLUMNS, rows, notes)]


def _peak_in_subprocess(name: str, work: Workload) -> int:
    """Return the bytes that a contender takes in a process of its own."""
    task = asdict(work) | {"contender": name}
    peak_bytes: int = measure.run_in_subprocess("halfstep.bench.accumulate", task)[
        "peak_bytes"
    ]
    journal.record(f"{name}, width {work.width}", peak_bytes=peak_bytes)
    measure.progress(
        f"memory of {name}, width {work.width}: {peak_bytes / _MIB:.0f} MiB"
    )
    return peak_bytes


def draw_batches(work: Workload) -> Batches:
    """Return the micro-batches of every step."""
    torch.manual_seed(0)
    shape = work.batch, work.width
    return [
        (
            torch.randn(shape, device=work.device),
            torch.randn(shape, device=work.device),
        )
        for _ in range(work.accumulate)
    ]


def make_loop(name: str, work: Workload) -> Loop:
    """Return a contender; all begin with the same weights."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(work.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    chosen = CONTENDERS[name]
    if chosen is None:
        dtype = formats.parse(work.dtype).dtype
        return PlainLoop(model, optimizer, loss_of, work.device, dtype)
    level, policy = chosen
    session = prepare(
        model,
        optimizer,
        level,
        dtype=work.dtype,
        policy=policy,
        accumulate=work.accumulate,
    )
    return SessionLoop(session, loss_of)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a micro-batch."""
    inputs, targets = batch
    loss: Tensor = F.mse_loss(model(inputs), targets)
    return loss


def weight_casts(loop: Loop, batches: Batches) -> int:
    """Return how often one step writes a weight in 16 bits."""
    before = loop.casts()
    low = [weight for weight in loop.model.parameters() if formats.is_low(weight.dtype)]
    versions = [weight._version for weight in low]  # noqa: SLF001
    counter = _CastCounter(loop.model)
    with counter:
        loop.step(batches)
    # Masters are rounded into weights by kernels that no dispatcher sees.
    written = sum(
        weight._version != version  # noqa: SLF001
        for weight, version in zip(low, versions, strict=True)
    )
    return counter.count + written + loop.casts() - before


class _CastCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts casts of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {id(weight) for weight in model.parameters()}
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.ops.aten._to_copy.default:  # noqa: SLF001
            self.count += self._count_weights(args[:1])
        return func(*args, **(kwargs or {}))

    def _count_weights(self, tensors: Sequence[Tensor]) -> int:
        return sum(id(tensor) in self._weights for tensor in tensors)


def peak(task: dict[str, Any]) -> dict[str, Any]:
    """Run two steps of a contender; return the most memory that was held."""
    name = task.pop("contender")
    work = Workload(**task)
    batches, loop = draw_batches(work), make_loop(name, work)
    for _ in range(2):
        loop.step(batches)
    measure.synchronize(work.device)
    return {"peak_bytes": hardware.peak_memory(work.device)}


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[1]))))

"""`halfstep bench optimizer`: time of an optimizer update.

Times are relative to a tensor copy that moves as many bytes as the update must: the
weights, gradients, masters and moments that it needs, read once and written once.
Encodings of master weights and torch's own optimizers take turns.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from halfstep.bench import commands, loops, measure
from halfstep.errors import UserError
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from halfstep.reporting.table import Cell, Table

LR = 1e-3


@dataclass(frozen=True)
class MasterForm:
    """One encoding of the master weights, and its bytes per parameter."""

    weight: int
    """Bytes per parameter of the weight; the other fields likewise."""
    extra: int
    """Besides the weight: the fp32 master, or the residual of a compact encoding."""
    moment: int
    """Each of the optimizer's moments."""
    settings: dict[str, Any]
    """Arguments of `prepare`; if `is_torch`, of torch's optimizer on fp32 weights."""
    is_torch: bool = False

    def bytes_moved(self, moments: int) -> int:
        """Return the minimum bytes per parameter that an update reads and writes.

        State is read and written; a gradient, as wide as the weight, is only read, and
        a weight with an fp32 master is only written.
        """
        weight = self.weight * (1 if self.extra > self.weight else 2)
        return weight + self.weight + 2 * (self.extra + moments * self.moment)


FORMS = {
    **{
        master: MasterForm(2, extra, moment, {"level": "O2", "master": master})
        for master, extra, moment in (
            *(("fp32", 4, 4), ("split", 2, 4), ("kahan", 2, 2)),
            *(("stochastic", 0, 2), ("none", 0, 2)),
        )
    },
    "torch-foreach": MasterForm(4, 0, 4, {"foreach": True}, is_torch=True),
    "torch-fused": MasterForm(4, 0, 4, {"fused": True}, is_torch=True),
}


class UpdateRule(NamedTuple):
    """An optimizer of torch."""

    make: Callable[..., torch.optim.Optimizer]
    moments: int
    """Number of state tensors as large as the weights."""


UPDATE_RULES = {
    "sgd": UpdateRule(partial(SGD, lr=LR), 0),
    "sgd-momentum": UpdateRule(partial(SGD, lr=LR, momentum=0.9), 1),
    "adam": UpdateRule(partial(Adam, lr=LR), 2),
    "adamw": UpdateRule(partial(AdamW, lr=LR), 2),
}
_name_of_copy = "copy of {}".format
"""Of a copy that moves this many bytes per parameter."""


def optimizer(arguments: Namespace) -> list[Table]:
    """Measure each optimizer with each encoding."""
    sources = draw_gradients(arguments)
    rows: list[dict[str, Cell]] = []
    rejected: list[str] = []
    for rule in arguments.optimizer:
        updates: dict[str, Update] = {}
        for name in arguments.forms:
            try:
                parts = UPDATE_RULES[rule], FORMS[name]
                updates[name] = Update(*parts, arguments, sources)
            except UserError as error:
                rejected.append(f"{rule}, {name} rejected: {error}")
        times = take_times(rule, updates, arguments)
        rows += [
            {"optimizer": rule, "form": name} | table_cells(times, name, rule)
            for name in arguments.forms
        ]
        measure.progress(f"{rule}: done")
    count = arguments.layers * arguments.width**2
    notes = (
        "update ms: session.step(), from gradients in the format of the weights",
        "torch-: fp32 throughout; optimizer.step() and zero_grad()",
        "copy ms: one tensor copied to another; half of the bytes moved are read",
        "bytes moved: what the update needs, each read once, each written once",
        measure.in_turn(arguments.rounds),
        f"{count} parameters in {arguments.layers} tensors",
        *rejected,
    )
    return [measure.table("Optimizer", rows, notes)]


def take_times(
    rule: str, updates: Mapping[str, Update], arguments: Namespace
) -> measure.Times:
    """Time updates and copies in turn; copies are named by the bytes they move."""
    device, parameters = arguments.device, arguments.layers * arguments.width**2

    def turn(update: Update) -> float:
        update.write_gradients()
        return measure.timed(update.step, device)[1]

    def copy(size: int) -> float:
        call = partial(target[:size].copy_, source[:size])
        return measure.timed(call, device)[1]

    moved = sorted({each.bytes_moved for each in updates.values()})
    most = max(moved, default=0) * parameters // 2
    source = torch.ones(most, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    turns = {name: partial(turn, each) for name, each in updates.items()} | {
        _name_of_copy(each): partial(copy, each * parameters // 2) for each in moved
    }
    for first in turns.values():
        first()  # initializes state
    return measure.take_turns(turns, arguments.rounds, rule)


def table_cells(times: measure.Times, name: str, rule: str) -> dict[str, Cell]:
    """Return the cells of one row; empty if the form was rejected."""
    moved = FORMS[name].bytes_moved(UPDATE_RULES[rule].moments)
    ran, copy = name in times.rounds, _name_of_copy(moved)
    return {
        "update ms": times.median(name, 1e3),
        "copy ms": times.median(copy, 1e3) if ran else None,
        "x copy": times.ratio(name, copy),
        "+-": times.spread(name, copy),
        "bytes moved": moved if ran else None,
        "not run": None if ran else "rejected",
    }


class Update:
    """Linear layers without bias, and an optimizer that updates their weights.

    All start from the same weights. torch's optimizers run on fp32 weights, the others
    in a Session.
    """

    def __init__(
        self,
        rule: UpdateRule,
        form: MasterForm,
        work: Namespace,
        sources: Sequence[Tensor],
    ) -> None:
        torch.manual_seed(1)
        sizes = work.width, work.width
        layers = (nn.Linear(*sizes, bias=False) for _ in range(work.layers))
        model = nn.Sequential(*layers).to(work.device)
        options = form.settings if form.is_torch else {}
        optimizer = rule.make(model.parameters(), **options)
        self._unrelated = torch.zeros((), device=work.device, requires_grad=True)
        loss_of = lambda *_: self._unrelated * 1  # noqa: E731
        step = Namespace(device=work.device, dtype=work.dtype, accumulate=1)
        task = loops.Task(model, optimizer, loss_of, step)
        if form.is_torch:
            self._loop = loops.plain(task, low=False)
        else:
            self._loop = loops.session(task, **form.settings)
        self.model, self.step = self._loop.model, self._loop.update
        self.bytes_moved = form.bytes_moved(rule.moments)
        self._sources = sources
        self._buffers = [torch.empty_like(p) for p in self.model.parameters()]

    def write_gradients(self) -> None:
        """Set the gradients, so that only `step` remains to be timed.

        The backward pass is that of an unrelated tensor, so that no part of the update,
        such as a cast of gradients, escapes the timing.
        """
        self._loop.passes([None])
        self._unrelated.grad = None
        torch._foreach_copy_(self._buffers, list(self._sources))
        for weight, buffer in zip(self.model.parameters(), self._buffers, strict=True):
            weight.grad = buffer


def draw_gradients(work: Namespace) -> list[Tensor]:
    """Draw each weight's gradient: fp32 values that 16 bits hold exactly."""
    torch.manual_seed(0)
    shape = work.layers, work.width, work.width
    drawn = torch.randn(shape, device=work.device)
    return [*drawn.to(formats.parse(work.dtype).dtype).float()]


BENCHES = {
    "optimizer": commands.Bench(
        optimizer,
        "Time the optimizer update with each form of master weights, as a multiple of "
        "a copy that moves as many bytes.",
        {
            "layers": commands.flag("weights", 3),
            "width": commands.flag("rows and columns of each weight", 4096),
            "optimizer": commands.names(UPDATE_RULES, "sgd", "sgd-momentum", "adamw"),
            "forms": commands.names(FORMS),
            **commands.PLACE,
            "rounds": commands.rounds(15),
        },
    )
}

"""`halfstep bench optimizer`: time and memory of an optimizer update.

Times are relative to a tensor copy that moves as many bytes as the update must: the
weights, gradients, masters and moments that it needs, read once and written once.
Encodings of master weights and torch's own optimizers take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import measure
from halfstep.bench.contenders import FORMS, UPDATE_RULES
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from halfstep.bench.contenders import MasterForm, TorchOptimizer
    from halfstep.reporting.table import Cell, Table
    from halfstep.session.session import Session

KINDS = ("weights", "gradients", "masters", "moments")
"""Kinds of training memory; masters: what is stored besides the weights."""

_COUNTER = 8
"""Maximum bytes of an optimizer's step counter per tensor."""
_LR = 1e-3


@dataclass(frozen=True)
class Workload:
    """The parameters to update, and their device."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"bf16" or "fp16"."""
    layers: int
    width: int
    """Rows and columns of each weight."""

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.layers * self.width**2


def optimizer(arguments: argparse.Namespace) -> list[Table]:
    """Measure each optimizer with each encoding."""
    device = measure.pick_device(arguments.device)
    work = measure.from_flags(Workload, arguments, device=device)
    sources = draw_gradients(work)
    rows: list[dict[str, Cell]] = []
    refusals: dict[tuple[str, str], str] = {}
    for rule in arguments.optimizer:
        updates: dict[str, Update] = {}
        for name in arguments.forms:
            try:
                updates[name] = Update(UPDATE_RULES[rule], FORMS[name], work, sources)
            except UserError as error:
                refusals[rule, name] = str(error)
        memory = {name: memory_after_backward(each) for name, each in updates.items()}
        times = take_times(updates, work, arguments.rounds)
        for name in arguments.forms:
            cells = table_cells(times, name, rule, memory.get(name), work)
            why_not = "rejected" if (rule, name) in refusals else None
            rows.append({"optimizer": rule, "form": name, **cells, "not run": why_not})
        measure.progress(f"{rule}: done")
    notes = (
        "update ms: session.step(), from gradients in the format of the weights",
        "torch-: fp32 throughout; optimizer.step() and zero_grad()",
        "copy ms: one tensor copied to another; half of the bytes moved are read",
        "bytes moved: what the update needs, each read once, each written once",
        "bytes held: at the end of a backward pass; both are of one parameter",
        "released: gradients go into updates during the backward pass; not timed",
        f"{measure.in_turn(arguments.rounds)}; {measure.SPREAD}",
        f"{work.parameters} parameters in {work.layers} tensors",
        *(f"{rule}, {n} rejected: {text}" for (rule, n), text in refusals.items()),
        *measure.conditions("optimizer", device, arguments),
    )
    return [measure.table("Optimizer", rows, notes)]


def memory_after_backward(update: Update) -> dict[str, int]:
    """Return the bytes after a second backward pass, when all state exists."""
    update.backward()
    update.step()
    update.backward()
    memory = update.memory()
    update.step()
    return memory


def take_times(
    updates: Mapping[str, Update], work: Workload, rounds: int
) -> measure.Times:
    """Time updates and copies in turn; copies are named by the bytes they move."""

    def turn(update: Update) -> float:
        update.write_gradients()
        return measure.timed(update.step, work.device)[1]

    def copy(bytes_: int) -> float:
        call = partial(target[:bytes_].copy_, source[:bytes_])
        return measure.timed(call, work.device)[1]

    timed = {name: each for name, each in updates.items() if FORMS[name].gradient}
    turns: dict[str, Callable[[], float]] = {
        name: partial(turn, update) for name, update in timed.items()
    }
    moved = sorted({each.bytes_moved for each in timed.values()})
    most = max(moved, default=0) * work.parameters // 2
    source, target = (
        torch.ones(most, dtype=torch.uint8, device=work.device) for _ in range(2)
    )
    for each in moved:
        turns[copy_of(each)] = partial(copy, each * work.parameters // 2)
    for first in turns.values():
        first()  # initializes state
    return measure.take_turns(turns, rounds)


def copy_of(moved: int) -> str:
    """Return the name of a copy that moves this many bytes per parameter."""
    return f"copy of {moved}"


def table_cells(
    times: measure.Times,
    name: str,
    rule: str,
    memory: Mapping[str, int] | None,
    work: Workload,
) -> dict[str, Cell]:
    """Return the cells of one row; empty if `memory` is None, as it was rejected.

    If updates happen in the backward pass, there are bytes but no time.
    """
    form, moments = FORMS[name], UPDATE_RULES[rule].moments
    moved, expected = form.bytes_moved(moments), form.expected_bytes(moments)
    copy = copy_of(moved)
    each = [memory[kind] / work.parameters for kind in KINDS] if memory else []
    more = (sum(each) - expected) * work.parameters
    ran = name in times.rounds
    return {
        "update ms": times.median(name, 1e3),
        "copy ms": times.median(copy, 1e3) if ran else None,
        "x copy": times.ratio(name, copy),
        "+-": times.spread(name, copy),
        "bytes moved": moved if memory else None,
        "bytes held": sum(each) if memory else None,
        "expected": expected if memory else None,
        "as expected": 0 <= more <= _COUNTER * work.layers if memory else None,
        "weights + gradients + masters + moments": " + ".join(f"{b:.3g}" for b in each)
        or None,
    }


# An update


class Update:
    """Linear layers without bias, and an optimizer that updates their weights.

    All start from the same weights. torch's optimizers run on fp32 weights, the others
    in a Session.

    Args:
        rule: The optimizer.
        form: The encoding of the master weights.
        work: Sizes, dtype and device.
        sources: The gradient of each weight.

    Raises:
        UserError: If the encoding does not support this optimizer or dtype.
    """

    def __init__(
        self,
        rule: TorchOptimizer,
        form: MasterForm,
        work: Workload,
        sources: Sequence[Tensor],
    ) -> None:
        torch.manual_seed(1)
        sizes = work.width, work.width
        layers = (nn.Linear(*sizes, bias=False) for _ in range(work.layers))
        self.model: nn.Module = nn.Sequential(*layers).to(work.device)
        self.bytes_moved = form.bytes_moved(rule.moments)
        settings: dict[str, Any] = {"lr": _LR} | rule.settings
        if form.is_torch:
            settings |= form.settings
        make = getattr(torch.optim, rule.class_name)
        self._optimizer = make(self.model.parameters(), **settings)
        self._session: Session | None = None
        if not form.is_torch:
            self._session = prepare(
                self.model, self._optimizer, dtype=work.dtype, **form.settings
            )
            self.model = self._session.model
        self._sources = sources
        self._buffers = [torch.empty_like(p) for p in self.model.parameters()]
        self._unrelated = torch.zeros((), device=work.device, requires_grad=True)

    def backward(self) -> None:
        """Run a backward pass that sets each weight's gradient."""
        if self._session is None:
            loss_of(self.model, self._sources).backward()  # type: ignore[no-untyped-call]
            return
        with self._session.autocast():
            loss = loss_of(self.model, self._sources)
        self._session.backward(loss)

    def write_gradients(self) -> None:
        """Set the gradients, so that only `step` remains to be timed.

        A Session gets its backward pass on an unrelated tensor, so that no part of the
        update, such as a cast of gradients, escapes the timing.
        """
        if self._session is not None:
            with self._session.autocast():
                loss = self._unrelated * 1
            self._session.backward(loss)
            self._unrelated.grad = None
        torch._foreach_copy_(self._buffers, list(self._sources))
        for weight, buffer in zip(self.model.parameters(), self._buffers, strict=True):
            weight.grad = buffer

    def step(self) -> object:
        """Update the weights; clear the gradients."""
        if self._session is not None:
            return self._session.step()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return None

    def memory(self) -> dict[str, int]:
        """Return the bytes of each of `KINDS`; shared storages count once."""
        if self._session is not None:
            sizes: dict[str, int] = self._session.memory()
            return sizes
        weights = list(self.model.parameters())
        states = self._optimizer.state.values()
        values = [value for state in states for value in state.values()]
        return {
            "weights": storage_bytes(weights),
            "gradients": storage_bytes(p.grad for p in weights if p.grad is not None),
            "masters": 0,
            "moments": storage_bytes(v for v in values if isinstance(v, Tensor)),
        }


def loss_of(model: nn.Module, sources: Sequence[Tensor]) -> Tensor:
    """Return a scalar loss whose gradients are `sources`."""
    pairs = zip(model.parameters(), sources, strict=True)
    loss: Tensor = sum(
        ((weight * source.to(weight.dtype)).sum() for weight, source in pairs),
        start=torch.zeros((), device=sources[0].device),
    )
    return loss


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total storage size; shared storages count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def draw_gradients(work: Workload) -> list[Tensor]:
    """Draw each weight's gradient: fp32 values that 16 bits hold exactly."""
    torch.manual_seed(0)
    low_dtype = formats.parse(work.dtype).dtype
    shape = work.width, work.width
    return [
        torch.randn(shape, device=work.device).to(low_dtype).float()
        for _ in range(work.layers)
    ]

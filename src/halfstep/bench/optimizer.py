"""`halfstep bench optimizer`: what an update costs, in memory copies and in bytes.

In: flags. Out: a table. The unit is a copy of one tensor to another that moves as many
bytes as the update must: what it needs of weights, gradients, masters and moments, read
once and written once. Forms of master weights and torch's own optimizers take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.bench import measure
from halfstep.bench.update_cases import (
    FORMS,
    KINDS,
    RULES,
    Rule,
    Update,
    Workload,
    draw_gradients,
    make_update,
)
from halfstep.errors import UserError
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

_COUNTER = 8
"""Most bytes that an optimizer's counter of steps takes beside each tensor."""

_COLUMNS = (
    "optimizer",
    "form",
    "update ms",
    "copy ms",
    "x copy",
    "+-",
    "bytes moved",
    "bytes held",
    "expected",
    "as expected",
    "weights + gradients + masters + moments",
    "not run",
)
_BLANK: tuple[Cell, ...] = (None,) * (len(_COLUMNS) - 3)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Measure each optimizer in each form.

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    device = measure.pick_device(arguments.device)
    work = Workload(device, arguments.dtype, arguments.layers, arguments.width)
    sources = draw_gradients(work)
    rows: list[tuple[Cell, ...]] = []
    refusals: dict[str, str] = {}
    for word in arguments.optimizer:
        cells_of_form, refused = measure_forms(
            RULES[word], arguments.forms, work, sources, arguments.rounds
        )
        for name in arguments.forms:
            why_not = "refused" if name in refused else None
            rows.append((word, name, *cells_of_form.get(name, _BLANK), why_not))
        refusals |= {f"{word}, {name}": text for name, text in refused.items()}
        measure.progress(f"{word}: done")
    notes = (
        "update ms: session.step(), from gradients in the format of the weights",
        "torch-: fp32 throughout; optimizer.step() and zero_grad()",
        "copy ms: one tensor copied to another; half of the bytes moved are read",
        "bytes moved: what the update needs, each read once, each written once",
        "bytes held: at the end of a backward pass; both are of one parameter",
        "released: gradients go into updates during the backward pass; not timed",
        f"{measure.in_turn(arguments.rounds)}; {measure.SPREAD}",
        f"{work.parameters} parameters in {work.layers} tensors",
        *(f"{name} refused: {text}" for name, text in refusals.items()),
        *measure.conditions("optimizer", device, arguments),
    )
    return [Table("Optimizer", _COLUMNS, tuple(rows), notes)]


def measure_forms(
    rule: Rule, names: Iterable[str], work: Workload, sources: list[Tensor], rounds: int
) -> tuple[dict[str, tuple[Cell, ...]], dict[str, str]]:
    """Measure one optimizer, its forms in turn.

    Returns:
        Form -> its cells, for those that can be; form -> its words, for the others.
    """
    updates: dict[str, Update] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            updates[name] = make_update(rule, FORMS[name], work, sources)
        except UserError as error:
            refused[name] = str(error)
    memory = {name: memory_after_backward(update) for name, update in updates.items()}
    timed = {n: update for n, update in updates.items() if FORMS[n].gradient}
    times = take_times(rule, timed, work, rounds)
    cells_of_form = {
        name: cells(times, name, rule, memory[name], work) for name in updates
    }
    return cells_of_form, refused


def memory_after_backward(update: Update) -> dict[str, int]:
    """Return the bytes held at the end of a second backward pass: all state is made."""
    update.backward()
    update.step()
    update.backward()
    memory = update.memory()
    update.step()
    return memory


def take_times(
    rule: Rule, updates: dict[str, Update], work: Workload, rounds: int
) -> measure.Times:
    """Let updates and copies take turns; a copy's name is the bytes that it moves."""

    def turn(update: Update) -> float:
        update.write_gradients()
        return measure.timed(update.step, work.device)[1]

    turns: dict[str, Callable[[], float]] = {
        name: partial(turn, update) for name, update in updates.items()
    }
    moved = sorted({FORMS[name].bytes_moved(rule.moments) for name in updates})
    most = max(moved, default=0) * work.parameters // 2
    source, target = (
        torch.ones(most, dtype=torch.uint8, device=work.device) for _ in range(2)
    )
    for each in moved:
        size = each * work.parameters // 2
        copy = partial(target[:size].copy_, source[:size])
        turns[copy_of(each)] = partial(_second, copy, work.device)
    for first in turns.values():
        first()  # what is made once is made here
    return measure.take_turns(turns, rounds)


def _second(call: Callable[[], object], device: str) -> float:
    return measure.timed(call, device)[1]


def copy_of(moved: int) -> str:
    """Return the name of a copy that moves so many bytes a parameter."""
    return f"copy of {moved}"


def cells(
    times: measure.Times, name: str, rule: Rule, memory: dict[str, int], work: Workload
) -> tuple[Cell, ...]:
    """Return a row but for its first two cells and its last."""
    form = FORMS[name]
    moved, expected = form.bytes_moved(rule.moments), form.expected_bytes(rule.moments)
    copy = copy_of(moved)
    each = [memory[kind] / work.parameters for kind in KINDS]
    more = sum(memory[kind] for kind in KINDS) - expected * work.parameters
    timed: tuple[Cell, ...] = (None, None, None, None)
    if name in times.rounds:
        timed = (
            times.median(name) * 1e3,
            times.median(copy) * 1e3,
            times.ratio(name, copy),
            times.spread(name, copy),
        )
    return (
        *timed,
        moved,
        sum(each),
        expected,
        0 <= more <= _COUNTER * work.layers,
        " + ".join(f"{share:.3g}" for share in each),
    )

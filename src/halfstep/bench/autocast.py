"""`halfstep bench autocast`: what one operation and one region cost.

In: flags. Out: tables. The same operations run in a region of torch.autocast and in
one of ours: as torch's table says, where both run torch's kernels; under a rule, where
ours runs a kernel of ours; and outside, where that kernel passes them on.

A kernel serves the whole process, so stock operations are measured before the first is
installed; after that, whoever is to run without it has it withdrawn before his turn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import measure
from halfstep.bench.op_cases import Call, RuledOp, ruled_operations, stock_operations
from halfstep.casting import dispatch_kernels, dispatch_table
from halfstep.casting.autocast_mode import autocast
from halfstep.numerics import formats
from halfstep.policy.rules import Policy
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

AutocastContext: TypeAlias = AbstractContextManager[Any]
"""An autocast context, torch's or halfstep's."""

STOCK_TARGET = 1.05
"""Time of a stock operation in our region, over torch's."""
RULE_TARGET = 7.0
"""Microseconds that an operation under a rule may take longer than one cast by hand."""

_TURN = 0.05
"""Seconds after which a turn has lasted long enough, whatever --calls says."""
_MICRO = 1e6
_NESTED = "where torch would cast again, in a region with enabled=False, made each time"
_RULE_POLICY = "torch + op:gelu=fp32"
"""Policy of the steered regions that are entered and left."""


@dataclass(frozen=True)
class Setup:
    """Where and how long to measure."""

    device: str
    """"cpu" or "cuda"."""
    dtype: torch.dtype
    """The regions' 16-bit dtype."""
    calls: int
    """Calls in one turn, at most."""
    rounds: int
    """Turns of each contender."""

    def torch_context(self) -> torch.autocast:
        """Return a context of torch.autocast."""
        return torch.autocast(self.device, self.dtype)

    def halfstep_context(self, policy: str | None = None) -> AutocastContext:
        """Return a context of halfstep's autocast."""
        return autocast(self.device, self.dtype, policy=policy)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Measure everything, stock operations first.

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    device = measure.pick_device(arguments.device)
    dtype = formats.parse(arguments.dtype).dtype
    setup = Setup(device, dtype, arguments.calls, arguments.rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        notes = tuple(measure.conditions("autocast", device, arguments))
        return [
            _stock_table(setup, arguments.sizes, notes),
            _context_table(setup, notes),
            *_rule_tables(setup, arguments.sizes, notes),
        ]
    finally:
        torch.set_num_threads(threads)


# One turn of one contender


def _inside(context: AutocastContext, call: Call, calls: int, setup: Setup) -> float:
    """Return the seconds of a call inside a context; entering it is not counted."""
    with context:
        call()  # casts what stays cast for the region
        return measure.per_call(call, calls, setup.device)


def _calls(call: Call, setup: Setup) -> int:
    """Return how many calls make a turn."""
    once = _inside(setup.torch_context(), call, 3, setup)
    return max(1, min(setup.calls, int(_TURN / once)))


# As torch's table says


def _stock_table(setup: Setup, sizes: list[int], notes: tuple[str, ...]) -> Table:
    """Compare operations that both regions leave to torch's kernels."""
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        for name, call in stock_operations(size, setup.device).items():
            calls = _calls(call, setup)
            contenders = {
                "torch": partial(_inside, setup.torch_context(), call, calls, setup),
                "halfstep": partial(
                    _inside, setup.halfstep_context(), call, calls, setup
                ),
            }
            times = measure.take_turns(contenders, setup.rounds, f"{name} {size}")
            ratio = times.ratio("halfstep", "torch")
            rows.append(
                (
                    name,
                    size,
                    times.median("torch") * _MICRO,
                    times.median("halfstep") * _MICRO,
                    ratio,
                    times.spread("halfstep", "torch"),
                    ratio <= STOCK_TARGET,
                )
            )
        measure.progress(f"stock operations, size {size}: done")
    columns = (
        "operation",
        "size",
        "torch.autocast us",
        "hs.autocast us",
        "x torch",
        "+-",
        f"within {STOCK_TARGET}",
    )
    more = (
        "us: microseconds of a forward call in an open region",
        f"{measure.in_turn(setup.rounds)}; {measure.SPREAD}",
        "linear, conv2d and layer_norm have weights that learn, cast once a region",
    )
    return Table("Stock operations", columns, tuple(rows), (*more, *notes))


# Entering and leaving


def _enter(context: AutocastContext) -> Call:
    def call() -> None:
        with context:
            pass

    return call


def _construct_and_enter(make: Callable[[], AutocastContext]) -> Call:
    def call() -> None:
        with make():
            pass

    return call


def _context_table(setup: Setup, notes: tuple[str, ...]) -> Table:
    """Compare what it costs to enter and leave an empty autocast context."""
    with_rule = partial(setup.halfstep_context, _RULE_POLICY)
    x = torch.ones(1, device=setup.device)
    with with_rule():
        F.gelu(x)  # a rule that had matched nothing would be warned of
    contexts = {
        "torch.autocast, reused": _enter(setup.torch_context()),
        "torch.autocast, made each time": _construct_and_enter(setup.torch_context),
        "hs.autocast, reused": _enter(setup.halfstep_context()),
        "hs.autocast, made each time": _construct_and_enter(setup.halfstep_context),
        "hs.autocast with a rule, reused": _enter(with_rule()),
        "hs.autocast with a rule, made each time": _construct_and_enter(with_rule),
    }
    turns = {
        name: partial(measure.per_call, call, setup.calls, setup.device)
        for name, call in contexts.items()
    }
    times = measure.take_turns(turns, setup.rounds)
    baseline = next(iter(contexts))
    rows = tuple(
        (
            name,
            times.median(name) * _MICRO,
            times.ratio(name, baseline),
            times.excess(name, baseline) * _MICRO,
        )
        for name in contexts
    )
    columns = ("region", "us", "x torch reused", "us more")
    more = (
        f"us: to enter and leave, with nothing inside; the rule: {_RULE_POLICY!r}",
        measure.in_turn(setup.rounds),
    )
    return Table("Regions", columns, rows, (*more, *notes))


# Under a rule


def _ruled_times(ruled: RuledOp, setup: Setup, what: str) -> measure.Times:
    """Let four contenders run one operation: see `_rule_tables`."""
    policy = f"torch + {ruled.rule}"
    dispatch_kernels.install(
        dispatch_table.op_casts_for(Policy.parse(policy), setup.device)
    )
    calls = _calls(ruled.by_hand, setup)
    stock = partial(_inside, setup.torch_context(), ruled.call, calls, setup)
    by_hand = partial(_inside, setup.torch_context(), ruled.by_hand, calls, setup)
    contenders = {
        "torch": stock,
        "by hand": by_hand,
        "passed on": partial(
            _inside, setup.halfstep_context(_RULE_POLICY), ruled.call, calls, setup
        ),
        "halfstep": partial(
            _inside, setup.halfstep_context(policy), ruled.call, calls, setup
        ),
    }
    return measure.take_turns(contenders, setup.rounds, what)


def _rule_tables(
    setup: Setup, sizes: list[int], notes: tuple[str, ...]
) -> tuple[Table, Table]:
    """Compare operations under a rule, and those that a kernel of ours passes on.

    Small operands show the least price. Large ones drive the interpreter's code out of
    the processor's caches between calls, and a kernel in Python then costs several
    times as much: training pays something between the two.
    """
    under: list[tuple[Cell, ...]] = []
    passed: list[tuple[Cell, ...]] = []
    for size in sizes:
        for ruled in ruled_operations(size, setup.device, setup.dtype):
            times = _ruled_times(ruled, setup, f"{ruled.rule} {size}")
            price = times.excess("halfstep", "by hand") * _MICRO
            under.append(
                (
                    ruled.rule,
                    size,
                    *(times.median(n) * _MICRO for n in ("torch", "by hand")),
                    times.median("halfstep") * _MICRO,
                    times.excess("halfstep", "torch") * _MICRO,
                    price,
                    price <= RULE_TARGET,
                )
            )
            passed.append(
                (
                    ruled.rule.partition(":")[2].partition("=")[0],
                    size,
                    *(times.median(n) * _MICRO for n in ("torch", "passed on")),
                    times.excess("passed on", "torch") * _MICRO,
                )
            )
        measure.progress(f"operations under rules, size {size}: done")
    rounds = measure.in_turn(setup.rounds)
    columns = (
        "rule",
        "size",
        "torch us",
        "by hand us",
        "halfstep us",
        "over torch us",
        "over by hand us",
        f"within {RULE_TARGET:g}",
    )
    more = (
        "torch: as called, by torch's table; over: what ours costs",
        "by hand: made to run as the rule says, by .to() or .float(); " + _NESTED,
        rounds,
    )
    passed_notes = (
        "passed on: under a policy that leaves the operation to torch",
        rounds,
    )
    heads = ("operation", "size", "torch us", "passed on us", "us more")
    return (
        Table("Operations under a rule", columns, tuple(under), (*more, *notes)),
        Table("Operations passed on", heads, tuple(passed), (*passed_notes, *notes)),
    )

"""`halfstep bench autocast`: overhead of operations and autocast contexts.

Compares torch.autocast with halfstep's: operations without rules, where both run
torch's kernels; operations under a rule, which run a dispatch kernel; and operations
without a rule that such a kernel passes on to torch.

Dispatch kernels are process-wide, so stock operations are measured before the first one
is installed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import commands, measure
from halfstep.casting import dispatch_table
from halfstep.casting.autocast_mode import autocast
from halfstep.numerics import formats
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from halfstep.reporting.table import Cell, Table

    AutocastContext: TypeAlias = AbstractContextManager[Any]
    """An autocast context, torch's or halfstep's."""
    Call: TypeAlias = Callable[[], object]

STOCK_TARGET = 1.05
"""Time of a stock operation under halfstep's autocast, relative to torch's."""
RULE_TARGET = 7.0
"""Microseconds that an operation under a rule may take more than a manual cast."""

_CHANNELS = 16
_MICRO = 1e6
_POLICY = "torch + op:gelu=fp32"
"""Policy of the context with a rule in the context benchmark."""


def tables(arguments: Namespace) -> list[Table]:
    """Run all measurements, stock operations first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        return [make(arguments) for make in (_stock_table, _context_table, _rule_table)]
    finally:
        torch.set_num_threads(threads)


def _open(arguments: Namespace, policy: str | None = None) -> AutocastContext:
    """Return a halfstep.autocast context."""
    dtype = formats.parse(arguments.dtype).dtype
    return autocast(arguments.device, dtype, policy=policy)


def _open_torch(arguments: Namespace) -> AutocastContext:
    """Return a torch.autocast context."""
    return torch.autocast(arguments.device, formats.parse(arguments.dtype).dtype)


def _take_turns(
    arguments: Namespace,
    what: str,
    slowest: Call,
    candidates: dict[str, tuple[AutocastContext, Call]],
) -> measure.Times:
    """Time candidates in turn, each a call inside a context.

    `slowest` determines the number of calls per turn; `what` is for the journal.
    """

    def seconds_of_call(context: AutocastContext, call: Call, calls: int) -> float:
        with context:
            call()  # fills the cast cache of the context
            return measure.per_call(call, calls, arguments.device)

    once = seconds_of_call(_open_torch(arguments), slowest, 3)
    calls = measure.calls_per_turn(arguments.calls, once)
    turns = {
        name: partial(seconds_of_call, context, call, calls)
        for name, (context, call) in candidates.items()
    }
    return measure.take_turns(turns, arguments.rounds, what)


def _stock_table(arguments: Namespace) -> Table:
    """Compare operations for which both contexts use torch's kernels."""
    rows: list[dict[str, Cell]] = []
    for size in arguments.sizes:
        for name, call in stock_operations(size, arguments.device).items():
            contexts = {
                "torch": (_open_torch(arguments), call),
                "halfstep": (_open(arguments), call),
            }
            times = _take_turns(arguments, f"{name} {size}", call, contexts)
            ratio = times.ratio("halfstep", "torch")
            rows.append(
                {
                    "operation": name,
                    "size": size,
                    "torch.autocast us": times.median("torch", _MICRO),
                    "hs.autocast us": times.median("halfstep", _MICRO),
                    **times.compared("halfstep", "torch"),
                    f"within {STOCK_TARGET}": measure.within(ratio, STOCK_TARGET),
                }
            )
        measure.progress(f"stock operations, size {size}: done")
    notes = (
        "us: microseconds of a forward call in an open context",
        measure.in_turn(arguments.rounds),
        "linear, conv2d and layer_norm have weights that learn, cast once a context",
    )
    return measure.table("Stock operations", rows, notes)


def _context_table(arguments: Namespace) -> Table:
    """Compare the time to enter and exit an empty autocast context."""
    with_rule = partial(_open, arguments, _POLICY)
    with with_rule():
        F.gelu(torch.ones(1, device=arguments.device))  # no warning of unmatched rules

    def enter(make: Callable[[], AutocastContext]) -> Call:
        def call() -> None:
            with make():
                pass

        return call

    contexts: dict[str, Callable[[], AutocastContext]] = {
        "torch.autocast": partial(_open_torch, arguments),
        "hs.autocast": partial(_open, arguments),
        "hs.autocast with a rule": with_rule,
    }
    calls: dict[str, Call] = {}
    for name, make in contexts.items():
        once = make()
        calls[f"{name}, reused"] = enter(lambda once=once: once)  # type: ignore[misc]
        calls[f"{name}, made each time"] = enter(make)
    turns = {
        name: partial(measure.per_call, call, arguments.calls, arguments.device)
        for name, call in calls.items()
    }
    times = measure.take_turns(turns, arguments.rounds)
    baseline = next(iter(calls))
    rows = [
        {
            "context": name,
            "us": times.median(name, _MICRO),
            "x torch reused": times.ratio(name, baseline),
            "us more": times.excess(name, baseline, _MICRO),
        }
        for name in calls
    ]
    notes = (
        f"us: to enter and leave, with nothing inside; the rule: {_POLICY!r}",
        measure.in_turn(arguments.rounds),
    )
    return measure.table("Autocast contexts", rows, notes)


def _rule_table(arguments: Namespace) -> Table:
    """Compare operations under a rule, and those that a kernel passes on.

    Small operands show the minimum overhead. Large ones evict the interpreter's code
    from the CPU caches between calls, and a Python kernel then takes several times as
    long. The overhead in training is between the two.
    """
    rows: list[dict[str, Cell]] = []
    device, low_dtype = arguments.device, formats.parse(arguments.dtype).dtype
    for size in arguments.sizes:
        operations = ruled_operations(size, device, low_dtype)
        for rule, (call, by_hand) in operations.items():
            policy = f"torch + {rule}"
            # Its kernel must be installed for "passed on", too.
            dispatch_table.op_casts_for(Policy.parse(policy), device)
            candidates = {
                "torch": (_open_torch(arguments), call),
                "by hand": (_open_torch(arguments), by_hand),
                "passed on": (_open(arguments, _POLICY), call),
                "halfstep": (_open(arguments, policy), call),
            }
            times = _take_turns(arguments, f"{rule} {size}", by_hand, candidates)
            cost = times.excess("halfstep", "by hand", _MICRO)
            rows.append(
                {
                    "rule": rule,
                    "size": size,
                    **{f"{n} us": times.median(n, _MICRO) for n in candidates},
                    "over torch us": times.excess("halfstep", "torch", _MICRO),
                    "over by hand us": cost,
                    f"within {RULE_TARGET:g}": measure.within(cost, RULE_TARGET),
                }
            )
        measure.progress(f"operations under rules, size {size}: done")
    how = ".to() or .float(); where torch would cast again, with enabled=False"
    notes = (
        "torch: as called, by torch's table; over: what ours costs",
        f"by hand: made to run as the rule says, by {how}",
        "passed on: under a policy that leaves the operation to torch",
        measure.in_turn(arguments.rounds),
    )
    return measure.table("Operations under a rule", rows, notes)


# The operations, on preallocated operands


def stock_operations(size: int, device: str) -> dict[str, Call]:
    """Return calls that cover each class of torch's op table, and some not in it."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    x, y, overwritten = (draw(size, size) for _ in range(3))
    weight, bias = nn.Parameter(draw(size, size)), nn.Parameter(draw(size))
    gain = nn.Parameter(draw(size))
    image = draw(1, _CHANNELS, size, size)
    filters = nn.Parameter(draw(_CHANNELS, _CHANNELS, 3, 3))
    labels = torch.randint(size, (size,), device=device)
    return {
        "linear": lambda: F.linear(x, weight, bias),
        "conv2d": lambda: F.conv2d(image, filters, padding=1),
        "mm": lambda: torch.mm(x, y),
        "layer_norm": lambda: F.layer_norm(x, (size,), gain, bias),
        "softmax": lambda: F.softmax(x, -1),
        "cross_entropy": lambda: F.cross_entropy(x, labels),
        "mse_loss": lambda: F.mse_loss(x, y),
        "x + y": lambda: x + y,
        "x * 2.0": lambda: x * 2.0,
        "relu_": lambda: torch.relu_(overwritten),
    }


def ruled_operations(
    size: int, device: str, low_dtype: torch.dtype
) -> dict[str, tuple[Call, Call]]:
    """Return operations under rules that change how they run on the device.

    No operand requires gradients, as the cast cache would spare halfstep the casts that
    the manual version makes.

    Returns:
        Rule -> (the operation as a model calls it; the same under torch.autocast with
        manual casts, with the result of the rule).
    """
    x, y, weight = (torch.randn(size, size, device=device) for _ in range(3))
    vector, low, shape = x[0], x.to(low_dtype), (size,)

    def without_autocast(call: Call) -> Call:
        def run() -> object:
            with torch.autocast(device, enabled=False):
                return call()

        return run

    cases: dict[str, tuple[Call, Call]] = {
        "op:gelu=fp32": (lambda: F.gelu(low), lambda: F.gelu(low.float())),
        "op:add=low": (lambda: x + y, lambda: x.to(low_dtype) + y.to(low_dtype)),
        "op:linear=fp32": (
            lambda: F.linear(low, weight),
            without_autocast(lambda: F.linear(low.float(), weight)),
        ),
    }
    if device == "cuda":
        return cases | {
            "op:layer_norm=low": (
                lambda: F.layer_norm(x, shape),
                without_autocast(lambda: F.layer_norm(x.to(low_dtype), shape)),
            )
        }
    return cases | {
        "op:layer_norm=fp32": (
            lambda: F.layer_norm(low, shape),
            lambda: F.layer_norm(low.float(), shape),
        ),
        "op:mv=low": (
            lambda: torch.mv(x, vector),
            lambda: torch.mv(x.to(low_dtype), vector.to(low_dtype)),
        ),
    }


BENCHES = {
    "autocast": commands.Bench(
        tables,
        "Time operations under torch.autocast and under halfstep.autocast, with "
        "torch's own table and with rules, and the autocast contexts themselves.",
        {
            "sizes": commands.flag(
                "rows and columns of the operands",
                [8, 512],
                commands.positive_ints,
                "N,N",
            ),
            "calls": commands.flag("calls in a round, fewer of slow ones", 2000),
            "threads": commands.flag("threads inside an operation on a CPU", 1),
            **commands.PLACE,
            "rounds": commands.rounds(21),
        },
    )
}

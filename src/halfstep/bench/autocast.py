"""`halfstep bench autocast`: overhead of operations and autocast contexts.

Compares torch.autocast with halfstep's: operations without rules, where both run
torch's kernels; operations under a rule, which run a dispatch kernel; and operations
without a rule that such a kernel passes on to torch.

Dispatch kernels are process-wide, so stock operations are measured before the first one
is installed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import measure
from halfstep.casting import dispatch_kernels, dispatch_table
from halfstep.casting.autocast_mode import autocast
from halfstep.numerics import formats
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from halfstep.reporting.table import Cell, Table

AutocastContext: TypeAlias = AbstractContextManager[Any]
"""An autocast context, torch's or halfstep's."""
Call: TypeAlias = "Callable[[], object]"

STOCK_TARGET = 1.05
"""Time of a stock operation under halfstep's autocast, relative to torch's."""
RULE_TARGET = 7.0
"""Microseconds that an operation under a rule may take more than a manual cast."""

_CHANNELS = 16
_MICRO = 1e6
_POLICY = "torch + op:gelu=fp32"
"""Policy of the context with a rule in the context benchmark."""


@dataclass(frozen=True)
class Setup:
    """Device, dtype and duration of the measurements."""

    device: str
    """"cpu" or "cuda"."""
    dtype: torch.dtype
    """The 16-bit dtype of the contexts."""
    calls: int
    """Maximum number of calls per turn."""
    rounds: int
    """Turns per contender."""

    def torch_context(self) -> AutocastContext:
        """Return a torch.autocast context."""
        return torch.autocast(self.device, self.dtype)

    def halfstep_context(self, policy: str | None = None) -> AutocastContext:
        """Return a halfstep.autocast context."""
        return autocast(self.device, self.dtype, policy=policy)

    def take_turns(
        self,
        what: str,
        slowest: Call,
        contenders: dict[str, tuple[AutocastContext, Call]],
    ) -> measure.Times:
        """Time contenders in turn, each a call inside a context.

        Args:
            what: Description for the journal.
            slowest: The call that determines the number of calls per turn.
            contenders: By name.
        """
        once = self._seconds_of_call(self.torch_context(), slowest, 3)
        calls = measure.calls_per_turn(self.calls, once)
        turns = {
            name: partial(self._seconds_of_call, context, call, calls)
            for name, (context, call) in contenders.items()
        }
        return measure.take_turns(turns, self.rounds, what)

    def _seconds_of_call(
        self, context: AutocastContext, call: Call, calls: int
    ) -> float:
        """Time a call inside the context; entering it is not timed."""
        with context:
            call()  # fills the cast cache of the context
            return measure.per_call(call, calls, self.device)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Run all measurements, stock operations first."""
    device = measure.pick_device(arguments.device)
    dtype = formats.parse(arguments.dtype).dtype
    setup = Setup(device, dtype, arguments.calls, arguments.rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        notes = measure.conditions("autocast", device, arguments)
        return [
            _stock_table(setup, arguments.sizes, notes),
            _context_table(setup, notes),
            *_rule_tables(setup, arguments.sizes, notes),
        ]
    finally:
        torch.set_num_threads(threads)


def _stock_table(setup: Setup, sizes: list[int], notes: list[str]) -> Table:
    """Compare operations for which both contexts use torch's kernels."""
    rows: list[dict[str, Cell]] = []
    for size in sizes:
        for name, call in stock_operations(size, setup.device).items():
            contexts = {
                "torch": (setup.torch_context(), call),
                "halfstep": (setup.halfstep_context(), call),
            }
            times = setup.take_turns(f"{name} {size}", call, contexts)
            ratio = times.ratio("halfstep", "torch")
            rows.append(
                {
                    "operation": name,
                    "size": size,
                    "torch.autocast us": times.median("torch", _MICRO),
                    "hs.autocast us": times.median("halfstep", _MICRO),
                    "x torch": ratio,
                    "+-": times.spread("halfstep", "torch"),
                    f"within {STOCK_TARGET}": measure.within(ratio, STOCK_TARGET),
                }
            )
        measure.progress(f"stock operations, size {size}: done")
    more = (
        "us: microseconds of a forward call in an open context",
        f"{measure.in_turn(setup.rounds)}; {measure.SPREAD}",
        "linear, conv2d and layer_norm have weights that learn, cast once a context",
    )
    return measure.table("Stock operations", rows, (*more, *notes))


def _context_table(setup: Setup, notes: list[str]) -> Table:
    """Compare the time to enter and exit an empty autocast context."""
    with_rule = partial(setup.halfstep_context, _POLICY)
    x = torch.ones(1, device=setup.device)
    with with_rule():
        F.gelu(x)  # an unmatched rule would give a warning

    def enter(make: Callable[[], AutocastContext]) -> Call:
        def call() -> None:
            with make():
                pass

        return call

    contexts: dict[str, Callable[[], AutocastContext]] = {
        "torch.autocast": setup.torch_context,
        "hs.autocast": setup.halfstep_context,
        "hs.autocast with a rule": with_rule,
    }
    calls: dict[str, Call] = {}
    for name, make in contexts.items():
        once = make()
        calls[f"{name}, reused"] = enter(lambda once=once: once)  # type: ignore[misc]
        calls[f"{name}, made each time"] = enter(make)
    turns = {
        name: partial(measure.per_call, call, setup.calls, setup.device)
        for name, call in calls.items()
    }
    times = measure.take_turns(turns, setup.rounds)
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
    more = (
        f"us: to enter and leave, with nothing inside; the rule: {_POLICY!r}",
        measure.in_turn(setup.rounds),
    )
    return measure.table("Autocast contexts", rows, (*more, *notes))


def _rule_tables(setup: Setup, sizes: list[int], notes: list[str]) -> list[Table]:
    """Compare operations under a rule, and those that a kernel passes on.

    Small operands show the minimum overhead. Large ones evict the interpreter's code
    from the CPU caches between calls, and a Python kernel then takes several times as
    long. The overhead in training is between the two.
    """
    ruled_rows: list[dict[str, Cell]] = []
    passed_rows: list[dict[str, Cell]] = []
    for size in sizes:
        for rule, (call, by_hand) in ruled_operations(
            size, setup.device, setup.dtype
        ).items():
            policy = f"torch + {rule}"
            dispatch_kernels.install(
                dispatch_table.op_casts_for(Policy.parse(policy), setup.device)
            )
            contenders = {
                "torch": (setup.torch_context(), call),
                "by hand": (setup.torch_context(), by_hand),
                "passed on": (setup.halfstep_context(_POLICY), call),
                "halfstep": (setup.halfstep_context(policy), call),
            }
            times = setup.take_turns(f"{rule} {size}", by_hand, contenders)
            cost = times.excess("halfstep", "by hand", _MICRO)
            ruled_rows.append(
                {
                    "rule": rule,
                    "size": size,
                    "torch us": times.median("torch", _MICRO),
                    "by hand us": times.median("by hand", _MICRO),
                    "halfstep us": times.median("halfstep", _MICRO),
                    "over torch us": times.excess("halfstep", "torch", _MICRO),
                    "over by hand us": cost,
                    f"within {RULE_TARGET:g}": measure.within(cost, RULE_TARGET),
                }
            )
            passed_rows.append(
                {
                    "operation": rule.partition(":")[2].partition("=")[0],
                    "size": size,
                    "torch us": times.median("torch", _MICRO),
                    "passed on us": times.median("passed on", _MICRO),
                    "us more": times.excess("passed on", "torch", _MICRO),
                }
            )
        measure.progress(f"operations under rules, size {size}: done")
    rounds = measure.in_turn(setup.rounds)
    how = ".to() or .float(); where torch would cast again, with enabled=False"
    more = (
        "torch: as called, by torch's table; over: what ours costs",
        f"by hand: made to run as the rule says, by {how}",
        rounds,
        *notes,
    )
    passed = "passed on: under a policy that leaves the operation to torch"
    return [
        measure.table("Operations under a rule", ruled_rows, more),
        measure.table("Operations passed on", passed_rows, (passed, rounds, *notes)),
    ]


# The operations, on preallocated operands


def stock_operations(size: int, device: str) -> dict[str, Call]:
    """Return calls that cover each class of torch's op table, and some not in it.

    Args:
        size: Rows and columns; images are `size` pixels wide, in 16 channels.
        device: "cpu" or "cuda".
    """

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

    Args:
        size: Rows and columns.
        device: "cpu" or "cuda", whose op tables differ.
        low_dtype: The 16-bit dtype of the autocast context.

    Returns:
        Rule -> (the operation as a model calls it; the same under torch.autocast with
        manual casts, with the result of the rule).
    """
    x, y, weight = (torch.randn(size, size, device=device) for _ in range(3))
    vector = torch.randn(size, device=device)
    low = x.to(low_dtype)
    shape = (size,)

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

"""Autocast contexts with a policy inside functions that `torch.compile` traces.

torch.compile can trace only torch's own autocast contexts. A policy is therefore set
and reset by two custom operations without tensors, which the graph contains; compiled
code contains only the resulting casts.

A context created outside the traced function cannot be entered inside: torch.compile
then breaks the graph, and raises under `fullgraph=True`. After a graph break inside
such a context, the function that enters it runs in eager mode.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.fx.node import has_side_effect
from torch.library import Library

from halfstep._torch.dynamo import call_after_trace, dynamo_disable
from halfstep.casting import active_context, dispatch_table
from halfstep.casting.active_context import CastContext
from halfstep.errors import UserError
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    Settings = tuple[str, torch.dtype | None, bool, bool | None]


def traceable_autocast(
    settings: Settings,
    policy: Policy | str | os.PathLike[str] | None,
    *,
    record: bool,
    has_module_rules: bool,
) -> contextlib.AbstractContextManager[Any]:
    """Return an autocast context that torch.compile can trace.

    `settings` are torch's four arguments; without a policy it is that of the enclosing
    context.

    Raises:
        UserError: If operations are recorded, or there are module or type rules.
    """
    if record or has_module_rules:
        raise UserError(
            "autocast(record=True) and autocast(model=...) cannot be traced by "
            "torch.compile; enter such a context around the compiled function."
        )
    if policy is None:
        return torch_autocast(*settings)
    return _policy_context(settings, str(policy))


@contextlib.contextmanager
def _policy_context(settings: Settings, policy_text: str) -> Iterator[None]:
    device = settings[0]
    with torch_autocast(*settings):
        torch.ops.halfstep.open_region(device, policy_text)
        try:
            yield
        finally:
            torch.ops.halfstep.close_region()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[active_context.Entry] = []


_thread = _Thread()
_library = Library("halfstep", "DEF")  # type: ignore[no-untyped-call]


def _open(device: str, policy_text: str) -> None:
    policy = Policy.parse(policy_text)
    dispatch_table.check_policy(policy, device, model=None)
    op_casts = dispatch_table.op_casts_for(policy, device)
    context = CastContext(policy, op_casts, None, dispatch_table.matched_rules(policy))
    # Not while tracing: the guard must be that of the enclosing context.
    is_tracing = TracingContext.try_get() is not None
    pushed = active_context.push(device, context, None if is_tracing else policy)
    _thread.entered.append(pushed)
    if is_tracing:
        # A graph break inside the context ends tracing before `_close`.
        call_after_trace(partial(_abandon, pushed))


def _abandon(pushed: active_context.Entry) -> None:
    while any(each is pushed for each in _thread.entered):
        _close()


def _close() -> None:
    active_context.pop(_thread.entered[-1])
    _thread.entered.pop()


def _define() -> None:
    for name, arguments, run in (
        ("open_region", "str device, str policy_text", _open),
        ("close_region", "", _close),
    ):
        _library.define(f"{name}({arguments}) -> ()")  # type: ignore[no-untyped-call]
        # After a graph break, torch.compile would try to compile these next.
        kernel = dynamo_disable(run)
        _library.impl(name, kernel, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        # Under a dispatch mode, as in tracing, torch restores the thread's dispatcher
        # state after an operation. Changes before its snapshot, at this key, persist.
        _library.impl(name, kernel, "PythonTLSSnapshot")  # type: ignore[no-untyped-call]
        packet = getattr(torch.ops.halfstep, name)
        has_side_effect(packet)
        has_side_effect(packet.default)


_define()

"""Excludes functions from `torch.compile`, and cleans up after its traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def dynamo_disable(function: F) -> F:
    """Make torch.compile trace neither a function nor what it calls; return it.

    Why: `torch.compiler.disable` wraps the function, and imports torch._dynamo, which
    takes a second.
    """
    # When torch.compile meets a call of it, it breaks the graph.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    # After a graph break it would still try to trace what eager code calls.
    return _set_actions(function, "SKIP", "SKIP")


def dynamo_inline_only(function: F) -> F:
    """Let torch.compile trace a function only as a part of its caller; return it."""
    return _set_actions(function, "SKIP", "DEFAULT")


def _set_actions(function: F, itself: str, calls: str) -> F:
    """Set what torch.compile does with a function and with what it calls."""
    frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
    actions = (getattr(frames._FrameAction, name) for name in (itself, calls))  # noqa: SLF001
    strategy = frames._FrameExecStrategy(*actions)  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def call_after_trace(callback: Callable[[], None]) -> None:
    """Call a function once torch.compile has traced the current frame, or given up.

    Where no frame is traced, as in later passes over a graph, it is not called.
    """
    from torch._dynamo.symbolic_convert import tls  # slow; loaded while tracing

    translator = getattr(tls, "current_tx", None)
    if translator is not None:
        translator.output.add_cleanup_hook(callback)

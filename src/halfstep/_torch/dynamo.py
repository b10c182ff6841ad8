"""Excludes functions from `torch.compile`."""

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
    frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
    skip = frames._FrameAction.SKIP  # noqa: SLF001
    strategy = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function

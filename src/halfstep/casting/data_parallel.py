"""Runs the replicas of `nn.DataParallel` under the caller's autocast context.

torch passes to its threads that autocast is on, but not the dtype, so that a bf16
context becomes fp16 there; it does not pass a policy either.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.nn import parallel

from halfstep._torch.patches import AttributePatch
from halfstep.casting import recompute, torch_cache
from halfstep.casting.dispatch_kernels import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _with_caller_context(
    original: Callable[..., list[Any]],
) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def parallel_apply(
        modules: Sequence[Callable[..., Any]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        replicas = in_caller_context(modules) if torch_cache.in_context() else modules
        return original(replicas, *args, **kwargs)

    return parallel_apply


PATCHES = tuple(
    AttributePatch(owner, "parallel_apply", _with_caller_context)
    for owner in (parallel, sys.modules[parallel.DataParallel.__module__])
)
"""For `nn.parallel.parallel_apply`, and for the name that `nn.DataParallel` imports."""


def in_caller_context(
    modules: Sequence[Callable[..., Any]],
) -> list[Callable[..., Any]]:
    """Return callables that run under this thread's autocast state in any thread."""
    dtypes = {
        device: torch.get_autocast_dtype(device)
        for device in KEYS
        if torch.is_autocast_enabled(device)
    }
    cache_enabled = torch.is_autocast_cache_enabled()
    enter_policy = recompute.capture()

    def wrap(module: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with contextlib.ExitStack() as contexts:
                for device, dtype in dtypes.items():
                    context = torch_autocast(device, dtype, cache_enabled=cache_enabled)
                    contexts.enter_context(context)
                contexts.enter_context(enter_policy())
                return module(*args, **kwargs)

        return run

    return [wrap(module) for module in modules]

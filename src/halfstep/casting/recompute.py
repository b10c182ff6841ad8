"""Runs code in other threads, and recomputed code, under its original contexts.

While a context is open, `torch.utils.checkpoint` is patched, reentrant and not: when
the backward pass recomputes a segment, exactly the contexts of its forward pass are
active. torch itself restores only whether autocast is on, and its dtype.

The replicas of `nn.DataParallel` run under the caller's contexts. torch passes to its
threads that autocast is on, but not the dtype, so that a bf16 context becomes fp16
there; it does not pass a policy either.

Code with its own way of recomputing is not covered; there, `halfstep.custom_fwd` and
`custom_bwd` restore the policy.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.nn import parallel
from torch.utils import checkpoint

from halfstep._torch.patches import AttributePatch
from halfstep.casting import active_context
from halfstep.casting.dispatch_kernels import KEYS
from halfstep.policy.rules import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

P = ParamSpec("P")
R = TypeVar("R")


def capture() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager factory that restores the contexts active now."""
    contexts = {device: active_context.active(device) for device in KEYS}
    dtypes = _enabled_dtypes()
    compile_policy = active_context.compile_policy()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if active_context.is_in_other_dtype(dtypes):
                # torch's checkpoint opens `torch.autocast`, whose casts are kept until
                # the outermost context ends, and would be used for the other dtype.
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            compiles_other = active_context.compile_policy() != compile_policy
            for device, context in contexts.items():
                if compiles_other or active_context.active(device) is not context:
                    compiles_other = False
                    recomputed = (
                        None if context is None else context.for_recomputation()
                    )
                    entry = active_context.push(
                        device, recomputed, compile_policy or TORCH
                    )
                    stack.callback(active_context.pop, entry)
            yield

    return restored


def _enabled_dtypes() -> dict[str, torch.dtype]:
    """Return device -> dtype of torch's autocast, where it is on."""
    enabled = filter(torch.is_autocast_enabled, KEYS)
    return {device: torch.get_autocast_dtype(device) for device in enabled}


def under_current_policy(run: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of `run` that runs it under the contexts active now."""
    restored = capture()

    @functools.wraps(run)
    def run_under_policy(*args: P.args, **kwargs: P.kwargs) -> R:
        with restored():
            return run(*args, **kwargs)

    return run_under_policy


def _reentrant(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    forward = original.__func__

    @functools.wraps(forward)
    def with_policy(ctx: object, run: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        return forward(ctx, under_current_policy(run), *args)

    return staticmethod(with_policy)


def _non_reentrant(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def with_policy(
        self: object,
        recompute_fn: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        original(self, under_current_policy(recompute_fn), *args, **kwargs)

    return with_policy


def in_caller_context(
    modules: Sequence[Callable[..., Any]],
) -> list[Callable[..., Any]]:
    """Return callables that run under this thread's autocast state in any thread."""
    dtypes = _enabled_dtypes()
    cache_enabled = torch.is_autocast_cache_enabled()
    enter_policy = capture()

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


def _data_parallel(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def parallel_apply(
        modules: Sequence[Callable[..., Any]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        if active_context.in_context():
            modules = in_caller_context(modules)
        return original(modules, *args, **kwargs)

    return parallel_apply


active_context.patches.add(
    AttributePatch(checkpoint.CheckpointFunction, "forward", _reentrant),
    AttributePatch(checkpoint._CheckpointFrame, "__init__", _non_reentrant),  # noqa: SLF001
    AttributePatch(parallel, "parallel_apply", _data_parallel),
    # The name that `nn.DataParallel` has imported.
    AttributePatch(
        sys.modules[parallel.DataParallel.__module__], "parallel_apply", _data_parallel
    ),
)

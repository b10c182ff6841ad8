"""Makes activation checkpointing recompute segments under their original policy.

It patches `torch.utils.checkpoint`, reentrant and non-reentrant: when the backward pass
recomputes a segment, exactly the contexts of its forward pass are active. torch itself
restores only whether autocast is on, and its dtype.

Code with its own way of recomputing is not covered; there, `halfstep.custom_fwd` and
`custom_bwd` restore the policy.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch._ops
from torch.utils import checkpoint

from halfstep._torch.patches import AttributePatch, SharedPatches
from halfstep.casting import active_context, compile_guard
from halfstep.casting.dispatch_kernels import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C import DispatchKeySet

P = ParamSpec("P")
R = TypeVar("R")


def capture() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager factory that restores the contexts active now.

    It also restores the state that torch.compile reads: the policy guard, and the
    setting that backward passes are compiled without autocast.
    """
    contexts = {device: active_context.active(device) for device in KEYS}
    guard = compile_guard.current_policy_guard()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, context in contexts.items():
                if active_context.active(device) is not context:
                    recomputed = (
                        None if context is None else context.for_recomputation()
                    )
                    stack.callback(pop, push(device, recomputed))
            stack.callback(
                compile_guard.restore_policy_guard, compile_guard.current_policy_guard()
            )
            compile_guard.restore_policy_guard(guard)
            if any(contexts.values()):
                stack.callback(
                    compile_guard.restore_backward_autocast,
                    compile_guard.disable_backward_autocast(),
                )
            yield

    return restored


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


def _without_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def key_extractor(tensors: Any, key_mask: DispatchKeySet) -> Any:  # noqa: ANN401
        return original(tensors, key_mask.remove(active_context.KEY))

    return key_extractor


_patches = SharedPatches(
    AttributePatch(checkpoint.CheckpointFunction, "forward", _reentrant),
    AttributePatch(checkpoint._CheckpointFrame, "__init__", _non_reentrant),  # noqa: SLF001
    # Higher-order operators require a kernel at each key that a thread includes.
    AttributePatch(torch._ops, "key_extractor", _without_key),  # noqa: SLF001
)


def push(
    device: str, context: active_context.CastContext | None
) -> active_context.Pushed:
    """Push a context as `active_context.push`, and patch activation checkpointing."""
    pushed = active_context.push(device, context)
    _patches.acquire()
    return pushed


def pop(pushed: active_context.Pushed, *undo: Callable[[], object]) -> None:
    """Undo a `push`, perhaps from another thread; `undo` as in `active_context.pop`."""
    active_context.pop(pushed, *undo, on_popped=_patches.release)

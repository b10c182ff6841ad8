"""Parts of a forward pass that are computed again, under the policy of the first time.

In: activation checkpointing that is about to run a segment (`torch.utils.checkpoint`
and all that builds on it, in both of its ways). Out: when the backward pass runs the
segment again, the frames of its forward pass are in force, and no others.

Why: torch restores whether autocast is on and in which dtype; of a policy it knows
nothing. Code with a recomputation of its own restores no more than it does itself;
`halfstep.custom_fwd` and `custom_bwd` carry the policy there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch._ops
from torch.utils import checkpoint

from halfstep._torch.patches import SharedPatches, attribute_patch
from halfstep.casting import active_context, compile_guard
from halfstep.casting.dispatch_kernels import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C import DispatchKeySet

P = ParamSpec("P")
R = TypeVar("R")


def capture() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what puts the frames that are in force now in force again later.

    With them comes what compiled code goes by: the sign of the policy, and that
    backward passes are compiled without autocast.
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
    """Return a function that runs under the frames in force now, whenever it is called.

    Args:
        run: Called with what the returned function is called with.
    """
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
    attribute_patch(checkpoint.CheckpointFunction, "forward", _reentrant),
    attribute_patch(checkpoint._CheckpointFrame, "__init__", _non_reentrant),  # noqa: SLF001
    # Higher-order operators ask for a kernel at each key that a thread includes.
    attribute_patch(torch._ops, "key_extractor", _without_key),  # noqa: SLF001
)


def push(
    device: str, context: active_context.CastContext | None
) -> active_context.Pushed:
    """Put a frame in force, as `active_context.push` does, recomputation included."""
    pushed = active_context.push(device, context)
    _patches.acquire()
    return pushed


def pop(pushed: active_context.Pushed, *undo: Callable[[], object]) -> None:
    """Undo a `push`, perhaps from another thread; `undo` as in `active_context.pop`."""
    active_context.pop(pushed, *undo, on_popped=_patches.release)

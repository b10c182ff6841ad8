"""Makes activation checkpointing recompute segments under their original policy.

While a context is open, `torch.utils.checkpoint` is patched, reentrant and not: when
the backward pass recomputes a segment, exactly the contexts of its forward pass are
active. torch itself restores only whether autocast is on, and its dtype.

Code with its own way of recomputing is not covered; there, `halfstep.custom_fwd` and
`custom_bwd` restore the policy.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.utils import checkpoint

from halfstep._torch.patches import AttributePatch
from halfstep.casting import active_context, compile_guard
from halfstep.casting.dispatch_kernels import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


def capture() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager factory that restores the contexts active now.

    It also restores the policy guard, which torch.compile reads.
    """
    contexts = {device: active_context.active(device) for device in KEYS}
    guard = compile_guard.number()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, context in contexts.items():
                if active_context.active(device) is not context:
                    recomputed = (
                        None if context is None else context.for_recomputation()
                    )
                    pushed = active_context.push(device, recomputed)
                    stack.callback(active_context.pop, pushed)
            stack.callback(compile_guard.set_number, compile_guard.number())
            compile_guard.set_number(guard)
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


active_context.patches.add(
    AttributePatch(checkpoint.CheckpointFunction, "forward", _reentrant),
    AttributePatch(checkpoint._CheckpointFrame, "__init__", _non_reentrant),  # noqa: SLF001
)

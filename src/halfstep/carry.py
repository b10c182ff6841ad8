"""Regions carried into the threads of `nn.DataParallel`.

In: replicas about to run, one thread each. Out: the same replicas, which run under the
region of the thread that called them.

Why: torch tells its threads that autocast is on, but not in which dtype, so that a
bf16 region becomes fp16 there; and it knows nothing of a policy.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import parallel

from halfstep import gate, stale
from halfstep.kernels import KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@functools.cache
def install() -> None:
    """Let `nn.DataParallel` carry regions of ours, from now on."""
    torchs = parallel.parallel_apply

    @functools.wraps(torchs)
    def parallel_apply(
        modules: Sequence[Callable[..., Any]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> list[Any]:
        runs = carried(modules) if stale.inside() else modules
        results: list[Any] = torchs(runs, *args, **kwargs)  # type: ignore[arg-type]
        return results

    parallel.parallel_apply = parallel_apply
    parallel.data_parallel.__globals__["parallel_apply"] = parallel_apply


def carried(modules: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return callables that run in another thread as they would in this one."""
    on = {
        device: (torch.get_autocast_dtype(device), gate.current(device))
        for device in KEYS
        if torch.is_autocast_enabled(device)
    }
    cache = torch.is_autocast_cache_enabled()

    def carry(module: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with contextlib.ExitStack() as regions:
                for device, (dtype, frame) in on.items():
                    region = torch.autocast(device, dtype, cache_enabled=cache)
                    regions.enter_context(region)
                    before = gate.enter(device, frame)
                    regions.callback(gate.leave, device, before)
                return module(*args, **kwargs)

        return run

    return [carry(module) for module in modules]

"""Contexts in threads: none waits for another for ever."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.casting import active_context

SOAK = Path(__file__).parents[1] / "support" / "thread_soak.py"
CONTEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "policy": {"policy": "lean"},
    "cache": {"cache": hs.CastCache()},
    "record": {"record": True},
}


def test_eight_threads() -> None:
    """Law: training and evaluation under torch's contexts and ours, mixed, go on.

    A process of its own: a hang holds the interpreter's lock, so that nothing inside
    could end it.
    """
    command = [sys.executable, "-W", "ignore", str(SOAK), "5", "8"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps: dict[str, int] = eval(done.stdout)  # noqa: S307 -- the program's own
    assert min(steps.values()) > 0


DEVICES = ("cpu", "cuda", "ipu", "maia", "mtia", "hpu")


@pytest.mark.parametrize("name", CONTEXTS)
def test_opened_here_closed_there(name: str) -> None:
    """Law: a generator may open a context in one thread and end in another.

    Both threads are then outside; torch.autocast stays on in the first.
    """

    def hold(context: Any) -> Iterator[torch.dtype]:
        with context:
            yield torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    def start_and_end(context: Any) -> tuple[Any, ...]:
        generator = hold(context)
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            seen = one.submit(next, generator).result()
            other.submit(list, generator).result()
            states = [pool.submit(state).result() for pool in (one, other)]
        return seen, *states

    def state() -> tuple[object, ...]:
        x = torch.ones(2, 2)
        with hs.autocast("cpu", enabled=False):  # the thread learns of it here
            pass
        return (
            [torch.is_autocast_enabled(device) for device in DEVICES],
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch._C._dispatch_tls_is_dispatch_key_included(active_context.KEY),
            torch.mm(x, x).dtype,
        )

    outside = state()
    seen, *states = start_and_end(hs.autocast("cpu", torch.float16, **CONTEXTS[name]))
    assert seen == torch.float16
    assert states == [outside, outside]
    assert active_context.active("cpu") is None
    assert not active_context.patches.users


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_used_context_is_copied(name: str) -> None:
    """Law: contexts, and models that hold one, are copied and pickled after use."""
    layer = nn.Linear(2, 2)
    layer.context = hs.autocast("cpu", **CONTEXTS[name])  # type: ignore[assignment]
    x = torch.ones(2, 2)
    with layer.context as opened:
        layer(x)
        while_open = copy.deepcopy(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), while_open):  # noqa: S301
        with other.context as again:
            assert other(x).dtype == torch.bfloat16
        assert again is not opened
    assert not torch.is_autocast_enabled("cpu")


def test_closed_out_of_order() -> None:
    """Law: after contexts that overlap, the state is that outside of both."""
    x = torch.ones(2, 2)
    outer = hs.autocast("cpu", policy="torch + op:mm=fp32")
    inner = hs.autocast("cpu", policy="torch + op:mm=keep")
    outer.__enter__()
    x.mm(x)
    inner.__enter__()
    x.mm(x)
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert active_context.active("cpu") is None
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.float16):
        assert x.mm(x).dtype == torch.float16


def test_one_that_is_finished_elsewhere() -> None:
    """Law: of what several threads hold, the entry of one that has ended is closed."""
    context = hs.autocast("cpu", policy="torch + op:mm=fp32")
    x = torch.ones(2, 2)

    def hold() -> Iterator[None]:
        with context:
            yield

    generator = hold()
    with ThreadPoolExecutor(1) as ended:
        ended.submit(next, generator).result()
    with ThreadPoolExecutor(1) as other:
        other.submit(context.__enter__).result()
        list(generator)
        assert other.submit(lambda: x.mm(x).dtype).result() == torch.float32
        other.submit(context.__exit__, None, None, None).result()
    assert active_context.nesting() == 0

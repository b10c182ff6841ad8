"""Contexts in threads: none waits for another for ever."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import casting, gate, stale

if TYPE_CHECKING:
    from collections.abc import Iterator

SOAK = Path(__file__).with_name("thread_soak.py")
CONTEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "policy": {"policy": "lean"},
    "cache": {"cache": hs.CastCache()},
}


def test_eight_threads() -> None:
    """Law: training and evaluation under torch's contexts and ours, mixed, go on.

    A process of its own: a hang holds the interpreter's lock, so that nothing inside
    could end it.
    """
    command = [sys.executable, "-W", "ignore", str(SOAK), "8", "8"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    steps: dict[str, int] = eval(done.stdout)  # noqa: S307 -- the program's own
    assert min(steps.values()) > 0


@pytest.mark.parametrize("name", CONTEXTS)
def test_opened_here_closed_there(name: str) -> None:
    """Law: a generator may open a context in one thread and end in another, as torch's.

    Nothing is counted as open after it, and ours leaves no policy in either thread.
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

    def state() -> tuple[bool, torch.dtype, bool]:
        enabled = torch.is_autocast_enabled("cpu")
        cached = torch.is_autocast_cache_enabled()
        return enabled, torch.get_autocast_dtype("cpu"), cached

    ours = start_and_end(hs.autocast("cpu", torch.float16, **CONTEXTS[name]))
    assert ours == start_and_end(torch.autocast("cpu", torch.float16))
    assert gate.current("cpu") is None
    assert not stale._open
    assert casting._patches._users == 0


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

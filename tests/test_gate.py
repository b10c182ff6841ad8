"""Frames: in force where a region is open, and where its forward pass is run again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from halfstep import gate
from halfstep.cast_cache import CastCache
from halfstep.gate import Frame, Row
from halfstep.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = pytest.mark.parametrize("reentrant", [True, False])


def frame(name: str, cache: CastCache | None = None) -> Frame:
    """Return a frame with a policy and a plan of its own."""
    policy = Policy.parse(f"torch + op:{name}=fp32")
    return Frame(policy, {name: Row("fp32", 0, stock=False)}, cache, set())


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know no thread of another test."""
    monkeypatch.setattr(gate, "_past", {})
    monkeypatch.setattr(gate, "_thread", gate._Thread())


A, B, C = (frame(name) for name in ("softmax", "gelu", "exp"))
NAMES = {id(A): "A", id(B): "B", id(C): "C", id(None): "-"}


def name(found: Frame | None) -> str:
    """Return a short name of a frame."""
    return NAMES[id(found)]


@contextmanager
def region(opened: Frame | None, device: str = "cpu") -> Iterator[None]:
    """Be in a region."""
    before = gate.enter(device, opened)
    try:
        yield
    finally:
        gate.leave(device, before)


class Ask(torch.autograd.Function):
    """The identity, which notes the frame of its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        """Note, and pass on."""
        seen.append(name(gate.in_force("cpu")))
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Note, and pass on."""
        ctx.seen.append(name(gate.in_force("cpu")))
        return grad, None


def ask(x: Tensor, seen: list[str]) -> Tensor:
    """Note the frame in the forward pass, and in the backward pass."""
    out: Tensor = Ask.apply(x, seen)  # type: ignore[no-untyped-call]
    return out


def look(x: Tensor, seen: list[str]) -> Tensor:
    """Note the frame in the forward pass, and make a node that saves something."""
    seen.append(name(gate.in_force("cpu")))
    return x.sin()


def start() -> Tensor:
    """Return a number to begin with."""
    return torch.ones((), requires_grad=True)


def backward(*outs: Tensor) -> None:
    """Run one backward pass."""
    torch.autograd.backward(outs)


# Open regions


def test_frames_nest() -> None:
    """Law: the innermost is in force, each end restores what was before it."""
    seen = []
    for opened in (A, B, None, C):
        with region(A), region(opened):
            seen.append((name(gate.current("cpu")), name(gate.in_force("cpu"))))
        assert gate.current("cpu") is None
    assert seen == [("A", "A"), ("B", "B"), ("-", "-"), ("C", "C")]


def test_devices_have_their_own() -> None:
    """Law: a region on one device is none on another."""
    with region(A), region(B, "cuda"):
        assert name(gate.in_force("cpu")) == "A"
        assert name(gate.in_force("cuda")) == "B"
        assert gate.in_force("mps") is None
    assert gate.in_force("cuda") is None


def test_threads_have_their_own() -> None:
    """Law: a thread starts without a region; leaving one leaves others alone."""
    barrier = threading.Barrier(2, timeout=30)

    def work(opened: Frame) -> list[str]:
        seen = [name(gate.in_force("cpu"))]
        with region(opened):
            barrier.wait()
            seen.append(name(gate.in_force("cpu")))
            barrier.wait()
        return [*seen, name(gate.in_force("cpu"))]

    with region(C), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (A, B))) == [["-", "A", "-"], ["-", "B", "-"]]
        assert name(gate.current("cpu")) == "C"


# Backward passes


def test_backward_finds_the_frame_of_its_forward() -> None:
    """Law: each function's backward runs under the frame that its forward ran under."""
    seen: list[str] = []
    x = ask(start(), seen)
    with region(A):
        x = ask(x, seen)
        with region(B):
            x = ask(ask(x, seen), seen)
        x = ask(x, seen)
    x = ask(x, seen)
    assert seen == ["-", "A", "B", "B", "A", "-"]
    seen.clear()
    backward(x)
    assert seen == ["-", "A", "B", "B", "A", "-"]


def test_a_backward_pass_in_a_region() -> None:
    """Law: the region around a backward pass has no say."""
    seen: list[str] = []
    with region(A):
        x = ask(start(), seen)
    x = ask(x, seen)
    with region(B):
        x = ask(x, seen)
        seen.clear()
        with region(C):
            backward(x)
    assert seen == ["B", "-", "A"]


def test_the_next_backward_pass_is_not_confused() -> None:
    """Law: what one pass has computed again says nothing about the next."""
    seen: list[str] = []
    with region(A):
        x = checkpoint(look, start(), seen, use_reentrant=True)
    backward(x)
    x = ask(start(), seen)
    backward(x)
    assert seen == ["A", "A", "-", "-"]


@KINDS
def test_recomputation(reentrant: bool) -> None:
    """Law: what is computed again finds the frame of its forward, region by region."""
    seen: list[str] = []

    def again(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(look, x, seen, use_reentrant=reentrant)
        return out

    with region(A):
        x = again(start())
        with region(B):
            x = again(x)
        x = again(x)
    with region(C):
        x = again(x)
    x = again(x)
    assert seen == ["A", "B", "A", "C", "-"]
    seen.clear()
    backward(x)
    assert seen == ["-", "C", "A", "B", "A"]


@KINDS
def test_recomputation_opens_its_own_regions(reentrant: bool) -> None:
    """Law: a region that the recomputed code opens is the one in force inside it."""
    seen: list[str] = []

    def inside(x: Tensor) -> Tensor:
        x = look(x, seen)
        with region(B):
            x = look(x, seen)
        return look(x, seen)

    for around in (A, None):
        with region(around):
            x = checkpoint(inside, start(), use_reentrant=reentrant)
        with region(C):
            backward(x)
    assert seen == ["A", "B", "A"] * 2 + ["-", "B", "-"] * 2


@KINDS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_recomputation_in_a_recomputation(reentrant: bool) -> None:
    """Law: nested checkpoints find the frames of their forward, in every round."""
    seen: list[tuple[int, str]] = []

    def note(x: Tensor, place: int) -> Tensor:
        seen.append((place, name(gate.in_force("cpu"))))
        return x.sin()

    def inner(x: Tensor, place: int) -> Tensor:
        return note(note(x, place), place + 1)

    def outer(x: Tensor) -> Tensor:
        x = note(x, 0)
        with region(B):
            x = checkpoint(inner, x, 1, use_reentrant=reentrant)
        out: Tensor = checkpoint(inner, x, 3, use_reentrant=reentrant)
        return out

    with region(A):
        x = checkpoint(outer, start(), use_reentrant=reentrant)
    once = list(enumerate(["A", "B", "B", "A", "A"]))
    assert seen == once
    with region(C):
        backward(x)
    assert set(seen) == set(once)
    # Inner checkpoints run in the outer's recomputation, and in one of their own.
    assert len(seen) > 2 * len(once)


@KINDS
def test_forward_in_another_thread(reentrant: bool) -> None:
    """Law: a thread without nodes of its own finds the frame of another's forward.

    A number that a thread has itself given to a node is taken for that.
    """
    seen: list[str] = []

    def forward() -> Tensor:
        with region(A):
            out: Tensor = checkpoint(look, start(), seen, use_reentrant=reentrant)
        return out

    x = forward()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, x).result()
        x = pool.submit(forward).result()
        pool.submit(backward, x).result()
    assert seen == ["A"] * 4
    with ThreadPoolExecutor(1) as pool:
        x = pool.submit(forward).result()
    for _ in range(9):
        start() * 1
    seen.clear()
    backward(x)
    assert seen == ["-"]


def test_each_thread_its_own_first() -> None:
    """Law: threads that run both passes themselves are never ambiguous."""

    def work(opened: Frame) -> set[str]:
        seen: list[str] = []
        for _ in range(50):
            with region(opened):
                x = ask(start(), seen)
            backward(x)
        return set(seen)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, (A, B, C))) == [{"A"}, {"B"}, {"C"}]


# Caches


def test_casts_keep_their_history_while_a_region_is_open() -> None:
    """Law: the outermost region with a cache opens and closes it, nested ones do not.

    A recomputation opens it for as long as its backward pass lasts.
    """
    cache = CastCache()
    outer, scope = frame("softmax", cache), frame("gelu", cache)
    NAMES.update({id(outer): "outer", id(scope): "scope"})
    opened = [cache.open]

    def note(x: Tensor) -> Tensor:
        gate.in_force("cpu")  # as a kernel asks
        opened.append(cache.open)
        return x.sin()

    with region(outer):
        opened.append(cache.open)
        with region(scope), region(None):
            opened.append(cache.open)
        x = checkpoint(note, start(), use_reentrant=False)
    opened.append(cache.open)
    assert opened == [False, True, True, True, False]
    backward(x)
    opened.append(cache.open)
    assert opened[5:] == [True, False]

"""Frames of other threads, and how many are remembered."""

from __future__ import annotations

import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfstep import gate
from halfstep.gate import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

GATE = runpy.run_path(str(Path(__file__).with_name("test_gate.py")))
"""Frames by name, and a function that notes which is in force."""
A, B, C, NAMES = GATE["A"], GATE["B"], GATE["C"], GATE["NAMES"]
ask, backward, frame = GATE["ask"], GATE["backward"], GATE["frame"]
region, start = GATE["region"], GATE["start"]


def forwards(frames: list[Frame]) -> list[Tensor]:
    """Return results of fresh threads, whose autograd numbers are thus the same."""
    outs: list[Tensor] = []

    def forward(opened: Frame) -> None:
        with region(opened):
            outs.append(ask(start(), []))

    for opened in frames:
        thread = threading.Thread(target=forward, args=(opened,))
        thread.start()
        thread.join()
    return outs


def other_thread(run: Callable[[], object]) -> BaseException | None:
    """Run something in a thread of its own; return its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).exception()


@pytest.fixture
def _no_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the threads of other tests."""
    monkeypatch.setattr(gate, "_past", {})
    monkeypatch.setattr(gate, "_thread", gate._Thread())


@pytest.mark.usefixtures("_no_past")
def test_ambiguous_threads() -> None:
    """Law: a node that may be of either of two threads is refused, with both words."""
    first, _ = forwards([A, B])
    error = other_thread(lambda: backward(first))
    assert str(error).splitlines()[0] == (
        "a recomputation in backward may belong to regions of several threads, with "
        "policies torch + op:gelu=fp32, torch + op:softmax=fp32; run their backward "
        "passes in their threads."
    )


@pytest.mark.usefixtures("_no_past")
def test_a_scope_and_its_region_are_ambiguous() -> None:
    """Law: frames of one policy are told apart by what they plan."""
    scope = Frame(A.policy, B.plan, None, set(), module="head")
    NAMES[id(scope)] = "scope"
    error = other_thread(lambda: backward(forwards([A, scope])[0]))
    assert "several threads" in str(error)


@pytest.mark.usefixtures("_no_past")
def test_threads_that_agree() -> None:
    """Law: with one plan it does not matter which thread's region it was."""
    twin = frame("softmax")
    NAMES[id(twin)] = "A"
    first, second = forwards([A, twin])
    assert other_thread(lambda: backward(first, second)) is None


# Memory


@pytest.mark.usefixtures("_no_past")
def test_memory_is_bounded() -> None:
    """Law: ten thousand regions leave as many notes as the last few thousand."""
    x = start()
    for number in range(10_000):
        with region((A, B)[number % 2]):
            x = x * 1
    log = gate._past["cpu"][0]
    assert len(gate._past["cpu"]) == 1
    assert gate._KEPT <= len(log.numbers) == len(log.frames) <= 2 * gate._KEPT
    seen: list[str] = []
    with region(C):
        x = ask(x, seen)
    backward(x)
    assert seen == ["C", "C"]


@pytest.mark.usefixtures("_no_past")
def test_what_is_forgotten_is_refused() -> None:
    """Law: a node older than all notes is an error, not torch's table in silence."""
    with region(A):
        x = ask(start(), [])
    y = x
    for _ in range(9000):
        with region(B):
            y = y * 1
    with pytest.raises(RuntimeError) as caught:
        backward(x)
    assert str(caught.value).splitlines()[0] == (
        "a recomputation in backward belongs to a forward pass thousands of regions "
        "ago, whose policy is forgotten; run the backward pass sooner."
    )


@pytest.mark.usefixtures("_no_past")
def test_regions_without_graphs_leave_no_notes() -> None:
    """Law: where no node is made, one note replaces the other."""
    for _ in range(1000):
        with region(A):
            pass
    assert len(gate._past["cpu"][0].numbers) <= 2


@pytest.mark.usefixtures("_no_past")
def test_threads_are_bounded() -> None:
    """Law: threads without end are forgotten, those in use are not."""
    seen: list[str] = []
    with region(A):
        x = ask(start(), seen)
    for _ in range(3):
        forwards([B] * 50)
        with region(A):
            x = ask(x, seen)
    assert len(gate._past["cpu"]) == 64
    seen.clear()
    assert other_thread(lambda: backward(x)) is None
    assert seen == ["A"] * 4

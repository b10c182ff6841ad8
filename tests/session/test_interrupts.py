"""Ctrl-C at any instruction of a session's calls: training goes on as if it were whole.

A trace function raises `KeyboardInterrupt` before the n-th instruction of halfstep's
own code. Then the loop goes on with the next batch.
"""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small_training import same
from torch import Tensor, nn

import halfstep as hs
from halfstep.masters import generic_step
from halfstep.session.session import Session

SOURCE = str(Path(hs.__file__).parent)
CALLER = 2
"""Instructions at each end of a call that nothing in it can guard: as in its caller."""
STRIDE = 199

BATCHES = [
    torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(6)
]
OVERFLOW = BATCHES[0] * torch.inf


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Collect only what these tests make, since each of many calls does so."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Interrupts:
    """Counts the instructions of halfstep's frames, and raises before one of them."""

    def __init__(self, under: str = SOURCE, at: int | None = None) -> None:
        self.codes: list[object] = []
        """The code of each instruction that was counted."""
        self._under, self._at = under, at

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._under):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if len(self.codes) == self._at:
                self._at = None
                raise KeyboardInterrupt
            self.codes.append(frame.f_code)
        return self._trace

    def run(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        gc.collect()  # earlier sessions: each that lives is told of a step
        gc.disable()
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            assert self._at is None
        finally:
            sys.settrace(before)
            gc.enable()


def chosen(codes: list[object]) -> list[int]:
    """Return instructions to interrupt: every n-th, and the last of each function."""
    numbers = range(CALLER, len(codes) - CALLER)
    return sorted({*numbers[::STRIDE], *{codes[n]: n for n in numbers}.values()})


SESSIONS: dict[str, dict[str, Any]] = {
    "O1 fp16": {"accumulate": 2},
    "O1 fp16 skip": {},
    "O2 bf16": {},
    "O2 bf16 generic": {},
    "O2 bf16 generic split": {"master": "split"},
    "O2 bf16 generic release": {"master": "split", "optimizer_in_backward": True},
    "O2 bf16 release": {"optimizer_in_backward": True},
}


def prepared(kind: str) -> Session:
    """Return a session that has made one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    make: Any = torch.optim.NAdam if "generic" in kind else torch.optim.AdamW
    level, dtype, *_ = kind.split()
    session = hs.prepare(
        model, make(model.parameters(), 0.1), level, dtype=dtype, **SESSIONS[kind]
    )
    train(session, BATCHES[-1:] * session.accumulate)
    return session


def forward(session: Session, batch: Tensor) -> Tensor:
    with session.autocast():
        return session.model(batch).float().square().mean()


def train(session: Session, batches: list[Tensor]) -> None:
    for batch in batches:
        session.backward(forward(session, batch))
        session.step()


def by_parameter(session: Session) -> list[Any]:
    """Return weight, fp32 value and moments of each parameter of the optimizer."""
    fp32, model = session.weights(), session.model
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    params = [p for group in session.optimizer.param_groups for p in group["params"]]
    states = [session.optimizer.state[param] for param in params]
    parts = zip(named, states, strict=True)
    return copy.deepcopy([[p.detach(), fp32[n], state] for (n, p), state in parts])


def state_of(session: Session) -> list[Any]:
    """Return all that the next step depends on but running statistics."""
    return [by_parameter(session), session.state_dict()["scaler"]["scale"]]


def cases() -> Iterator[Any]:
    for kind, options in SESSIONS.items():
        for done in range(options.get("accumulate", 1)):
            for call in ("backward", "step"):
                yield pytest.param(kind, done, call, id=f"{kind}-{done}-{call}")


@pytest.mark.parametrize(("kind", "done", "call"), [*cases()])
def test_training_goes_on(
    kind: str, done: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the next step is one that a run without the interrupt could have taken.

    Of the window before it, all is dropped, or all is applied, or whole micro-batches
    are left. Only an interrupt in the middle of the update itself may leave parameters
    that have it beside others that have not.
    """
    monkeypatch.setattr(generic_step, "MAX_PIECE_NUMEL", 12)
    size = SESSIONS[kind].get("accumulate", 1)
    first = OVERFLOW if "skip" in kind else BATCHES[0]
    before, after = [first, *BATCHES[1 : done + 1]], BATCHES[2:4]
    runs = [after[:size], [*before[:-1], *after][:size], [*before, *after][:size]]
    if done + 1 == size:
        runs[-1] = [*before, *after[:size]]
    starts, ends = [], []
    for batches in runs:
        session = prepared(kind)
        train(session, batches[:-size])
        starts.append(by_parameter(session))
        train(session, batches[-size:])
        ends.append(state_of(session))

    def interrupted(at: int | None) -> tuple[Session, list[object]]:
        session, interrupts = prepared(kind), Interrupts(at=at)
        train(session, before[:-1])
        loss = forward(session, before[-1])
        if call == "step":
            session.backward(loss)
        do = session.step if call == "step" else partial(session.backward, loss)
        interrupts.run(do)
        return session, interrupts.codes

    _, codes = interrupted(None)
    assert codes
    for number in chosen(codes):
        session, _ = interrupted(number)
        where = number, codes[number]
        start = by_parameter(session)
        for now, *options in zip(start, *starts, strict=True):
            assert any(same(now, option) for option in options), where
        attempted = session.steps_applied + session.steps_skipped
        for batch in after:
            session.backward(forward(session, batch))
            if session.step().complete:
                break
        assert session.steps_applied + session.steps_skipped == attempted + 1
        if any(same(start, each) for each in starts):
            assert any(same(state_of(session), end) for end in ends), where


def test_contexts_close() -> None:
    """Law: a forward pass that is interrupted leaves no context open, and no trace.

    The first instruction of `__exit__` and the last of `__enter__` belong to `with`,
    which nothing in them can guard; Python handles no signal there.
    """
    kind, where = "O1 fp16", str(Path(SOURCE, "session"))
    twin = prepared(kind)
    train(twin, BATCHES[:2])

    def interrupted(at: int | None) -> tuple[Session, list[Any]]:
        session, interrupts = prepared(kind), Interrupts(where, at)
        context = session.autocast()

        def pass_through() -> None:
            with context:
                pass

        interrupts.run(pass_through)
        assert not torch.is_autocast_enabled("cpu")
        return session, interrupts.codes

    codes = interrupted(None)[1]
    names = [code.co_name for code in codes]
    assert {"__enter__", "__exit__"} <= {*names}
    last = max(n for n, name in enumerate(names) if name == "__enter__")
    own = {n for n, name in enumerate(names) if name in ("__enter__", "__exit__")}
    for number in {*chosen(codes), *own} - {last, names.index("__exit__")}:
        session, _ = interrupted(number)
        train(session, BATCHES[:2])
        assert same(state_of(session), state_of(twin)), (number, codes[number])


@pytest.mark.parametrize("call", ["backward", "step", "flush"])
def test_grad_mode_is_restored(call: str) -> None:
    """Law: an interrupt that keeps torch from leaving `no_grad` does not keep it on."""
    session = prepared("O2 bf16 generic release")
    loss = forward(session, BATCHES[0])
    if call != "backward":
        session.backward(loss)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not torch.no_grad.__enter__.__code__:
            return None
        if event == "return":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.backward(loss) if call == "backward" else getattr(session, call)()
    finally:
        sys.settrace(before)
    assert torch.is_grad_enabled()
    train(session, BATCHES[1:2])

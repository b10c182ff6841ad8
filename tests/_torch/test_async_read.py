"""Numbers that arrive late: how late, in which order, and what follows from them."""

import contextlib
import math

import pytest
import torch
from late_scalars import slow_device  # noqa: F401
from torch import nn

import halfstep as hs
from halfstep._torch import async_read
from halfstep._torch.async_read import DELAY_STEPS, DelayedScalars
from halfstep.scaling import LossScaler, ScaleRule
from halfstep.session.lr_schedule import LRSchedule


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    halves = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    return halves


def test_on_a_cpu_at_once() -> None:
    """Law: where nobody waits, numbers come at once, of any dtype and shape."""
    sent = (torch.tensor(2.5), torch.tensor([3]), torch.tensor([[1]]).bool())
    assert DelayedScalars().submit(sent) == [2.5, 3.0, 1.0]
    assert DelayedScalars().num_pending == 0


@pytest.mark.usefixtures("slow")
def test_collapse_comes_late_but_comes() -> None:
    """Law: a limit of 5 skips ends the run in the step that the fifth arrives in."""
    scaler = LossScaler(ScaleRule(max_consecutive_skips=5))
    for _ in range(5 + DELAY_STEPS - 1):
        scaler.observe_loss(torch.tensor(1.0))
        scaler.update(torch.tensor(1.0))
    with pytest.raises(hs.LossScaleCollapse) as caught:
        scaler.update(torch.tensor(1.0))
    assert caught.value.history == tuple(
        2.0**exponent for exponent in range(16, 11, -1)
    )


@pytest.mark.usefixtures("slow")
def test_a_state_holds_what_is_under_way() -> None:
    """Law: the steps before a state was saved are in it, arrived or not."""
    scaler = LossScaler(ScaleRule())
    for number in range(DELAY_STEPS + 2):
        scaler.observe_loss(torch.tensor(8.0 - number))
        scaler.update(torch.tensor(float(number == DELAY_STEPS)))
        told = scaler.state_dict()["watch"]
        assert told["applied"] == number + (number < DELAY_STEPS)
        assert told["history"] == [2.0**16] * (number == DELAY_STEPS)


@pytest.mark.usefixtures("slow")
def test_a_scale_that_may_be_below_one() -> None:
    """Law: what has not arrived counts as so many back-offs."""
    scaler = LossScaler(ScaleRule(init_scale=4.0, min_scale=2.0**-10))
    below = []
    for _ in range(5):
        below.append(scaler.may_be_below_one)
        scaler.update(torch.tensor(0.0))
    # 4, then for all we know 2, 1; then 4 arrives, of two steps ago: 1.
    assert below == [False] * 5
    scaler.update(torch.tensor(1.0))
    assert not scaler.may_be_below_one
    for _ in range(2):
        scaler.update(torch.tensor(1.0))
    # 2 has arrived; two steps later it may be 1/2.
    assert scaler.may_be_below_one
    for scale, is_below in ((1024.0, False), (2.0**-9, True)):
        scaler.set_state(torch.tensor(scale), scaler.state.clean_steps)
        below = []
        for _ in range(5):  # what was sent before the scale was set says nothing of it
            below.append(scaler.may_be_below_one)
            scaler.update(torch.tensor(0.0))
        assert below == [True] * 3 + [is_below] * 2


@pytest.mark.usefixtures("slow")
def test_a_schedule_follows() -> None:
    """Law: a schedule makes as many steps as were applied, `DELAY_STEPS` steps late."""
    schedule = LRSchedule(scheduler())
    assert schedule.scheduler is not None
    seen = []
    for applied in (1, 2, 2, 3, 3, 3):
        schedule.step(torch.tensor(float(applied)))
        seen.append(schedule.scheduler.last_epoch)
    assert seen == [0, 0, 1, 2, 2, 3]


@pytest.mark.usefixtures("slow")
def test_loading_forgets_what_is_under_way() -> None:
    """Law: numbers sent before a load are not taken for those of the run after it."""
    schedule = LRSchedule(scheduler())
    schedule.step(torch.tensor(1.0))
    saved = schedule.state_dict()
    for applied in range(2, 20):
        schedule.step(torch.tensor(float(applied)))
    with contextlib.ExitStack() as undo:
        schedule.load_scheduler(saved, undo)
        undo.pop_all()
    schedule.restart(saved, 1)
    assert schedule.scheduler is not None
    for applied in (2, 3, 4):
        schedule.step(torch.tensor(float(applied)))
    assert schedule.scheduler.last_epoch == 2
    scaler = LossScaler(ScaleRule(max_consecutive_skips=3))
    state = scaler.state_dict()
    for _ in range(3):
        scaler.update(torch.tensor(1.0))
    scaler.load_state_dict(state)
    for _ in range(6):
        scaler.update(torch.tensor(0.0))


def test_a_session_steps_its_schedule() -> None:
    """Law: the schedule of a session follows applied steps only, and its state too."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halves = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    session, bad = hs.prepare(model, optimizer, "O0", scheduler=halves), {0, 1, 4}
    for step in range(6):
        loss = model(torch.ones(1, 2)).square().mean()
        session.backward(loss * math.nan if step in bad else loss)
        session.step()
    applied = 6 - len(bad)
    assert optimizer.param_groups[0]["lr"] == 0.5**applied
    fresh = nn.Linear(2, 1)
    other = torch.optim.SGD(fresh.parameters(), lr=1.0)
    again = hs.prepare(
        fresh, other, "O0", scheduler=torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    )
    again.load_state_dict(session.state_dict())
    again.backward(fresh(torch.ones(1, 2)).square().mean())
    again.step()
    assert other.param_groups[0]["lr"] == 0.5 ** (applied + 1)


def test_a_schedule_set_later_begins_then() -> None:
    """Law: steps applied before a schedule was set are none of its own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = hs.prepare(model, optimizer, "O0")
    for step in range(5):
        if step == 3:
            session.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        session.backward(model(torch.ones(1, 2)).square().mean())
        session.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.gpu
def test_on_a_gpu_late_and_in_order() -> None:
    """Law: on a GPU, too, exactly those of `DELAY_STEPS` submits ago arrive."""
    sender = DelayedScalars()
    arrived = [sender.submit((torch.tensor(n, device="cuda"),)) for n in range(6)]
    assert arrived == [None] * DELAY_STEPS + [
        [float(n)] for n in range(6 - DELAY_STEPS)
    ]
    assert sender.num_pending == DELAY_STEPS
    assert sender.read_pending() == [[float(n)] for n in range(6 - DELAY_STEPS, 6)]


def test_which_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what tells that numbers have come stands behind them, on their own GPU."""
    marked: list[torch.device] = []

    class Event:
        def record(self, stream: torch.device) -> None:
            marked.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    second = torch.device("cuda", 1)
    async_read._record_event(second)
    assert marked == [second]

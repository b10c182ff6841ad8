"""Numbers that arrive late, as from a GPU, on a CPU."""

from typing import Any

import pytest

from halfstep._torch import async_read


class Slow(async_read.DelayedScalars):
    """What a GPU does: numbers come `DELAY_STEPS` submits late."""

    def __init__(self) -> None:
        self.queue: list[list[float]] = []

    @property
    def num_pending(self) -> int:
        return len(self.queue)

    def submit(self, values: Any) -> list[float] | None:
        self.queue.append([number for v in values for number in v.flatten().tolist()])
        return self.queue.pop(0) if len(self.queue) > async_read.DELAY_STEPS else None

    def read_pending(self) -> list[list[float]]:
        return self.queue


@pytest.fixture(name="slow")
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
    monkeypatch.setattr("halfstep.scaling.collapse.DelayedScalars", Slow)
    monkeypatch.setattr("halfstep.session.lr_schedule.DelayedScalars", Slow)

"""A whole step, `GradScaler` included, that is captured in a CUDA graph."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from session_cases import same

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu
SCALE = 2.0**10


class Loop:
    """A line that learns, by torch's fused AdamW; its step can be captured."""

    def __init__(
        self, scaler_class: Callable[..., Any], warmup: int = 3, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.line = torch.nn.Linear(4, 1, device="cuda")
        self.optimizer = torch.optim.AdamW(
            self.line.parameters(), 0.1, capturable=True, fused=True
        )
        self.scaler = scaler_class("cuda", init_scale=SCALE, **options)
        self.x = torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            loss = self.line(self.x).float().square().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def replay(self, number: float) -> list[Any]:
        self.x.fill_(number)
        self.graph.replay()
        return self.now()

    def now(self) -> list[Any]:
        """Return copies of weights and moments, and the scale."""
        state = list(self.optimizer.state[self.line.weight].values())
        tensors = [*self.line.parameters(), *state]
        return [self.scaler.get_scale(), *(t.detach().clone() for t in tensors)]


def test_replays_do_what_torchs_do() -> None:
    """Law: scale, weights and moments after each replay are torch's, to the bit.

    An overflow changes no weight and halves the scale, and clean steps raise it again.
    """
    theirs = Loop(torch.amp.GradScaler, growth_interval=2)
    with pytest.warns(UserWarning, match="captured in a CUDA graph: replays change"):
        ours = Loop(hs.GradScaler, growth_interval=2)
    before = ours.now()
    same(before, theirs.now())
    for number in (1.0, math.inf, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0):
        after = ours.replay(number)
        same(after, theirs.replay(number))
        assert ours.scaler.last_step.scale == before[0]
        if not math.isfinite(number):
            same(after[1:], before[1:])
            assert after[0] == before[0] / 2
        before = after
    ours.x.fill_(1.0)
    theirs.x.fill_(1.0)
    ours.step()  # outside of the graph it goes on
    theirs.step()
    same(ours.now(), theirs.now())


def test_hysteresis_is_counted_by_replays() -> None:
    """Law: what is only ours is kept on the device, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = Loop(hs.GradScaler, warmup=1, hysteresis=2)
    assert loop.scaler.call_order_watch is None  # in its second step
    scales = [loop.replay(number)[0] for number in (math.inf, math.inf, 1.0)]
    assert scales == [SCALE, SCALE / 2, SCALE / 2]

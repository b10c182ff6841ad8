"""Ranges in fp16: a feed-forward layer as T5's, whose values fp16 cannot hold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.graph import ranges


class FeedForward(nn.Module):
    """A block without biases that normalizes by the mean square, and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.wi = nn.Linear(32, 64, bias=False)
        self.wo = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.wi.weight.mul_(100)
            self.wo.weight.mul_(1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus what two layers make of it; x: (rows, 32)."""
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.wo(torch.relu(self.wi(normed)))


def task(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    layers = FeedForward(), FeedForward(), nn.LayerNorm(32), nn.Linear(32, 4)
    model, x = nn.Sequential(*layers), torch.randn(128, 32)
    return model, x, (x @ torch.randn(32, 4)).argmax(-1)


def losses(run: nn.Module, x: Tensor, y: Tensor, steps: int) -> tuple[list[float], int]:
    """Train with a `GradScaler`; return losses, and steps skipped after the 20th."""
    optimizer = torch.optim.AdamW(run.parameters(), 3e-3)
    scaler = hs.GradScaler("cpu")
    found, late_skips = [], 0
    for step in range(steps):
        loss = nn.functional.cross_entropy(run(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step
        late_skips += step >= 20 and not report.applied
        found.append(loss.item())
    return found, late_skips


def step_of(x: Tensor, y: Tensor) -> Callable[[nn.Module], None]:
    return lambda model: nn.functional.cross_entropy(model(x), y).backward()


@pytest.mark.filterwarnings("ignore:the loss is")
def test_what_overflows_stays_fp32() -> None:
    """Law: fp16 trains as fp32 does once what exceeds its range is left out."""
    model, x, y = task(0)
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
    forward_alone = hs.plan(model, [x], dtype="fp16", method="painting")
    assert hs.rewrite(model, forward_alone)(x).isfinite().all()

    plan = hs.plan(model, [x], dtype="fp16", method="painting", calibrate=step_of(x, y))
    kept = {
        node.name: node for node in plan.nodes if "in fp32; fp16 ends" in node.reason
    }
    assert {node.module.rpartition(".")[2] for node in kept.values()} >= {"wo"}
    by_module = {node.module: node for node in plan.nodes if node.op == "linear"}
    assert not by_module["0.wo"].low
    assert by_module["0.wi"].low
    assert by_module["3"].low
    planned, late_skips = losses(hs.rewrite(model, plan), x, y, 100)
    assert late_skips == 0
    reference = [losses(*task(seed), 100)[0][-1] for seed in range(3)]
    spread = max(reference) - min(reference)
    assert abs(planned[-1] - reference[0]) <= spread


def test_ranges_are_the_largest() -> None:
    """Law: largest value and gradient over all batches, by node."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -3.0]]))
    graph_module = hs.plan(model, [torch.zeros(1, 2)]).graph_module

    def step(run: nn.Module) -> None:
        for row, weight in (([1.0, 0.0], 5), ([0.0, 1.0], 1)):
            (run(torch.tensor([row])).sum() * weight).backward()

    found = ranges.measure(graph_module, step)
    assert found["linear"] == ranges.Range(value=3.0, gradient=5.0)


def test_kinds_of_ones_own() -> None:
    """Law: an operation is moved from list to list, and says so."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 8))
    kinds = {"softplus": "infer", "linear": "allow"}
    for asked, low in (
        (None, [1, 0, 1]),
        (kinds, [1, 1, 1]),
        ({"linear": "deny"}, [0] * 3),
    ):
        plan = hs.plan(model, [torch.randn(4, 8)], method="painting", kinds=asked)
        assert [node.low for node in plan.nodes] == low
    assert plan.nodes[0].reason == "the caller chose this kind"

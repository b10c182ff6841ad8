"""A planned model means what the model means, or is refused: no silent difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        scores: Tensor = self.layer(x).sum(0) / x.shape[0] * factor
        return scores


def test_inputs_of_another_kind() -> None:
    """Law: shapes, dtypes and constants are those of the plan, or are refused."""
    model, x = Scaled(), torch.ones(8, 4)
    run = hs.rewrite(model, hs.plan(model, (x, 2.0), method="painting"))
    assert torch.allclose(run(x, 2.0), model(x), atol=2**-5)
    refused = {
        (
            x[:3],
            2.0,
        ): r"input 0 is fp32 of shape \(3, 4\), and .* \(8, 4\): .*drop_last",
        (x.double(), 2.0): "input 0 is float64 of shape",
        (x, 10.0): "input 1 is 10.0, and the graph was planned for 2.0",
    }
    for inputs, message in refused.items():
        with pytest.raises(hs.UserError, match=message):
            run(*inputs)


def test_a_plan_has_one_mode() -> None:
    """Law: a rewritten model does not switch; a plan of the other mode is refused."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4)
    plan = hs.plan(model, [x], method="painting")
    run = hs.rewrite(model, plan)
    assert run.train() is run
    with pytest.raises(hs.UserError, match=r"planned in train\(\) mode"):
        run.eval()
    evaluating = hs.rewrite(model, hs.plan(model.eval(), [x], method="painting"))
    assert evaluating(x).equal(evaluating.eval()(x))
    with pytest.raises(hs.UserError, match=r"Sequential in train\(\) mode, and here"):
        hs.rewrite(model, plan)
    softmax = hs.plan(nn.Softmax(-1), [x], method="painting")
    with pytest.raises(hs.UserError, match=r"'' is Softmax .* and here ReLU"):
        hs.rewrite(nn.ReLU(), softmax)


class Rotary(nn.Module):
    """Angles of positions, which 16 bits cannot hold, turn what a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("speeds", torch.linspace(0.5, 2.0, 16))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions * self.speeds
        hidden = self.layer(x)
        turned: Tensor = hidden * torch.cos(angles) + hidden * torch.sin(angles)
        return turned


def test_what_products_never_touched_stays_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: no time gained makes the minimum cut round fp32 inputs before a function."""
    times = {torch.float32: 1000, torch.bfloat16: 1}
    monkeypatch.setattr(
        "halfstep.graph.op_times.OpTimes.operation",
        lambda *_, low: times[torch.bfloat16 if low else torch.float32],
    )
    monkeypatch.setattr("halfstep.graph.op_times.OpTimes.cast", lambda *_: 1)
    monkeypatch.setattr("halfstep.graph.op_times.OpTimes.time_pass", lambda *_: 10**6)
    model = Rotary()
    x, positions = torch.randn(64, 16), torch.arange(64.0)[:, None] * 16
    plan = hs.plan(model, (x, positions))
    nodes = {node.name: node for node in plan.nodes}
    assert {name for name, node in nodes.items() if not node.low} == {
        "mul",
        "cos",
        "sin",
    }
    assert nodes["cos"].reason == "none of its inputs was computed in 16 bits"
    assert nodes["add"].low
    error = (hs.rewrite(model, plan)(x, positions) - model(x, positions)).abs().max()
    assert error < 2**-4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_regions_without_autocast() -> None:
    """Law: what the model runs with autocast off stays fp32, captured either way."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = one(x)
        return two(hidden)  # type: ignore[no-any-return]

    plans: list[Any] = []
    options = {"method": "painting", "on_plan": plans.append}
    torch.compile(forward, backend="halfstep", options=options)(torch.randn(2, 4))
    (plan,) = plans
    first, second = (node for node in plan.nodes if node.op == "linear")
    assert (first.low, first.reason) == (False, "autocast is off there")
    assert second.low


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_masks_in_fp16(value: float) -> None:
    """Law: a mask that fp16 cannot hold is added in fp32; -inf is held."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = (self.layer(x) + mask).softmax(-1)
            return self.layer(scores)

    mask = torch.zeros(3, 4)
    mask[0, 1:] = value
    if value > -torch.inf:
        mask[0] = value
    model, x = Masked(), torch.randn(3, 4)
    plan = hs.plan(model, (x, mask), dtype="fp16", method="painting")
    assert hs.rewrite(model, plan)(x, mask).isfinite().all()


def test_a_recurrent_layer_is_one() -> None:
    """Law: painting runs an LSTM and the parts of its result in one format: 16 bits."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.head(self.lstm(self.first(x))[0]).split(1, -1)
            return left * right

    model, x = Recurrent(), torch.randn(3, 2, 4)
    plan = hs.plan(model, [x], method="painting")
    recurrent = next(node for node in plan.nodes if node.op == "lstm.input")
    assert recurrent.low or recurrent.reason == "it has no bf16 kernel"
    assert next(node for node in plan.nodes if node.op == "split.Tensor").low
    assert hs.rewrite(model, plan)(x).shape == (3, 2, 1)

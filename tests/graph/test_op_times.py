"""Times of operations are measured once, and kept for other processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.graph import Plan, planner
from halfstep.graph.op_times import OpTimes
from halfstep.machine import rate_cache
from halfstep.numerics import formats


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Count measurements, each of which takes 1000 ns more; use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def time(*_: Any) -> int:
        calls.append(0)
        return 1000 * len(calls)

    monkeypatch.setattr(OpTimes, "_time", time)
    monkeypatch.setattr(OpTimes, "_time_passes", time)
    return calls


def plan() -> Plan:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    return hs.plan(model, [torch.zeros(4, 8)])


def test_measured_once(measured: list[int]) -> None:
    """Law: same operation, shapes and format: one time, also in the next process."""
    first = plan()
    num_measured = len(measured)
    linears = [node for node in first.nodes if node.op == "linear"]
    assert linears[1].fp32_ms == linears[2].fp32_ms > linears[0].fp32_ms
    again = plan()
    assert len(measured) == num_measured
    assert (again.nodes, again.casts, again.doubt) == (first.nodes, first.casts, "")


def test_fused_casts_are_free(measured: list[int]) -> None:
    """Law: what a compiler makes part of an operation before it costs nothing."""
    graph = plan().graph_module
    costs = {}
    for fused in (False, True):
        of_graph = planner.plan_graph(
            graph,
            torch.device("cpu"),
            formats.BF16,
            hs.Policy.parse("lean + op:relu=fp32"),
            "painting",
            kinds={},
            fp32_ranges={},
            fused=fused,
        )
        costs[fused] = {cast.tensor: cast.ms for cast in of_graph.casts}
    assert costs[False]["relu"] > 0
    assert costs[True] == costs[False] | {"relu": 0}
    assert measured


def counted() -> tuple[nn.Module, list[Tensor]]:
    """Return a layer whose norm counts its calls in a buffer, and that drops values."""
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Softplus()
    return nn.Sequential(*layers), [torch.randn(4, 8)]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_predictions_are_of_whole_passes(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Law: what painting and fp32 are predicted to take is what their passes took."""
    passes = iter([8_000_000, 50_000_000])
    monkeypatch.setattr(OpTimes, "_time_passes", lambda *_: next(passes))
    model, inputs = counted()
    painted = hs.plan(model, inputs, method="painting")
    assert (painted.fp32_ms, painted.ms) == (pytest.approx(8), pytest.approx(50))
    # Passes of O1 serve all plans: the next would have nothing to take.
    cut = hs.plan(model, inputs, level=level)
    assert cut.slowdown == painted.slowdown
    assert cut.ms <= painted.ms * (1 + 1e-6)
    assert f"{painted.slowdown.fp32:.2f} (fp32)" in str(painted)


@pytest.mark.usefixtures("measured")
def test_a_pass_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a model of which fp32 needs too much memory is planned, and it is said."""

    def overflow(*_: Any) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(OpTimes, "_time_passes", overflow)
    planned = hs.plan(*counted())
    assert "memory did not suffice" in str(planned)
    assert (planned.slowdown.fp32, planned.slowdown.low) == (1, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "{",
        lambda entry: json.dumps(entry | {"times": {"cast (4, 8)": "soon"}}),
        lambda entry: json.dumps(entry | {"key": ""}),
    ],
)
def test_a_file_that_will_not_do(measured: list[int], spoil: Any) -> None:
    """Law: damaged and foreign files count as absent."""
    plan()
    num_measured = len(measured)
    (file,) = rate_cache.folder("op-times").iterdir()
    file.write_text(spoil(json.loads(file.read_text())))
    plan()
    assert len(measured) == 2 * num_measured

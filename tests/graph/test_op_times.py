"""Times of operations are measured once, and kept for other processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.graph import planner
from halfstep.graph.op_times import OpTimes
from halfstep.machine import gemm, rate_cache
from halfstep.numerics import formats

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.graph import Plan


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Count measurements, each of which takes 1000 ns more; use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def time(*_: Any) -> int:
        calls.append(0)
        return 1000 * len(calls)

    monkeypatch.setattr(OpTimes, "_time", time)
    monkeypatch.setattr(gemm, "count_waiting", lambda: lambda: 0.0)
    return calls


def plan() -> Plan:
    """Return a plan of a small model, made anew."""
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


def test_a_busy_machine_keeps_nothing(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what was measured under load is said to be so, and measured again."""
    monkeypatch.setattr(gemm, "count_waiting", lambda: lambda: 0.5)
    assert "measured under load: threads waited 50%" in str(plan())
    num_measured = len(measured)
    plan()
    assert len(measured) == 2 * num_measured


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "{",
        lambda entry: json.dumps(entry | {"time": 0}),
        lambda entry: json.dumps(entry | {"times": {"cast (4, 8)": "soon"}}),
        lambda entry: json.dumps(entry | {"conditions": {}}),
    ],
)
def test_a_file_that_will_not_do(measured: list[int], spoil: Any) -> None:
    """Law: damaged, old and foreign files count as absent."""
    plan()
    num_measured = len(measured)
    (file,) = rate_cache.folder("op-times").iterdir()
    file.write_text(spoil(json.loads(file.read_text())))
    plan()
    assert len(measured) == 2 * num_measured

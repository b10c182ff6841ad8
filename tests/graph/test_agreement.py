"""Eager autocast and the plan of a graph decide as `decide` does, operation by op."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.policy import op_tables
from halfstep.policy.decision import decide

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": nn.functional.linear,
    "add": lambda x, w: x + w,
    "exp": lambda x, _: (x * 2**-6).exp(),
    "softmax": lambda x, _: x.softmax(-1),
    "log_softmax": lambda x, _: x.log_softmax(-1),
    "relu": lambda x, _: x.relu(),
    "gelu": lambda x, _: nn.functional.gelu(x),
    "cumsum": lambda x, _: x.cumsum(0),
    "mean": lambda x, _: x.mean(-1, keepdim=True).expand(8, 8),
    "norm": lambda x, _: nn.functional.layer_norm(x, (8,)),
    "pow": lambda x, _: x.pow(2),
    "residual": lambda x, w: x + (x @ w).relu(),
    "transpose": lambda x, _: x.t(),
}
POLICIES = (
    "lean",
    "torch",
    "lean + op:gelu=fp32 + op:softmax=low",
    "torch + op:add=fp32",
)


class Program(nn.Module):
    """Some operations in a row, each with the same weight."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.eye(8) / 2)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = OPERATIONS[name](x, self.weight)
        return x


def decisions(rows: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for op, reason in rows:
        found.setdefault(op, set()).add(reason)
    return found


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_eager_and_graph_agree(policy: str, seed: int) -> None:
    """Law: the same reasons; low and fp32 operations compute what they are said to."""
    names = random.Random(seed).sample(sorted(OPERATIONS), len(OPERATIONS))  # noqa: S311
    model, x = Program(names), torch.randn(8, 8)
    plan = hs.plan(model, [x], policy=policy, method="painting")
    with hs.autocast("cpu", torch.bfloat16, policy=policy, record=True) as context:
        model(x)
    eager = [
        dict(zip(context.report().columns, r, strict=True))
        for r in context.report().rows
    ]
    graph_reasons = decisions(
        (node.op, node.reason.removeprefix("no row: ").partition("; its neigh")[0])
        for node in plan.nodes
    )
    for op, reasons in decisions((r["operation"], r["reason"]) for r in eager).items():
        assert graph_reasons.get(op, reasons) == reasons, op
    chosen = hs.Policy.parse(policy)
    for node in plan.nodes:
        category = decide(node.op, [torch.float32], "cpu", policy=chosen).category
        outs = {r["out"] for r in eager if r["operation"] == node.op}
        if category == op_tables.LOW:
            assert (node.low, outs) == (True, {"bf16"}), node
        elif category == op_tables.FP32:
            assert (node.low, outs) == (False, {"fp32"}), node

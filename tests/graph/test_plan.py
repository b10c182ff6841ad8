"""Plans of small models: what is captured, decided, rewritten, and kept in training."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.graph import rewrite as rewriting
from halfstep.graph.compile_backend import compile_graph
from halfstep.graph.op_times import OpTimes

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = torch.bfloat16


class Attention(nn.Module):
    """What a plan meets: products, norms, dropout, parts, in-place writes, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.project = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.0)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.embed(tokens))
        key, value = self.project(hidden).chunk(2, dim=-1)
        weights = torch.softmax(hidden @ key.transpose(1, 2) * scale, -1)
        hidden = hidden + self.drop(nn.functional.gelu(weights @ value))
        table = torch.zeros(tokens.shape[1], 16)
        table[0] += hidden[0, 0].detach()
        convolved = self.batch_norm(self.conv((hidden + table).transpose(1, 2)))
        peak, where = convolved.max(-1)
        return {"scores": self.out(torch.exp(peak)), "where": where}


def attention() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Attention(), (torch.randint(0, 11, (3, 5)), torch.tensor(0.25))


def mlp() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model whose plan is what autocast does, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(6, 8),)


def painted(make: Callable[[], Any]) -> tuple[nn.Module, Any, Any]:
    model, batch = make()
    return model, batch, hs.plan(model, batch, method="painting")


def test_decisions_have_reasons() -> None:
    """Law: op, module, line, format and reason of each operation; in place is fixed."""
    _, _, plan = painted(attention)
    nodes = {node.name: node for node in plan.nodes}
    assert nodes["linear"].op == "linear"
    assert nodes["linear"].module == "project"
    assert nodes["linear"].source.startswith("test_plan.py:")
    assert nodes["linear"].reason.startswith("a matmul")
    assert nodes["exp"].kind == "deny"
    written = [node for node in plan.nodes if node.reason.startswith("its memory")]
    assert {node.op.partition(".")[0] for node in written} >= {"zeros", "add_"}
    assert {node.low for node in written} == {False}
    assert {name for name in ("linear", "matmul", "softmax") if nodes[name].low}
    text = str(plan)
    assert f"of {len(plan.nodes)} operations in bf16" in text
    assert "predicted: " in text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_rewritten_model_trains(
    monkeypatch: pytest.MonkeyPatch, seed: int, dtype: str
) -> None:
    """Law: it shares parameters, keeps output dtypes, and stays near fp32."""
    method = "min-cut" if seed else "painting"
    torch.manual_seed(seed)  # of times: plans differ, and none asks the clock
    costs = iter(torch.randint(1, 50, (999,)).tolist())
    monkeypatch.setattr(OpTimes, "operation", lambda *_, **__: next(costs))
    monkeypatch.setattr(OpTimes, "cast", lambda *_: next(costs) // 5)
    monkeypatch.setattr(OpTimes, "time_pass", lambda *_: 10**6)
    model, batch = attention()
    reference = copy.deepcopy(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    rewritten = hs.rewrite(model, hs.plan(model, batch, method=method, dtype=dtype))
    for each in (rewritten, reference):
        optimizer = torch.optim.SGD(each.parameters(), 2.0**-8)
        for _ in range(3):
            out = each(*batch)
            assert (out["scores"].dtype, out["where"].dtype) == (
                torch.float32,
                torch.int64,
            )
            optimizer.zero_grad()
            out["scores"].square().mean().backward()
            optimizer.step()
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, param), (_, expected) in pairs:
        assert param.dtype == torch.float32
        # Three steps of 2**-8 times gradients below 16, each off by 2**-4 at most.
        assert torch.allclose(param, expected, atol=3 * 2**-8 * 16 * 2**-4), name
        assert not param.equal(start[name]), name


def test_a_plan_that_is_autocasts_gives_its_bits() -> None:
    """Law: the same decisions, the same numbers: rewritten, compiled and autocast."""
    model, batch, plan = painted(mlp)
    assert len(plan.low) == len(plan.nodes)
    with torch.autocast("cpu", LOW):
        expected = model(*batch).float()
    options = {"method": "painting"}
    compiled = torch.compile(model, backend="halfstep", options=options)
    for run in (hs.rewrite(model, plan), compiled):
        assert run(*batch).equal(expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_dynamo_plans_each_part() -> None:
    """Law: a graph break makes two plans; gradients reach the parameters."""
    model, batch = mlp()

    def forward(x: Tensor) -> Tensor:
        hidden = model[:2](x)
        torch._dynamo.graph_break()
        return model[2](hidden)

    plans: list[Any] = []
    options = {"method": "painting", "on_plan": plans.append}
    compiled = torch.compile(forward, backend=compile_graph, options=options)
    compiled(*batch).sum().backward()
    assert [len(plan.low) for plan in plans] == [2, 1]
    assert all(param.grad is not None for param in model.parameters())
    assert plans[0].nodes[0].ms > 0


def break_promise(name: str, graph: torch.fx.Graph) -> None:
    casts = [n for n in graph.nodes if n.target is torch.ops.aten.to.dtype]
    if name == "takes":
        casts[0].replace_all_uses_with(casts[0].args[0])
        graph.erase_node(casts[0])
    elif name == "cast already":
        with graph.inserting_after(casts[0]):
            again = graph.call_function(casts[0].target, (casts[0], torch.float32))
        casts[-1].replace_input_with(casts[-1].args[0], again)
    elif name == "cast twice":
        with graph.inserting_after(casts[0]):
            graph.call_function(casts[0].target, casts[0].args)
    else:
        output = graph.output_node()
        output.replace_input_with(casts[-1], casts[-1].args[0])


@pytest.mark.parametrize("name", ["takes", "cast already", "cast twice", "output"])
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Law: a graph that breaks a promise is not returned."""
    model, _, plan = painted(mlp)
    verify = rewriting.verify

    def spoil(rewritten: torch.fx.GraphModule, *others: Any) -> None:
        break_promise(name, rewritten.graph)
        verify(rewritten, *others)

    monkeypatch.setattr(rewriting, "verify", spoil)
    with pytest.raises(AssertionError, match=name):
        hs.rewrite(model, plan)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_refusals() -> None:
    """Law: one error says what is wrong, and what would be right."""
    model, batch, plan = painted(mlp)
    (x,) = batch
    refused: dict[str, Callable[[], object]] = {
        "example_inputs is of type Tensor; it must be a list": lambda: hs.plan(
            model, x
        ),
        "kinds is of type str; it must be a dictionary": lambda: hs.plan(
            model, batch, kinds="gelu"
        ),
        "calibrate is of type int; it must be a function of the": lambda: hs.plan(
            model, batch, dtype="fp16", calibrate=3
        ),
        "plan is of type str; it must be a plan of halfstep.plan": lambda: hs.rewrite(
            model, "a.toml"
        ),
        "method='cut' must be painting or min-cut": lambda: hs.plan(
            model, batch, method="cut"
        ),
        "dtype='fp32' must be bf16 or fp16": lambda: hs.plan(
            model, batch, dtype="fp32"
        ),
        "the plan is of another model: its parameter '0.weight'": lambda: hs.rewrite(
            mlp()[0], plan
        ),
        "Branching cannot be captured as one graph.* compiles it in parts, with breaks "
        r"at test_plan.py:\d+ (generic_jump": lambda: hs.plan(Branching(), batch),
    }
    for message, call in refused.items():
        with pytest.raises(hs.UserError, match=message.replace("(", r"\(")):
            call()
    compiled = torch.compile(model, backend=compile_graph, options={"typ": "bf16"})
    with pytest.raises(Exception, match="options hold 'typ'; choose dtype"):
        compiled(*batch)

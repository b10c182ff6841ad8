"""Plans of small models: what is captured, decided as eager autocast does, and run."""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.graph import Plan, load_plan
from halfstep.graph import rewrite as rewriting
from halfstep.graph.compile_backend import compile_graph
from halfstep.graph.op_times import OpTimes
from halfstep.policy import op_tables
from halfstep.policy.decision import decide

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


@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, "bf16"), (1, "bf16"), (2, "fp16"), (3, "fp16")]
)
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


WRONG: dict[str, dict[str, Any]] = {
    "example_inputs is of type Tensor; it must be a list": {
        "example_inputs": torch.ones(1)
    },
    "kinds is of type str; it must be a dictionary": {"kinds": "gelu"},
    "'lineal' must be a name in torch.ops.aten": {"kinds": {"lineal": "deny"}},
    "'no' must be allow, infer, clear, deny": {"kinds": {"linear": "no"}},
    "method='cut' must be painting or min-cut": {"method": "cut"},
    "level='O3' must be O1 or O2": {"level": "O3"},
    "dtype='fp32' must be bf16 or fp16": {"dtype": "fp32"},
    "calibrate is of type int; it must be a function of the": {
        "dtype": "fp16",
        "calibrate": 3,
    },
    "must be None with bf16": {"calibrate": print},
    "never called the model": {"dtype": "fp16", "calibrate": repr},
    "in fp32 .* is NaN; halfstep.find_nonfinite": {
        "dtype": "fp16",
        "calibrate": lambda model: model(torch.full((6, 8), torch.nan)),
    },
    "Branching cannot be captured as one graph.* compiles it in parts, with breaks "
    r"at test_plan.py:\d+ \(generic_jump": {"model": Branching()},
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_are_refused(message: str) -> None:
    """Law: one error says what is wrong, and what would be right."""
    model, batch = mlp()
    given: dict[str, Any] = {"model": model, "example_inputs": batch} | WRONG[message]
    with pytest.raises(hs.UserError, match=message):
        hs.plan(**given)


def test_refusals() -> None:
    """Law: so does one error where a plan does not fit, or a compiler's option."""
    model, batch, plan = painted(mlp)
    with pytest.raises(hs.UserError, match=r"plan is of type str; it must be a plan"):
        hs.rewrite(model, "a.toml")
    with pytest.raises(hs.UserError, match=r"of another model: its parameter '0.weigh"):
        hs.rewrite(mlp()[0], plan)
    compiled = torch.compile(model, backend=compile_graph, options={"typ": "bf16"})
    with pytest.raises(Exception, match="options hold 'typ'; choose dtype"):
        compiled(*batch)


def encoder() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model whose embedding is the output layer as well, and a batch."""
    torch.manual_seed(0)
    layers = nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)
    model = nn.Sequential(*layers, nn.Linear(8, 11, bias=False))
    model[4].weight = model[0].weight
    return model, (torch.randint(0, 11, (3, 5)),)


def planned(model: nn.Module, batch: tuple[Tensor], policy: str = "lean") -> Plan:
    return hs.plan(model, batch, method="painting", level="O2", policy=policy)


def session_of(model: nn.Module) -> hs.Session:
    return hs.prepare(model, torch.optim.AdamW(model.parameters()), "O2", dtype="bf16")


def train(session: hs.Session, run: nn.Module, batch: tuple[Tensor]) -> list[float]:
    losses = []
    for _ in range(3):
        with session.autocast():
            loss = run(*batch).square().mean()
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def test_planned_steps_are_those_of_the_level() -> None:
    """Law: with O2's decisions, the losses and weights of O2, to the bit."""
    model, batch = encoder()
    eager = copy.deepcopy(model)
    plan = planned(model, batch)
    assert len(plan.low) == len(plan.nodes)
    session = session_of(model)
    expected = train(session_of(eager), eager, batch)
    assert train(session, hs.rewrite(model, plan), batch) == expected
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(own.equal(other) for own, other in pairs)


def test_low_weights_need_no_cast() -> None:
    """Law: casts are of inputs and results; norms keep fp32, and what rules say."""
    model, batch = encoder()
    plan = planned(model, batch)
    assert set(plan.low_weights) == {"0.weight", "1.weight", "1.bias", "4.weight"}
    assert {(cast.tensor, cast.to) for cast in plan.casts} == {("linear_1", "fp32")}
    ruled = planned(model, batch, policy="lean + module:1=fp32")
    assert set(ruled.low_weights) == {"0.weight", "4.weight"}


def test_an_fp32_operation_takes_a_low_weight() -> None:
    """Law: where an operation stays fp32, its weight is cast up."""
    model, batch = encoder()
    fp32 = hs.plan(model, batch, level="O2", kinds={"embedding": "deny"})
    # One of the two names of the tied weight.
    up = {cast.tensor for cast in fp32.casts if cast.to == "fp32"}
    assert up & {"_0_weight", "_4_weight"}
    session_of(model)
    assert hs.rewrite(model, fp32)(*batch).dtype == torch.float32


def test_a_file_keeps_them(tmp_path: Path) -> None:
    """Law: a plan for low weights is one from its file, too; unknown ones are not."""
    model, batch = encoder()
    plan, path = planned(model, batch), tmp_path / "plan.toml"
    plan.save(path)
    again = load_plan(path, model, batch)
    assert (again.low_weights, len(again.casts)) == (plan.low_weights, len(plan.casts))
    for spoilt in ('["1.weigth"]', "1"):
        text = path.read_text().splitlines()
        text[3] = f"low_weights = {spoilt}"
        path.write_text("\n".join(text))
        with pytest.raises(hs.UserError, match=r"has .*, which is no parameter"):
            load_plan(path, model, batch)


def test_the_order_of_calls() -> None:
    """Law: plan, prepare, rewrite; any other order ends in one line."""
    model, batch = encoder()
    low, fp32 = planned(model, batch), hs.plan(model, batch, method="painting")
    early = r"fp32: call halfstep.prepare\(model, optimizer, 'O2', dtype='bf16'\) first"
    with pytest.raises(hs.UserError, match=f"'0.weight' is {early}"):
        hs.rewrite(model, low)
    session_of(model)
    with pytest.raises(hs.UserError, match=r"for fp32 weights, and '0\.weight' is b"):
        hs.rewrite(model, fp32)
    with pytest.raises(hs.UserError, match="is bf16: plan the model while"):
        planned(model, batch)


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
@pytest.mark.parametrize("seed", range(2))
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
        if not node.reason.startswith("it takes numbers")  # x may be a mask
    )
    for op, reasons in decisions((r["operation"], r["reason"]) for r in eager).items():
        assert graph_reasons.get(op, reasons) == reasons, op
    chosen = hs.Policy.parse(policy)
    for node in plan.nodes:
        if node.reason.startswith("it takes numbers"):
            continue
        category = decide(node.op, [torch.float32], "cpu", policy=chosen).category
        outs = {r["out"] for r in eager if r["operation"] == node.op}
        if category == op_tables.LOW:
            assert (node.low, outs) == (True, {"bf16"}), node
        elif category == op_tables.FP32:
            assert (node.low, outs) == (False, {"fp32"}), node


# Plans are files


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).split(8, dim=-1)
        hidden = value * gate.exp()
        scores: Tensor = self.down(hidden)
        counts = torch.ones(4)
        counts += 1
        return scores * counts


@pytest.fixture(scope="module")
def planned_gated() -> tuple[nn.Module, list[Tensor], Plan]:
    torch.manual_seed(0)
    model, inputs = Gated(), [torch.randn(4, 8)]
    return model, inputs, hs.plan(model, inputs, method="painting")


@pytest.fixture
def saved_gated(
    planned_gated: Any, tmp_path: Path
) -> tuple[nn.Module, list[Tensor], Plan, Path]:
    path = tmp_path / "plan.toml"
    planned_gated[2].save(path)
    return *planned_gated, path


def test_what_is_written_is_read(saved_gated: Any) -> None:
    """Law: a plan is the same from its file, and so is what it makes of the model."""
    model, inputs, plan, path = saved_gated
    again = load_plan(path, model, inputs)
    assert (again.nodes, again.dtype, again.method) == (
        plan.nodes,
        plan.dtype,
        plan.method,
    )
    assert {(c.tensor, c.to) for c in again.casts} == {
        (c.tensor, c.to) for c in plan.casts
    }
    assert again.slowdown == plan.slowdown
    assert again.fp32_ms == plan.fp32_ms  # casts are timed anew
    expected = hs.rewrite(model, plan)(*inputs)
    assert hs.rewrite(model, again)(*inputs).equal(expected)


def test_an_edited_format(saved_gated: Any) -> None:
    """Law: what a person writes is what runs, casts included."""
    model, inputs, plan, path = saved_gated
    text = path.read_text()
    line = next(one for one in text.splitlines() if 'name = "exp"' in one)
    assert 'runs_in = "fp32"' in line
    path.write_text(text.replace(line, line.replace('"fp32"', '"bf16"')))
    again = load_plan(path, model, inputs)
    assert again.low == plan.low | {"exp"}
    assert next(node for node in again.nodes if node.name == "exp").low_ms > 0
    assert hs.rewrite(model, again)(*inputs).dtype == torch.float32


def edit(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text, count=1)


REFUSED = {
    "cannot be read as a plan": lambda _: "nodes = [",
    "dtype is 'fp8'; it must be 'bf16' or 'fp16'": edit('"bf16"', '"fp8"'),
    "it needs nodes, and painting or min-cut": edit("painting", "banana"),
    "'methode' must be one of dtype, method,": edit("dtype", "methode = 1\\ndtype"),
    "'run_in' must be one of name, op,": edit("kind = ", "run_in = 1, kind = "),
    "node 1 needs op, a text": edit('op = "linear"', "op = 1"),
    "linear has runs_in = 'int8'; it must be bf16 or fp32": edit(
        'runs_in = "bf16"', 'runs_in = "int8"'
    ),
    "slowdown is .* must be fp32 and low, both above 0": edit(
        "low = [0-9]", "low = -1"
    ),
    "has times that are none": edit(r"fp32_ms = [\d.e-]+", "fp32_ms = nan"),
    r"operation 1 of this Gated is linear \(linear of up\); the file's "
    r"linear \(linear of down\)": edit('module = "up"', 'module = "down"'),
    "ends there": edit(r"  \{.*\},\n\]", "]"),
    r"ends before operation \d+ of the file, more": edit(
        r"(  \{.*\},\n)\]",
        r'\1  {name = "more", op = "", module = "", source = "", '
        r'runs_in = "fp32", kind = "deny", reason = "", low_ms = 0, fp32_ms = 0},\n]',
    ),
    "ones must run in fp32: ": edit(r'(name = "ones".*runs_in = )"fp32"', r'\1"bf16"'),
    "getitem and split share memory": edit(
        r'(name = "getitem".*runs_in = )"bf16"', r'\1"fp32"'
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_do_not_fit(saved_gated: Any, message: str) -> None:
    """Law: a file that does not fit is refused with the place."""
    model, inputs, _, path = saved_gated
    before = path.read_text()
    path.write_text(REFUSED[message](before))
    assert path.read_text() != before
    with pytest.raises(hs.UserError, match=message):
        load_plan(path, model, inputs)


def test_files_that_are_not_there(saved_gated: Any, tmp_path: Path) -> None:
    """Law: reading and writing where nothing is ends in one line."""
    model, inputs, plan, _ = saved_gated
    with pytest.raises(hs.UserError, match="cannot be read as a plan"):
        load_plan(tmp_path / "none.toml", model, inputs)
    with pytest.raises(hs.UserError, match="cannot be written"):
        plan.save(tmp_path / "none" / "plan.toml")


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), (6, 8)),
    "no bias": (lambda: nn.LayerNorm(8, bias=False), (6, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (6, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (4, 8, 3, 8)),
    "no weights": (lambda: nn.GroupNorm(2, 8, affine=False), (4, 8, 3, 8)),
    "BatchNorm": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 8)),
    "no affine": (lambda: nn.BatchNorm2d(8, affine=False), (4, 8, 3, 8)),
    "InstanceNorm": (
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        (4, 8, 3, 8),
    ),
}
OP_RULES = " + ".join(f"op:{n}_norm=low" for n in ("layer", "group", "batch"))


class Norms(TorchDispatchMode):
    """Notes the dtypes of what each norm takes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if "norm" in name or "rsqrt" in name:
            dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor)]
            self.dtypes.append((name, dtypes))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:policy rule", "ignore:Mismatch dtype between")
@pytest.mark.parametrize(
    ("name", "base"),
    [
        *((name, "lean") for name in NORMS),
        *((name, f"lean + {OP_RULES}") for name in NORMS if name != "RMSNorm"),
        *((name, "torch") for name in ("LayerNorm", "RMSNorm", "BatchNorm")),
    ],
)
def test_norms_are_cast_as_in_eager_autocast(name: str, base: str) -> None:
    """Law: plan and context cast the same arguments of a norm; its statistics learn."""
    torch.manual_seed(0)
    norm, shape = NORMS[name]
    model, x = (
        nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 8)),
        torch.ones(shape),
    )
    twin = copy.deepcopy(model)
    rewritten = hs.rewrite(twin, hs.plan(twin, [x], policy=base, method="painting"))
    with Norms() as planned:
        rewritten(x)
    with hs.autocast("cpu", LOW, policy=base), Norms() as eager:
        model(x)
    assert eager.dtypes == planned.dtypes
    for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
        is_count = not buffer.is_floating_point()  # instance norms do not count
        assert is_count or buffer.count_nonzero() == buffer.numel()

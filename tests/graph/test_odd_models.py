"""Models that do more than compute, or write in place: plans keep what they mean.

Or they are refused: there is no silent difference.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_models import Odd, compiled, planned
from small_training import same
from torch import Tensor, nn
from torch.nn import (  # noqa: N812 -- torch's own name for it
    functional as F,
)
from torch.utils.checkpoint import checkpoint

import halfstep as hs

Step = Callable[[nn.Module, Tensor], Tensor]
Way = Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]
REGISTER_HOOK = Tensor.register_hook


def used_without_gradients_first(model: nn.Module, x: Tensor) -> Tensor:
    """Use a weight under no_grad, as a target net, and then to train."""
    with torch.no_grad():
        target = model.a(x)
    return model.b(model.a(x)) - target


def dropout_and_relu_in_place(model: nn.Module, x: Tensor) -> Tensor:
    """Write to what dropout returned, which in evaluation is its input."""
    hidden = model.a(x)
    return model.b(F.dropout(hidden, 0.5, training=False).relu_()) + hidden


def einsum_in_place(model: nn.Module, x: Tensor) -> Tensor:
    """Write to what einsum returned, which may be its input."""
    hidden = model.a(x)
    return model.b(torch.einsum("ij->ij", hidden).mul_(0.0)) + hidden


def instance_norm(model: nn.Module, x: Tensor) -> Tensor:
    """Update running statistics that the schema does not speak of."""
    normed: Tensor = model.norm(model.a(x).view(-1, 4, 8))
    return model.b(normed.view_as(x))


def own_bf16(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.a(x).bfloat16()
    return model.b((hidden * hidden).softmax(-1).float())


def promoted_in_place(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.a(x)
    hidden = hidden * 1.0
    hidden.mul_(model.total.double() + 2)
    return model.b(hidden)


def masked(model: nn.Module, x: Tensor) -> Tensor:
    """Fill with fp32's lowest number, behind a shape that depends on data."""
    rows = model.a(x)[x[:, 0] > 0]
    filled = rows.masked_fill(rows > 1, torch.finfo(torch.float32).min)
    return model.b(filled.clamp_min(-1))


BODIES = [
    used_without_gradients_first,
    dropout_and_relu_in_place,
    einsum_in_place,
    instance_norm,
    own_bf16,
    promoted_in_place,
    masked,
]


def after_a_pass(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    autocast: bool = False,
) -> Any:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = run(x)
    assert output.dtype == torch.float32
    output.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {"output": output.detach()} | grads | dict(model.named_buffers())


def case(body: Step, *, input_grad: bool = False) -> tuple[Odd, Tensor, Any]:
    """Return a model, its input, and what a pass of the plain model leaves."""
    torch.manual_seed(0)
    model, x = Odd(body), torch.randn(16, 8, requires_grad=input_grad)
    twin = copy.deepcopy(model)
    return model, x, after_a_pass(twin, twin, x)


@pytest.mark.filterwarnings("ignore:a compiled graph holds")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's
@pytest.mark.parametrize(
    ("body", "way", "outside"),
    [
        (body, way, (number + place) % 2 > 0)
        for number, body in enumerate(BODIES)
        for place, way in enumerate((planned, compiled))
    ],
)
def test_the_model_that_was_meant(body: Step, way: Way, outside: bool) -> None:
    """Law: outputs, gradients and buffers near fp32's, also in an autocast context."""
    model, x, expected = case(body)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        run = way(model, x)
    found = after_a_pass(model, run, x, autocast=outside)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
            continue
        # Some products of 8 numbers below 2**4, rounded to 2**-8 each.
        bound = 2.0**-4 * max(1.0, float(value.abs().max()))
        assert (found[name] - value).abs().max() <= bound, name


class Reversed(torch.autograd.Function):
    """Passes values on, and gradients with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return -gradient


def with_a_hook(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.a(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: 3 * grad)
    return model.b(hidden)


def with_inference_mode(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        factor = model.a(x).sum()
    return model.b(model.a(x)) * float(factor > 0)


LOST: dict[str, Step] = {
    r"a hook on a tensor \(register_hook\)": with_a_hook,
    r"torch\.inference_mode": with_inference_mode,
    "the custom autograd.Function Reversed": lambda model, x: model.b(
        Reversed.apply(model.a(x))
    ),
    "activation checkpointing": lambda model, x: model.b(
        checkpoint(model.a, x, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_graph_would_lose(what: str) -> None:
    """Law: a plan refuses it by name; a compiled graph runs as it is, and says so.

    For evaluation it is planned.
    """
    model, x, expected = case(LOST[what], input_grad=True)
    with pytest.raises(hs.UserError, match=f"the model uses {what}"):
        planned(model, x)
    if "inference" not in what:  # its number depends on the data
        with torch.no_grad():
            assert planned(copy.deepcopy(model).eval(), x)(x).shape == x.shape
    run = compiled(model, x)
    with warnings.catch_warnings(record=True) as warned:  # or a graph break keeps it
        warnings.simplefilter("always")
        found = after_a_pass(model, run, x)
    words = [str(each.message) for each in warned]
    assert all(each.startswith("a compiled graph holds") for each in words)
    error = (found["a.weight"] - expected["a.weight"]).abs().max()
    assert error <= 2.0**-5 * expected["a.weight"].abs().max()
    # torch is as it was
    assert Tensor.register_hook is REGISTER_HOOK
    assert Reversed.apply(x).grad_fn is not None


def through_data(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model.a(x)
    hidden.data.mul_(2)
    return model.b(hidden)


def with_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return model.b(torch.func.vmap(lambda row: row * 2)(model.a(x)))


def with_its_own_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        hidden = model.a(x)
    return model.b(hidden.float())


def with_dropout_twice(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    hidden = checkpoint(lambda x: F.dropout(model.a(x)), x, use_reentrant=False)
    return model.b(F.dropout(hidden))


LEFT = [through_data, with_vmap, with_its_own_autocast, with_dropout_twice]


@pytest.mark.parametrize("body", LEFT)
def test_what_a_compiled_graph_is_left_with(body: Step) -> None:
    """Law: what tracing would lose runs as it is, with a warning, to the bit."""
    model, x, expected = case(body)
    with pytest.warns(UserWarning, match="a compiled graph holds"):
        found = after_a_pass(model, compiled(model, x), x)
    for name, value in expected.items():
        assert value is None or found[name].equal(value), name


@torch.library.custom_op("halfstep_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, grad: 3 * grad)


def test_a_registered_operator_keeps_its_backward_pass() -> None:
    """Law: an operator of torch.library is a node of the graph, derivative included."""
    model, x, expected = case(lambda model, x: model.b(twice(model.a(x))))
    found = after_a_pass(model, planned(model, x), x)
    grad, wanted = found["a.weight"], expected["a.weight"]
    assert (grad - wanted).abs().max() <= 2.0**-5 * wanted.abs().max()


def large_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model.b(torch.vmap(lambda row: 1e-5 * (1e5 * model.a(row)))(x))


@pytest.mark.parametrize(("body", "dtype"), [(with_vmap, "bf16"), (large_rows, "fp16")])
def test_vmap_is_planned(body: Step, dtype: str) -> None:
    """Law: code under `torch.vmap` is planned, and its ranges are measured for fp16."""
    model, x, expected = case(body)
    found = after_a_pass(model, planned(model, x, dtype=dtype), x)
    grad, wanted = found["a.weight"], expected["a.weight"]
    assert (grad - wanted).abs().max() <= 2.0**-5 * wanted.abs().max()


def one_step(fp32: nn.Module) -> None:
    optimizer = torch.optim.SGD(fp32.parameters(), 0.1)
    fp32(torch.randn(16, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("real_clock")
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "calibrate": one_step}])
def test_planning_changes_nothing(options: dict[str, Any]) -> None:
    """Law: no random number, gradient, input or weight; times are more than nothing.

    Nor does a calibration that steps.
    """
    torch.manual_seed(0)

    def body(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(1.5)
        hidden = model.embedding(x[:, 0].long() * 0 + 1) + x
        return F.dropout(model.b(model.batch(hidden)), 0.5)

    model, x = Odd(body), torch.randn(16, 8)
    model.embedding = nn.Embedding(8, 8, max_norm=0.5)
    model(x).sum().backward()

    def everything() -> Any:
        return dict(model.state_dict()), x, [p.grad for p in model.parameters()]

    before, state = copy.deepcopy(everything()), torch.get_rng_state()
    plan = hs.plan(model, [x], refresh=True, **options)
    assert plan.fp32_ms > 0
    assert all(node.fp32_ms > 0 for node in plan.nodes if node.op == "linear")
    assert 0 < plan.slowdown.fp32 < 1000
    assert same(everything(), before)
    assert torch.get_rng_state().equal(state)


def test_gradients_of_weights_count() -> None:
    """Law: an operation whose bias has a gradient beyond fp16 stays fp32."""
    model, x = nn.Linear(8, 8), torch.ones(4096, 8)
    plan = hs.plan(
        model,
        [x],
        dtype="fp16",
        calibrate=lambda fp32: (20 * fp32(x)).sum().backward(),
    )
    (node,) = plan.nodes
    assert not node.low
    assert "gradients of" in node.reason


@pytest.mark.parametrize("change", ["buffer", "dtype"])
def test_a_model_that_has_changed(change: str) -> None:
    """Law: a buffer that was replaced, or weights in another dtype, are refused."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    plan = hs.plan(model, [x], method="painting")
    if change == "buffer":
        model[1].running_mean = torch.ones(8)
    else:
        model.double()
    with pytest.raises(hs.UserError, match=r"running_mean|is fp64|is float64"):
        hs.rewrite(model, plan)


def count(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    self.total.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
    return self.a(x) * self.count + self.total


def flat_view(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    flat = y.view(-1)
    F.relu_(y)
    return flat


def set_items(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[0] = 1.0
    y[:, 1] = x[:, 0]
    y[torch.tensor([1, 2])] = 0.0
    return y


def detached(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    shared = y.detach()
    y = y * 2
    shared.add_(1)
    return y


def without_grad(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    with torch.no_grad():
        z = y.clone()
        z.add_(1)
    return y * z


def branch(self: Any, x: Tensor) -> Tensor:
    out = self.a(x)
    branch = self.a(out.relu())
    branch += out
    branch.mul_(2.0)
    viewed = self.a(torch.relu_(branch))
    viewed[0].add_(1.0)
    return branch + viewed


def both(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.a(x)
    return y, y.add_(1)


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mask": lambda self, x: self.a(x).masked_fill_(x < 0, -1e4).softmax(-1),
    "integers": lambda self, x: self.a(x).add_(torch.arange(8)),
    "copy": lambda self, x: self.a(x).copy_(x) * self.a.weight[0],
    "dropout": lambda self, x: F.dropout(self.a(x), 0.0, inplace=True),
    "scatter": lambda self, x: torch.zeros(4, 8).index_add_(
        0, torch.tensor([0, 1]), self.a(x)[:2]
    ),
    "fill": lambda self, x: self.a(x).fill_(3.0) * self.a(x),
    "transpose": lambda self, x: self.a(x)[:, :4].t_().relu(),
    "leaky": lambda self, x: F.leaky_relu(self.batch(self.a(x)), 0.1, inplace=True),
    "of the input": lambda self, x: self.a(x.clone().zero_().add_(1.0)),
    "bool": lambda self, x: self.a(x) * (x > 0).logical_or_(x < -1),
    **{each.__name__: each for each in (count, flat_view, set_items, detached)},
    **{each.__name__: each for each in (without_grad, both, branch)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_results(name: str) -> None:
    """Law: all in fp32, results, gradients and buffers are the model's to the bit."""
    model, x = Odd(PROGRAMS[name]), torch.linspace(-2, 2, 32).view(4, 8)
    reference = copy.deepcopy(model)
    plan = hs.plan(model, [x])
    nodes = tuple(dataclasses.replace(node, low=False) for node in plan.nodes)
    rewritten = hs.rewrite(model, dataclasses.replace(plan, nodes=nodes))
    results = []
    for run in (rewritten, reference):
        out = run(x)
        out = out if isinstance(out, tuple) else (out,)
        torch.stack([each.square().sum() for each in out]).sum().backward()
        results.append(out)
    pairs = [
        *zip(*results, strict=True),
        *zip(model.buffers(), reference.buffers(), strict=True),
        *(
            (p.grad, q.grad)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    ]
    for own, expected in pairs:
        assert (own is None) == (expected is None)
        assert own is None or own.equal(expected)


def test_writes_that_nobody_can_tell() -> None:
    """Law: a write to a result without views is no reason for fp32; others are one."""
    plan = hs.plan(Odd(branch), [torch.randn(4, 8)], method="painting")
    free = {node.op for node in plan.nodes if "in place" not in node.reason}
    assert free == {"linear", "relu", "add.Tensor", "mul.Tensor"}
    fixed = {node.op for node in plan.nodes if "in place" in node.reason}
    assert fixed >= {"linear", "select.int", "add_.Tensor"}


def test_shapes_that_depend_on_data() -> None:
    """Law: what has such a shape is planned without a time."""
    plan = hs.plan(Odd(masked), [torch.randn(16, 8)], method="painting")
    (indexed,) = (node for node in plan.nodes if node.op == "index.Tensor")
    assert (indexed.low, indexed.low_ms, indexed.fp32_ms) == (True, 0, 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return self.layer(x).sum(0) / x.shape[0] * factor


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


def rotary(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    """Turn what a layer computes by angles of positions, which 16 bits cannot hold."""
    angles = positions * model.speeds
    hidden = model.a(x)
    return hidden * torch.cos(angles) + hidden * torch.sin(angles)


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
    model = Odd(rotary)
    model.speeds = torch.linspace(0.5, 2.0, 8)
    x, positions = torch.randn(64, 8), torch.arange(64.0)[:, None] * 16
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
    mask = torch.zeros(3, 8)
    mask[0, 1:] = value
    if value > -torch.inf:
        mask[0] = value
    model = Odd(lambda model, x, mask: model.b((model.a(x) + mask).softmax(-1)))
    x = torch.randn(3, 8)
    plan = hs.plan(model, (x, mask), dtype="fp16", method="painting")
    assert hs.rewrite(model, plan)(x, mask).isfinite().all()


def test_a_recurrent_layer_is_one() -> None:
    """Law: painting runs an LSTM and the parts of its result in one format: 16 bits."""

    def recurrent_layer(model: nn.Module, x: Tensor) -> Tensor:
        left, right = model.b(model.lstm(model.a(x))[0]).split(4, -1)
        return left * right

    model, x = Odd(recurrent_layer), torch.randn(3, 2, 8)
    model.lstm = nn.LSTM(8, 8)
    plan = hs.plan(model, [x], method="painting")
    recurrent = next(node for node in plan.nodes if node.op == "lstm.input")
    assert recurrent.low or recurrent.reason == "it has no bf16 kernel"
    assert next(node for node in plan.nodes if node.op == "split.Tensor").low
    assert hs.rewrite(model, plan)(x).shape == (3, 2, 4)

"""What each level stores in 16 bits, and what runs apart in fp32."""

import contextlib
import copy
import dataclasses
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

import halfstep as hs
from halfstep.casting.convert_model import Conversion, convert_
from halfstep.errors import UserError
from halfstep.policy import TORCH, Policy, levels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm1d(4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}


class Zoo(nn.Module):
    """One of everything that conversion treats in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norms = nn.ModuleDict({name: make() for name, make in NORMS.items()})
        self.recurrent = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("table", torch.rand(3))
        self.register_buffer("wide", torch.rand(3, dtype=torch.float64))
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def rules(*words: str) -> Policy:
    return Policy.parse(" + ".join(["torch", *words]))


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("level", levels.LEVELS.values(), ids=str)
def test_what_is_stored(level: levels.Level, low: torch.dtype) -> None:
    """Law: O2 spares norms and buffers, O3 nothing; O0 and O1 leave all as it is.

    Only fp32 numbers become low, frozen ones too.
    """
    model = Zoo()
    model.recurrent.requires_grad_(requires_grad=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conversion = convert_(model, level, low, TORCH)
    buffers = dict(model.named_buffers())
    for name, tensor in model.state_dict().items():
        spared = level.fp32_norms and (name.startswith("norms.") or name in buffers)
        changes = level.low_weights and before[name].dtype == FP32 and not spared
        wanted = before[name].to(low) if changes else before[name]
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    if not level.low_weights:
        assert conversion == Conversion({}, (), TORCH)


def test_identity_survives() -> None:
    """Law: parameters stay the same objects, tied ones tied, and hooks still run."""
    model = Zoo()
    before = dict(model.named_parameters())
    values = {name: param.detach().clone() for name, param in before.items()}
    called: list[str] = []
    model.head.register_forward_hook(lambda *_: called.append("module"))
    weight: Any = model.head.weight
    weight.register_hook(lambda _: called.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda _: called.append("sum"))
    conversion = convert_(model, levels.O2, BF16, TORCH)
    for name, param in model.named_parameters():
        assert param is before[name]
    assert model.head.weight is model.embedding.weight
    # Originals are the fp32 values before; the stored ones are those, rounded.
    names = {id(param): name for name, param in before.items()}
    assert len(conversion.originals) == 1 + 4
    for param, original in conversion.originals.items():
        assert torch.equal(original, values[names[id(param)]])
        assert torch.equal(param, original.to(BF16))
    torch.autograd.backward(model.head(torch.ones(2, 4, dtype=BF16)).sum())
    assert called == ["module", "tensor", "sum"]
    assert model.head.weight.grad.dtype == BF16


class Watch(nn.Linear):
    def __init__(self, size: int = 4) -> None:
        super().__init__(size, size)
        self.register_buffer("shift", torch.zeros(size))
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return super().forward(x)


@contextlib.contextmanager
def region() -> Iterator[None]:
    with torch.autocast("cpu", BF16):
        yield
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == BF16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", [levels.O1, levels.O2, levels.O3], ids=str)
@pytest.mark.parametrize("rule", ["module:1=fp32", "type:Watch=fp32"])
def test_islands(level: levels.Level, rule: str) -> None:
    """Law: a rule's module is stored and run in fp32 without autocast; others low.

    Without autocast its output comes back low for the next layer.
    """
    model = nn.Sequential(nn.Linear(4, 4), Watch(), nn.Linear(4, 4))
    conversion = convert_(model, level, BF16, rules(rule))
    assert conversion.fp32_modules == ("1",)
    low = BF16 if level.low_weights else FP32
    assert [p.dtype for p in model.parameters()] == [low, low, FP32, FP32, low, low]
    assert [b.dtype for b in model.buffers()] == [FP32]
    outputs: list[torch.dtype] = []
    for module in model:
        module.register_forward_hook(lambda *args: outputs.append(args[2].dtype))
    with region() if level.autocast else contextlib.nullcontext():
        model(torch.ones(2, 4))
    assert outputs == [BF16, FP32 if level.autocast else BF16, BF16]
    assert model[1].seen == [(FP32, False)]


@pytest.mark.parametrize("name", NORMS)
def test_norms_run_at_o2(name: str) -> None:
    """Law: each norm takes a low input at O2, and its gradients are fp32."""
    model = nn.Sequential(nn.Linear(4, 4), NORMS[name]())
    convert_(model, levels.O2, BF16, TORCH)
    with region():
        hidden = model[0](torch.randn(6, 4))
        assert hidden.dtype == BF16
        shaped = hidden[None].mT if name == "instance" else hidden
        out = model[1](shaped)
    torch.autograd.backward(out.float().square().sum())
    grads = [param.grad for param in model[1].parameters()]
    assert all(grad is not None and grad.dtype == FP32 for grad in grads)


@pytest.mark.parametrize("word", ["module:head.*=fp32", "type:Conv2d=fp32"])
def test_a_rule_without_a_module(word: str) -> None:
    """Law: a rule that speaks of nothing is refused, and the model is untouched."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match=f"rule '{re.escape(word)}' matches no module"):
        convert_(model, levels.O2, BF16, rules("type:Linear=fp32", word))
    assert model[0].weight.dtype == FP32
    assert not model[0]._forward_pre_hooks


def test_rules_may_overlap() -> None:
    """Law: a rule whose modules an earlier rule already took is not called unused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = rules("module:*=fp32", "type:Linear=fp32", "module:1=fp32")
    convert_(model, levels.O2, BF16, both)
    assert {param.dtype for param in model.parameters()} == {FP32}
    # An island in an island is one island.
    places = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "ab": nn.Linear(4, 4)})
    both = rules("module:a=fp32", "type:Linear=fp32")
    assert convert_(places, levels.O2, BF16, both).fp32_modules == ("a", "ab")


@pytest.mark.parametrize("word", ["op:softmax.int=fp32", "module:0=low"])
def test_a_rule_that_needs_regions(word: str) -> None:
    """Law: where there is no autocast, rules that only it can obey are refused."""
    with pytest.raises(UserError, match=f"rule '{word}' cannot be applied at level O3"):
        convert_(nn.Sequential(nn.Linear(4, 4)), levels.O3, BF16, rules(word))
    for level in (levels.O0, levels.O1, levels.O2):
        convert_(nn.Sequential(nn.Linear(4, 4)), level, BF16, rules(word))


@pytest.mark.parametrize("level", [levels.O2, levels.O3])
def test_a_wrapped_model_is_refused(level: levels.Level) -> None:
    """Law: weights under a wrapper are not converted; nothing is left half done."""
    model = nn.Linear(4, 4)
    with pytest.raises(UserError, match=f"level={level} .* already in DataParallel"):
        convert_(nn.DataParallel(model), level, BF16, rules("type:Linear=fp32"))
    assert model.weight.dtype == FP32
    assert not model._forward_pre_hooks
    convert_(nn.DataParallel(model), levels.O1, BF16, TORCH)


@pytest.mark.parametrize("level", levels.LEVELS.values(), ids=str)
@pytest.mark.parametrize("base", ["torch", "lean"])
def test_rules_in_force(level: levels.Level, base: str) -> None:
    """Law: those given come first; torch's RMSNorm is spared where norms are, alone."""
    given = Policy.parse(f"{base} + module:0=fp32")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    conversion = convert_(model, level, BF16, given)
    spared = level.fp32_norms and base == "torch"
    expected = f"{given} + type:RMSNorm=fp32" if spared else str(given)
    assert str(conversion.policy) == expected
    assert conversion.fp32_modules == (("0",) if level.low else ())
    # Where all is fp32 there is nothing to keep apart.
    assert bool(model[0]._forward_pre_hooks) == level.low


@pytest.mark.parametrize("level", [levels.O1, levels.O2])
@pytest.mark.parametrize("category", ["low", "keep", "promote", "banned"])
def test_other_rules_leave_weights(level: levels.Level, category: str) -> None:
    """Law: only fp32 keeps a module's weights fp32; rules on operations keep none."""
    plain, ruled = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
    convert_(plain, level, BF16, TORCH)
    words = rules(f"module:0={category}", "op:linear=fp32")
    assert convert_(ruled, level, BF16, words).fp32_modules == ()
    dtypes = [[p.dtype for p in model.parameters()] for model in (plain, ruled)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("came", [BF16, FP16])
@pytest.mark.parametrize("level", [levels.O2, levels.O3], ids=str)
def test_a_model_that_came_in_16_bits(
    level: levels.Level, came: torch.dtype, low: torch.dtype
) -> None:
    """Law: its parameters, and all of its norms, are stored as after `float()`."""
    torch.manual_seed(0)
    model, twin = Zoo(), Zoo()
    for tensor in (*model.parameters(), *model.norms.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(came)
    twin.load_state_dict(model.state_dict())
    policy = rules("module:head=fp32", "module:embedding=fp32")
    done = [convert_(one, level, low, policy) for one in (model, twin)]
    kept = {name for name, _ in model.named_parameters()}
    kept |= {name for name in model.state_dict() if name.startswith("norms.")}
    mine, theirs = model.state_dict(), twin.state_dict()
    for name in kept:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0, msg=name)
    assert mine["head.weight"].dtype == FP32
    # What master weights begin with: the values that the model came with.
    given, after = done
    twins = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        before = given.originals.get(param, param.detach()).float()
        exact = after.originals.get(twins[name], twins[name].detach())
        torch.testing.assert_close(before, exact, rtol=0, atol=0, msg=name)


# What goes into a prepared model and what comes out, and copies of one


LOW = pytest.mark.parametrize("level", ["O2", "O3"])


class Pair(NamedTuple):
    logits: Any
    ids: Any


@dataclasses.dataclass(frozen=True)
class Found:
    """A frozen dataclass, one field of which it fills itself."""

    logits: Any
    ids: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", (self.logits, self.ids))


OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda x, _: x, lambda out: (out, None)),
    "tuple": (lambda x, ids: (x, ids), lambda out: out),
    "list": (lambda x, ids: [None, [x, ids]], lambda out: out[1]),
    "dict": (
        lambda x, ids: {"a": {"x": x}, "ids": ids},
        lambda out: (out["a"]["x"], out["ids"]),
    ),
    "named": (Pair, lambda out: (out.logits, out.ids)),
    "dataclass": (Found, lambda out: out.twice),
    "model": (
        lambda x, ids: MaskedLMOutput(logits=x, hidden_states=(x, ids)),
        lambda out: out.hidden_states,
    ),
}
"""How a model returns its numbers and ids, and how to get at them."""


class Model(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return self.wrap(out, torch.arange(3) + x.size(0))


def prepared(model: nn.Module, level: str, dtype: str = "bf16", **more: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hs.prepare(model, optimizer, level, dtype=dtype, **more)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@LOW
def test_gradients_are_those_of_a_cast_by_hand(dtype: str, level: str) -> None:
    """Law: loss and gradients equal, to the bit, a low model whose output is cast."""
    ours, plain = Model(OUTPUTS["tensor"][0]), Model(OUTPUTS["tensor"][0])
    session = prepared(ours, level, dtype)
    low = session.choice.format.dtype
    plain.to(low)
    inputs, targets = torch.randn(5, 4), torch.randn(5, 3)
    with session.autocast():
        out = ours(inputs)
    # By hand, outside any region: no table is asked, so this loss sees what it gets.
    loss = (out - targets).square().sum() * 2.0**8
    theirs = (plain(inputs.to(low)).float() - targets).square().sum() * 2.0**8
    torch.autograd.backward([loss, theirs])
    assert loss.item() == theirs.item()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.grad.dtype == low
        assert torch.equal(one.grad, other.grad)


@LOW
def test_hooks_of_the_user(level: str) -> None:
    """Law: hooks from before see what was computed, later ones what is returned."""
    model = Model(OUTPUTS["tensor"][0])
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    model.register_full_backward_hook(lambda *args: seen.append(args[2][0].dtype))
    session = prepared(model, level)
    model.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with session.autocast():
        loss = model(torch.randn(2, 4, requires_grad=True)).square().mean()
    session.backward(loss)
    assert seen == ["pre", BF16, FP32, FP32]
    assert session.step().applied


def test_inputs_of_o3() -> None:
    """Law: nested numbers go in low and keep their graph; what the caller has stays."""
    seen: list[Any] = []

    class Takes(nn.Linear):
        def forward(self, batch: Any, *, more: Any) -> Tensor:
            seen.extend((batch, more))
            return super().forward(batch["x"])

    model = Takes(4, 3)
    prepared(model, "O3")
    x = torch.ones(2, 4, requires_grad=True)
    batch = {"x": x}
    out = model(batch, more=[batch, None])
    taken, more = seen
    assert (taken["x"].dtype, batch["x"].dtype) == (BF16, FP32)
    assert more[0]["x"] is taken["x"]
    torch.autograd.backward(out.sum())
    assert x.grad.dtype == FP32
    expected = model.weight.detach().sum(0).float().expand(2, 4)
    # Each is a sum of three bf16 numbers below 1/2, rounded once or twice to bf16.
    torch.testing.assert_close(x.grad, expected, rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@LOW
def test_copies_behave_alike(how: str, level: str) -> None:
    """Law: a copy of a prepared model casts and keeps islands as the model does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    session = prepared(model, level, policy="lean + module:2=fp32")
    if how == "deepcopy":
        words, no_warning = "the copy of the model holds", contextlib.nullcontext()
        with pytest.warns(UserWarning, match=words) if level == "O2" else no_warning:
            twin = copy.deepcopy(model)
    else:
        twin = pickle.loads(pickle.dumps(model))  # noqa: S301 -- our own words
    inputs = torch.randn(2, 4)
    with session.autocast():
        outs = [each(inputs) for each in (model, twin)]
    assert outs[0].dtype == outs[1].dtype == FP32
    assert torch.equal(*outs)
    stored = [[p.dtype for p in each.parameters()] for each in (model, twin)]
    assert stored[0] == stored[1]
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's
@pytest.mark.parametrize(
    ("kind", "around"), [(kind, bool(n % 2)) for n, kind in enumerate(OUTPUTS)]
)
def test_compiled_in_one_piece(kind: str, around: bool) -> None:
    """Law: each container keeps its type; numbers become fp32, and ids stay.

    torch.compile traces the casts, once: no graph break, the same numbers.
    """
    is_old = torch.__version__ < "2.13"  # 2.9 cannot trace how these are copied
    in_one = not (is_old and kind in {"named", "dataclass", "model"})
    wrap, parts = OUTPUTS[kind]
    torch._dynamo.reset()
    model = Model(wrap)
    session = prepared(model, "O3" if around else "O2")
    graphs: list[Any] = []
    first = 0

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def calls(x: Tensor) -> Any:
        return model(x)

    program: Any = calls if around else model
    compiled = torch.compile(program, fullgraph=in_one, backend=backend)
    for _ in range(3):
        inputs = torch.randn(2, 4)
        with session.autocast():
            eager, traced = model(inputs), compiled(inputs)
        # torch runs the hooks of a model that is itself compiled outside its graph.
        assert len(graphs) == 1 or not around or not in_one
        first = first or len(graphs)
        assert len(graphs) == first  # whatever is returned, nothing is compiled again
    assert type(traced) is type(eager) is type(wrap(torch.ones(1), torch.ones(1)))
    numbers, ids = parts(traced)
    assert numbers.dtype == FP32
    assert ids is None or ids.tolist() == [2, 3, 4]
    assert torch.equal(numbers, parts(eager)[0])
    session.backward(numbers.square().mean())
    assert session.step().applied

"""What each level stores in 16 bits, and what runs apart in fp32."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    with pytest.raises(UserError) as caught:
        convert_(model, levels.O2, BF16, rules("type:Linear=fp32", word))
    assert str(caught.value) == (
        f"rule '{word}' matches no module; see model.named_modules()."
    )
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
    with pytest.raises(UserError) as caught:
        convert_(nn.Sequential(nn.Linear(4, 4)), levels.O3, BF16, rules(word))
    assert str(caught.value) == (
        f"rule '{word}' cannot be applied at level O3, which has no autocast: there "
        "modules can only be kept in fp32, as in 'module:PATH=fp32' or "
        "'type:NAME=fp32'."
    )
    for level in (levels.O0, levels.O1, levels.O2):
        convert_(nn.Sequential(nn.Linear(4, 4)), level, BF16, rules(word))


@pytest.mark.parametrize("level", [levels.O2, levels.O3])
def test_a_wrapped_model_is_refused(level: levels.Level) -> None:
    """Law: weights under a wrapper are not converted; nothing is left half done."""
    model = nn.Linear(4, 4)
    with pytest.raises(UserError) as caught:
        convert_(nn.DataParallel(model), level, BF16, rules("type:Linear=fp32"))
    assert str(caught.value) == (
        f"level={level} changes the dtype of weights, and the model is already in "
        "DataParallel. Prepare the bare model, then wrap session.model."
    )
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

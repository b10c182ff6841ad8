"""Models of every kind under conversion: ties, states, odd or large parameters."""

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.casting.convert_model import convert_
from halfstep.errors import UserError
from halfstep.policy import Policy, levels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = pytest.mark.parametrize("level", ["O2", "O3"])
LEAN = Policy(base="lean")
INPUTS = torch.linspace(-1, 1, 48).view(8, 6).sin()
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))


def convert(model: nn.Module, level: str, low: torch.dtype = BF16) -> Any:
    return convert_(model, levels.parse(level), low, LEAN)


def prepared(model: nn.Module, level: str, dtype: str = "bf16", **more: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hs.prepare(model, optimizer, level, dtype=dtype, loss_scale=4.0, **more)


def losses(session: Any, inputs: Tensor = INPUTS, steps: int = 6) -> list[float]:
    seen = []
    for _ in range(steps):
        with session.autocast():
            loss = session.model(inputs).square().mean()
        session.backward(loss)
        assert session.step().applied
        seen.append(loss.item())
    return seen


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.listed = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(6, 6)})
        self.wide = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 6))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.plain = torch.ones(6)
        self.recurrent = nn.LSTM(6, 6, num_layers=2, bidirectional=True)
        self.used_twice = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor([1e6]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.used_twice(torch.tanh(self.used_twice(x)))
        x = x @ self.listed[0] @ self.named["a"] * 0.1
        return self.recurrent(x)[0]


@LOW
def test_every_kind_of_parameter(level: str) -> None:
    """Law: fp32 parameters become low wherever they are kept; other dtypes stay."""
    model = Odd()
    lost = pytest.warns(UserWarning, match="buffer 'scale' reaches 1e\\+06")
    with lost if level == "O3" else contextlib.nullcontext():
        session = prepared(model, level, "fp16")
    kept = {"wide": torch.float64, "turn": torch.complex64, "count": torch.int64}
    for name, param in model.named_parameters():
        assert param.dtype == kept.get(name, FP16), name
    assert model.plain.dtype == FP32
    # 1e6 is no fp16 number: under autocast buffers stay what they are.
    assert model.scale.item() == (1e6 if level == "O2" else torch.inf)
    seen = losses(session)
    assert seen[-1] < seen[0]


class Row(torch.Tensor):
    """A user's tensor type."""


@LOW
def test_subclasses_of_tensors(level: str) -> None:
    """Law: a parameter of a user's tensor type keeps that type, and trains."""
    model = network()
    model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(Row))
    weight = model[0].weight
    seen = losses(prepared(model, level))
    assert model[0].weight is weight
    assert type(weight) is Row
    assert weight.dtype == BF16
    assert seen[-1] < seen[0]


@LOW
def test_storage_ties(level: str) -> None:
    """Law: parameters that are views of the same memory still are; others are apart."""
    memory = torch.arange(40.0)
    model = nn.ParameterDict(
        {
            "head": memory[4:16].view(3, 4),
            "turned": memory[4:16].view(3, 4).t(),
            "overlaps": memory[14:20],
            "beside": memory[20:24],
            "norm": torch.ones(2),
        }
    )
    exact = {name: param.detach().clone() for name, param in model.items()}
    converted = convert(model, level)
    for name, param in model.items():
        same(param.detach(), exact[name].to(BF16))
    for param, original in converted.originals.items():
        same(original, exact[next(n for n, p in model.items() if p is param)])
    with torch.no_grad():
        model["head"].fill_(-1)
    assert (model["turned"] == -1).all()
    assert model["overlaps"].tolist() == [-1, -1, 16, 17, 18, 19]
    assert model["beside"].tolist() == [20, 21, 22, 23]
    places = {model[name].untyped_storage().data_ptr() for name in ("head", "beside")}
    assert len(places) == 2


@LOW
def test_formats_in_one_storage(level: str) -> None:
    """Law: neighbours of other formats are apart, though their offsets cross."""
    memory = torch.zeros(80, dtype=torch.uint8)
    parts = memory[:40].view(FP16).fill_(1.0), memory[40:].view(FP32).fill_(2.0)
    model = nn.ParameterList(parts)
    convert(model, level)
    assert [param.unique().tolist() for param in model] == [[1.0], [2.0]]


@LOW
def test_gradients_are_cast_with_their_parameters(level: str) -> None:
    """Law: a gradient from before stays, in its parameter's dtype; graphs stay good."""
    model = network()
    loss = model(INPUTS).square().mean()
    torch.autograd.backward(loss, retain_graph=True)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    convert(model, level)
    for name, param in model.named_parameters():
        same(param.grad, before[name].to(param.dtype))
    model.zero_grad()
    torch.autograd.backward(model(INPUTS.to(BF16)).square().mean())
    grads = [param.grad for param in model.parameters()]
    assert [g.dtype for g in grads if g is not None] == [
        p.dtype for p in model.parameters()
    ]


@LOW
def test_recurrent_weights_are_put_in_one_piece(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: once converted, cuDNN's one piece of weights is asked for again."""
    model = Odd()
    seen: list[set[torch.dtype]] = []
    monkeypatch.setattr(
        nn.LSTM,
        "flatten_parameters",
        lambda module: seen.append({param.dtype for param in module.parameters()}),
    )
    convert(model, level)
    assert seen == [{BF16}]


def inferred() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(6, 6)


REFUSED = {
    "has no shape yet": lambda: nn.LazyLinear(6),
    "is on the meta device": lambda: nn.Linear(6, 6, device="meta"),
    "was made in inference mode": inferred,
}


@pytest.mark.parametrize("words", REFUSED)
@LOW
def test_weights_that_are_not_ready(words: str, level: str) -> None:
    """Law: weights without numbers are refused by name, and nothing is changed."""
    model: Any = nn.Sequential(nn.Linear(6, 6), REFUSED[words]())
    with pytest.raises(UserError, match=f"'1.weight' in 16 bits, but it {words}"):
        convert_(model, levels.parse(level), BF16, LEAN + "module:0=fp32")
    assert model[0].weight.dtype == FP32
    assert not model[0]._forward_pre_hooks
    assert not model._forward_hooks


def test_a_tie_across_an_island() -> None:
    """Law: at O3 a weight that is both low and fp32 is refused; at O2 it is fp32."""
    rules = LEAN + "module:2=fp32"
    for level in ("O2", "O3"):
        model = network()
        model[2].weight = model[0].weight
        if level == "O2":
            seen = losses(prepared(model, level, policy=rules))
            assert seen[-1] < seen[0]
            assert model[0].weight.dtype == FP32
            continue
        with pytest.raises(UserError, match=r"module '0' .* rule 'module:0=fp32'"):
            convert_(model, levels.parse(level), BF16, rules)
        convert_(model, levels.parse(level), BF16, rules + "module:0=fp32")
        assert model(INPUTS).dtype == FP32


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_scripted_part(level: str) -> None:
    """Law: a model with a part that torch.jit made is prepared, and learns."""
    scripted: Any = torch.jit.script(nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    model = nn.Sequential(scripted, nn.Linear(4, 4))
    before = [param.detach().clone().float() for param in model.parameters()]
    losses(prepared(model, level), torch.ones(2, 4), steps=1)
    moved = [
        not torch.equal(a, b.float())
        for a, b in zip(before, model.parameters(), strict=True)
    ]
    assert all(moved)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_scripted_model() -> None:
    """Law: it learns at O1; what needs hooks gets torch's error, and stays."""
    model: Any = torch.jit.script(network())  # type: ignore[no-untyped-call]
    for level in ("O2", "O3"):
        with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
            prepared(model, level)
    assert {param.dtype for param in model.parameters()} == {FP32}
    seen = losses(prepared(model, "O1"))
    assert seen[-1] < seen[0]


FITS, OVERFLOWS = 65519.0, 65520.0
"""From half-way between fp16's largest number and 65536 on, rounding gives inf."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))


def put(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


@pytest.mark.parametrize("value", [OVERFLOWS, -1e5, 3e38])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_weight_beyond_fp16(level: str, value: float) -> None:
    """Law: it is named with its size and the cures, and each cure holds it."""
    model = Wide()
    put(model.head.weight, value)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as caught:
        prepared(model, level, "fp16")
    text = str(caught.value)
    assert text.startswith(f"parameter 'head.weight' reaches {abs(value):g}, and fp16 ")
    assert text.endswith("Use dtype='bf16' or the rule 'module:head=fp32'.")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    bare = Wide()
    put(bare.gain, value)
    # Of a parameter of the model itself, only what helps is said.
    with pytest.raises(UserError, match=r" inf\. Use dtype='bf16'\.$"):
        prepared(bare, level, "fp16")
    for dtype, policy in (("bf16", "lean"), ("fp16", "lean + module:head=fp32")):
        twin = copy.deepcopy(model)
        session = prepared(twin, level, dtype, policy=policy)
        assert twin.head.weight.isfinite().all()
        assert session.weights()["head.weight"].isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_fits_and_what_stays(level: str) -> None:
    """Law: a number that rounds to 65504, inf itself, and fp32 weights are let in."""
    model = Wide()
    put(model.head.weight, FITS)
    put(model.head.bias, torch.inf)
    if level != "O3":
        put(model.norm.weight, 1e5)
    prepared(model, level, "fp16")
    if level in {"O2", "O3"}:
        assert model.head.weight.max() == 65504


def test_bf16_has_a_limit_too() -> None:
    """Law: fp32 goes a little beyond bf16's largest number, and O1 holds it."""
    model = Wide()
    put(model.head.weight, torch.finfo(torch.float32).max)
    with pytest.raises(UserError, match=r"reaches 3\.40282e\+38, .* Use level='O1'"):
        prepared(model, "O2", "bf16")
    prepared(model, "O1", "bf16")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_state_beyond_fp16(level: str) -> None:
    """Law: a session refuses such a state, and stays as it was."""
    model = Wide()
    put(model.head.weight, 1e5)
    state = prepared(model, "O1", "bf16").state_dict()
    session = prepared(Wide(), level, "fp16")
    before = copy.deepcopy(session.weights())
    with pytest.raises(UserError, match=r"^parameter 'head\.weight' reaches 100000, "):
        session.load_state_dict(state)
    torch.testing.assert_close(session.weights(), before, rtol=0, atol=0)
    other = prepared(Wide(), level, "bf16")
    other.load_state_dict(state)
    assert other.weights()["head.weight"][0, 0] == pytest.approx(1e5, rel=2**-8)

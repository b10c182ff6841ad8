"""What goes into a prepared model and what comes out, and copies of such a model."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

import halfstep as hs

BF16, FP32 = torch.bfloat16, torch.float32
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
    assert more[0] is taken
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

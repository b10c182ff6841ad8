"""The rule that a warning or `LossScaleCollapse` proposes ends the overflow."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from fp16_training import by_scaler, by_session
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs

WIDTH = 16


def scale(factor: float, *layers: nn.Linear) -> None:
    for layer in layers:
        layer.weight.data.mul_(factor)


class Ffn(nn.Module):
    def __init__(self, square: Any = lambda x: x * x, *, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.square = square
        scale(2e3, self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.square(self.up(x).relu()))


class Glu(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        scale(1e3, self.gate, self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class SquareLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        scale(2e3, self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.up(x) ** 2)[0]


class Attention(nn.Module):
    def __init__(self, factor: float = 400.0) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query, self.key, self.value = layers
        scale(factor, self.query, self.key)

    def logits(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.key(x).transpose(-1, -2)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1) @ self.value(x)


class EinsumAttention(Attention):
    def logits(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,bsd->bts", self.query(x), self.key(x))


class Denominator(Attention):
    """A softmax by hand: exponentials are divided after the product with the values."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.logits(x).exp()
        return (weights @ self.value(x)) / weights.sum(-1, keepdim=True)


def large(factor: float = 1e5) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    scale(factor, layer)
    return layer


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = large(3e4)

    def forward(self, x: Tensor) -> Tensor:
        part = self.layer(x)
        return part + part + part


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ffn() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + functional.layer_norm(block(x), (WIDTH,))
        return x


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(WIDTH, WIDTH), part
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


def at_root(kind: Any, **more: Any) -> nn.Module:
    """Return a model: no module encloses the operations but the model itself."""

    class Root(kind):
        def forward(self, x: Tensor) -> Tensor:
            return functional.layer_norm(super().forward(x), (WIDTH,))

    return Root(**more)


class AtRootMatmul(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 3e4)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.flatten(0, 1) @ self.weight))[None]


def large_product(logits: Tensor) -> Tensor:
    return (logits * 1e6).square().mean() * 1e-12


def entropy(logits: Tensor) -> Tensor:
    targets = torch.arange(logits.shape[0] * logits.shape[1]) % 4
    return functional.cross_entropy(logits.flatten(0, 1), targets)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "squared relu": Ffn,
    # Policies keep a power in fp32 until the next layer.
    "squared relu by pow": lambda: Ffn(lambda x: x**2),
    # No rule for an operation changes a product written in place.
    "squared relu in place": lambda: Ffn(lambda x: x.clone().mul_(x)),
    "squared relu without bias": lambda: Ffn(bias=False),
    "glu": Glu,
    "glu without bias": lambda: Glu(bias=False),
    "lstm": SquareLstm,
    "attention": Attention,
    "einsum": EinsumAttention,
    "softmax denominator": lambda: Denominator(4.0),
    "large linear": large,
    "sum": Sum,
}
AT_ROOT = "op:mul=fp32 + module:down=fp32"
PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], str]] = {
    **{
        name: (lambda make=make: Net(make()), entropy, "module:body=fp32")
        for name, make in BODIES.items()
    },
    "squared relu at the root": (lambda: at_root(Ffn), entropy, AT_ROOT),
    "squared relu without bias at the root": (
        *(lambda: at_root(Ffn, bias=False), entropy, AT_ROOT),
    ),
    "glu at the root": (lambda: at_root(Glu), entropy, AT_ROOT),
    "matmul at the root": (AtRootMatmul, entropy, "op:/linear|matmul|mm/=fp32"),
    "loss product": (lambda: Net(nn.Identity()), large_product, "op:mul=fp32"),
    "two layers": (  # the second casts the result of the first
        lambda: Net(nn.Sequential(large(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
        entropy,
        "module:body.0=fp32 + module:body.2=fp32",
    ),
    "numbered layers": (
        lambda: Net(Blocks()),
        entropy,
        "op:mul=fp32 + module:body.blocks.*.down=fp32",
    ),
}
"""Model, loss, and the rules that are proposed."""

STEPS, LIMIT = 12, 6
"""Steps of a run, and consecutive skips that end it."""


def data(_: int = 0) -> Tensor:
    return torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(0))


def test_the_rule_is_added_to_the_policy_of_this_loss() -> None:
    """Law: contexts that made other losses, before or after, do not change it."""
    model = Ffn()

    def loss_under(context: AbstractContextManager[object]) -> Tensor:
        with context:
            return entropy(model(data()))

    def policy_of(loss: Tensor) -> str:
        with pytest.warns(UserWarning, match="the loss is") as warned:
            hs.GradScaler("cpu").scale(loss)
        (base,) = re.findall(r"policy='([a-z]*) ", str(warned[0].message))
        return str(base)

    lean = loss_under(hs.autocast("cpu", torch.float16, policy="lean"))
    plain = loss_under(torch.autocast("cpu", torch.float16))
    loss_under(hs.autocast("cpu", torch.bfloat16, policy="torch + op:mul=low"))
    assert (policy_of(lean), policy_of(plain)) == ("lean", "torch")


LOOPS: dict[str, Any] = {
    "O1": partial(by_session, level="O1"),
    "O2": partial(by_session, level="O2"),
    "GradScaler": by_scaler,
}


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:dtype=fp16")
@pytest.mark.parametrize(
    ("place", "loop"),
    # At O2 the model returns float32 to the loss; without the names of parameters, the
    # products of an LSTM look like those of linear layers.
    [
        (place, loop)
        for (number, place), loop in product(enumerate(PARTS), LOOPS)
        if (place, loop) not in {("loss product", "O2"), ("lstm", "GradScaler")}
        and loop != list(LOOPS)[number % 3]
    ],
)
def test_the_proposed_rule_ends_the_overflow(place: str, loop: str) -> None:
    """Law: under the policy in the message, the same place does not overflow again."""
    make, loss_of, rule = PARTS[place]
    policy = "lean + op:layer_norm=fp32"
    numbers = {"init_scale": 256.0, "max_consecutive_skips": LIMIT}
    train = partial(LOOPS[loop], make, loss_of, data, STEPS, **numbers)
    with (
        pytest.warns(UserWarning, match="the loss is") as warned,
        pytest.raises(hs.LossScaleCollapse) as caught,
    ):
        train(policy=policy)
    (warning,) = [str(one.message) for one in warned if "the loss" in str(one.message)]
    proposed = {}
    for text in (str(caught.value), warning):
        assert re.search("its (result|argument) (holds (inf|NaN)|reaches)", text)
        assert text.endswith("halfstep.find_nonfinite(model, step) names the module.")
        (proposed[text],) = re.findall(r"policy='([^']*)'", text)
    assert proposed[str(caught.value)] == policy.replace("lean", f"lean + {rule}")
    # A GradScaler learns the names of parameters only after the first warning.
    for text in {*proposed.values()}:
        assert train(policy=text) == STEPS

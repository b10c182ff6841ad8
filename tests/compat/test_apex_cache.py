"""O1: casts of weights that are kept, recurrent layers, and functions of one's own."""

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.compat.apex import amp
from halfstep.compat.apex.state import STATE

HALF, FLOAT = torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)


def start(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    # Sums of fp16 numbers, times 65536, are no fp16 numbers.
    amp.initialize(net, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
    return optimizer


def test_weights_are_cast_once() -> None:
    """Law: between two scale_loss a weight is cast once; after one, anew."""
    net = nn.Linear(2, 2)
    optimizer = start(net)
    (cache,) = STATE.handle.caches.values()
    x = torch.ones(1, 2)
    for count in (1, 2):
        out = net(x) + net(x)
        assert cache.misses == 2 * count  # weight and bias
        with amp.scale_loss(out.float().sum(), optimizer) as scaled:
            scaled.backward()
        assert len(cache) == 0


@pytest.mark.parametrize("edit", ["data", "no_grad", "load"])
def test_edits_are_seen(edit: str) -> None:
    """Law: a weight changed between two evaluations is never served as it was."""
    net = nn.Linear(1, 1, bias=False)
    start(net)
    with torch.no_grad():
        net(torch.ones(1, 1))
        if edit == "data":
            net.weight.data.fill_(3)
        elif edit == "no_grad":
            net.weight.fill_(3)
        else:
            net.load_state_dict({"weight": torch.full((1, 1), 3.0)})
        assert net(torch.ones(1, 1)).item() == 3


def test_backward_runs_as_forward_did() -> None:
    """Law: what ran in fp32 has an fp32 backward pass, inside scale_loss.

    2**12 * 2**12 is no fp16 number; were the product of the backward pass cast, the
    gradient would be inf.
    """
    weight = nn.Parameter(torch.full((2, 2), 2.0**12))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    amp.initialize(nn.Linear(1, 1), optimizer, opt_level="O1", verbosity=0)
    x = torch.full((2, 2), 2.0**12)
    with amp.disable_casts():
        loss = (x @ weight).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0**13))


# Recurrent layers

LAYERS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
CELLS = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}


@DTYPES
@pytest.mark.parametrize(
    ("depth", "sides", "packed"), [(1, 2, False), (2, 1, False), (1, 1, True)]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_recurrent_layers(
    kind: str, depth: int, sides: int, packed: bool, dtype: torch.dtype
) -> None:
    """Law: layers compute in fp16, states too; every weight gets an fp32 gradient."""
    net = LAYERS[kind](3, 4, depth, bidirectional=sides == 2)
    optimizer = start(net)
    x: Any = torch.randn(5, 2, 3).to(dtype)
    given = nn.utils.rnn.pack_padded_sequence(x, [5, 3]) if packed else x
    out, state = net(given)
    out = out.data if packed else out
    states = state if isinstance(state, tuple) else (state,)
    assert {out.dtype, *(s.dtype for s in states)} == {HALF}
    with amp.scale_loss(out.float().sum(), optimizer) as scaled:
        scaled.backward()
    for param in net.parameters():
        assert param.grad.dtype == FLOAT
        assert param.grad.isfinite().all()


@DTYPES
@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_cells(kind: str, dtype: torch.dtype) -> None:
    """Law: cells compute in fp16, near what they compute in fp32."""
    net = CELLS[kind](3, 4)
    plain = copy.deepcopy(net)
    optimizer = start(net)
    x = torch.randn(2, 3).to(dtype)
    out = first(net(x))
    assert out.dtype == HALF
    with amp.disable_casts():
        expected = first(plain(x.float()))
    # Gates of slope 1 over sums of seven products of fp16 numbers below 4.
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=7 * 4 * 2.0**-11)
    with amp.scale_loss(out.float().sum(), optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None for p in net.parameters())


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


# Functions of the user's own

REGISTER = {
    "half": (amp.register_half_function, amp.half_function, HALF, HALF),
    "float": (amp.register_float_function, amp.float_function, FLOAT, FLOAT),
    "promote": (amp.register_promote_function, amp.promote_function, FLOAT, HALF),
}
"""Way -> how to register, to decorate; the dtype of fp32 with fp16, of fp16 alone."""


def twice(x: Tensor, more: list[Tensor]) -> Tensor:
    return x + more[0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", REGISTER)
def test_registered(way: str, when: str) -> None:
    """Law: a registered function gets its arguments cast, nested ones too."""
    register, decorate, mixed, low = REGISTER[way]
    module = types.ModuleType("mine")
    module.twice = twice
    if when == "before":
        register(module, "twice")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    if when == "after":
        register(module, "twice")
    half, full = torch.ones(2, dtype=HALF), torch.ones(2)
    assert module.twice(half, [full]).dtype == mixed
    assert module.twice(half, more=[half]).dtype == low
    with amp.disable_casts():
        assert module.twice(half, [half]).dtype == HALF
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert module.twice(half, [full]).dtype == mixed
    STATE.handle.close()
    assert module.twice is twice
    run = decorate(twice)  # a decorated function does the same
    assert run(half, [half]).dtype == HALF
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert run(half, [full]).dtype == mixed
    assert run(half, more=[half]).dtype == low
    assert run.__name__ == "twice"


def test_decorated_with_weights() -> None:
    """Law: inside a half function products still cast weights that are no argument."""
    weight = nn.Parameter(torch.ones(2, 2))

    @amp.half_function
    def product(x: Tensor) -> Tensor:
        return functional.linear(x, weight)

    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    out = product(torch.ones(1, 2))
    assert out.dtype == HALF
    out.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (functional, "softmax", lambda x: functional.softmax(x, -1)),
        (functional, "gelu", lambda x: functional.gelu(input=x)),
        (torch, "exp", lambda x: torch.exp(input=x)),
    ],
)
def test_users_word_comes_before_the_lists(owner: Any, name: str, call: Any) -> None:
    """Law: torch's own functions obey registration against apex's lists."""
    amp.register_half_function(owner, name)
    amp.register_float_function(torch, "matmul")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert call(torch.ones(2)).dtype == HALF
    assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT


def test_unknown_function() -> None:
    """Law: a misspelt name is refused at once, with the module's name."""
    with pytest.raises(amp.AmpError, match=r"torch has no function 'sigmoyd'"):
        amp.register_half_function(torch, "sigmoyd")

"""Fast dropout: masks distributed as torch's, and everything else equal to torch's."""

import functools
import math
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep import fast_dropout

DRAWS = 200_000
DOUBT = 1e-9
"""Chance that a right generator fails one bound, were its seed not fixed."""


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.25), nn.Linear(64, 4))


def _bounds(count: int, chance: float) -> tuple[int, int]:
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(chance)
        + (count - k) * math.log1p(-chance)
        for k in range(count + 1)
    ]
    low, below = 0, math.exp(logs[0])
    while below < DOUBT / 2:
        low += 1
        below += math.exp(logs[low])
    high, above = count, math.exp(logs[count])
    while above < DOUBT / 2:
        high -= 1
        above += math.exp(logs[high])
    return low, high


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_a_binomial_allows(p: float) -> None:
    """Law: the count of kept elements lies within exact binomial bounds."""
    steps = round(p * fast_dropout.STEPS)
    kept = int(fast_dropout.dropout(torch.ones(DRAWS), p).count_nonzero())
    low, high = _bounds(DRAWS, 1 - steps / fast_dropout.STEPS)
    assert low <= kept <= high


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8])
def test_neighbours_are_independent(apart: int) -> None:
    """Law: elements near each other are dropped together as seldom as by chance."""
    dropped = fast_dropout.dropout(torch.ones(DRAWS), 0.5) == 0
    # Disjoint pairs, so that their count is binomial itself.
    pairs = dropped[: DRAWS // (2 * apart) * 2 * apart].view(-1, 2, apart)
    together = int((pairs[:, 0] & pairs[:, 1]).sum())
    low, high = _bounds(pairs.numel() // 2, 0.25)
    assert low <= together <= high


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_mask_times_scale(dtype: torch.dtype, inplace: bool) -> None:
    """Law: kept elements and their gradients are scaled by one factor, others zero."""
    p = 0.1
    x = torch.randn(33, 7, dtype=dtype)
    x[x == 0] = 1
    leaf = x.clone().requires_grad_()
    y = fast_dropout.dropout(leaf * 1, p, inplace=inplace)
    above = torch.randn(33, 7, dtype=dtype)
    y.backward(above)
    mask = y != 0
    scale = fast_dropout.STEPS / (fast_dropout.STEPS - round(p * fast_dropout.STEPS))
    assert 0 < mask.sum() < mask.numel()
    assert torch.equal(y, x * mask * scale)
    assert torch.equal(leaf.grad, above * scale * mask)


def test_a_seed_gives_the_masks_again() -> None:
    """Law: one seed gives one mask, the next draw and another seed give others."""
    x = torch.ones(1000)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return fast_dropout.dropout(x, 0.5), fast_dropout.dropout(x, 0.5)

    first, second = draw(3)
    again, then = draw(3)
    assert torch.equal(first, again)
    assert torch.equal(second, then)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(4)[0])


@pytest.mark.parametrize("p", [0.0, 1e-6, 1 - 1e-6, 1.0])
def test_what_16_bits_cannot_tell_is_left_to_torch(p: float) -> None:
    """Law: where no multiple of 1/65536 is near but 0 and 1, torch itself draws."""
    x = torch.randn(100)
    torch.manual_seed(5)
    ours = fast_dropout.dropout(x, p)
    torch.manual_seed(5)
    assert torch.equal(ours, functional.dropout(x, p))


def test_recomputation_draws_the_masks_again() -> None:
    """Law: under torch.utils.checkpoint the gradients are those without it."""
    net = _net()
    hs.use_fast_dropout(net)
    x = torch.randn(16, 8)

    def gradients(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        return list(torch.autograd.grad(forward(x).sum(), list(net.parameters())))

    plain = gradients(net)
    again = gradients(lambda x: checkpoint(net, x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_state_is_unchanged() -> None:
    """Law: no state changes, what is saved loads either way, twice is once."""
    plain, fast = _net(), _net()
    hs.use_fast_dropout(fast)
    hs.use_fast_dropout(fast)
    ours, theirs = fast.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    plain.load_state_dict(ours)
    fast.load_state_dict(theirs)
    assert repr(fast).replace("FastDropout", "Dropout") == repr(plain)


def test_subclasses_of_dropout_are_left_alone() -> None:
    """Law: only `nn.Dropout` itself is changed, for others may mean another thing."""

    class Own(nn.Dropout):
        pass

    model = nn.Sequential(Own(0.5), nn.Dropout1d(0.5))
    hs.use_fast_dropout(model)
    assert [type(each) for each in model] == [Own, nn.Dropout1d]


# Attention


def _bert(implementation: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("masked", ["nothing", "padding", "a row", "scores"])
def test_attention_without_dropout_is_torchs(masked: str) -> None:
    """Law: the attention inside equals torch's in fp64, fp64 rounding apart."""
    shape = (2, 3, 5, 4)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    mask: Tensor | None = None
    if masked == "scores":
        mask = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    elif masked != "nothing":
        mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
        mask[1, :, :, 3:] = False
        if masked == "a row":
            mask[0, :, 2] = False
    shares = fast_dropout.attention_probs(query, key, mask, 0.5)
    theirs = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5)
    # Two sums of five products each and a softmax, of numbers near one.
    bound = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(shares @ value, theirs, rtol=bound, atol=bound)


def test_attention_at_no_dropout_is_torchs_to_the_bit() -> None:
    """Law: with p = 0 a fast model's losses and gradients are the plain model's."""
    results = []
    for change in (False, True):
        model = _bert()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if change:
            hs.use_fast_dropout(model)
        tokens = torch.arange(48).remainder(32).view(4, 12)
        loss = model(input_ids=tokens, labels=torch.tensor([0, 1, 0, 1])).loss
        loss.backward()
        results.append([loss, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *results))


class _Attention(nn.Module):
    def forward(
        self, *operands: Tensor, mask: Tensor | None, p: float, is_causal: bool = False
    ) -> Tensor:
        return functional.scaled_dot_product_attention(
            *operands, mask, p, is_causal, scale=0.4
        )


def _attention(
    *operands: Tensor, mask: Tensor | None = None, p: float = 0.3, **more: bool
) -> Tensor:
    torch.manual_seed(7)
    module = _Attention()
    hs.use_fast_dropout(module)
    output: Tensor = module(*operands, mask=mask, p=p, **more)
    return output


def _torchs(*operands: Tensor, mask: Tensor | None = None, p: float = 0.3) -> Tensor:
    torch.manual_seed(7)
    return _Attention()(*operands, mask=mask, p=p)  # type: ignore[no-any-return]


def _operands(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, length, 3, 4, dtype=dtype) for length in (6, 5, 5)]
    return [each.transpose(1, 2).requires_grad_() for each in made]


def test_attention_drops_shares() -> None:
    """Law: fast attention drops as its own dropout does of the shares it computes."""
    query, key, value = _operands(torch.float64)
    ours = _attention(query, key, value, p=0.5)
    torch.manual_seed(7)
    shares = fast_dropout.dropout(
        fast_dropout.attention_probs(query, key, None, 0.4), 0.5
    )
    torch.testing.assert_close(ours, shares @ value)
    assert not torch.allclose(ours, _torchs(query, key, value, p=0.5))


@pytest.mark.parametrize("masked", ["nothing", "padding", "a row"])
def test_gradients_of_attention(masked: str) -> None:
    """Law: the gradients are those of finite differences, also of rows without keys."""
    mask = None
    if masked != "nothing":
        mask = torch.zeros(2, 1, 6, 5, dtype=torch.float64)
        mask[1, :, :, 3:] = -torch.inf
        if masked == "a row":
            mask[0, :, 2] = -torch.inf
    operands = [each[:, :2].detach() for each in _operands(torch.float64)]
    operands = [each.requires_grad_() for each in operands]
    attend = functools.partial(_attention, mask=mask)
    assert torch.autograd.gradcheck(attend, operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_16_bits(dtype: torch.dtype) -> None:
    """Law: outputs and gradients in 16 bits lie as near the exact ones as theirs do."""
    wide = _operands(torch.float32)
    low = [each.detach().to(dtype).requires_grad_() for each in wide]
    exact = [each.detach().double().requires_grad_() for each in low]
    pull = torch.randn(2, 3, 6, 4, dtype=torch.float64).to(dtype)
    for operands in (low, exact):
        out = _attention(*operands)
        assert out.dtype == operands[0].dtype
        out.backward(pull.to(out.dtype))
    for ours, right in zip(low, exact, strict=True):
        assert ours.grad is not None
        assert right.grad is not None
        # Shares, their gradients, those of scores and the result are each rounded.
        bound = 4 * torch.finfo(dtype).eps * right.grad.abs().max()
        assert (ours.grad.double() - right.grad).abs().max() < bound


@pytest.mark.parametrize("queries", [5, 6])
def test_causal_attention(queries: int) -> None:
    """Law: it is attention under torch's triangular mask, and not under another."""
    query, key, value = _operands(torch.float64)
    operands = query[:, :, :queries], key, value
    mask = torch.ones(queries, 5, dtype=torch.bool).tril()
    causal = _attention(*operands, is_causal=True)
    assert torch.equal(causal, _attention(*operands, mask=mask))
    with pytest.raises(RuntimeError, match="should not be set when is_causal=True"):
        _attention(*operands, mask=mask, is_causal=True)


def test_a_compiled_model_keeps_torchs_dropout() -> None:
    """Law: hooks and class leave one graph, with the masks of torch's own dropout."""
    operands = [each.detach() for each in _operands(torch.float32)]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, *operands: Tensor) -> Tensor:
            out = functional.scaled_dot_product_attention(*operands, None, 0.3)
            return self.dropout(out)

    outputs = []
    for change in (False, True):
        module = Attention()
        if change:
            hs.use_fast_dropout(module)
        torch.manual_seed(7)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        outputs.append(compiled(*operands))
    assert torch.equal(*outputs)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is missing is named."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    words = "numpy, which is not installed: pip install numpy"
    with pytest.raises(hs.UserError, match=words):
        runpy.run_path(fast_dropout.__file__)["use_fast_dropout"](_net())


def test_what_attention_leaves_to_torch() -> None:
    """Law: a mask that learns, and tensors of other ranks, are torch's, to the bit."""
    query, key, value = _operands(torch.float32)
    bias = torch.randn(6, 5, requires_grad=True)
    # torch itself may give three dimensions a fourth; five stay as they are.
    deep = [each.unsqueeze(0) for each in (query, key, value)]
    for operands, mask in (((query, key, value), bias), (deep, None)):
        ours = _attention(*operands, mask=mask)
        assert torch.equal(ours, _torchs(*operands, mask=mask))
    _attention(query, key, value, mask=bias).sum().backward()
    assert bias.grad is not None


def test_attention_once() -> None:
    """Law: a gradient of a gradient is refused, and not wrong in silence."""
    query, key, value = _operands(torch.float64)
    out = _attention(query, key, value).sum()
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(out, query, create_graph=True)


def test_only_attention_modules_are_fast() -> None:
    """Law: after a fast module, also one that raised, attention is torch's again.

    One whose earlier pre-hook raises does not count as left.
    """
    operands = _operands(torch.float32)

    def raises(*_: object) -> None:
        raise TypeError

    before = _torchs(*operands)
    for early in (False, True):
        module = _Attention()
        if early:
            module.register_forward_pre_hook(raises)
        hs.use_fast_dropout(module)
        for _ in range(2):
            with pytest.raises(TypeError):
                module(*operands, mask=None, p="much")
        assert torch.equal(_torchs(*operands), before)
    assert not torch.equal(_attention(*operands), before)
    assert torch.equal(_torchs(*operands), before)


def test_evaluation_is_the_identity() -> None:
    """Law: in evaluation a fast dropout returns its operand and draws nothing."""
    layer = nn.Sequential(nn.Dropout(0.5))
    hs.use_fast_dropout(layer)
    x = torch.randn(50)
    before = torch.get_rng_state()
    assert layer.eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(layer.train()(x), x)

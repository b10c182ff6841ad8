"""Cheap dropout: masks as torch's are distributed, and everything else as torch's.

In: the quick dropout and models made quick. Out: the laws that `quicken` promises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.train import quick

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DRAWS = 200_000
DOUBT = 1e-9
"""Chance that a right generator fails one bound, were its seed not fixed."""


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.25), nn.Linear(64, 4))


def _bounds(count: int, chance: float) -> tuple[int, int]:
    """Return between what a binomial lies but for `DOUBT`: its tails, summed."""
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
    steps = round(p * quick.STEPS)
    kept = int(quick.dropout(torch.ones(DRAWS), p).count_nonzero())
    low, high = _bounds(DRAWS, 1 - steps / quick.STEPS)
    assert low <= kept <= high


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8])
def test_neighbours_are_independent(apart: int) -> None:
    """Law: elements near each other are dropped together as seldom as by chance."""
    dropped = quick.dropout(torch.ones(DRAWS), 0.5) == 0
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
    y = quick.dropout(leaf * 1, p, inplace=inplace)
    above = torch.randn(33, 7, dtype=dtype)
    y.backward(above)
    mask = y != 0
    scale = quick.STEPS / (quick.STEPS - round(p * quick.STEPS))
    assert 0 < mask.sum() < mask.numel()
    assert torch.equal(y, x * mask * scale)
    assert torch.equal(leaf.grad, above * scale * mask)


@pytest.mark.parametrize("inplace", [False, True])
def test_in_place_writes_where_it_was_asked_to(inplace: bool) -> None:
    """Law: the operand is written if and only if `inplace` says so."""
    x = torch.ones(64)
    y = quick.dropout(x, 0.5, inplace=inplace)
    assert (y.data_ptr() == x.data_ptr()) == inplace
    assert bool((x == 1).all()) != inplace


def test_a_seed_gives_the_masks_again() -> None:
    """Law: one seed gives one mask, the next draw and another seed give others."""
    x = torch.ones(1000)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return quick.dropout(x, 0.5), quick.dropout(x, 0.5)

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
    ours = quick.dropout(x, p)
    torch.manual_seed(5)
    assert torch.equal(ours, functional.dropout(x, p))


def test_recomputation_draws_the_masks_again() -> None:
    """Law: under torch.utils.checkpoint the gradients are those without it."""
    net = _net()
    assert quick.quicken(net) == 1
    x = torch.randn(16, 8)

    def gradients(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        return list(torch.autograd.grad(forward(x).sum(), list(net.parameters())))

    plain = gradients(net)
    again = gradients(lambda x: checkpoint(net, x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_evaluation_is_the_identity() -> None:
    """Law: in evaluation a quick dropout returns its operand and draws nothing."""
    layer = nn.Sequential(nn.Dropout(0.5))
    quick.quicken(layer)
    x = torch.randn(50)
    before = torch.get_rng_state()
    assert layer.eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(layer.train()(x), x)


def test_state_is_unchanged() -> None:
    """Law: quicken changes no state, what is saved loads either way, twice is once."""
    plain, quickened = _net(), _net()
    assert quick.quicken(quickened) == 1
    assert quick.quicken(quickened) == 0
    ours, theirs = quickened.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    plain.load_state_dict(ours)
    quickened.load_state_dict(theirs)
    assert repr(quickened).replace("QuickDropout", "Dropout") == repr(plain)


def test_subclasses_of_dropout_are_left_alone() -> None:
    """Law: only `nn.Dropout` itself is changed, for others may mean another thing."""

    class Own(nn.Dropout):
        pass

    model = nn.Sequential(Own(0.5), nn.Dropout1d(0.5))
    assert quick.quicken(model) == 0
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
    )
    config._attn_implementation = implementation
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
    shares = quick._shares(query, key, mask, 0.5)
    theirs = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5)
    # Two sums of five products each and a softmax, of numbers near one.
    bound = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(shares @ value, theirs, rtol=bound, atol=bound)


def test_attention_at_no_dropout_is_torchs_to_the_bit() -> None:
    """Law: with p = 0 a quick model's losses and gradients are the plain model's."""
    results = []
    for change in (False, True):
        model = _bert()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if change:
            assert quick.quicken(model) > 0
        tokens = torch.arange(48).remainder(32).view(4, 12)
        loss = model(input_ids=tokens, labels=torch.tensor([0, 1, 0, 1])).loss
        loss.backward()
        results.append([loss, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *results))


def test_attention_drops_shares() -> None:
    """Law: quick attention drops as its own dropout does of the shares it computes."""
    query, key, value = (torch.randn(2, 2, 6, 4) for _ in range(3))
    quick._install()
    torch.manual_seed(7)
    with quick._wanted:
        ours = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(7)
    shares = quick._shares(query, key, None, 0.5)
    assert torch.equal(ours, quick.dropout(shares, 0.5) @ value)
    torch.manual_seed(7)
    theirs = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert not torch.equal(ours, theirs)


def test_eager_attention_is_not_marked() -> None:
    """Law: only "sdpa" attention is quick; of an eager model only the dropouts are."""
    eager, sdpa = _bert("eager"), _bert()
    dropouts = sum(type(each) is nn.Dropout for each in eager.modules())
    # Its attention keeps a dropout module of its own, which "sdpa" never calls.
    assert quick.quicken(eager) == dropouts
    assert quick.quicken(sdpa) == dropouts + 2


def test_a_tiny_bert_learns_and_its_export_says_sdpa(tmp_path: Path) -> None:
    """Law: a quick model learns, and what it saves is what transformers expects."""
    model = _bert()
    assert quick.quicken(model) > 0
    tokens = torch.randint(2, 32, (32, 8))
    labels = torch.arange(32) % 2
    tokens[:, 0] = labels
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model.train()
    for _ in range(40):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        guesses = model.eval()(input_ids=tokens).logits.argmax(-1)
    assert torch.equal(guesses, labels)
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    with torch.no_grad():
        again = loaded.eval()(input_ids=tokens).logits
        assert torch.equal(again, model(input_ids=tokens).logits)

"""Weights cast once, and never served stale."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
)

import halfstep as hs
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP16 = torch.bfloat16, torch.float16


def weight(rows: int = 4, *, learns: bool = True) -> nn.Parameter:
    """Return a weight whose numbers bf16 holds."""
    numbers = torch.arange(1.0, 4 * rows + 1).view(rows, 4)
    return nn.Parameter(numbers, requires_grad=learns)


def counts(cache: CastCache) -> tuple[int, int]:
    """Return hits and misses."""
    return cache.hits, cache.misses


def sums_up(out: Tensor, param: Tensor, expected: float) -> bool:
    """Say whether every gradient of a weight is a number, after a backward pass."""
    out.float().sum().backward()  # type: ignore[no-untyped-call]
    assert param.grad is not None
    return torch.equal(param.grad, torch.full_like(param, expected))


def region(cache: CastCache, dtype: torch.dtype = BF16) -> Any:
    """Return a region with a cache."""
    return hs.autocast("cpu", dtype, cache=cache)


# What is served


def test_a_cast_is_the_weight_rounded() -> None:
    """Law: the value is `weight.to(dtype)`, cast once, for as long as it holds."""
    cache, param = CastCache(), nn.Parameter(torch.randn(5, 3))
    for dtype in (BF16, FP16, BF16, FP16):
        low = cache(param, dtype)
        assert low.dtype == dtype
        assert torch.equal(low, param.to(dtype))
    assert counts(cache) == (2, 2)
    assert len(cache) == 2


def stepped(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Any], object]:
    """Return an edit: a step of an optimizer."""

    def edit(param: nn.Parameter) -> None:
        param.grad = torch.ones_like(param)
        make([param], lr=0.5).step()

    return edit


def adamw(params: Any, **more: Any) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(params, **more, fused=True)


def foreach(params: Any, **more: Any) -> torch.optim.Optimizer:
    """Return an SGD that updates lists of tensors."""
    return torch.optim.SGD(params, **more, foreach=True)


def fused(params: Any, **more: Any) -> torch.optim.Optimizer:
    """Return torch's fused SGD."""
    return torch.optim.SGD(params, **more, fused=True)


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "zero": lambda param: param.zero_(),
    "view": lambda param: param[1].fill_(9),
    "detached": lambda param: param.detach().mul_(2),
    "copy": lambda param: param.copy_(torch.ones_like(param)),
    "out": lambda param: torch.mul(param, 2, out=param),
    "init": lambda param: nn.init.constant_(param, 3),
    "item": lambda param: param.__setitem__((0, 0), 7),
    "list": lambda param: torch._foreach_mul_([param], 2.0),
    "clip": lambda param: param.clamp_(max=3),
    "data": lambda param: setattr(param, "data", torch.zeros_like(param)),
    "set": lambda param: param.set_(
        torch.zeros(16).untyped_storage(), 0, (4, 4), (4, 1)
    ),
    "sgd": stepped(torch.optim.SGD),
    "foreach": stepped(foreach),
    "fused sgd": stepped(fused),
    "adamw": stepped(torch.optim.AdamW),
    "fused adamw": stepped(adamw),
    "rprop": stepped(torch.optim.Rprop),
    "vector": lambda param: nn.utils.vector_to_parameters(torch.zeros(16), [param]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_no_stale_value(edit: Callable[[nn.Parameter], object]) -> None:
    """Law: after any edit a weight is cast anew, once; the old cast keeps its value."""
    cache, param = CastCache(), weight()
    old = cache(param, BF16)
    kept = old.clone()
    with torch.no_grad():
        edit(param)
    new = cache(param, BF16)
    assert torch.equal(new, param.detach().to(BF16))
    assert not torch.equal(new, kept)
    assert torch.equal(old, kept)
    assert torch.equal(cache(param, BF16), new)
    assert counts(cache) == (1, 2)
    assert len(cache) == 1


def test_an_edit_of_data_is_not_seen() -> None:
    """Law: what the docstring says: an edit through `.data` counts after `refresh`."""
    cache, param = CastCache(), weight()
    old = cache(param, BF16)
    param.data.zero_()
    assert torch.equal(cache(param, BF16), old)
    cache.refresh()
    assert not cache(param, BF16).any()


def test_requires_grad_may_be_switched() -> None:
    """Law: a cast requires grad where its weight does; a switch costs no cast."""
    cache, param = CastCache(), weight(learns=False)
    with region(cache):
        for learns in (False, True, False, True):
            low = cache(param.requires_grad_(learns), BF16)
            assert low.requires_grad == learns
            assert torch.equal(low, param.to(BF16))
    assert counts(cache) == (3, 1)


def test_what_is_a_weight() -> None:
    """Law: parameters, frozen too, and fp32 leaves that learn; nothing else."""
    cache = CastCache()
    param = weight()
    leaf = torch.ones(2, requires_grad=True)
    weights = [param, weight(learns=False), leaf]
    others: dict[str, Tensor] = {
        "buffer": torch.ones(2),
        "activation": param * 1,
        "view": param[0],
        "transposed": param.T,
        "view in no_grad": leaf.detach()[:1].requires_grad_(),
        "double": nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "low": nn.Parameter(torch.ones(2, dtype=BF16)),
        "whole": nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    }
    assert [cache.is_weight(tensor) for tensor in weights] == [True] * 3
    assert [name for name, tensor in others.items() if cache.is_weight(tensor)] == []
    for tensor in others.values():
        assert cache(tensor, BF16).dtype == BF16
    assert counts(cache) == (0, 0)
    for tensor in weights:
        cache(tensor, BF16)
    assert counts(cache) == (0, 3)
    assert len(cache) == 3


def test_counts_by_hand() -> None:
    """Law: hits, misses and bytes are what a pencil says."""
    cache, large, small = CastCache(), weight(8), weight(1)
    cache(large, BF16)  # 32 numbers of 2 bytes
    cache(small, BF16)  # 4
    cache(small, FP16)  # 4
    cache(large, BF16)
    assert (counts(cache), cache.bytes, cache.bytes_cast) == ((1, 3), 80, 80)
    with torch.no_grad():
        large.zero_()
    cache(large, BF16)
    assert (counts(cache), cache.bytes, cache.bytes_cast) == ((1, 4), 80, 144)
    cache.refresh()
    cache(small, BF16)
    assert (counts(cache), cache.bytes, cache.bytes_cast) == ((1, 5), 80, 152)
    cache.clear()
    assert (len(cache), cache.bytes, cache.bytes_cast) == (0, 0, 152)


@pytest.mark.parametrize("learns", [True, False])
def test_casts_die_with_their_weight(learns: bool) -> None:
    """Law: a cache keeps no weight alive, after a region and its backward pass."""
    cache, layer = CastCache(), nn.Linear(4, 4).requires_grad_(learns)
    x = torch.ones(2, 4, requires_grad=True)
    with region(cache):
        out = layer(x * 1)
    out.float().sum().backward()
    assert len(cache) == 2
    gone = [weakref.ref(param) for param in layer.parameters()]
    del layer, out
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_session_dies() -> None:
    """Law: nothing remembers a model whose session is gone, recomputation or not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    for _ in range(2):
        with session.autocast():
            out = checkpoint(model, torch.ones(2, 4), use_reentrant=False)
            loss = out.float().sum()
        session.backward(loss)
        session.step()
    gone = [weakref.ref(item) for item in (model, *model.parameters())]
    del model, optimizer, session, out, loss
    gc.collect()
    assert {ref() for ref in gone} == {None}


# Regions


def test_spans_regions() -> None:
    """Law: a cache outlives regions; each weight and bias is cast once for all."""
    cache, layer = CastCache(), nn.Linear(4, 4)
    for _ in range(3):
        with region(cache):
            out = layer(torch.ones(2, 4))
            again = layer(torch.ones(2, 4))
        assert torch.equal(out, again)
    assert counts(cache) == (10, 2)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_evaluation_first(first: Callable[[], Any]) -> None:
    """Law: a cast made for evaluation lets gradients through later, and is exact."""
    cache, layer = CastCache(), nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with region(cache):
        with first():
            layer(x)
        out = layer(x)
    assert sums_up(out, layer.weight, 2.0)
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [2.0] * 4


def test_inference_mode() -> None:
    """Law: inference mode takes normal casts, leaves none of its own behind."""
    cache, param = CastCache(), weight()
    with torch.inference_mode():
        assert cache(param, BF16).is_inference()
        assert len(cache) == 0
        inner = nn.Parameter(torch.ones(2))
        cache(inner, BF16)
    assert counts(cache) == (0, 1)
    cache(param, BF16)
    with torch.inference_mode():
        assert not cache(param, BF16).is_inference()
    assert counts(cache) == (1, 2)


# Renewal


def test_renewal_writes_into_the_same_memory() -> None:
    """Law: after `refresh` a weight is cast once more, where its old cast was."""
    cache, param = CastCache(), weight()
    place = cache(param, BF16).data_ptr()
    for number in range(2, 5):
        with torch.no_grad():
            param.fill_(number)
        cache.refresh()
        low = cache(param, BF16)
        assert low.data_ptr() == place
        assert torch.equal(low, torch.full((4, 4), number, dtype=BF16))
        assert counts(cache) == (number - 2, number)
        cache(param, BF16)
    assert len(cache) == 1


def test_renewal_of_a_weight_that_has_another_shape() -> None:
    """Law: memory that does not fit any more is not written into."""
    cache, param = CastCache(), weight()
    old = cache(param, BF16)
    param.data = torch.ones(2, 3)
    cache.refresh()
    assert torch.equal(cache(param, BF16), torch.ones(2, 3, dtype=BF16))
    assert old.shape == (4, 4)


def test_an_older_graph_is_refused() -> None:
    """Law: a backward pass that needs an overwritten cast gets torch's error."""
    cache, layer = CastCache(), nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with region(cache):
        old = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    cache.refresh()
    with region(cache):
        layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.float().sum().backward()


def test_an_older_graph_that_needs_no_cast_is_right() -> None:
    """Law: without a gradient for its input, an older graph still gives its own."""
    cache, layer = CastCache(), nn.Linear(4, 4, bias=False)
    with region(cache):
        old = layer(torch.full((2, 4), 3.0))
    cache.refresh()
    with region(cache):
        layer(torch.ones(2, 4))
    assert sums_up(old, layer.weight, 6.0)

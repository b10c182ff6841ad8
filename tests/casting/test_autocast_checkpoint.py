"""Activation checkpointing: what is computed again is computed as it was at first."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from twins import torch_only

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 16).view(4, 4)
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


class Block(nn.Module):
    """Two layers and a product that only lean casts; it takes down the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        vector = hidden.float().mv(x[0].float())
        out: Tensor = self.second(hidden.float().tanh())
        self.seen.append((hidden.dtype, vector.dtype, out.dtype))
        return out.float() * vector.float()


Policies = dict[str, Any]
AROUND: dict[str, tuple[Policies, tuple[torch.dtype, ...]]] = {
    "stock": ({}, (BF16, FP32, BF16)),
    "fp16": ({"dtype": FP16}, (FP16, FP32, FP16)),
    "lean": ({"policy": "lean"}, (BF16, BF16, BF16)),
    "lean fp16": ({"policy": "lean", "dtype": FP16}, (FP16, FP16, FP16)),
    "operation": ({"policy": "torch + op:linear=fp32 + op:mv=low"}, (FP32, BF16, FP32)),
    "module": ({"policy": "lean + module:second=fp32"}, (BF16, BF16, FP32)),
    "promote": ({"policy": "torch + module:second=promote"}, (BF16, FP32, FP32)),
    "type": ({"policy": "torch + type:Linear=fp32"}, (FP32, FP32, FP32)),
    # A rule on modules speaks of operations that have a row: of mv only lean has one.
    "all": ({"policy": "torch + module:*=low"}, (BF16, FP32, BF16)),
    "cache": ({"policy": "lean", "cache": ...}, (BF16, BF16, BF16)),
    "no cache": ({"policy": "lean", "cache_enabled": False}, (BF16, BF16, BF16)),
    "record": ({"policy": "lean", "record": True}, (BF16, BF16, BF16)),
}


def region(more: Policies, block: nn.Module) -> Any:
    given: Any = {k: CastCache() if v is ... else v for k, v in more.items()}
    about_modules = any(kind in str(more) for kind in ("module:", "type:"))
    return autocast("cpu", **given, model=block if about_modules else None)


def gradients(block: Block, out: Tensor, x: Tensor) -> list[Tensor]:
    """Run backward, and return all gradients."""
    out.sum().backward()  # type: ignore[no-untyped-call]
    grads = [x.grad, *(param.grad for param in block.parameters())]
    assert all(grad is not None for grad in grads)
    return grads


def train(run: Callable[[Block, Tensor], Tensor]) -> tuple[Block, list[Tensor]]:
    block, x = Block(), X.clone().requires_grad_()
    out = run(block, x)
    assert active_context.active("cpu") is None
    return block, [out, *gradients(block, out, x)]


def in_both_ways(run: Callable[..., Tensor]) -> list[tuple[Block, list[Tensor]]]:
    """Train without checkpointing and with it."""
    return [train(functools.partial(run, saved=saved)) for saved in (False, True)]


def exact(left: list[Tensor], right: list[Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@REENTRANT
@pytest.mark.parametrize("kind", AROUND)
def test_a_region_around(kind: str, reentrant: bool) -> None:
    """Law: recomputation runs in the forward's dtypes; gradients are those without."""
    more, expected = AROUND[kind]

    def run(block: Block, x: Tensor, *, saved: bool) -> Tensor:
        with region(more, block):
            return checkpoint(block, x, use_reentrant=reentrant) if saved else block(x)

    (bare, wanted), (block, seen) = in_both_ways(run)
    assert bare.seen == [expected]
    assert block.seen == [expected] * 2
    exact(seen, wanted)
    assert not torch.is_autocast_enabled("cpu")


@REENTRANT
@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.filterwarnings("ignore:policy rule")
def test_a_region_inside(kind: str, reentrant: bool) -> None:
    """Law: a region that the checkpointed code opens is opened again alike.

    Under another region too, whose policy the recomputation must not take up.
    """
    more, expected = AROUND[kind]
    outer = ("none", "lean", "torch + op:linear=fp32")[list(AROUND).index(kind) % 3]
    # Without a policy it inherits one.
    more = {"policy": "torch"} | more
    on = outer != "none"
    around = autocast("cpu", enabled=on, policy=outer if on else None)

    def inside(x: Tensor, block: Block) -> Tensor:
        with region({"dtype": BF16} | more, block):
            return block(x)

    def run(block: Block, x: Tensor, *, saved: bool) -> Tensor:
        part = functools.partial(inside, block=block)
        with around:
            return checkpoint(part, x, use_reentrant=reentrant) if saved else part(x)

    (_, wanted), (block, seen) = in_both_ways(run)
    assert block.seen == [expected] * 2
    exact(seen, wanted)


@REENTRANT
@pytest.mark.parametrize("place", ["here", "thread", "region"])
def test_several_regions_one_backward(reentrant: bool, place: str) -> None:
    """Law: each part is computed again under its own policy, or under torch's table.

    The region and the thread in which backward is called have no say.
    """
    block, x = Block(), X.clone().requires_grad_()
    parts: list[tuple[Any, tuple[torch.dtype, ...]]] = [
        (autocast("cpu", policy="lean"), (BF16, BF16, BF16)),
        (autocast("cpu", FP16, policy="torch + op:linear=fp32"), (FP32, FP32, FP32)),
        (autocast("cpu"), (BF16, FP32, BF16)),
        (torch.autocast("cpu", FP16), (FP16, FP32, FP16)),
        (autocast("cpu", FP16, policy="lean"), (FP16, FP16, FP16)),
    ]
    out = x
    for around, _ in parts:
        with around:
            out = checkpoint(block, out, use_reentrant=reentrant)
    dtypes = [expected for _, expected in parts]
    assert block.seen == dtypes

    def backward() -> None:
        out.sum().backward()

    if place == "thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(backward).result()
    else:
        with autocast("cpu", enabled=False) if place == "region" else nullcontext():
            backward()
    assert block.seen == dtypes + dtypes[::-1]


@REENTRANT
def test_a_closed_region_keeps_nothing(reentrant: bool) -> None:
    """Law: the recomputation casts weights anew, and leaves no cast behind."""
    weight = nn.Parameter(torch.eye(4))
    around = autocast("cpu", policy="lean")
    assert not isinstance(around, torch.autocast)
    x = torch.ones(4, requires_grad=True)
    with around:
        out = checkpoint(
            lambda x: weight.mv(x).float().sin(), x, use_reentrant=reentrant
        )
        assert len(around.cache) > 0
    assert len(around.cache) == 0
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert len(around.cache) == 0
    assert weight.grad is not None


def save_casts_and_products(_: object, op: Any, *__: Any, **___: Any) -> Any:
    ops = torch.ops.aten
    saved = {ops.mm.default, ops.addmm.default, ops.mv.default, ops._to_copy.default}
    must = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return must[op not in saved]


def passes(block: Block, x: Tensor, around: Any, *, saved: bool) -> Tensor:
    contexts = functools.partial(
        create_selective_checkpoint_contexts, save_casts_and_products
    )
    with around:
        for _ in range(3):
            if saved:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
    return x


@pytest.mark.parametrize("policy", ["torch", "lean", "lean + op:linear=fp32"])
def test_selective_checkpointing_with_a_cache(policy: str) -> None:
    """Law: with a cache of casts the recomputation finds what was saved.

    A weight is cast in the first pass, and found in the others and in recomputations.
    """
    cache = CastCache()
    region = autocast("cpu", policy=policy, cache=cache)
    (_, wanted), (block, seen) = in_both_ways(functools.partial(passes, around=region))
    exact(seen, wanted)
    assert len(block.seen) == 6
    assert len(set(block.seen)) == 1
    assert (cache.hits > 0) == ("linear=fp32" not in policy)


@torch_only
def test_twin_selective_checkpointing_without() -> None:
    """Law: torch's cache is warm in the forward pass and cold in the recomputation.

    Where this fails, torch was mended.
    """
    region = torch.autocast("cpu")
    with pytest.raises(RuntimeError, match="invocation index"):
        train(functools.partial(passes, around=region, saved=True))

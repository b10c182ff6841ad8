"""Gradients through weights cast once: torch's to the bit, in whatever order."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 -- its usual name
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import halfstep as hs
from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.casting.weight_cache import CastCache

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


def region(cache: CastCache) -> Any:
    """Return a region with a cache."""
    return hs.autocast("cpu", BF16, cache=cache)


class Net(nn.Module):
    """A weight used twice, one used once, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        x = self.twice(self.frozen(self.twice(x)).float().sigmoid())
        out: Tensor = self.once(x.tanh())
        return out.float()


REGIONS = pytest.mark.parametrize(
    "gradients", [None, Fp32GradAccumulator], ids=["plain", "fold"]
)


def pair(gradients: Any) -> list[tuple[Net, Callable[[], Any]]]:
    """Return the same network twice: with torch's regions, and with ours."""
    cache = CastCache(gradients and gradients())
    return [
        (Net(), lambda: torch.autocast("cpu", BF16)),
        (Net(), lambda: region(cache)),
    ]


def in_several_passes(net: Net, make: Callable[[], Any]) -> list[Tensor | None]:
    """Run several backward passes, through each graph and through both."""
    for seed in range(3):
        torch.manual_seed(seed)
        with make():
            loss = net(torch.randn(5, 4)).square().mean()
            other = net(torch.randn(5, 4)).abs().mean()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (loss + other).backward()
    return []


def through_graphs_of_four_contexts(
    net: Net, make: Callable[[], Any]
) -> list[Tensor | None]:
    """Run one backward pass for all."""
    losses = []
    for seed in range(4):
        torch.manual_seed(seed)
        with make():
            losses.append(net(torch.randn(5, 4)).square().mean())
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return []


def twice_differentiated(net: Net, make: Callable[[], Any]) -> list[Tensor | None]:
    """Return gradients of chosen inputs, and run a backward pass through those."""
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    with make():
        loss = net(x).square().sum()
    chosen = [x, net.twice.weight, net.once.bias]
    first = torch.autograd.grad(loss, chosen, create_graph=True)
    torch.stack([grad.square().sum() for grad in first]).sum().backward()  # type: ignore[no-untyped-call]
    return [*first, x.grad]


def recomputed(
    net: Net, make: Callable[[], Any], *, reentrant: bool = False
) -> list[Tensor | None]:
    """Compute the network again in the backward pass."""
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    with make():
        out: Any = checkpoint(net, x, use_reentrant=reentrant)
    (out.square().sum() + net.once.weight.square().sum()).backward()
    return []


PROGRAMS = (
    *(in_several_passes, through_graphs_of_four_contexts, twice_differentiated),
    *(recomputed, functools.partial(recomputed, reentrant=True)),
)


@REGIONS
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_torchs(gradients: Any, program: Callable[..., Any]) -> None:
    """Law: what a program leaves in `.grad` is torch.autocast's, to the bit."""
    found = []
    for net, make in pair(gradients):
        results = program(net, make)
        found.append([*results, *(param.grad for param in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert [grad is None for grad in found[1][-6:]] == [False] * 4 + [True] * 2


def test_recomputation_casts_nothing() -> None:
    """Law: a cache that its owner keeps serves the recomputation too."""
    cache, net = CastCache(), Net()
    with region(cache):
        out: Any = checkpoint(net, torch.ones(2, 4), use_reentrant=False)
    assert (cache.hits, cache.misses) == (2, 6)
    out.sum().backward()
    assert (cache.hits, cache.misses) == (10, 6)


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(saved: bool) -> None:
    """Law: selective checkpointing meets no cast in one pass and not in the other."""
    keep = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: keep)  # type: ignore[no-untyped-call]

    found = []
    for net, make in pair(None):
        with make():
            out: Any = checkpoint(
                net, torch.ones(2, 4), use_reentrant=False, context_fn=contexts
            )
        out.sum().backward()
        found.append([param.grad for param in net.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# What is no weight after all


def test_fake_tensors_are_not_cached() -> None:
    """Law: tracing leaves no fake cast behind, and is given fake ones."""
    cache, layer = CastCache(), nn.Linear(4, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(layer.weight)
        x = mode.from_tensor(torch.ones(2, 4))
        with region(cache):
            assert F.linear(x, fake).dtype == BF16
        assert len(cache) == 0
    with region(cache):
        assert type(layer(torch.ones(2, 4))) is Tensor


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_transforms_are_not_cached() -> None:
    """Law: torch.func's derivatives, over weights and over inputs, are torch's.

    Each weight is used once: torch's cache would sum its uses in 16 bits.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    params = {name: param.detach() for name, param in net.named_parameters()}
    x = torch.linspace(-1, 1, 8).view(2, 4)

    def of_weights(params: Any, x: Tensor) -> Tensor:
        out: Any = torch.func.functional_call(net, params, (x,))
        loss: Tensor = out.float().square().sum()
        return loss

    def of_input(x: Tensor) -> Tensor:
        out: Tensor = net(x).float().square().sum()
        return out

    cache = CastCache(Fp32GradAccumulator())
    found = []
    for make in (lambda: torch.autocast("cpu", BF16), lambda: region(cache)):
        with make():
            by_weight = torch.func.grad(of_weights)(params, x)
            each = torch.func.vmap(torch.func.grad(of_weights), (None, 0))(params, x)
            slope = torch.func.grad(of_input)(x)
            along = torch.func.jvp(of_input, (x,), (torch.ones_like(x),))
        found.append((by_weight, each, slope, along))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert len(cache) == 0


def test_two_threads() -> None:
    """Law: threads that share weights and cache get torch's results, and no error."""
    net, cache = Net(), CastCache()
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(20)]
    with torch.autocast("cpu", BF16):
        outputs = [net(x) for x in inputs]
    expected = torch.autograd.grad(torch.stack(outputs).sum(), inputs)
    barrier = threading.Barrier(2, timeout=30)

    def work(start: int) -> list[Tensor]:
        found: list[Tensor] = []
        for x in inputs[start::2]:
            if barrier.wait() == 0:
                cache.refresh()
            barrier.wait()
            with region(cache):
                out = net(x)
            found += torch.autograd.grad(out.sum(), [x])
        return found

    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(work, (0, 1))
    found = [grad for both in zip(even, odd, strict=True) for grad in both]
    torch.testing.assert_close(found, list(expected), rtol=0, atol=0)
    # Six casts for each of ten renewals, whichever thread came first, and the inputs.
    assert cache.misses == 60 + 20

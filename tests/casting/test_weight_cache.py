"""Weights cast once, never served stale; gradients through them are torch's."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 -- its usual name
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.casting.weight_cache import CastCache

BF16, FP16 = torch.bfloat16, torch.float16


def weight(rows: int = 4, *, learns: bool = True) -> nn.Parameter:
    numbers = torch.arange(1.0, 4 * rows + 1).view(rows, 4)
    return nn.Parameter(numbers, requires_grad=learns)


def counts(cache: CastCache) -> tuple[int, int]:
    return cache.hits, cache.misses


def sums_up(out: Tensor, param: Tensor, expected: float) -> bool:
    out.float().sum().backward()  # type: ignore[no-untyped-call]
    return torch.equal(param.grad, torch.full_like(param, expected))


def region(cache: CastCache, dtype: torch.dtype = BF16) -> Any:
    return hs.autocast("cpu", dtype, cache=cache)


def stepped(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Any], object]:
    def edit(param: nn.Parameter) -> None:
        param.grad = torch.ones_like(param)
        make([param], lr=0.5).step()

    return edit


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "zero": lambda param: param.zero_(),
    "view": lambda param: param[1].fill_(9),
    "detached": lambda param: param.detach().mul_(2),
    "out": lambda param: torch.mul(param, 2, out=param),
    "list": lambda param: torch._foreach_mul_([param], 2.0),
    "data": lambda param: setattr(param, "data", torch.zeros_like(param)),
    "set": lambda param: param.set_(
        torch.zeros(16).untyped_storage(), 0, (4, 4), (4, 1)
    ),
    "sgd": stepped(torch.optim.SGD),
    "foreach": stepped(functools.partial(torch.optim.SGD, foreach=True)),
    "fused sgd": stepped(functools.partial(torch.optim.SGD, fused=True)),
    "fused adamw": stepped(functools.partial(torch.optim.AdamW, fused=True)),
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


def test_older_graphs() -> None:
    """Law: a backward pass that needs an overwritten cast gets torch's error.

    Without a gradient for its input, an older graph still gives its own.
    """
    cache, layer = CastCache(), nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4, requires_grad=True)
    with region(cache):
        old, right = layer(x), layer(torch.full((2, 4), 3.0))
    with torch.no_grad():
        layer.weight.mul_(2)
    cache.refresh()
    with region(cache):
        layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.float().sum().backward()
    assert sums_up(right, layer.weight, 6.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.frozen(self.twice(x)).float().sigmoid())
        out: Tensor = self.once(x.tanh())
        return out.float()


@pytest.mark.parametrize(
    "gradients", [lambda: None, Fp32GradAccumulator], ids=["plain", "fold"]
)
def test_second_derivatives_are_torchs(gradients: Callable[[], Any]) -> None:
    """Law: gradients of gradients, of weights too, are torch.autocast's, to the bit."""
    found, cache = [], CastCache(gradients())
    for make in (lambda: torch.autocast("cpu", BF16), lambda: region(cache)):
        net, x = Net(), torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        with make():
            loss = net(x).square().sum()
        chosen = [x, net.twice.weight, net.once.bias]
        first = torch.autograd.grad(loss, chosen, create_graph=True)
        torch.stack([grad.square().sum() for grad in first]).sum().backward()  # type: ignore[no-untyped-call]
        found.append([*first, x.grad, *(param.grad for param in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert [grad is None for grad in found[1][-6:]] == [False] * 4 + [True] * 2


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

    def loss(params: Any, x: Tensor) -> Tensor:
        out: Any = torch.func.functional_call(net, params, (x,))
        return out.float().square().sum()

    cache = CastCache(Fp32GradAccumulator())
    slope = torch.func.grad(loss, (0, 1))
    found = []
    for make in (lambda: torch.autocast("cpu", BF16), lambda: region(cache)):
        with make():
            each = torch.func.vmap(slope, (None, 0))(params, x)
            along = torch.func.jvp(lambda x: loss(params, x), (x,), (x,))
            found.append((slope(params, x), each, along))
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

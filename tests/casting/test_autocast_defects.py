"""Defects and gaps of torch.autocast, each as a program run under it and under ours.

Where a twin fails, torch was mended.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 -- its usual name
from twins import EYE, Case, Make, autocast_state, linear, outcome, torch_only
from versions import torch_has_lstm

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    """Turn off what a defect of torch leaves on."""
    yield
    torch.set_autocast_enabled("cpu", False)  # noqa: FBT003 -- torch's own
    torch.clear_autocast_cache()


# A weight in two dtypes


def nested_dtype(make: Make) -> object:
    layer = linear()
    with make(BF16):
        seen = [layer(EYE).dtype]
        with make(FP16):
            seen.append(layer(EYE).dtype)
        return [*seen, layer(EYE).dtype]


def two_regions_in_an_island(make: Make) -> object:
    layer, seen = linear(), []
    with make(enabled=False):
        for dtype in (BF16, FP16, BF16):
            with make(dtype):
                seen.append(layer(EYE).dtype)
    return seen


def side_by_side(make: Make) -> object:
    layer = linear()

    def use() -> object:
        return layer(EYE).dtype

    with make(BF16), ThreadPoolExecutor(1) as other:
        seen = [use()]
        region = make(FP16)
        other.submit(region.__enter__).result()
        seen += [other.submit(use).result(), use()]
        other.submit(region.__exit__, None, None, None).result()
        return [*seen, use()]


# A weight that changes inside a region


def stale(edit: Callable[[nn.Linear, Make], None]) -> Callable[[Make], object]:
    """Return a program: does a second forward pass see what was done to the weight?"""

    def program(make: Make) -> object:
        layer = linear()
        with make():
            layer(EYE)
            edit(layer, make)
            seen = layer(EYE)
        now = layer.weight.detach().bfloat16().T
        assert not torch.equal(now, linear().weight.detach().bfloat16().T)
        return torch.equal(seen, now)

    return program


def zeroed(layer: nn.Linear, _: Make) -> None:
    with torch.no_grad():
        layer.weight.zero_()


def zeroed_in_inference(layer: nn.Linear, _: Make) -> None:
    with torch.inference_mode():
        layer.weight.zero_()


def zeroed_by_a_switch(layer: nn.Linear, _: Make) -> None:
    torch.set_grad_enabled(False)
    layer.weight.zero_()
    torch.set_grad_enabled(True)


def zeroed_by_another_thread(layer: nn.Linear, make: Make) -> None:
    """Likewise, by a thread that is in no region."""
    thread = threading.Thread(target=zeroed, args=(layer, make))
    thread.start()
    thread.join()


def stepped(layer: nn.Linear, make: Make) -> None:
    del make
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(EYE).float().sum().backward()
    optimizer.step()


def stepped_in_an_island(layer: nn.Linear, make: Make) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, foreach=True)
    layer(EYE).float().sum().backward()
    with make(enabled=False):
        optimizer.step()


def stepped_in_backward(layer: nn.Linear, make: Make) -> None:
    del make
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
    layer(EYE).float().sum().backward()


WRITES = (
    zeroed,
    zeroed_in_inference,
    zeroed_by_a_switch,
    zeroed_by_another_thread,
)
STEPS = (stepped, stepped_in_an_island, stepped_in_backward)


# An instance entered while it is entered


def entered_twice(make: Make) -> object:
    region = make()
    with region, region:
        assert torch.is_autocast_enabled("cpu")
    return autocast_state()


def recursive(make: Make) -> object:
    def countdown(number: int) -> int:
        assert torch.is_autocast_enabled("cpu")
        return again(number - 1) + 1 if number else 0

    again: Callable[[int], int] = make()(countdown)
    assert again(5) == 5
    return autocast_state()


def shared(make: Make) -> object:
    """Share one instance with a thread that enters first and leaves first."""
    region = make()
    with ThreadPoolExecutor(1) as other:
        other.submit(region.__enter__).result()
        with make(), region:
            other.submit(region.__exit__, None, None, None).result()
            return other.submit(autocast_state).result()


MIXED = (
    "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != "
    "c10::BFloat16"
)
STALE, FRESH = False, True
OFF, ON = (False, BF16, True, 0), (True, BF16, True, 0)

CASES = (
    Case("nested dtype", nested_dtype, MIXED, [BF16, FP16, BF16]),
    Case("regions in an island", two_regions_in_an_island, MIXED, [BF16, FP16, BF16]),
    Case("two threads", side_by_side, MIXED, [BF16, FP16, BF16, BF16]),
    *(Case(edit.__name__, stale(edit), STALE, FRESH) for edit in STEPS + WRITES),
    Case("entered twice", entered_twice, ON, OFF),
    Case("recursive", recursive, ON, OFF),
    Case("shared", shared, ON, OFF),
)
TABLE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@TABLE
def test_it_is_right(case: Case) -> None:
    """Law: under our regions each program gives what is right."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return autocast("cpu", *args, **kwargs)

    assert outcome(case.program, make) == case.right
    assert autocast_state() == OFF


@TABLE
@torch_only
def test_twin_torch_is_wrong(case: Case) -> None:
    """Law: torch's own regions show the defect.

    Where this fails, torch was mended, and the room that mends it here may go.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        return torch.autocast("cpu", *args, **kwargs)

    assert outcome(case.program, make) == case.torchs


@pytest.mark.parametrize("edit", STEPS + WRITES)
def test_a_steered_region_is_right_too(edit: Callable[[nn.Linear, Make], None]) -> None:
    """Law: torch's cache starts anew under a policy; a cache given goes by versions."""
    for more in ({"policy": "lean"}, {"cache": CastCache()}):

        def make(*args: Any, more: Any = more, **kwargs: Any) -> Any:
            return autocast("cpu", *args, **(more | kwargs))

        assert stale(edit)(make) is FRESH


def lstm(make: Make, low: torch.dtype) -> object:
    """Return in which dtype an LSTM runs; its result is right."""
    results = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        layer, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
        with make("cpu", low, enabled=dtype == torch.float32):
            results.append(layer.to(dtype)(x.to(dtype))[0])
    exact, result = results
    # Eight roundings, of the largest number: operands, product, gates, result.
    room = 8 * torch.finfo(low).eps * max(1.0, exact.abs().max().item())
    assert (result.double() - exact).abs().max() < room
    return result.dtype


@pytest.mark.parametrize("low", [BF16, FP16])
def test_an_lstm_runs_on_every_cpu(low: torch.dtype) -> None:
    """Law: lean computes an LSTM in 16 bits, also where oneDNN has none in them."""
    assert lstm(functools.partial(autocast, policy="lean"), low) == low


@pytest.mark.parametrize("low", [BF16, FP16])
@torch_only
def test_twin_torch_asks_onednn_for_an_lstm(low: torch.dtype) -> None:
    """Law: where oneDNN has none, torch fails, and so do our regions by default."""
    for make in (torch.autocast, autocast):
        seen = outcome(functools.partial(lstm, low=low), make)
        refused = isinstance(seen, str) and "LSTM forward propagation" in seen
        assert seen == low if torch_has_lstm(low) else refused


# binary_cross_entropy, which CUDA's table bans

UNSAFE = "unsafe to autocast"


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch believe that there is a CUDA device, for tensors without values."""
    common = "torch.cuda.amp.common.amp_definitely_not_available"
    monkeypatch.setattr(common, lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("low", [BF16, FP16])
def test_cross_entropy_of_probabilities(low: torch.dtype) -> None:
    """Law: lean lets it run, in fp32, in bf16 regions and fp16 ones."""
    chance = torch.full((4,), 0.25, device="cuda", dtype=low)
    with autocast("cuda", low, policy="lean"):
        loss = F.binary_cross_entropy(chance, chance)
    assert loss.dtype == FP32
    for make in (autocast, torch.autocast):
        with make("cuda", low), pytest.raises(RuntimeError, match=UNSAFE):
            F.binary_cross_entropy(chance, chance)


@pytest.mark.gpu
def test_cross_entropy_on_a_device() -> None:
    """Law: lean's result is that of fp32."""
    chance = torch.rand(64, device="cuda").to(BF16).requires_grad_()
    target = torch.rand(64, device="cuda")
    with autocast("cuda", BF16, policy="lean"):
        loss = F.binary_cross_entropy(chance, target)
    exact = F.binary_cross_entropy(chance.float(), target)
    torch.testing.assert_close(loss, exact, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(loss, [chance])
    assert gradient.dtype == BF16

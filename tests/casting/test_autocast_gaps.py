"""What torch's table for the CPU leaves out, under the lean one: small programs.

Each is run under torch.autocast, which shows the gap, and under a lean region of ours.
Where a twin fails, torch was mended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 -- its usual name
from twins import Make, outcome, torch_only
from versions import torch_has_lstm

from halfstep.casting.autocast_mode import autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def computed(
    run: Callable[[torch.dtype], Any], low: torch.dtype
) -> Callable[[Make], object]:
    """Return a program: in which dtype does it run, and is the result right?

    Args:
        run: Gives a result, and the same in float64 when asked for float64.
        low: The region's dtype.
    """

    def program(make: Make) -> object:
        exact = run(torch.float64)
        with make(low):
            result = run(torch.float32)
        assert result.isfinite().all()
        # Eight roundings, of the largest number: operands, product, gates, result.
        room = 8 * torch.finfo(low).eps * max(1.0, exact.abs().max().item())
        assert (result.double() - exact).abs().max() < room
        return result.dtype

    return program


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return the same numbers each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind: type[nn.Module], *shape: int) -> Callable[[torch.dtype], Any]:
    """Return a run of a recurrent layer or cell."""

    def run(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        out = kind(4, 4).to(dtype)(drawn(*shape).to(dtype))
        return out[0] if isinstance(out, tuple) else out

    return run


@pytest.mark.parametrize("low", [BF16, FP16])
def test_an_lstm_runs_on_every_cpu(low: torch.dtype) -> None:
    """Law: lean computes an LSTM in 16 bits, also where oneDNN has none in them."""
    program = computed(layer(nn.LSTM, 3, 2, 4), low)
    assert program(lambda low: autocast("cpu", low, policy="lean")) == low


@pytest.mark.parametrize("low", [BF16, FP16])
@torch_only
def test_twin_torch_asks_onednn_for_an_lstm(low: torch.dtype) -> None:
    """Law: where oneDNN has none, torch fails, and so do our regions by default."""
    program = computed(layer(nn.LSTM, 3, 2, 4), low)
    for make in (torch.autocast, autocast):
        seen = outcome(program, lambda low, make=make: make("cpu", low))
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

"""16-bit products in fp32: the exact ones, rounded once, and only where they belong."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import jobs
from halfstep.machine import hardware, matmul_emulation


class Running(TorchDispatchMode):
    """Notes in which formats products really run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        name = func.overloadpacket.__name__
        if (
            "mm" in name
            or name in {"dot", "mv"}
            or "attention" in name
            or "conv" in name
        ):
            self.products.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def drawn(*shape: int, seed: int) -> Tensor:
    some = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=some) * 1.5 + 0.5
    sign = torch.randint(0, 2, shape, generator=some) * 2 - 1
    return (size * sign).half()


A, B = drawn(12, 48, seed=1), drawn(48, 20, seed=2)
A3, B3 = drawn(3, 12, 48, seed=3), drawn(3, 48, 20, seed=4)
C, C3, ROW = drawn(12, 20, seed=5), drawn(3, 12, 20, seed=6), drawn(20, seed=7)

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (A, B)),
    "addmm": (torch.addmm, (C, A, B)),
    "addmm of a row": (torch.addmm, (ROW, A, B)),
    "addmm with factors": (partial(torch.addmm, beta=2, alpha=0.5), (C, A, B)),
    "bmm": (torch.bmm, (A3, B3)),
    "baddbmm": (torch.baddbmm, (C3, A3, B3)),
    "matmul": (torch.matmul, (A3, B3)),
    "matmul of one matrix": (torch.matmul, (A3, B)),
    "linear": (functional.linear, (A3, B.t().contiguous(), ROW)),
    "convolution": (
        functional.conv1d,
        (drawn(2, 4, 9, seed=8), drawn(5, 4, 3, seed=9)),
    ),
}
"""Name -> operation and operands; no sum has more than 49 terms."""


def forward_backward(
    call: Callable[..., Tensor], given: tuple[Tensor, ...], way: Tensor
) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = call(*leaves)
    out.backward(way)  # type: ignore[no-untyped-call]
    grads = [leaf.grad for leaf in leaves if leaf.dim() > 1]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def assert_rounded_once(mine: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Hold that a result is the exact one within half an ulp of its format.

    Args:
        mine: In 16 bits.
        exact: In fp64.
        terms: The sum of the absolute terms: each of at most 64 additions in fp32
            errs by half an ulp of no more than that.
    """
    there, info = exact.numpy(), torch.finfo(mine.dtype)
    binade = np.log2(np.maximum(np.abs(there), info.smallest_normal))
    half = np.exp2(np.floor(binade)) * info.eps / 2
    summing = 64 * 2.0**-24 * terms.numpy()
    assert (np.abs(mine.double().numpy() - there) <= half + summing).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype) -> None:
    """Law: 16-bit products are the exact ones, rounded once; gradients are too."""
    call, operands = PRODUCTS[name]
    given = tuple(each.to(dtype) for each in operands)
    way = drawn(*call(*(each.float() for each in given)).shape, seed=8).to(dtype)
    with Running() as ran, matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
        mine = forward_backward(call, given, way)
    assert ran.products == {torch.float32}
    doubles = tuple(each.double() for each in given)
    exact = forward_backward(call, doubles, way.double())
    sizes = tuple(each.abs() for each in doubles)
    terms = forward_backward(call, sizes, way.double().abs())
    for got, there, most in zip(mine, exact, terms, strict=True):
        assert got.dtype is dtype
        assert_rounded_once(got, there, most)


@pytest.mark.parametrize("name", PRODUCTS)
def test_mixed_formats_are_refused(name: str) -> None:
    """Law: what torch refuses for its mixed formats is refused as before."""
    call, given = PRODUCTS[name]
    for place in range(len(given)):
        mixed = [one.float() if n == place else one for n, one in enumerate(given)]
        with (
            matmul_emulation.Fp32Matmuls(),
            pytest.raises(RuntimeError, match=r"type|Half"),
        ):  # type: ignore[no-untyped-call]
            call(*mixed)


def test_gradients_that_nobody_wants() -> None:
    """Law: of a convolution over a batch that does not learn, the weight's is right."""
    weight = drawn(5, 4, 3, seed=9).requires_grad_()
    with matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
        functional.conv1d(A.view(2, 4, 72), weight).sum().backward()  # type: ignore[no-untyped-call]
    exact = A.view(2, 4, 72).double().unfold(2, 3, 1).sum((0, 2)).expand(5, 4, 3)
    assert weight.grad is not None
    terms = A.view(2, 4, 72).double().abs().unfold(2, 3, 1).sum((0, 2)).expand(5, 4, 3)
    half = np.spacing(exact.abs().half().numpy()).astype(np.float64) / 2
    # 140 additions in fp32.
    assert (
        np.abs(weight.grad.double().numpy() - exact.numpy())
        <= half + 140 * 2.0**-24 * terms.numpy()
    ).all()


@pytest.mark.parametrize(
    ("last", "result"),
    [(-299.0, 300.0), (-82.0, 65400.0), (-81.0, math.inf), (300.0, math.inf)],
)
def test_overflow(last: float, result: float) -> None:
    """Law: sums may pass 65504 on their way; a result that does is inf.

    90000 - 300 x 82 is 65400, which rounds to 65408; 65700 rounds to no number.
    """
    left = torch.tensor([[300.0, 300.0]]).half()
    right = torch.tensor([[300.0], [last]]).half()
    with matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
        out = left @ right
    assert out.item() == np.float64(result).astype(np.float16)


def attention(mask: Tensor | None) -> Callable[..., Tensor]:
    return partial(functional.scaled_dot_product_attention, attn_mask=mask)


@pytest.mark.parametrize("masked", [True, False])
def test_attention(*, masked: bool) -> None:
    """Law: attention is that of fp32, rounded once; so are its gradients.

    Of fp64's, the result is within half an ulp; backward meets the rounded result,
    which moves gradients by as much as half an ulp of each of its 16 numbers.
    """
    q, k, v, way = (drawn(2, 3, 7, 16, seed=10 + n) for n in range(4))
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.float16) if masked else None
    if mask is not None:
        mask[1, :, :, 4:] = -math.inf
    with Running() as ran, matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
        mine = forward_backward(attention(mask), (q, k, v), way)
    assert ran.products == {torch.float32}
    wide = None if mask is None else mask.float()
    dtypes = (torch.float32, torch.float64)
    given = [tuple(each.to(dtype) for each in (q, k, v)) for dtype in dtypes]
    out = forward_backward(attention(wide), given[0], way.float())[0]
    assert torch.equal(mine[0], out.half())
    double = None if mask is None else mask.double()
    exact = forward_backward(attention(double), given[1], way.double())
    # Scores of 16 products, and 7 shares of numbers up to 2, in fp32.
    assert mine[0].dtype is torch.float16
    assert_rounded_once(mine[0], exact[0], torch.full_like(exact[0], 2 * 16))
    for got, there in zip(mine[1:], exact[1:], strict=True):
        assert got.dtype is torch.float16
        # 16 x 2 x half an ulp of 2 in the sum that each share's gradient loses; keys
        # and queries of at most 2 carry it on, and all is divided by 4.
        off = 16 * 2 * 2.0**-10 * 2 / 4 + 2.0**-10 * there.abs()
        assert ((got.double() - there).abs() <= off).all()


def test_logarithms_stay_wide() -> None:
    """Law: of attention, the logarithm of the sums stays in fp32."""
    q = drawn(1, 1, 5, 8, seed=20)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
        out, sums = attend(q, q, q)
    exact = (q.double() @ q.double().mT / math.sqrt(8)).logsumexp(-1)
    assert (out.dtype, sums.dtype) == (torch.float16, torch.float32)
    # 8 products, a division, exp, 5 terms and log: some 32 roundings of at most 32.
    assert sums.double().numpy() == pytest.approx(exact.numpy(), abs=32 * 32 * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_formats(dtype: torch.dtype) -> None:
    """Law: what has no 16 bits runs as it does without, to the bit."""
    for call, given in PRODUCTS.values():
        others = tuple(each.to(dtype) for each in given)
        with Running() as ran, matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
            mine = call(*others)
        assert ran.products == {dtype}
        assert torch.equal(mine, call(*others))


def test_nothing_is_left_behind() -> None:
    """Law: after the region, be it by an error, fp16 runs in fp16; operands stay."""
    kept = A.clone()

    def fail() -> None:
        with matmul_emulation.Fp32Matmuls():  # type: ignore[no-untyped-call]
            torch.mm(A, B)
            torch.mm(A, A)

    with pytest.raises(RuntimeError, match="shapes"):
        fail()
    with Running() as ran:
        torch.mm(A, B)
    assert ran.products == {torch.float16}
    assert torch.equal(A, kept)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", None])
@pytest.mark.parametrize("slow", [True, False])
def test_where_it_is_used(
    *, monkeypatch: pytest.MonkeyPatch, dtype: str | None, slow: bool
) -> None:
    """Law: a run is in it if it is of fp16 and the machine has none."""
    inside = []

    def run(_: dict[str, Any]) -> None:
        inside.append(torch._C._len_torch_dispatch_stack())
        message = "planted"
        raise jobs.Diverged(message)

    monkeypatch.setattr(jobs, "run", run)
    monkeypatch.setenv("HALFSTEP_CACHE", "")  # a run sets its own
    monkeypatch.setattr(
        matmul_emulation, "is_needed", lambda dtype, _: slow and dtype != "fp32"
    )
    jobs.run_once({"dtype": dtype, "device": "cpu"})
    assert inside == [int(slow and dtype == "fp16")]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: only a CPU needs it, and a format below half of fp32's rate there."""
    rates = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.49}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_: rates)
    for device in ("cpu", "cuda"):
        needed = {name for name in rates if matmul_emulation.is_needed(name, device)}
        assert needed == ({"fp16"} if device == "cpu" else set())

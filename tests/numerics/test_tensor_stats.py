"""Statistics of tensors, against a numpy float64 twin on the worst that there is."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bit_patterns import EDGES, HUGE, WIDTHS, Wide, tensors, wide_of
from hypothesis import given
from no_waiting import NoWaiting
from torch import Tensor

from halfstep._torch import async_read
from halfstep.errors import UserError
from halfstep.numerics import tensor_counts
from halfstep.numerics.formats import BF16, FP16, FP32, FloatFormat
from halfstep.numerics.tensor_stats import measure
from halfstep.numerics.tensor_summary import TensorSummary

# The twin


def cast_by_numpy(values: Wide, form: FloatFormat) -> Wide:
    """Return what a format makes of numbers. Like torch, fp64 goes by way of fp32."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        if form is FP32:
            return single.astype(np.float64)
        if form is FP16:
            return single.astype(np.float16).astype(np.float64)
        bits = single.view(np.uint32).astype(np.uint64)
        bits = bits + 0x7FFF + ((bits >> 16) & 1) & 0xFFFF0000  # to nearest, even
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def by_numpy(tensor: Tensor, casts: tuple[FloatFormat, ...]) -> dict[str, Any]:
    """Return what `TensorStats.data` must be."""
    wide = wide_of(tensor)
    size = np.abs(wide)
    good = size[np.isfinite(size)]
    nonzero = good[good > 0]
    tiny = torch.finfo(tensor.dtype).smallest_normal
    exponents: dict[str, int] = {}
    for value in nonzero[nonzero >= 2.0**-1022].tolist():
        at = str(math.frexp(value)[1] - 1)
        exponents[at] = exponents.get(at, 0) + 1
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "count": len(wide),
        "zeros": int((wide == 0).sum()),
        "subnormals": int((nonzero < tiny).sum()),
        "infs": int(np.isinf(wide).sum()),
        "nans": int(np.isnan(wide).sum()),
        "amax": float(good.max(initial=0.0)),
        "amin": float(nonzero.min()) if len(nonzero) else 0.0,
        "exponents": exponents,
        "casts": {form.name: losses_by_numpy(good, form) for form in casts},
    }


def losses_by_numpy(good: Wide, form: FloatFormat) -> dict[str, float]:
    low = cast_by_numpy(good, form)
    most = tensor_counts.LARGEST
    signal = np.minimum(good, most)
    with np.errstate(under="ignore"):
        errors = np.minimum(good - np.minimum(low, form.max), most)
        return {
            "flushed": int(((low == 0) & (good > 0)).sum()),
            "subnormal": int(((low > 0) & (low < form.min_normal)).sum()),
            "saturated": int(np.isinf(low).sum()),
            "signal": math.fsum(signal**2),
            "noise": math.fsum(errors**2),
        }


def assert_same(ours: dict[str, Any], twins: dict[str, Any]) -> None:
    """Compare all; counts and ends to the bit, sums to fp64's last few."""
    ours, twins = dict(ours), dict(twins)
    mine, others = ours.pop("casts"), twins.pop("casts")
    ours["exponents"] = dict(sorted(ours["exponents"].items()))
    twins["exponents"] = dict(sorted(twins["exponents"].items()))
    assert ours == twins
    assert mine.keys() == others.keys()
    for name, losses in mine.items():
        for word in ("signal", "noise"):
            # An error of a number that overflows is taken in the number's own dtype.
            near = pytest.approx(others[name].pop(word), rel=2.0**-22, abs=0)
            assert losses.pop(word) == near, (name, word)
        assert losses == others[name], name


ALL = (FP16, BF16, FP32)
ONE = torch.ones(1)


@given(tensors())
def test_twin(tensor: Tensor) -> None:
    """Law: all that is measured is what numpy finds in fp64, whatever the bits."""
    assert_same(measure(tensor, ALL).data(), by_numpy(tensor, ALL))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_edges(dtype: torch.dtype) -> None:
    """Law: so it does at each edge of each format."""
    for value in [*HUGE, *(-value for value in HUGE)]:
        tensor = torch.tensor(value, dtype=torch.float64).to(dtype)
        assert_same(measure(tensor, ALL).data(), by_numpy(tensor, ALL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern(dtype: torch.dtype) -> None:
    """Law: so it does for all numbers of 16 bits at once, NaNs of all payloads too."""
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    stats = measure(tensor, ALL)
    assert_same(stats.data(), by_numpy(tensor, ALL))
    assert stats.subnormals == stats.data()["subnormals"]
    assert not stats.finite


@pytest.mark.parametrize("dtype", WIDTHS)
def test_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a tensor of many pieces, the last one short, is one tensor."""
    monkeypatch.setattr(tensor_counts, "_CHUNK_NUMEL", {True: 64})
    monkeypatch.setattr(tensor_counts, "_CHUNK_NUMEL_16BIT", 64)
    spread = torch.randn(1000, dtype=torch.float64) * 2.0 ** torch.randint(
        -40, 20, (1000,)
    )
    tensor = spread.to(dtype)
    assert_same(measure(tensor).data(), by_numpy(tensor, (FP16, BF16)))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_empty(dtype: torch.dtype) -> None:
    """Law: of no numbers there is nothing, and nothing is lost."""
    stats = measure(torch.empty(0, 3, dtype=dtype))
    assert (stats.count, stats.amax, stats.amin, stats.exponents) == (0, 0.0, 0.0, {})
    assert stats.cast("fp16").sqnr == stats.headroom("fp16") == math.inf
    assert stats.underflow("fp16") == 0
    assert stats.finite


def test_without_bincount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where reading the largest bin would wait, the same is counted."""
    drawn = torch.randn(999)
    found = [measure(drawn.to(dtype)).data() for dtype in WIDTHS]
    monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
    assert [measure(drawn.to(dtype)).data() for dtype in WIDTHS] == found


@pytest.mark.parametrize("dtype", WIDTHS)
def test_nothing_waits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: measuring reads no number; the first property does."""
    monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
    with NoWaiting():  # type: ignore[no-untyped-call]
        stats = measure(torch.randn(50).to(dtype))
    assert stats.count == 50


def test_the_tensor_stays() -> None:
    """Law: measuring changes nothing, and takes no part in the graph."""
    tensor = torch.randn(9, requires_grad=True)
    before = tensor.detach().clone()
    stats = measure(tensor * 1)
    assert not stats.counted.sums.requires_grad
    assert torch.equal(tensor, before)
    assert tensor._version == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_and_sparse() -> None:
    """Law: a complex number counts as two, a sparse tensor as what it stores.

    Numbers that torch negates only when it reads them are measured, too.
    """
    parts = torch.tensor([[0.0, 1.0], [math.inf, 3.0]])
    stats = measure(torch.view_as_complex(parts).conj())
    assert stats.data() == measure(parts).data()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]),
        torch.tensor([1.0, 2.0, 4.0]),
        (9,),
        check_invariants=True,
    )
    assert measure(sparse).data() == measure(torch.tensor([3.0, 4.0])).data()
    parts = torch.tensor([[1.0, 2.0], [0.0, -3.0]], dtype=torch.float16)
    stats = measure(torch.view_as_complex(parts).conj().imag)
    assert (stats.count, stats.amin, stats.amax) == (2, 2.0, 3.0)


# Derived


def test_sqnr() -> None:
    """Law: SQNR of Gaussian numbers is that of the formats' bits; lost ones have 0."""
    drawn = torch.randn(2**16)
    assert measure(drawn).cast(BF16).sqnr == pytest.approx(55.6, abs=0.2)
    assert measure(drawn).cast(FP16).sqnr == pytest.approx(73.6, abs=0.2)
    assert measure(drawn.bfloat16()).cast("bf16").sqnr == math.inf
    assert measure(drawn * 1e-12).cast("fp16").sqnr == 0
    assert measure(torch.tensor([1e-300], dtype=torch.float64)).cast(BF16).sqnr == 0
    # What overflows counts as the largest number: far off, but not endlessly.
    assert measure(torch.tensor([131008.0])).cast("fp16").sqnr == pytest.approx(
        6.02, abs=0.01
    )


def test_underflow_and_headroom() -> None:
    """Law: both are what casting the scaled tensor shows, away from exact halves."""
    drawn = torch.randn(4096) * 2.0 ** torch.randint(-40, 0, (4096,))
    stats = measure(drawn)
    for scale in (1.0, 2.0**7, 2.0**15, 2.0**-3):
        lost = ((drawn * scale).half() == 0).double().mean().item()
        assert stats.underflow("fp16", scale) == pytest.approx(lost)
        room = stats.headroom(FP16, scale)
        fits = stats.amax * scale * 2.0 ** np.floor(room)
        assert fits <= 65504 < 2 * fits
    assert measure(torch.tensor([65504.0])).headroom("fp16") == 0
    assert measure(torch.tensor([65504.0])).headroom("fp16", 2.0) == -1


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("torch.int64 has no statistics", lambda: measure(torch.arange(3))),
        ("a cast to fp16 .* only bf16", lambda: measure(ONE, ("bf16",)).cast("fp16")),
        ("dtype='fp8' is not a format", lambda: measure(ONE, ("fp8",))),
        ("scale=3.0 must be a power of", lambda: measure(ONE).underflow("fp16", 3.0)),
        ("scale=0.0 must be above 0", lambda: measure(ONE).headroom("fp16", 0.0)),
    ],
)
def test_rejected(text: str, call: Callable[[], object]) -> None:
    """Law: what cannot be measured is rejected, with what would be right."""
    with pytest.raises(UserError, match=text):
        call()


@given(tensors())
def test_json(tensor: Tensor) -> None:
    """Law: a summary read from JSON holds what was measured."""
    stats = measure(tensor)
    data = stats.data()
    summary = TensorSummary.from_data(json.loads(json.dumps(data, allow_nan=False)))
    for name in ("count", "zeros", "infs", "nans", "amax", "exponents"):
        assert getattr(summary, name) == getattr(stats, name)
    for name, sqnr in summary.casts.items():
        loss = stats.cast(name)
        signal, noise = map(np.log10, (loss.signal or np.nan, loss.noise or 1.0))
        expected = 10 * (signal - noise) if loss.noise else math.inf
        assert sqnr == (pytest.approx(expected) if loss.signal else None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", WIDTHS)
def test_cuda(dtype: torch.dtype) -> None:
    """Law: a GPU counts the same, and nothing waits for it."""
    tensor = torch.tensor(EDGES * 999, dtype=dtype)
    there = tensor.cuda()
    measure(there)  # tables are copied once
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = measure(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(stats.data(), measure(tensor).data())

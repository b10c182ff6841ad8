"""What the lean table claims of torch's kernels, tried on the CPU.

The oracle of a 16-bit kernel is the fp32 kernel on the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from halfstep.casting.dispatch_kernels import overload_of
from halfstep.policy.op_tables import FOLLOW, FP32, FP32_RESULT, LEAN, PROMOTE, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable

LOWS = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)


def cast(values: Iterable[Any], dtype: torch.dtype) -> list[Any]:
    """Return arguments with floating tensors of that dtype, the first as a leaf."""
    found = [
        value.detach().to(dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in values
    ]
    found[0].requires_grad_()
    return found


def first(value: Any) -> Tensor:
    """Return an operation's first result."""
    found: Tensor = value[0] if isinstance(value, tuple) else value
    return found


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    # Sums over thousands of numbers, and more pixels than 16 bits count: a kernel
    # that added or counted in 16 bits would be far off.
    LONG, WEIGHT = torch.randn(4, 4096), torch.randn(4096)
    SERIES, PICTURE = torch.randn(1, 2, 600), torch.randn(1, 8, 33, 300)
    VOLUME, GAIN = torch.randn(1, 2, 7, 8, 300), torch.randn(8)
    GRID, GRID3 = torch.rand(1, 5, 6, 2), torch.rand(1, 2, 3, 4, 3)
    LITTLE = torch.randn(1, 2, 6, 6, 6)
    SAMPLES2, SAMPLES3 = torch.rand(1, 8, 2), torch.rand(1, 2, 3)

SUMS = {
    "layer_norm": (LONG, [4096], WEIGHT, WEIGHT),
    "native_layer_norm": (LONG, [4096], WEIGHT, WEIGHT, 1e-5),
    "rms_norm": (LONG, [4096], WEIGHT),
    "group_norm": (PICTURE, 2, GAIN, GAIN),
    "softmax.int": (LONG, 1),
}
PIXELS = {
    "upsample_nearest1d": (SERIES, [1301]),
    "_upsample_nearest_exact1d": (SERIES, [1301]),
    "upsample_linear1d": (SERIES, [1301], False),
    "upsample_nearest2d": (PICTURE, [40, 601]),
    "_upsample_nearest_exact2d": (PICTURE, [40, 601]),
    "upsample_bilinear2d": (PICTURE, [40, 601], False),
    "upsample_bicubic2d": (PICTURE, [40, 601], False),
    "upsample_nearest3d": (VOLUME, [9, 9, 601]),
    "_upsample_nearest_exact3d": (VOLUME, [9, 9, 601]),
    "upsample_trilinear3d": (VOLUME, [9, 9, 601], False),
}


def test_every_follower_is_tried() -> None:
    """Law: nothing that follows is left out below."""
    follow = {name for name, row in LEAN["cpu"].items() if row.category == FOLLOW}
    assert follow == SUMS.keys() | PIXELS.keys()


def twins(operation: str, given: Any, low: torch.dtype) -> Iterable[tuple[Any, Any]]:
    """Return result and gradients in 16 bits, each with its twin in fp32."""
    lows = cast(given, low)
    wides = cast(lows, torch.float32)
    ours, exact = (
        first(overload_of(operation)(*lows)),
        first(overload_of(operation)(*wides)),
    )
    assert ours.dtype == low
    seed = torch.randn_like(ours)
    (grad,) = torch.autograd.grad(ours, lows[0], seed)
    (exact_grad,) = torch.autograd.grad(exact, wides[0], seed.float())
    assert grad.dtype == low
    return (ours, exact), (grad, exact_grad)


@LOWS
@pytest.mark.parametrize("operation", SUMS)
def test_kernels_accumulate_in_fp32(operation: str, low: torch.dtype) -> None:
    """Law: result and gradient are as good as fp32's, rounded once.

    Rounding to nearest errs by half an ulp; one is left for what it meets halfway.
    Gradients are differences, so their error is measured against their size.
    """
    (ours, exact), (grad, exact_grad) = twins(operation, SUMS[operation], low)
    ulp = torch.finfo(low).eps
    torch.testing.assert_close(ours.float(), exact, rtol=ulp, atol=1e-5)
    assert (grad - exact_grad).norm() < ulp * exact_grad.norm()


@LOWS
@pytest.mark.parametrize("operation", PIXELS)
def test_resampling_stays_within_an_ulp(operation: str, low: torch.dtype) -> None:
    """Law: a resampled picture errs by an ulp of its largest pixel at most.

    Kernels may hold the weights of neighbours in 16 bits, not the coordinates.
    """
    (ours, exact), (grad, exact_grad) = twins(operation, PIXELS[operation], low)
    ulp = torch.finfo(low).eps
    assert (ours - exact).abs().max() < ulp * exact.abs().max()
    assert (grad - exact_grad).norm() < ulp * exact_grad.norm()


def test_the_oracle_notices() -> None:
    """Law: sums in 16 bits would not pass: softmax by hand errs by many ulps."""
    exponentials = LONG.half().exp()
    total = torch.zeros(4, dtype=torch.float16)
    for column in exponentials.T:
        total += column
    by_hand = exponentials / total[:, None]
    exact = LONG.half().float().softmax(1)
    ulp = torch.finfo(torch.float16).eps
    assert (by_hand - exact).norm() > ulp * exact.norm()


INSIDE = torch.arange(216).reshape(6, 6, 6).repeat(1, 2, 1, 1, 1)
AS_CALLED = {
    "adaptive_avg_pool3d": (LITTLE, [2, 2, 2]),
    "adaptive_max_pool3d": (LITTLE, [2, 2, 2]),
    "fractional_max_pool2d": (PICTURE, [2, 2], [2, 2], SAMPLES2),
    "fractional_max_pool3d": (LITTLE, [2, 2, 2], [2, 2, 2], SAMPLES3),
    "max_pool3d": (LITTLE, [2, 2, 2]),
    "max_unpool2d": (LITTLE[0, :, 0], INSIDE[0, :, 0], [9, 9]),
    "max_unpool3d": (LITTLE, INSIDE, [6, 6, 6], [1, 1, 1], [0, 0, 0]),
    "reflection_pad1d": (SERIES, [1, 1]),
    "reflection_pad2d": (PICTURE, [1, 1, 1, 1]),
    "replication_pad1d": (SERIES, [1, 1]),
    "replication_pad2d": (PICTURE, [1, 1, 1, 1]),
    "replication_pad3d": (LITTLE, [1] * 6),
    "fake_quantize_per_tensor_affine": (LONG, 0.5, 0, -8, 7),
}
GRIDS = {
    "grid_sampler": (PICTURE, GRID, 0, 0, False),
    "grid_sampler_2d": (PICTURE, GRID, 0, 0, False),
    "grid_sampler_3d": (LITTLE, GRID3, 0, 0, False),
}


@LOWS
@pytest.mark.parametrize("operation", [*AS_CALLED, *GRIDS])
def test_kernels_that_there_are(operation: str, low: torch.dtype) -> None:
    """Law: what torch's table runs in fp32 on CPU and lean does not has its kernels."""
    assert TABLES["cpu"][operation].category == FP32
    row = LEAN["cpu"].get(operation)
    assert (row and row.category) == (PROMOTE if operation in GRIDS else None)
    given = cast((AS_CALLED | GRIDS)[operation], low)
    found = first(overload_of(operation)(*given))
    assert found.dtype == low
    (grad,) = torch.autograd.grad(found.sum(), given[0])
    assert grad.dtype == low


def test_no_row_was_given_up_untried() -> None:
    """Law: lean leaves out of torch's table for the CPU only what is tried above."""
    assert TABLES["cpu"].keys() - LEAN["cpu"] == AS_CALLED.keys()


@LOWS
@pytest.mark.parametrize(
    ("operation", "given"),
    [
        ("avg_pool3d", (LITTLE, [2, 2, 2])),
        ("_upsample_bilinear2d_aa", (PICTURE, [9, 9], False)),
        ("_upsample_bicubic2d_aa", (PICTURE, [9, 9], False)),
        ("_grid_sampler_2d_cpu_fallback", (PICTURE, GRID, 0, 0, False)),
        ("linalg_matrix_norm", (LONG[:, :4], 2)),
        ("linalg_matrix_norm.str_ord", (LONG[:, :4], "nuc")),
        ("cdist", (LONG, LONG)),
        ("fft_fft", (WEIGHT,)),
        ("quantile.scalar", (WEIGHT, 0.5)),
        ("inverse", (LONG[:, :4],)),
    ],
)
def test_kernels_that_there_are_not(
    operation: str, given: Any, low: torch.dtype
) -> None:
    """Law: lean runs these in fp32, for in 16 bits they fail on CPU."""
    assert LEAN["cpu"][operation].category == FP32
    with pytest.raises((RuntimeError, NotImplementedError)):
        overload_of(operation)(*cast(given, low))
    overload_of(operation)(*given)


@LOWS
def test_fp32_results_without_a_copy(low: torch.dtype) -> None:
    """Law: each operation with an fp32 result takes 16 bits and the word for it."""
    named: dict[str, tuple[str, tuple[Any, ...]]] = {
        "norm.Scalar": ("norm.ScalarOpt_dtype", (2,)),
        "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (2, [0], False)),
        "sum.dim_IntList": ("sum.dim_IntList", ([0],)),
    }
    for dimensional in ("prod.dim_int", "cumprod", "cumsum", "log_softmax.int"):
        named[dimensional] = (dimensional, (0,))
    for operation, row in LEAN["cpu"].items():
        if row.category == FP32_RESULT:
            name, more = named.get(operation, (operation, ()))
            found = overload_of(name)(LONG.to(low), *more, dtype=torch.float32)
            assert found.dtype == torch.float32, operation

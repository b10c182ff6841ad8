"""The tables against torch: its dispatcher, and its kernels in 16 bits on the CPU.

The oracle of a 16-bit kernel is the fp32 kernel on the same numbers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from op_arguments import WITH_DTYPE, arguments
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.casting.dispatch_kernels import KEYS, overload_of
from halfstep.policy import decide, op_tables
from halfstep.policy.op_tables import (
    BANNED,
    FOLLOW,
    FP32,
    FP32_RESULT,
    LEAN,
    LOW,
    NAMED,
    TABLES,
)

DEVICES = pytest.mark.parametrize("device", KEYS)


# torch's


@DEVICES
def test_names_are_those_registered(device: str) -> None:
    """Law: the table holds exactly the operations that torch registers for casting.

    Without those on named dimensions: torch 2.9 casts them, later versions do not.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    found = [n.removeprefix("aten::") for n in registered if n.startswith("aten::")]
    # Only builds with cuDNN register it; it re-packs weights, and has no row.
    found = [name for name in found if "imname" not in name and ".names_" not in name]
    assert TABLES[device].keys() == {*found} - {"_cudnn_rnn"}


@pytest.mark.parametrize("base", NAMED)
@DEVICES
def test_rows_say_why_and_where(device: str, base: str) -> None:
    """Law: a reason is a phrase that fits a line, the source a file or lean itself."""
    files = {f"aten/src/ATen/autocast_mode.{suffix}" for suffix in ("h", "cpp")}
    for operation, row in NAMED[base][device].items():
        assert 20 < len(row.reason) <= 80, operation
        assert not row.reason.endswith("."), operation
        assert row.source in (files if base == "torch" else {"halfstep lean"})


# Lean

CPU_ALONE = {
    "_transformer_encoder_layer_fwd",
    *("lstm.input", "lstm.data"),
    *("gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data"),
    *("rnn_relu.input", "rnn_relu.data"),
}


def test_lean_is_the_same_everywhere() -> None:
    """Law: one table for all, but for whole layers on CPU and one gap of MPS.

    Batch and instance norm run as called: their weights stay fp32 themselves.
    """
    assert LEAN["cuda"] == LEAN["xpu"]
    assert LEAN["cpu"].keys() - LEAN["cuda"] == CPU_ALONE
    assert LEAN["cpu"].items() >= LEAN["cuda"].items()
    gap = "conv_transpose3d.input"
    assert LEAN["cuda"] | {gap: LEAN["mps"][gap]} == LEAN["mps"]
    assert (LEAN["cuda"][gap].category, LEAN["mps"][gap].category) == (LOW, FP32)
    assert not {"batch_norm", "instance_norm"} & LEAN["mps"].keys()
    known = {*torch._C._dispatch_get_all_op_names()}
    assert {f"aten::{name}" for name in LEAN["cpu"]} <= known


# Modules


def test_modules_name_real_operations() -> None:
    """Law: each type is torch's, and its operation is aten's, overload included."""
    for name, operation in op_tables.OPERATION_OF.items():
        assert issubclass(getattr(nn, name), nn.Module)
        packet, _, overload = operation.partition(".")
        assert (overload or "default") in getattr(torch.ops.aten, packet).overloads()


LOWS = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)


def cast(values: Iterable[Any], dtype: torch.dtype) -> list[Any]:
    found = [
        value.detach().to(dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in values
    ]
    found[0].requires_grad_()
    return found


def first(value: Any) -> Tensor:
    found: Tensor = value[0] if isinstance(value, tuple) else value
    return found


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    # Sums over thousands of numbers, and more pixels than 16 bits count: a kernel
    # that added or counted in 16 bits would be far off.
    LONG, WEIGHT = torch.randn(4, 4096), torch.randn(4096)
    SERIES, PICTURE = torch.randn(1, 2, 600), torch.randn(1, 8, 33, 300)
    VOLUME, GAIN = torch.randn(1, 2, 7, 8, 300), torch.randn(8)
    GRID = torch.rand(1, 5, 6, 2)
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


@LOWS
@pytest.mark.parametrize("operation", AS_CALLED)
def test_kernels_that_there_are(operation: str, low: torch.dtype) -> None:
    """Law: what torch's table runs in fp32 on CPU and lean does not has its kernels."""
    assert TABLES["cpu"][operation].category == FP32
    given = cast(AS_CALLED[operation], low)
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
def test_a_grid_is_computed_and_sampled_in_fp32(low: torch.dtype) -> None:
    """Law: lean samples a 16-bit picture at a 16-bit transform's fp32 coordinates.

    Coordinates of 224 pixels in 16 bits are whole pixels off, and torch's kernel then
    reads beyond the picture.
    """
    size = [1, 1, 224, 224]
    picture, transform = torch.rand(size), torch.eye(2, 3)[None] * 1.03

    def sample(picture: Tensor, transform: Tensor) -> Tensor:
        grid = nn.functional.affine_grid(transform, size, align_corners=False)
        return nn.functional.grid_sample(picture, grid, align_corners=False)

    picture, transform = picture.to(low), transform.to(low)
    with halfstep.autocast("cpu", low, policy="lean"):
        sampled = sample(picture, transform)
    assert torch.equal(sampled, sample(picture.float(), transform.float()))


@LOWS
def test_what_mixes_dtypes_inside_runs(low: torch.dtype) -> None:
    """Law: lean runs a sparse matmul forward and backward, and a matrix exponential.

    In 16 bits the backward pass of the first meets its fp32 matrix; the second sums in
    the fp32 of lean's other rows and writes to 16-bit memory.
    """
    dense, sparse = torch.rand(4, 4).to(low).requires_grad_(), torch.eye(4).to_sparse()
    with halfstep.autocast("cpu", low, policy="lean"):
        product = torch.sparse.mm(sparse, dense)
        total = torch.sparse.addmm(product, sparse, dense)
        power = torch.matrix_exp(dense) + torch.linalg.matrix_exp(dense)
    assert product.dtype == total.dtype == power.dtype == torch.float32
    (total.sum() + power.sum()).backward()
    assert dense.grad is not None


@LOWS
def test_a_fused_encoder_layer_takes_a_padding_mask(low: torch.dtype) -> None:
    """Law: lean casts all operands of torch's encoder layer in evaluation."""
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    encoder, mask = nn.TransformerEncoder(layer, 1).eval(), torch.eye(2) > 0
    with torch.no_grad(), halfstep.autocast("cpu", low, policy="lean"):
        assert encoder(torch.ones(2, 2, 4), src_key_padding_mask=mask).dtype == low


# torch's tables for accelerators, on tensors without memory


ACCELERATORS = ("cuda", "xpu", "mps")
NO_MEMORY = FakeTensorMode()


with NO_MEMORY:
    ARGUMENTS = {device: arguments(device) for device in ACCELERATORS}


def recast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(recast(item, dtype) for item in value)
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if dtype and seen else value


def dtypes_of(value: Any) -> list[torch.dtype]:
    if isinstance(value, tuple | list):
        return [dtype for item in value for dtype in dtypes_of(item)]
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return [value.dtype] if seen else []


@contextmanager
def region(device: str, low: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, low)
    torch.set_autocast_enabled(device, True)  # noqa: FBT003 -- torch's own
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)  # noqa: FBT003
        torch.set_autocast_dtype(device, before)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which kernels run on which dtypes, copies included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.prim.device.default:
            self.seen.append(f"{func} {dtypes_of(args)}")
        return func(*args, **(kwargs or {}))


def kernels(call: Any, given: Any, words: Any, dtype: torch.dtype | None) -> list[str]:
    """Return what casts and call run, in no order, and how the call ends."""
    with Kernels() as recorder:
        try:
            end = str(dtypes_of(call(*recast(given, dtype), **words)))
        # Without the device some kernels are missing; the casts before them are not.
        except (RuntimeError, AssertionError) as error:
            end = type(error).__name__
    return [*sorted(recorder.seen), end]


@pytest.mark.parametrize(
    ("device", "operation"),
    [(device, operation) for device in ACCELERATORS for operation in TABLES[device]],
)
@pytest.mark.filterwarnings("ignore:.*(chain_matmul|torch.cross).*:UserWarning")
def test_autocast_runs_what_is_decided(device: str, operation: str) -> None:
    """Law: autocast runs the kernels, casts included, that `decide`'s casts run.

    An fp32 result is what the same call with dtype=torch.float32 gives: no copy. Each
    row has arguments.
    """
    low = torch.float16
    first, *others = ARGUMENTS[device][operation]
    with NO_MEMORY:
        half = recast(first, low)
        for given in ((first, *others), (half, *others), (half, *recast(others, low))):
            found = decide(operation, dtypes_of(given), device, low=low)
            with region(device, low):
                theirs = kernels(overload_of(operation), given, {}, None)
            if found.category == BANNED:
                assert theirs == ["RuntimeError"]
            elif found.category == FP32_RESULT:
                name, more = WITH_DTYPE.get(operation, (operation, ()))
                words = {"dtype": torch.float32}
                assert theirs == kernels(
                    overload_of(name), (*given, *more), words, None
                )
            else:
                assert theirs == kernels(overload_of(operation), given, {}, found.dtype)

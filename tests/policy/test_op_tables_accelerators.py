"""torch's tables for CUDA, XPU and MPS against torch, without any of them.

The oracle is torch's own casting kernels, which also run on tensors without memory.
Each operation runs under autocast, and once more without it on operands cast as
`decide` says: both must run the same kernels, casts included.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.policy import decide
from halfstep.policy.op_tables import BANNED, FP32_RESULT, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = ("cuda", "xpu", "mps")
NO_MEMORY = FakeTensorMode()


def randn(device: str, *size: int) -> Tensor:
    """Return numbers without memory."""
    return torch.randn(size, device=device)


def arguments(device: str) -> dict[str, tuple[Any, ...]]:
    """Return what to call each row with."""
    x, v, b = randn(device, 8, 8), randn(device, 8), randn(device, 2, 8, 8)
    tall, taller = randn(device, 24, 8), randn(device, 32, 8)
    wide3, wide4 = randn(device, 8, 24), randn(device, 8, 32)
    bias = randn(device, 32)
    series, picture = randn(device, 2, 2, 8), randn(device, 2, 2, 8, 8)
    volume, query = randn(device, 2, 2, 8, 8, 8), randn(device, 1, 2, 8, 8)
    w1, w2 = randn(device, 2, 2, 3), randn(device, 2, 2, 3, 3)
    w3, grid = randn(device, 2, 2, 3, 3, 3), randn(device, 2, 8, 8, 2)
    labels = torch.zeros(8, dtype=torch.long, device=device)
    places = torch.zeros(8, 8, dtype=torch.long, device=device)
    many = torch.zeros(2, 8, 8, dtype=torch.long, device=device)
    ones, zeros = [1, 1], [0, 0]
    alone = """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        softplus pdist prod sum nuclear_norm linalg_vector_norm norm.Scalar
        linalg_matrix_sqrth
        linalg_matrix_norm.str_ord
    """
    pairs = """
        matmul mm linalg_vecdot linear l1_loss smooth_l1_loss huber_loss mse_loss
        soft_margin_loss kl_div hinge_embedding_loss binary_cross_entropy dist cdist
        binary_cross_entropy_with_logits atan2 pow.Tensor_Tensor cosine_similarity
    """
    triples = """
        addmm addcdiv addcmul triplet_margin_loss margin_ranking_loss
    """
    along = "softmax.int log_softmax.int cumprod cumsum prod.dim_int"
    dims = "logsumexp sum.dim_IntList frobenius_norm.dim nuclear_norm.dim"
    return {
        **dict.fromkeys(alone.split(), (x,)),
        **dict.fromkeys(pairs.split(), (x, x)),
        **dict.fromkeys(triples.split(), (x, x, x)),
        **dict.fromkeys(along.split(), (x, 0)),
        **dict.fromkeys(dims.split(), (x, [0, 1])),
        "_convolution": (
            *(picture, w2, None, ones, zeros, ones),
            *(False, zeros, 1, False, False, False, False),
        ),
        "_convolution.deprecated": (
            *(picture, w2, None, ones, zeros, ones),
            *(False, zeros, 1, False, False, False),
        ),
        "convolution": (picture, w2, None, ones, zeros, ones, False, zeros, 1),
        "cudnn_convolution": (picture, w2, zeros, ones, ones, 1, False, False, False),
        "cudnn_convolution_transpose": (
            *(picture, w2, zeros, zeros, ones, ones, 1),
            *(False, False, False),
        ),
        "_mps_convolution": (picture, w2, None, zeros, ones, ones, 1),
        "conv1d": (series, w1),
        "conv2d": (picture, w2),
        "conv3d": (volume, w3),
        "conv_tbc": (series, randn(device, 3, 8, 2), randn(device, 2)),
        "conv_transpose1d": (series, w1),
        "conv_transpose2d.input": (picture, w2),
        "conv_transpose3d.input": (volume, w3),
        "addmv": (v, x, v),
        "addr": (x, v, v),
        "mv": (x, v),
        "dot": (v, v),
        "vdot": (v, v),
        "addbmm": (x, b, b),
        "baddbmm": (b, b, b),
        "bmm": (b, b),
        "chain_matmul": ([x, x, x],),
        "linalg_multi_dot": ([x, x, x],),
        "einsum": ("ij,jk->ik", [x, x]),
        "scaled_dot_product_attention": (query, query, query),
        "_scaled_dot_product_flash_attention": (query, query, query),
        "lstm_cell": (x, [x, x], taller, taller, bias, bias),
        "_thnn_fused_lstm_cell": (wide4, wide4, x, bias, bias),
        "gru_cell": (x, x, tall, tall),
        "_thnn_fused_gru_cell": (wide3, wide3, x),
        "rnn_tanh_cell": (x, x, x, x),
        "rnn_relu_cell": (x, x, x, x),
        "prelu": (x, v),
        "pow.Tensor_Scalar": (x, 2),
        "pow.Scalar": (2, x),
        "layer_norm": (x, [8], v, v),
        "native_layer_norm": (x, [8], v, v, 1e-5),
        "rms_norm": (x, [8], v),
        "group_norm": (x, 2, v, v),
        "batch_norm": (x, v, v, v, v, False, 0.1, 1e-5, False),
        "renorm": (x, 2, 0, 1),
        "norm.ScalarOpt_dim": (x, 2, [0]),
        "linalg_matrix_norm": (x, 1),
        "poisson_nll_loss": (x, x, True, False, 1e-8, 1),
        "cosine_embedding_loss": (x, x, v),
        "nll_loss": (x, labels),
        "nll_loss2d": (picture, many),
        "multi_margin_loss": (x, labels),
        "multilabel_margin_loss": (x, places),
        "bilinear": (x, x, b),
        "cross": (randn(device, 8, 3), randn(device, 8, 3), 1),
        "grid_sampler": (picture, grid, 0, 0, False),
        "index_put": (x, [labels], x),
        "tensordot": (x, x, [1], [0]),
        "scatter_add": (x, 0, places, x),
        "upsample_nearest1d": (series, [9]),
        "_upsample_nearest_exact1d": (series, [9]),
        "upsample_nearest2d": (picture, [9, 9]),
        "_upsample_nearest_exact2d": (picture, [9, 9]),
        "upsample_nearest3d": (volume, [9, 9, 9]),
        "_upsample_nearest_exact3d": (volume, [9, 9, 9]),
        "upsample_linear1d": (series, [9], False),
        "upsample_bilinear2d": (picture, [9, 9], False),
        "_upsample_bilinear2d_aa": (picture, [9, 9], False),
        "upsample_trilinear3d": (volume, [9, 9, 9], False),
        "upsample_bicubic2d": (picture, [9, 9], False),
        "_upsample_bicubic2d_aa": (picture, [9, 9], False),
    }


with NO_MEMORY:
    ARGUMENTS = {device: arguments(device) for device in DEVICES}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating tensors by hand, in tuples and lists too."""
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if dtype and seen else value


def dtypes_of(value: Any) -> list[torch.dtype]:
    """Return the dtypes of floating tensors in nested tuples and lists."""
    if isinstance(value, tuple | list):
        return [dtype for item in value for dtype in dtypes_of(item)]
    seen = isinstance(value, Tensor) and value.is_floating_point()
    return [value.dtype] if seen else []


@contextmanager
def region(device: str, low: torch.dtype) -> Iterator[None]:
    """Turn autocast on, which its constructor refuses without the device."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, low)
    torch.set_autocast_enabled(device, True)  # noqa: FBT003 -- torch's own
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)  # noqa: FBT003
        torch.set_autocast_dtype(device, before)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which kernels run on which dtypes, copies included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record one kernel, and run it."""
        if func is not torch.ops.prim.device.default:
            self.seen.append(f"{func} {dtypes_of(args)}")
        return func(*args, **(kwargs or {}))


def kernels(call: Any, given: Any, words: Any, dtype: torch.dtype | None) -> list[str]:
    """Return what casts and call run, in no order, and how the call ends."""
    with Recorder() as recorder:
        try:
            end = str(dtypes_of(call(*cast(given, dtype), **words)))
        # Without the device some kernels are missing; the casts before them are not.
        except (RuntimeError, AssertionError) as error:
            end = type(error).__name__
    return [*sorted(recorder.seen), end]


def overload(operation: str) -> Any:
    """Return aten's function of that name."""
    packet, _, name = operation.partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")


WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Operations that take a dtype under another name."""
WANTED: dict[str, tuple[Any, ...]] = {
    "norm.Scalar": (2,),
    "norm.ScalarOpt_dim": (False,),
}
"""What those want besides."""


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_is_called(device: str) -> None:
    """Law: nothing below is left out."""
    assert TABLES[device].keys() <= ARGUMENTS[device].keys()


@pytest.mark.parametrize(
    ("device", "operation"),
    [(device, operation) for device in DEVICES for operation in TABLES[device]],
)
@pytest.mark.filterwarnings("ignore:.*(chain_matmul|torch.cross).*:UserWarning")
def test_autocast_runs_what_is_decided(device: str, operation: str) -> None:
    """Law: autocast runs the kernels, casts included, that `decide`'s casts run.

    An fp32 result is what the same call with dtype=torch.float32 gives: no copy.
    """
    low = torch.float16
    first, *others = ARGUMENTS[device][operation]
    with NO_MEMORY:
        half = cast(first, low)
        for given in ((first, *others), (half, *others), (half, *cast(others, low))):
            found = decide(operation, dtypes_of(given), device, low=low)
            with region(device, low):
                theirs = kernels(overload(operation), given, {}, None)
            if found.category == BANNED:
                assert theirs == ["RuntimeError"]
            elif found.category == FP32_RESULT:
                call = overload(WITH_DTYPE.get(operation, operation))
                more = (*given, *WANTED.get(operation, ()))
                assert theirs == kernels(call, more, {"dtype": torch.float32}, None)
            else:
                assert theirs == kernels(overload(operation), given, {}, found.dtype)

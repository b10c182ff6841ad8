"""The op tables: which operation autocast casts to which dtype, and why.

`NAMED[policy][device][operation]` is a `Row`. Operation names are aten's, with overload
if the overloads of an operation are cast differently.

`TABLES` holds torch's own autocast, per device: the rows below that the dispatcher of
the installed torch registers. `LEAN` is halfstep's table, the same on every device but
for a few rows. An operation that the installed torch lacks has no row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LOW = "low"
"""Runs in the 16-bit format."""
FP32 = "fp32"
"""Runs in fp32: operands are cast, which copies them."""
FP32_RESULT = "fp32_result"
"""Accumulates in fp32 and returns fp32; the operand is not cast."""
PROMOTE = "promote"
"""Runs in the widest dtype of its operands."""
FOLLOW = "follow"
"""Runs in the dtype of its first operand; the other operands are cast to it."""
FP32_IN_FP16 = "fp32_in_fp16"
"""Runs in fp32 if the 16-bit format is fp16; if it is bf16, operands are not cast."""
BANNED = "banned"
"""Raises an error."""


@dataclass(frozen=True)
class Row:
    """How one operation runs, and why."""

    category: str
    """One of the categories above."""
    reason: str
    source: str
    """File of torch's source that registers it, or "halfstep lean"."""


Groups = dict[tuple[str, str], str]
"""(category, reason) -> operations."""


def _exists(operation: str) -> bool:
    """Return whether the installed torch has an aten operation with this overload."""
    name, _, overload = operation.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (overload or "default") in packet.overloads()


def _rows(source: str, groups: Groups) -> dict[str, Row]:
    return {
        operation: Row(*key, source)
        for key, operations in groups.items()
        for operation in operations.split()
        if _exists(operation)
    }


def _registered(device: str, rows: dict[str, Row]) -> dict[str, Row]:
    """Return the rows of the operations that the installed torch casts on a device."""
    key = f"Autocast{device.upper()}"
    names = {*torch._C._dispatch_get_registrations_for_dispatch_key(key)}  # noqa: SLF001
    return {name: row for name, row in rows.items() if f"aten::{name}" in names}


_PRODUCT = "a matmul: fast in 16 bits, accumulated in fp32"
_CONVOLUTION = "a convolution: fast in 16 bits, accumulated in fp32"
_ATTENTION = "attention is two matmuls: fast in 16 bits"
_RECURRENT = "a recurrent cell consists of matmuls: fast in 16 bits"
_ENCODER_LAYER = "its matmuls are fast in 16 bits, and its operands need one dtype"
_PRELU = "it follows a matmul, and its weight is cast to the dtype of that result"
_RANGE = "exponentials and powers leave the range of 16 bits"
_STEEP = "its derivative is unbounded: a rounded operand changes the result"
_LOGARITHM = "near 1 a logarithm magnifies the rounding error of 16 bits"
_NORM = "a norm sums squares: they overflow fp16 and lose digits in bf16"
_SCALING = "normalisation subtracts and divides by sums over many elements"
_LOSS = "a loss sums small terms, and gradients start from it"
_PROBABILITY = "it takes logarithms of probabilities: 16 bits lose those near 0 and 1"
_DISTANCE = "a distance sums squares of differences that nearly cancel"
_RESAMPLING = "resampling computes coordinates and weights; in 16 bits they are coarse"
_REDUCTION = "a reduction over many elements: its result needs fp32 precision"
_MIXED = "its operands need one dtype: casting to the widest is exact"
_LINEAR_ALGEBRA = "linear algebra: the underlying library has no 16-bit kernel"
_FFT = "Fourier transforms: the underlying library has no 16-bit kernel"
_QUANTILE = "quantiles: the kernel sorts and interpolates in fp32 or fp64 only"
_COMPLEX = "its result is complex, and its kernel has no 16-bit form"
_VOLUME = "pooling and padding had no 16-bit kernel on CPU when the list was made"
_GRID = "sampling coordinates are coarse in 16 bits"
_QUANTISER = "quantisation is simulated on fp32 values"

# Accelerators: common to CUDA, XPU and MPS

_ACCELERATORS: Groups = {
    (LOW, _CONVOLUTION): """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input convolution
    """,
    (LOW, _PRODUCT): """
        addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul
        linalg_multi_dot
    """,
    (LOW, _ATTENTION): "scaled_dot_product_attention",
    (LOW, _RECURRENT): "lstm_cell",
    (LOW, _PRELU): "prelu",
    (FP32, _RANGE): """
        cosh exp expm1 reciprocal rsqrt sinh pow.Tensor_Scalar pow.Tensor_Tensor
        pow.Scalar softplus logsumexp
    """,
    (FP32, _STEEP): "acos asin erfinv tan",
    (FP32, _LOGARITHM): "log log10 log2 log1p",
    (FP32, _SCALING): "layer_norm native_layer_norm group_norm",
    (FP32, _NORM): "frobenius_norm.dim nuclear_norm nuclear_norm.dim renorm",
    (FP32, _DISTANCE): "cosine_similarity dist pdist cdist",
    (FP32, _LOSS): """
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    """,
    (PROMOTE, _MIXED): """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot
        scatter_add
    """,
}

_REDUCTIONS = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
"""MPS casts their operand to fp32; CUDA and XPU request an fp32 result (`dtype=`)."""

_UPSAMPLING = """
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
"""
_UPSAMPLING_SMOOTH = "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"

# CUDA and XPU, in addition

_CUDA_AND_XPU: Groups = {
    (LOW, _CONVOLUTION): "conv_transpose3d.input",
    (LOW, _PRODUCT): "linalg_vecdot",
    (LOW, _ATTENTION): "_scaled_dot_product_flash_attention",
    (LOW, _RECURRENT): """
        _thnn_fused_lstm_cell _thnn_fused_gru_cell gru_cell rnn_tanh_cell
        rnn_relu_cell
    """,
    (FP32, _SCALING): "rms_norm",
    (FP32, _RESAMPLING): _UPSAMPLING + _UPSAMPLING_SMOOTH,
    (FP32_RESULT, _REDUCTION): _REDUCTIONS + "norm.Scalar norm.ScalarOpt_dim",
    (PROMOTE, _MIXED): "vdot",
}
_BAN: Groups = {(BANNED, _PROBABILITY): "binary_cross_entropy"}

# CUDA only

_CUDA: Groups = {
    (LOW, _CONVOLUTION): "cudnn_convolution cudnn_convolution_transpose",
    (FP32, _LINEAR_ALGEBRA): "linalg_matrix_sqrth",
}

# MPS, in addition to the accelerators' rows

_NOT_ON_MPS: Groups = {
    (FP32, "it has no 16-bit kernel on MPS"): "conv_transpose3d.input"
}
_MPS: Groups = {
    (LOW, _CONVOLUTION): "_mps_convolution",
    (FP32, _SCALING): "batch_norm",
    (FP32, _REDUCTION): _REDUCTIONS,
}

# CPU

_POOLS_AND_PADS = """
    adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d
    fractional_max_pool3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
"""

_CPU: Groups = {
    (LOW, _CONVOLUTION): """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
        _convolution.deprecated conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input
    """,
    (LOW, _PRODUCT): """
        bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm linear matmul
    """,
    (LOW, _ATTENTION): "scaled_dot_product_attention _native_multi_head_attention",
    (LOW, _RECURRENT): "mkldnn_rnn_layer",
    (LOW, _PRELU): "prelu",
    (FP32, _VOLUME): "avg_pool3d" + _POOLS_AND_PADS,
    (FP32, _GRID): """
        grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
    """,
    (FP32, _PROBABILITY): "binary_cross_entropy",
    (FP32, _LOSS): """
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
        ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div
        l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    """,
    (FP32, _LINEAR_ALGEBRA): """
        _lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig
        linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
        linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve
        linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr
        ormqr pinverse qr svd triangular_solve
    """,
    (FP32, _FFT): """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft
        fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft
        stft.center
    """,
    (FP32, _QUANTILE): "nanquantile nanquantile.scalar quantile quantile.scalar",
    (FP32, _COMPLEX): "polar view_as_complex",
    (FP32, _DISTANCE): "cdist",
    (FP32, _REDUCTION): "prod prod.dim_int trace",
    (FP32, _QUANTISER): "fake_quantize_per_tensor_affine",
    (PROMOTE, _MIXED): "stack cat index_copy",
}

_MACROS = "aten/src/ATen/autocast_mode.h"
_REGISTRATIONS = "aten/src/ATen/autocast_mode.cpp"
_on_both = _rows(_MACROS, _ACCELERATORS) | _rows(_MACROS, _CUDA_AND_XPU)
_on_both |= _rows(_REGISTRATIONS, _BAN)
_on_mps = _rows(_REGISTRATIONS, _ACCELERATORS) | _rows(_REGISTRATIONS, _MPS)
_WRITTEN = {
    "cpu": _rows(_REGISTRATIONS, _CPU),
    "cuda": _on_both | _rows(_REGISTRATIONS, _CUDA),
    "mps": _on_mps | _rows(_REGISTRATIONS, _NOT_ON_MPS),
    "xpu": _on_both,
}

TABLES = {device: _registered(device, rows) for device, rows in _WRITTEN.items()}
"""Device -> operation -> row, as in torch. Operands of an operation without a row are
not cast."""

# Lean: torch's rows for CUDA and CPU, registered by this torch or not, except these

_KERNEL_SUMS_IN_FP32 = "its kernel accumulates in fp32 for every input dtype"
_POWERS = "powers leave the range of fp16; bf16 has the range of fp32"
_FEW_PIXELS = "it copies or mixes few pixels, at coordinates that stay fp32"
_LEAN: Groups = {
    (LOW, _CONVOLUTION): "_mps_convolution",
    (
        FOLLOW,
        _KERNEL_SUMS_IN_FP32,
    ): "layer_norm native_layer_norm rms_norm group_norm softmax.int",
    (FP32_IN_FP16, _POWERS): "pow.Tensor_Scalar",
    (FOLLOW, _FEW_PIXELS): _UPSAMPLING,
    (FP32, "it has no 16-bit kernel on CPU"): _UPSAMPLING_SMOOTH + " avg_pool3d",
    (
        FP32,
        "half of its norms have no 16-bit kernel, not even for an fp32 result",
    ): "linalg_matrix_norm linalg_matrix_norm.str_ord",
    (FP32, _PROBABILITY): "binary_cross_entropy",
    (FP32, _GRID): """
        grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator
    """,
    (FP32, _RANGE): "matrix_exp linalg_matrix_exp",
    (FP32, "its backward pass needs one dtype"): "_sparse_mm _sparse_addmm",
}
_LEAN_AS_CALLED = _POOLS_AND_PADS + "fake_quantize_per_tensor_affine"
"""fp32 in torch's CPU table, although 16-bit CPU kernels exist by now."""

_LEAN_CPU: Groups = {
    (LOW, _RECURRENT): """
        lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data
        rnn_relu.input rnn_relu.data
    """,
    (LOW, _ENCODER_LAYER): "_transformer_encoder_layer_fwd",
}
"""CPU only: cuDNN packs the weights of whole layers and casts them itself, and torch
itself does not take an encoder layer's fused path under autocast on CUDA."""

_SOURCE = "halfstep lean"
_lean = {
    name: replace(row, source=_SOURCE)
    for name, row in (_WRITTEN["cpu"] | _WRITTEN["cuda"]).items()
    if name not in _LEAN_AS_CALLED.split()
}
_lean |= _rows(_SOURCE, _LEAN)
LEAN = {
    "cpu": _lean | _rows(_SOURCE, _LEAN_CPU),
    "cuda": _lean,
    "mps": _lean | _rows(_SOURCE, _NOT_ON_MPS),
    "xpu": _lean,
}

NAMED = {"torch": TABLES, "lean": LEAN}

NORMALISATION = ("_NormBase", "LayerNorm", "RMSNorm", "GroupNorm")
"""Endings of class names (of a module or its bases) whose parameters stay fp32 at
levels with `fp32_norms`. `_NormBase` is the base of batch and instance norms."""

_FP32_ARGUMENTS = {
    **dict.fromkeys(("layer_norm", "native_layer_norm", "group_norm"), (2, 3)),
    "native_group_norm": (1, 2),
    **dict.fromkeys(("batch_norm", "native_batch_norm", "instance_norm"), (1, 2, 3, 4)),
    **dict.fromkeys(("_batch_norm_impl_index", "cudnn_batch_norm"), (1, 2, 3, 4)),
    "_native_batch_norm_legit": (1, 2, 3, 4),
}
"""Operation -> indices of weight, bias and running statistics."""
_ONE_DTYPE_ON_ACCELERATORS = {
    *("layer_norm", "native_layer_norm", "group_norm", "native_group_norm")
}


def fp32_arguments(op: str, device: str) -> tuple[int, ...]:
    """Return the indices of arguments that stay fp32 where an operation is cast to low.

    Its kernel takes 16-bit data with fp32 weights; to cast them would cost time and
    digits of the result, and updates of running statistics would be lost. Weight and
    bias come first.

    Example:
        >>> fp32_arguments("layer_norm", "cpu"), fp32_arguments("layer_norm", "cuda")
        ((2, 3), ())
    """
    op = op.partition(".")[0]
    if op in _ONE_DTYPE_ON_ACCELERATORS and device != "cpu":
        return ()
    return _FP32_ARGUMENTS.get(op, ())


OPERATION_OF = {
    "Linear": "linear",
    "Conv1d": "conv1d",
    "Conv2d": "conv2d",
    "Conv3d": "conv3d",
    "ConvTranspose1d": "conv_transpose1d",
    "ConvTranspose2d": "conv_transpose2d.input",
    "ConvTranspose3d": "conv_transpose3d.input",
    "Bilinear": "bilinear",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding_bag",
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "GroupNorm": "group_norm",
    "BatchNorm1d": "batch_norm",
    "BatchNorm2d": "batch_norm",
    "BatchNorm3d": "batch_norm",
    "PReLU": "prelu",
}
"""Class name of a module with parameters -> the aten operation that it runs."""

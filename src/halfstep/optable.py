"""torch's own autocast tables as rows: which operation is cast to what, per device.

In: nothing. Out: `TABLES[device][operation]`, one of the treatments below, as torch
2.13 registers them. Operation names are aten's, overload included where several
overloads are treated alike only in part.

Sources: aten/src/ATen/autocast_mode.h (CUDA) and autocast_mode.cpp (CPU) of torch
2.13; the rows were compared with the dispatcher's registrations.
"""

from __future__ import annotations

LOW = "low"
FP32 = "fp32"
FP32_RESULT = "fp32_result"
PROMOTE = "promote"
BANNED = "banned"

REASONS = {
    LOW: "matrix product or convolution: fast in 16 bits, accumulated in fp32",
    FP32: "sums, exponentials, losses or a kernel without 16-bit form: fp32",
    FP32_RESULT: "a reduction: its result is kept in fp32, its input is not copied",
    PROMOTE: "operands must agree: the widest of their formats",
    BANNED: "its input must be a probability, and 16 bits lose those near 0 and 1",
}
"""Why a treatment is what it is."""

_CPU = {
    LOW: """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm
        linalg_vecdot baddbmm addmm _addmm_activation addbmm linear
        _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input prelu
        scaled_dot_product_attention _native_multi_head_attention
    """,
    FP32: """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d
        adaptive_max_pool3d avg_pool3d binary_cross_entropy
        binary_cross_entropy_with_logits cdist cholesky cholesky_inverse
        cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList
        ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn
        fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d
        fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d
        hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve
        margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
        nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse
        poisson_nll_loss polar prod prod.dim_int qr quantile quantile.scalar
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd trace
        triangular_solve triplet_margin_loss view_as_complex
    """,
    PROMOTE: "stack cat index_copy",
}

_CUDA = {
    LOW: """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
        cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
        linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
        gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention
    """,
    FP32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh
        tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm
        native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
        nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss
        nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """,
    FP32_RESULT: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum
        linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
        sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
    """,
    PROMOTE: """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put
        tensordot scatter_add
    """,
    BANNED: "binary_cross_entropy",
}


def _rows(table: dict[str, str]) -> dict[str, str]:
    return {
        operation: treatment
        for treatment, operations in table.items()
        for operation in operations.split()
    }


TABLES = {"cpu": _rows(_CPU), "cuda": _rows(_CUDA)}
"""Device -> operation -> treatment. An operation without a row runs as it is called."""

NORMALISATION = ("_NormBase", "LayerNorm", "RMSNorm", "GroupNorm")
"""Endings of class names, a module's own or its bases', whose few parameters stay
fp32 at the levels that ask for it. `_NormBase` is every batch and instance norm."""

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
"""Module type -> the operation that does its work, for those with parameters."""

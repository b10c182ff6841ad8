"""apex's lists of functions for O1, as rules of a halfstep policy.

In: a device type. Out: the policy whose first rules are apex's lists, with torch's own
table for the device behind them.
"""

from __future__ import annotations

from functools import cache

from halfstep.policy.op_tables import FP32, LOW, PROMOTE
from halfstep.policy.rules import Policy, Rule

_HALF = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    linear prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell
"""
_HALF_LAYERS = {"cpu": "lstm gru rnn_tanh rnn_relu"}
"""Recurrent layers; on CUDA torch's own kernel casts what cuDNN packs."""

_FP32_WORDS = """
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod
    cumsum dist norm prod std sum var renorm
"""
FP32_NAMES = tuple(_FP32_WORDS.split())
"""Names in `torch`, most of them of tensors too."""

_FLOAT = (
    _FP32_WORDS
    + """
    linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
    softplus log_softmax softmax gelu layer_norm group_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
    kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    multi_margin_loss nll_loss nll_loss2d nll_loss_nd binary_cross_entropy_with_logits
    smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss binary_cross_entropy
"""
)
_WIDEST = "addcdiv addcmul atan2 cross linalg_cross bilinear dot cat stack"
"""torch promotes the arithmetic and the comparisons of apex's list by itself."""

PATCHED_FP32 = ("local_response_norm", "multilabel_soft_margin_loss")
"""Composed in Python, of operations that are on no list."""
BANNED = ("binary_cross_entropy",)


@cache
def policy_for(device: str) -> Policy:
    """Return O1's policy on a device."""
    half = f"{_HALF} {_HALF_LAYERS.get(device, '')}"
    return Policy(
        (
            _rule(half, LOW, "apex's O1 runs it in fp16: products and convolutions"),
            _rule(_FLOAT, FP32, "apex's O1 runs it in fp32: range and sums"),
            _rule(_WIDEST, PROMOTE, "apex's O1 runs it in its widest operand's dtype"),
        )
    )


def _rule(names: str, category: str, reason: str) -> Rule:
    return Rule("op", f"/{'|'.join(names.split())}/", category, reason)

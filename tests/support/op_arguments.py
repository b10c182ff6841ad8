"""Arguments for the operations of the op tables: torch's own lists, and others."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.policy.op_tables import TABLES

Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Kind of list, operation, arguments, keywords."""

WITH_DTYPE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (2,)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (False,)),
}
"""Operations that take a dtype under another name, and what those want besides."""


def torch_lists(device: str) -> Any:
    """Return torch's own lists of operations, each with arguments to call it with."""
    # They ask torch's test library, which needs much else, for one flag.
    stub = ModuleType("torch.testing._internal.common_utils")
    vars(stub).update(TEST_WITH_ROCM=False, TestCase=object)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stub.__name__, stub)
        from torch.testing._internal import autocast_test_lists as lists
    torch.manual_seed(0)
    kinds: Any = lists
    if device == "cpu":
        return kinds.AutocastCPUTestLists("cpu")
    return kinds.AutocastTestLists(device)


def listed() -> list[Case]:
    return [
        (kind, entry[0], entry[1], entry[2] if isinstance(entry[-1], dict) else {})
        for kind, entries in vars(torch_lists("cpu")).items()
        for entry in entries
    ]


def function(kind: str, operation: str) -> Any:
    """Return the function or method that torch's list means."""
    if kind.startswith("methods"):
        return getattr(Tensor, operation)
    c: Any = torch._C
    places = (torch, c._nn, c._linalg)
    return next(getattr(at, operation) for at in places if hasattr(at, operation))


def cpu_arguments() -> dict[str, tuple[Any, ...]]:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    spd = x @ x.T + 6 * torch.eye(6)
    a, b, m = x.bfloat16(), y.bfloat16(), spd.bfloat16()
    picture, volume = torch.randn(2, 3, 4, 4), torch.randn(1, 2, 6, 6, 6)
    p16, v16, grid = picture.bfloat16(), volume.bfloat16(), torch.rand(2, 5, 5, 2)
    within = torch.arange(216).reshape(6, 6, 6).repeat(1, 2, 1, 1, 1)
    labels, ones = torch.arange(6), torch.ones(6, dtype=torch.long)
    kernel, vector = torch.randn(1, 3, 3, 3), torch.randn(6)
    one_matrix = (
        "cholesky cholesky_inverse geqrf inverse pinverse prod qr svd trace "
        "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh "
        "linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex "
        "linalg_matrix_sqrth linalg_qr linalg_svd linalg_svdvals _lu_with_info "
        "linalg_matrix_exp matrix_exp exp gelu sum"
    )
    fft = [name for name in TABLES["cpu"] if name.startswith("fft_")]
    return dict.fromkeys([*one_matrix.split(), *fft], (m,)) | {
        "adaptive_avg_pool3d": (v16, [2, 2, 2]),
        "adaptive_max_pool3d": (v16, [2, 2, 2]),
        "affine_grid_generator": (p16[..., :2, :3][:, 0], [2, 3, 4, 4], False),
        "cdist": (a, b),
        "cholesky_solve": (a, m),
        "conv1d.padding": (picture[0], torch.randn(1, 4, 3), None, [1], "same"),
        "conv2d.padding": (picture, kernel, None, [1, 1], "same"),
        "conv3d.padding": (volume, torch.randn(1, 2, 3, 3, 3), None, [1] * 3, "valid"),
        "cross_entropy_loss": (a, labels),
        "ctc_loss.IntList": (a[:, None].log_softmax(2), labels[None, 1:3], [6], [2]),
        "ctc_loss.Tensor": (
            a[:, None].log_softmax(2),
            labels[None, 1:3],
            *ones[:2, None],
        ),
        "embedding": (x, labels),
        "fake_quantize_per_tensor_affine": (a, 0.5, 0, -8, 7),
        "_grid_sampler_2d_cpu_fallback": (p16, grid.bfloat16(), 0, 0, False),
        "fractional_max_pool2d": (p16, [2, 2], [2, 2], torch.rand(2, 3, 2).bfloat16()),
        "fractional_max_pool3d": (
            v16,
            [2] * 3,
            [2] * 3,
            torch.rand(1, 2, 3).bfloat16(),
        ),
        "grid_sampler": (p16, grid.bfloat16(), 0, 0, False),
        "grid_sampler_2d": (p16, grid.bfloat16(), 0, 0, False),
        "grid_sampler_3d": (v16, torch.rand(1, 2, 2, 2, 3).bfloat16(), 0, 0, False),
        "index_copy": (x, 0, ones[:1], b[:1]),
        "kl_div": (a, b.abs()),
        "layer_norm": (a, [6]),
        "linalg_cond.p_str": (m, "fro"),
        "linalg_householder_product": (m, vector.bfloat16()),
        "linalg_matrix_rank": (m, 0.1),
        "linalg_matrix_rank.atol_rtol_float": (m,),
        "linalg_matrix_rank.tol_tensor": (m, vector[0].bfloat16()),
        "linalg_solve": (m, a),
        "linalg_tensorinv": (m.reshape(2, 3, 6),),
        "linalg_tensorsolve": (m, vector.bfloat16()),
        "linalg_vecdot": (x, y),
        "lu_solve": (a, m, torch.arange(1, 7, dtype=torch.int32)),
        "max_pool3d": (v16, [2, 2, 2]),
        "max_unpool2d": (
            p16,
            torch.arange(16).reshape(4, 4).repeat(2, 3, 1, 1),
            [8, 8],
        ),
        "max_unpool3d": (v16, within, [6, 6, 6], [1, 1, 1], [0, 0, 0]),
        "multilabel_margin_loss_forward": (a[0], labels, 1),
        "mv": (x, vector),
        "nanquantile": (m, torch.tensor([0.5], dtype=torch.bfloat16)),
        "nanquantile.scalar": (m, 0.5),
        "orgqr": (m, vector.bfloat16()),
        "ormqr": (m, vector.bfloat16(), a),
        "polar": (a, b),
        "prod.dim_int": (m, 0),
        "quantile": (m, torch.tensor([0.5], dtype=torch.bfloat16)),
        "quantile.scalar": (m, 0.5),
        "reflection_pad2d": (p16, [1, 1, 1, 1]),
        "replication_pad1d": (a, [1, 1]),
        "replication_pad2d": (p16, [1, 1, 1, 1]),
        "replication_pad3d": (v16, [1] * 6),
        "rms_norm": (a, [6]),
        "scaled_dot_product_attention": (picture, picture, picture),
        "softmax.int": (a, 0),
        "_sparse_addmm": (a, m.to_sparse(), b),
        "_sparse_mm": (m.to_sparse(), b),
        "stft": (a[0], 4, None, None, None, False, True, True),
        "stft.center": (a[0], 4, *[None] * 3, True, "reflect", False, True, True),
        "triangular_solve": (a, m),
        "view_as_complex": (a.reshape(18, 2),),
    }


def randn(device: str, *size: int) -> Tensor:
    return torch.randn(size, device=device)


def arguments(device: str) -> dict[str, tuple[Any, ...]]:
    """Return what to call each row of an accelerator's table with."""
    x, v, b = randn(device, 8, 8), randn(device, 8), randn(device, 2, 8, 8)
    p = torch.rand(8, 8, device=device) / 2 + 0.25
    tall, taller = randn(device, 24, 8), randn(device, 32, 8)
    wide3, wide4 = randn(device, 8, 24), randn(device, 8, 32)
    bias = randn(device, 32)
    series, picture = randn(device, 2, 2, 8), randn(device, 2, 2, 8, 8)
    volume, query = randn(device, 2, 2, 8, 8, 8), randn(device, 1, 2, 8, 8)
    w1, w2 = randn(device, 2, 2, 3), randn(device, 2, 2, 3, 3)
    w3, grid = randn(device, 2, 2, 3, 3, 3), randn(device, 2, 8, 8, 2)
    labels = torch.arange(8, device=device)
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
        **dict.fromkeys(alone.split(), (p,)),
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
        "pow.Tensor_Scalar": (p, 2.5),
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


def recurrent_arguments() -> dict[str, tuple[Any, ...]]:
    calls: dict[str, tuple[Any, ...]] = {}
    x, hidden = torch.randn(3, 2, 4), torch.randn(1, 2, 4)
    packed = x[:2].reshape(4, 4), torch.tensor([2, 2])
    for name, gates in {"rnn_relu": 1, "rnn_tanh": 1, "gru": 3, "lstm": 4}.items():
        weights = [torch.randn(gates * 4, 4), torch.randn(gates * 4, 4)]
        weights += [torch.randn(gates * 4), torch.randn(gates * 4)]
        state = [hidden, hidden] if name == "lstm" else hidden
        rest = (weights, True, 1, 0.0, True, False)
        calls[f"{name}.input"] = (x, state, *rest, False)
        calls[f"{name}.data"] = (*packed, state, *rest)
    return calls

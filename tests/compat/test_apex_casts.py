"""O1: what runs in which dtype, forward and backward, on apex's lists."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.compat.apex import amp
from halfstep.compat.apex.amp_handle import FP32_NAMES, AmpHandle, policy_for
from halfstep.compat.apex.state import STATE
from halfstep.policy import rules

HALF, FLOAT = torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)


@pytest.fixture
def _casts() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)


W = torch.linspace(-1, 1, 16).view(4, 4)
IMAGE = (1, 2, 6, 6)

HALVES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 3), (2, 4)),
    "conv1d": (nn.Conv1d(2, 3, 3), (1, 2, 6)),
    "conv2d": (nn.Conv2d(2, 3, 3), IMAGE),
    "conv3d": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 3, 3), (1, 2, 6)),
    "conv_transpose2d": (nn.ConvTranspose2d(2, 3, 3), IMAGE),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "conv_tbc": (lambda x: torch.conv_tbc(x, W.view(2, 2, 4), W[0]), (5, 2, 2)),
    "prelu": (nn.PReLU(), (2, 4)),
    "operator": (lambda x: x @ W, (4, 4)),
    "mm": (lambda x: x.mm(W), (4, 4)),
    "mv": (lambda x: torch.mv(W, x), (4,)),
    "bmm": (lambda x: torch.bmm(x, W.view(1, 4, 4)), (1, 4, 4)),
    "addmm": (lambda x: torch.addmm(W, x, W), (4, 4)),
    "addmv": (lambda x: torch.addmv(W[0], W, x), (4,)),
    "addr": (lambda x: torch.addr(W, x, W[0]), (4,)),
    "addbmm": (lambda x: torch.addbmm(W, x, W.view(1, 4, 4)), (1, 4, 4)),
    "baddbmm": (lambda x: torch.baddbmm(W, x, W.view(1, 4, 4)), (1, 4, 4)),
}
F, TARGET, ONES = functional, torch.tensor([0, 2]), torch.tensor([1.0, -1.0])
WITH_W = "mse_loss l1_loss smooth_l1_loss cosine_similarity"
WITH_SIGNS = "hinge_embedding_loss soft_margin_loss"
WITH_SHARES = """poisson_nll_loss binary_cross_entropy_with_logits
    multilabel_soft_margin_loss"""
FLOATS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "softplus": (F.softplus, (2, 4)),
    "gelu": (F.gelu, (2, 4)),
    "layer_norm": (nn.LayerNorm(4), (2, 4)),
    "group_norm": (nn.GroupNorm(1, 2), IMAGE),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), IMAGE),
    "normalize": (F.normalize, (2, 4)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "grid_sample": (
        lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2), align_corners=False),
        IMAGE,
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET), (2, 4)),
    "nll_loss": (lambda x: F.nll_loss(x, TARGET), (2, 4)),
    "kl_div": (lambda x: F.kl_div(x, W.abs(), reduction="sum"), (4, 4)),
    "multi_margin": (lambda x: F.multi_margin_loss(x, TARGET), (2, 4)),
    "cosine": (lambda x: F.cosine_embedding_loss(x, W[:2], ONES), (2, 4)),
    "margin_ranking": (lambda x: F.margin_ranking_loss(x, W[0, :2], ONES), (2,)),
    "triplet": (lambda x: F.triplet_margin_loss(x, W, W.flip(0)), (4, 4)),
    "pow": (lambda x: x**2, (2, 4)),
    "rpow": (lambda x: 2**x, (2, 4)),
    "var": (lambda x: x.var(0), (2, 4)),
    "dist": (lambda x: torch.dist(x, W), (4, 4)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (2, 4)),
    "acos": (lambda x: (x / 8).acos(), (2, 4)),
    "erfinv": (lambda x: (x / 8).erfinv(), (2, 4)),
    "cpu": (lambda x: x.cpu(), (2, 4)),
}
UNARY = "exp expm1 tan cosh sinh reciprocal log rsqrt sum prod std norm"
FLOATS |= {name: (getattr(torch, name), (2, 4)) for name in UNARY.split()}


def calling(function: Any, *more: Any) -> Any:
    return lambda x: function(x, *more)


for owner, names, given in (
    *((torch, "cumsum cumprod", 0), (F, "softmax softmin log_softmax", -1)),
    *((F, WITH_W, W), (F, WITH_SIGNS, W.sign()), (F, WITH_SHARES, W.abs())),
):
    FLOATS |= {n: (calling(getattr(owner, n), given), (4, 4)) for n in names.split()}
MATCHES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "relu": (F.relu, (2, 4)),
    "batch_norm": (nn.BatchNorm2d(2), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "mean": (lambda x: x.mean(), (2, 4)),
    "sigmoid": (torch.sigmoid, (2, 4)),
    "dropout": (lambda x: F.dropout(x, 0.5), (2, 4)),
    "view": (lambda x: x.view(-1), (2, 4)),
}


def ran(program: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Any]:
    x = torch.rand(shape).to(dtype).requires_grad_()
    out = program(x)
    out.backward(torch.ones_like(out))
    assert x.grad.isfinite().all()
    return out.dtype, x.grad.dtype


PROGRAMS = HALVES | FLOATS | MATCHES


@pytest.mark.usefixtures("_casts")
@DTYPES
@pytest.mark.parametrize("name", PROGRAMS)
def test_lists(name: str, dtype: torch.dtype) -> None:
    """Law: products come out in fp16; sums, ranges and losses in fp32; others as is.

    Gradients have the dtype of their tensor.
    """
    out = HALF if name in HALVES else FLOAT if name in FLOATS else dtype
    assert ran(*PROGRAMS[name], dtype) == (out, dtype)


def test_without_casts() -> None:
    """Law: before initialize, and while disabled, nothing is cast: the twin."""
    for enabled in (False, True):
        if enabled:
            amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        with amp.disable_casts():
            with amp.disable_casts():
                pass
            assert ran(lambda x: x @ W, (4, 4), FLOAT) == (FLOAT, FLOAT)
            assert ran(lambda x: x**2, (4, 4), HALF) == (HALF, HALF)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_are_operations(device: str) -> None:
    """Law: each name on our lists is an operation that torch knows."""
    for rule in policy_for(device).rules:
        known = {op.removeprefix("aten::") for op in rules.matching_ops(rule)}
        known = {op.partition(".")[0] for op in known}
        assert set(rule.pattern.strip("/").split("|")) == known


@pytest.mark.usefixtures("_casts")
@pytest.mark.parametrize("name", sorted({*FP32_NAMES, "__ipow__"}))
def test_in_place(name: str) -> None:
    """Law: an fp32 operation in place on fp16 raises; on fp32 it runs."""
    method = name if name == "__ipow__" else f"{name}_"
    if not hasattr(Tensor, method):
        pytest.skip(f"there is no Tensor.{method}")
    arguments = {"pow": (2,), "__ipow__": (2,), "renorm": (2, 0, 1.0)}
    arguments |= {"cumsum": (0,), "cumprod": (0,)}
    given = arguments.get(name, ())
    with pytest.raises(NotImplementedError, match="computes in fp32"):
        getattr(torch.rand(2, 2).half(), method)(*given)
    assert getattr(torch.rand(2, 2), method)(*given).dtype == FLOAT


PAIRS = [(HALF, HALF), (HALF, FLOAT), (FLOAT, HALF), (FLOAT, FLOAT)]


@pytest.mark.usefixtures("_casts")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize(
    "name", ["atan2", "mul", "add", "div", "cross", "dot", "bilinear", "addcmul"]
)
def test_promotion(name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    """Law: operands of two dtypes meet in the wider one; gradients go back."""
    x, y = (torch.rand(3, dtype=dtype, requires_grad=True) for dtype in pair)
    if name == "bilinear":
        out = functional.bilinear(x[None], y[None], torch.ones(2, 3, 3, dtype=pair[0]))
    elif name == "addcmul":
        out = torch.addcmul(x, x, y)
    elif name == "cross":
        out = torch.cross(x, y, dim=0)
    else:
        out = getattr(torch, name)(x, y)
    wide = HALF if pair == (HALF, HALF) else FLOAT
    assert out.dtype == wide
    out.sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, y.grad.dtype) == pair


@pytest.mark.usefixtures("_casts")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_promotion_of_sequences(pair: tuple[Any, Any]) -> None:
    """Law: sequences meet in the widest dtype in them, and so do comparisons."""
    x, y = (torch.rand(3, dtype=dtype) for dtype in pair)
    expected = torch.promote_types(*pair)
    assert torch.cat([x, y]).dtype == torch.stack((x, y, x)).dtype == expected
    assert (x < y).dtype == torch.eq(x, y).dtype == torch.bool


def test_banned() -> None:
    """Law: BCE on fp16 is refused with its cure, which works; on fp32 it runs."""
    target = torch.ones(2)
    amp.register_float_function(torch, "sigmoid")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    half = torch.rand(2).half()
    with pytest.raises(NotImplementedError, match="register_float_function"):
        functional.binary_cross_entropy(half, target)
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(half, target)
    assert nn.BCELoss()(torch.sigmoid(half), target).dtype == FLOAT
    assert nn.BCELoss()(nn.Sigmoid()(half), target).dtype == FLOAT
    assert nn.BCELoss()(half.float(), target).dtype == FLOAT


def test_everything_is_put_back() -> None:
    """Law: ending the casts leaves torch as it was."""
    watched = [(Tensor, "cpu"), (Tensor, "exp_"), (torch, "exp_"), (torch, "sigmoid")]
    watched += [(functional, "binary_cross_entropy"), (Tensor, "__ipow__")]
    before = [getattr(*pair) for pair in watched]
    own = set(vars(Tensor))
    amp.register_half_function(torch, "sigmoid")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    during = [getattr(*pair) for pair in watched]
    assert all(new is not old for new, old in zip(during, before, strict=True))
    STATE.handle.close()
    after = [getattr(*pair) for pair in watched]
    assert after == before
    assert set(vars(Tensor)) == own
    assert torch.rand(2).half().exp_().dtype == HALF


def test_what_cannot_begin_is_put_back() -> None:
    """Law: a handle whose second context does not open leaves no patch and no cast."""
    before = Tensor.exp_, functional.local_response_norm
    with pytest.raises(RuntimeError):
        AmpHandle(frozenset({"cpu", "nonsense"}))
    assert (Tensor.exp_, functional.local_response_norm) == before
    assert not torch.is_autocast_enabled("cpu")


def test_other_threads_are_not_cast() -> None:
    """Law: casts hold in the thread that called initialize, as documented."""
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    found = []
    thread = threading.Thread(target=lambda: found.append((W @ W).dtype))
    thread.start()
    thread.join()
    assert found == [FLOAT]
    assert (W @ W).dtype == HALF

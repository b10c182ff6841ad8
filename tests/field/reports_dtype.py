"""Operations that refuse a mix of dtypes, or have no kernel in 16 bits."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tests.field.nets import WIDTH, loop, mean_square, trained, training
from tests.field.report import Amp, Program, report
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import halfstep as hs

BF16 = torch.bfloat16


def plain_training(model: nn.Module, *, dtype: torch.dtype) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, WIDTH, dtype=dtype)
    return loop(None, model, lambda: mean_square(model(x)), optimizer)


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


# Functions of one's own


class Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class DecoratedProjection(Projection):
    forward = staticmethod(torch.amp.custom_fwd(Projection.forward, device_type="cpu"))
    backward = staticmethod(
        torch.amp.custom_bwd(Projection.backward, device_type="cpu")
    )


@report(says=r"Projection.*(custom_fwd|low_precision)", truth="Projection|custom_fwd")
def custom_backward(amp: Amp, *, cured: bool) -> Program:
    function = DecoratedProjection if cured else Projection
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
    model = Net(lambda x: function.apply(x, weight))
    model.register_parameter("weight", weight)
    return training(amp, model)


def extension_kernel(x: Tensor, bias: Tensor) -> Tensor:
    """Do as a kernel of a C++ extension does: take one dtype."""
    if x.dtype != bias.dtype:
        raise RuntimeError("expected scalar type Half but found Float")
    return x + bias


class FusedBias(torch.autograd.Function):
    """Calls the kernel; `custom_fwd` without arguments casts nothing."""

    @staticmethod
    @hs.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return extension_kernel(x, bias)

    @staticmethod
    @hs.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.to(ctx.dtype), grad.sum(0).float()


class FusedBiasInFp32(FusedBias):
    @staticmethod
    @hs.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return extension_kernel(x, bias)


@report(says=r"FusedBias.*cast_inputs", truth="FusedBias|cast_inputs")
def extension_with_two_dtypes(amp: Amp, *, cured: bool) -> Program:
    function = FusedBiasInFp32 if cured else FusedBias
    bias = nn.Parameter(torch.zeros(WIDTH))
    model = Net(lambda x: function.apply(x, bias))
    model.register_parameter("bias", bias)
    return training(amp, model)


# Writing into a tensor of another dtype


@report(
    says=r"index_put_ .*\(Net\) got float32 \(rows\), float16.*float32 by hand",
    truth="index_put|Index put",
)
@trained(Net)
def rows_of_a_buffer(y: Tensor, *, cured: bool) -> Tensor:
    rows, kept = torch.zeros(2 * len(y), WIDTH), 2 * torch.arange(len(y))
    rows[kept] = y.to(rows.dtype) if cured else y
    return rows


@report(says=r"index_add .*float32 \(pooled\), float16 \(rows\)", truth="index_add")
@trained(Net)
def index_add(rows: Tensor, *, cured: bool) -> Tensor:
    pooled, index = torch.zeros(2, WIDTH), torch.arange(4) % 2
    rows = rows.to(pooled.dtype) if cured else rows
    return pooled.index_add(0, index, rows)


@report(says=r"lerp_? .*float32 \(center\), bfloat16 \(now\)", truth="lerp")
def running_center(amp: Amp, *, cured: bool) -> Program:
    center = torch.zeros(WIDTH)

    def function(y: Tensor) -> Tensor:
        now = y.detach().mean(0)
        now = now.to(center.dtype) if cured else now
        center.lerp_(now, 0.1)
        return y - center

    return training(amp, Net(function), dtype=BF16)


# Operations that autocast does not cast


@report(
    says=r"bilinear in module 'function\.pairs'.*op:bilinear=", truth="(?i)bilinear"
)
def bilinear(amp: Amp, *, cured: bool) -> Program:

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Bilinear(WIDTH, WIDTH, 2)

        def forward(self, y: Tensor) -> Tensor:
            y = y.float() if cured else y
            return self.pairs(y, y)

    return training(amp, Net(Pairs()))


@report(
    says=r"embedding_bag .*float32 \(weight\), float16 \(per_sample_weights\)",
    truth="embedding_bag",
)
def weighted_bag(amp: Amp, *, cured: bool) -> Program:
    bag = nn.EmbeddingBag(10, WIDTH, mode="sum")

    def function(y: Tensor) -> Tensor:
        shares = y.float() if cured else y
        return bag(torch.randint(10, (4, WIDTH)), per_sample_weights=shares)

    return training(amp, Net(function))


@report(says=r"logdet.*(op:logdet=fp32|\.float\(\)|float32)", truth="logdet|linalg")
@trained(Net, dtype=BF16)
def linear_algebra_in_bf16(y: Tensor, *, cured: bool) -> Tensor:
    gram = y @ y.T
    gram = gram + 10 * torch.eye(len(gram), dtype=gram.dtype)
    return torch.logdet(gram.float() if cured else gram)


@report(
    says=r"(sparse|addmm|\bmm\b|matmul).*(=fp32|\.float\(\)|enabled=False)",
    truth="sparse",
)
@trained(Net, dtype=BF16)
def sparse_product(y: Tensor, *, cured: bool) -> Tensor:
    graph = torch.eye(4).to_sparse_csr()
    with torch.autocast("cpu", dtype=BF16, enabled=not cured):
        return torch.sparse.mm(graph, y.float() if cured else y)


@report(says=r"complex .*bfloat16.*(float\(\)|float32)", truth="(?i)bfloat16")
@trained(Net, dtype=BF16)
def complex_of_bf16(y: Tensor, *, cured: bool) -> Tensor:
    y = y.float() if cured else y
    return torch.complex(y, y).abs()


# Constants, numpy, tracing


@report(
    says=r"masked_fill.*-1e\+?0?9.*torch\.finfo\(.*\.min",
    truth="masked_fill|without overflow",
)
@trained(Net)
def mask_constant(y: Tensor, *, cured: bool) -> Tensor:
    scores = y @ y.T
    constant = torch.finfo(scores.dtype).min if cured else -1e9
    return scores.masked_fill(torch.ones(4, 4).triu(1) > 0, constant).softmax(-1)


@report(says=r"numpy.*bfloat16.*\.float\(\)", truth="(?i)bfloat16")
@trained(Net, dtype=BF16)
def numpy_of_bf16(logits: Tensor, *, cured: bool) -> Tensor:
    kept = logits.detach()
    (kept.float() if cured else kept).numpy().argmax(-1)
    return logits


@report(says=r"cache_enabled=False", truth="cache")
def trace_under_autocast(amp: Amp, *, cured: bool) -> Program:
    layer = nn.Linear(WIDTH, WIDTH)
    twice = nn.Sequential(layer, layer)

    def step() -> None:
        with amp.autocast(BF16, cache_enabled=not cured):
            torch.jit.trace(twice, torch.randn(4, WIDTH))

    return Program(twice, step)


# Models that were cast as a whole


@report(
    says=r"linear in module '0' \(Linear\) got float32 \(input\), bfloat16",
    truth=r"Float and BFloat16|float32 \(input\)",
)
def half_model_with_float_inputs(amp: Amp, *, cured: bool) -> Program:
    del amp
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16()
    return plain_training(model, dtype=BF16 if cured else torch.float32)


@report(
    says=r"(BatchNorm1d|'norm').*float32|float32.*(BatchNorm1d|'norm')",
    truth="(?i)batch.?norm|'norm'",
)
def norm_in_half(amp: Amp, *, cured: bool) -> Program:
    del amp
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(WIDTH))
    model.add_module("layer", nn.Linear(WIDTH, WIDTH))
    if not cured:
        model.norm.bfloat16()
    return plain_training(model, dtype=torch.float32)


@report(says=r"float32 \(mixing\)", truth="mixing")
def attribute_left_in_fp32(amp: Amp, *, cured: bool) -> Program:
    del amp

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            if cured:
                self.register_buffer("mixing", torch.eye(WIDTH))
            else:
                self.mixing = torch.eye(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y @ self.mixing

    return plain_training(Mixing().bfloat16(), dtype=BF16)


@report(
    says=r"scaled_dot_product_attention.*float32 \(query, key\).*bfloat16 \(value\)",
    truth="query.*float.*value",
)
def rotary_table_in_fp32(amp: Amp, *, cured: bool) -> Program:
    del amp

    def function(y: Tensor) -> Tensor:
        value = y.unsqueeze(0)
        angles = torch.arange(4.0)[:, None] / math.pi
        query = key = value * angles.cos()
        if cured:
            query, key = query.to(value.dtype), key.to(value.dtype)
        return F.scaled_dot_product_attention(query, key, value)

    return plain_training(Net(function).bfloat16(), dtype=BF16)


@report(
    says=r"(nll_loss|cross_entropy).*(bfloat16|float32)",
    truth="nll_loss|cross_entropy|weight",
)
def weights_of_classes(amp: Amp, *, cured: bool) -> Program:
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss(weight=torch.ones(3))
    x, y = torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 0])

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast(BF16):
            logits = model(x)
        loss_of(logits.float() if cured else logits, y).backward()
        optimizer.step()

    return Program(model, step)

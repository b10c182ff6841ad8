"""Operations that refuse a mix of dtypes, or have no kernel in 16 bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tests.field.nets import WIDTH, loop, mean_square, training
from tests.field.report import Program, reports_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.field.report import Amp

report = reports_of("dtype error")
BF16 = torch.bfloat16


def plain_training(model: nn.Module, *, dtype: torch.dtype) -> Program:
    """Return the loop of a model that was cast as a whole, without autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, WIDTH, dtype=dtype)
    return loop(None, model, lambda: mean_square(model(x)), optimizer)


class Net(nn.Module):
    """A linear layer, and a function of its output that is the report's."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes of it."""
        return self.function(self.layer(x))


# Functions of one's own


class Projection(torch.autograd.Function):
    """A product with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x @ weight.T`; autocast casts both."""
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the gradient by what was saved in float32."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class DecoratedProjection(Projection):
    """The same, cured."""

    forward = staticmethod(torch.amp.custom_fwd(Projection.forward, device_type="cpu"))
    backward = staticmethod(
        torch.amp.custom_bwd(Projection.backward, device_type="cpu")
    )


@report(
    "shawntan/scattermoe#17 NVlabs/pacnet#27 gungui98/Pytorch-Depthwise-Conv3d#3",
    symptom="The backward pass of a custom function: expected Half but found Float.",
    cause="Forward runs under autocast, backward does not: it has two dtypes.",
    says=r"Projection.*(custom_fwd|low_precision)",
    truth="Projection|custom_fwd",
    cure="Decorate `forward` with `custom_fwd` and `backward` with `custom_bwd`.",
)
def custom_backward(amp: Amp, *, cured: bool) -> Program:
    """Train a layer whose product is a function of one's own."""
    function = DecoratedProjection if cured else Projection
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
    model = Net(lambda x: function.apply(x, weight))
    model.register_parameter("weight", weight)
    return training(amp, model)


def extension_kernel(x: Tensor, bias: Tensor) -> Tensor:
    """Do as a kernel of a C++ extension does: take one dtype."""
    if x.dtype != bias.dtype:
        message = "expected scalar type Half but found Float"
        raise RuntimeError(message)
    return x + bias


class FusedBias(torch.autograd.Function):
    """Calls the kernel; `custom_fwd` without arguments casts nothing."""

    @staticmethod
    @hs.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Run the kernel."""
        ctx.dtype = x.dtype
        return extension_kernel(x, bias)

    @staticmethod
    @hs.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the gradient on."""
        return grad.to(ctx.dtype), grad.sum(0).float()


class FusedBiasInFp32(FusedBias):
    """The same, cured."""

    @staticmethod
    @hs.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Run the kernel."""
        ctx.dtype = x.dtype
        return extension_kernel(x, bias)


@report(
    "pytorch/pytorch#38487 pytorch/pytorch#47906",
    symptom="A kernel of an extension: expected scalar type Half but found Float.",
    cause="`custom_fwd` without `cast_inputs` casts no argument of the kernel.",
    command="run",
    says=r"FusedBias.*cast_inputs",
    truth="FusedBias|cast_inputs",
    cure="`custom_fwd(cast_inputs=torch.float32)`.",
)
def extension_with_two_dtypes(amp: Amp, *, cured: bool) -> Program:
    """Train a layer whose bias a kernel of an extension adds."""
    function = FusedBiasInFp32 if cured else FusedBias
    bias = nn.Parameter(torch.zeros(WIDTH))
    model = Net(lambda x: function.apply(x, bias))
    model.register_parameter("bias", bias)
    return training(amp, model)


# Writing into a tensor of another dtype


@report(
    "pyg-team/pytorch_geometric#7473 open-mmlab/mmdetection3d#1842 "
    "hiyouga/LlamaFactory#3807 zai-org/VisionReward#7 pytorch/rl#1703 "
    "pytorch/pytorch#81876",
    symptom=(
        "Index put requires the source and destination dtypes match. "
        "masked_scatter: expected self and source to have same dtypes."
    ),
    cause="A layer's output in 16 bits is written into a tensor in float32.",
    command="run",
    says=r"index_put_ .*\(Net\) got float32 \(rows\), float16.*float32 by hand",
    truth="index_put|Index put",
    cure="`rows[kept] = y.to(rows.dtype)`, or make `rows` with `y.new_zeros`.",
)
def rows_of_a_buffer(amp: Amp, *, cured: bool) -> Program:
    """Write each second row."""

    def function(y: Tensor) -> Tensor:
        rows, kept = torch.zeros(2 * len(y), WIDTH), 2 * torch.arange(len(y))
        rows[kept] = y.to(rows.dtype) if cured else y
        return rows

    return training(amp, Net(function))


@report(
    "NVIDIA/apex#455 pytorch/pytorch#51730 flairNLP/flair#3651",
    symptom=(
        "index_add_(): self and source must have the same scalar type. scatter(): "
        "Expected self.dtype to be equal to src.dtype."
    ),
    cause="Rows or messages in 16 bits are added to a tensor in float32.",
    command="run",
    says=r"index_add .*float32 \(pooled\), float16 \(rows\)",
    truth="index_add",
    cure="`pooled.index_add(0, index, rows.to(pooled.dtype))`.",
)
def index_add(amp: Amp, *, cured: bool) -> Program:
    """Pool rows by their index."""

    def function(rows: Tensor) -> Tensor:
        pooled, index = torch.zeros(2, WIDTH), torch.arange(4) % 2
        rows = rows.to(pooled.dtype) if cured else rows
        return pooled.index_add(0, index, rows)

    return training(amp, Net(function))


@report(
    "zichongli5/NorMuon#7 LoganBooker/prodigy-plus-schedule-free#10",
    symptom="expected dtype float for `end` but got dtype c10::BFloat16.",
    cause="A running mean in float32 is moved towards a mean in 16 bits.",
    command="run",
    says=r"lerp_? .*float32 \(center\), bfloat16 \(now\)",
    truth="lerp",
    cure="`center.lerp_(now.to(center.dtype), 0.1)`.",
)
def running_center(amp: Amp, *, cured: bool) -> Program:
    """Keep a running mean of features."""
    center = torch.zeros(WIDTH)

    def function(y: Tensor) -> Tensor:
        now = y.detach().mean(0)
        now = now.to(center.dtype) if cured else now
        center.lerp_(now, 0.1)
        return y - center

    return training(amp, Net(function), dtype=BF16)


# Operations that autocast does not cast


@report(
    "NVIDIA/apex#302 NVIDIA/apex#596",
    symptom="nn.Bilinear: all tensors must have the same dtype.",
    cause="No list of autocast's has `bilinear`: it gets 16 bits and float32.",
    command="run",
    says=r"bilinear in module 'function\.pairs'.*op:bilinear=",
    truth="(?i)bilinear",
    cure="`bilinear(x.float(), x.float())`, or the rule `op:bilinear=promote`.",
)
def bilinear(amp: Amp, *, cured: bool) -> Program:
    """Compare features with themselves."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Bilinear(WIDTH, WIDTH, 2)

        def forward(self, y: Tensor) -> Tensor:
            y = y.float() if cured else y
            return self.pairs(y, y)

    return training(amp, Net(Pairs()))


@report(
    "meta-pytorch/torchrec#1758",
    symptom="embedding_bag: weight and per_sample_weights must have the same type.",
    cause="The weights of samples come from a layer, in 16 bits.",
    command="run",
    says=r"embedding_bag .*float32 \(weight\), float16 \(per_sample_weights\)",
    truth="embedding_bag",
    cure="`bag(tokens, per_sample_weights=shares.float())`.",
)
def weighted_bag(amp: Amp, *, cured: bool) -> Program:
    """Weigh tokens by what a layer says of them."""
    bag = nn.EmbeddingBag(10, WIDTH, mode="sum")

    def function(y: Tensor) -> Tensor:
        shares = y.float() if cured else y
        return bag(torch.randint(10, (4, WIDTH)), per_sample_weights=shares)

    return training(amp, Net(function))


@report(
    "KohakuBlueleaf/LyCORIS#123 NVIDIA/apex#887 pytorch/pytorch#17413",
    symptom="linalg: low precision dtypes not supported. Got BFloat16.",
    cause="Linear algebra has no 16-bit kernels, and autocast does not cast to fp32.",
    command="run",
    says=r"logdet.*(op:logdet=fp32|\.float\(\)|float32)",
    truth="logdet|linalg",
    cure="`torch.logdet(gram.float())`.",
)
def linear_algebra_in_bf16(amp: Amp, *, cured: bool) -> Program:
    """Take a log-determinant of products."""

    def function(y: Tensor) -> Tensor:
        gram = y @ y.T
        gram = gram + 10 * torch.eye(len(gram), dtype=gram.dtype)
        return torch.logdet(gram.float() if cured else gram)

    return training(amp, Net(function), dtype=BF16)


@report(
    "pytorch/pytorch#41069 cai4cai/torchsparsegradutils#53 NVIDIA/apex#907 "
    "Lightning-AI/pytorch-lightning#5282",
    symptom="torch.sparse.mm: \"addmm_sparse\" not implemented for 'Half'.",
    cause="There is no 16-bit kernel for this sparse product.",
    command="run",
    says=r"(sparse|addmm|\bmm\b|matmul).*(=fp32|\.float\(\)|enabled=False)",
    truth="sparse",
    cure="`with torch.autocast('cpu', enabled=False)`, and `y.float()` in it.",
)
def sparse_product(amp: Amp, *, cured: bool) -> Program:
    """Multiply by the adjacency matrix of a graph."""
    graph = torch.eye(4).to_sparse_csr()

    def function(y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=not cured):
            return torch.sparse.mm(graph, y.float() if cured else y)

    return training(amp, Net(function), dtype=BF16)


@report(
    "pytorch/pytorch#95100 Francis-Komizu/Sovits#4",
    symptom="Complex numbers are only made of Half, Float or Double, not BFloat16.",
    cause="torch has no complex dtype of two bfloat16.",
    command="run",
    says=r"complex .*bfloat16.*(float\(\)|float32)",
    truth="(?i)bfloat16",
    cure="`torch.complex(y.float(), y.float())`.",
)
def complex_of_bf16(amp: Amp, *, cured: bool) -> Program:
    """Take real and imaginary parts from a layer."""

    def function(y: Tensor) -> Tensor:
        y = y.float() if cured else y
        return torch.complex(y, y).abs()

    return training(amp, Net(function), dtype=BF16)


# Constants, numpy, tracing


@report(
    "NVIDIA/apex#1052 NVIDIA/apex#1105 facebookresearch/fairseq#3575 "
    "huggingface/lerobot#710",
    symptom="value cannot be converted to type at::Half without overflow.",
    cause="Scores are masked with -1e9, which float16 does not hold.",
    command="run",
    says=r"masked_fill.*-1e\+?0?9.*torch\.finfo\(.*\.min",
    truth="masked_fill|without overflow",
    cure="`scores.masked_fill(mask, torch.finfo(scores.dtype).min)`.",
)
def mask_constant(amp: Amp, *, cured: bool) -> Program:
    """Mask the scores of an attention."""

    def function(y: Tensor) -> Tensor:
        scores = y @ y.T
        constant = torch.finfo(scores.dtype).min if cured else -1e9
        return scores.masked_fill(torch.ones(4, 4).triu(1) > 0, constant).softmax(-1)

    return training(amp, Net(function))


@report(
    "pytorch/pytorch#110285 xwying/torchshow#23 locuslab/open-unlearning#156 "
    "IntelLabs/open-omics-alphafold#9",
    symptom="TypeError: Got unsupported ScalarType BFloat16.",
    cause="numpy has no bfloat16.",
    command="run",
    says=r"numpy.*bfloat16.*\.float\(\)",
    truth="(?i)bfloat16",
    cure="`logits.float().numpy()`.",
)
def numpy_of_bf16(amp: Amp, *, cured: bool) -> Program:
    """Compute a metric in numpy."""

    def function(logits: Tensor) -> Tensor:
        kept = logits.detach()
        (kept.float() if cured else kept).numpy().argmax(-1)
        return logits

    return training(amp, Net(function), dtype=BF16)


@report(
    "pytorch/pytorch#50231 pytorch/pytorch#84092 pytorch/pytorch#63552",
    symptom="torch.jit.trace: cannot insert a tensor that requires grad as a constant.",
    cause="autocast's cache hands the tracer the cast weight of the first call.",
    command="run",
    says=r"cache_enabled=False",
    truth="cache",
    cure="`torch.autocast(..., cache_enabled=False)` while tracing.",
)
def trace_under_autocast(amp: Amp, *, cured: bool) -> Program:
    """Trace a model that uses its layer twice."""
    layer = nn.Linear(WIDTH, WIDTH)
    twice = nn.Sequential(layer, layer)

    def step() -> None:
        with amp.autocast(BF16, cache_enabled=not cured):
            torch.jit.trace(twice, torch.randn(4, WIDTH))

    return Program(twice, step)


# Models that were cast as a whole


@report(
    "OpenBMB/MiniCPM-V#234 ToTheBeginning/PuLID#162 "
    "Vaibhavs10/fast-whisper-finetuning#14",
    symptom="mat1 and mat2 must have the same dtype, but got Float and Half.",
    cause="The model is in float16, its inputs are in float32.",
    says=r"linear in module '0' \(Linear\) got float32 \(input\), bfloat16",
    truth=r"Float and BFloat16|float32 \(input\)",
    cure="Keep the model in float32 and use `autocast`; or `model(x.half())`.",
)
def half_model_with_float_inputs(amp: Amp, *, cured: bool) -> Program:
    """Call `model.half()`, and leave the batch as it is."""
    del amp
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16()
    return plain_training(model, dtype=BF16 if cured else torch.float32)


@report(
    "Mikubill/sd-webui-controlnet#2147 Nerogar/OneTrainer#655",
    symptom="mixed dtype (CPU): expect parameter to have scalar type of Float.",
    cause="The norm is in 16 bits, and gets float32.",
    says=r"(BatchNorm1d|'norm').*float32|float32.*(BatchNorm1d|'norm')",
    truth="(?i)batch.?norm|'norm'",
    cure="Keep norms in float32: `prepare(model, optimizer, 'O2')` does.",
)
def norm_in_half(amp: Amp, *, cured: bool) -> Program:
    """Cast a norm to bfloat16, and give it float32."""
    del amp
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(WIDTH))
    model.add_module("layer", nn.Linear(WIDTH, WIDTH))
    if not cured:
        model.norm.bfloat16()
    return plain_training(model, dtype=torch.float32)


@report(
    "huggingface/transformers#22888",
    symptom="After model.half(): expected scalar type Half but found Float.",
    cause="A plain attribute of a module is no buffer: `half()` leaves it in float32.",
    says=r"float32 \(mixing\)",
    truth="mixing",
    cure="`self.register_buffer('mixing', mixing)`.",
)
def attribute_left_in_fp32(amp: Amp, *, cured: bool) -> Program:
    """Keep a matrix as an attribute."""
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
    "facebookresearch/xformers#742 facebookresearch/xformers#325 "
    "lucidrains/rotary-embedding-torch#9 pytorch/pytorch#126053",
    symptom="Expected query, key, and value to have the same dtype.",
    cause="A table of rotary angles in float32 promotes query and key, not value.",
    says=r"scaled_dot_product_attention.*float32 \(query, key\).*bfloat16 \(value\)",
    truth="query.*float.*value",
    cure="Cast back: `(query * angles).to(value.dtype)`.",
)
def rotary_table_in_fp32(amp: Amp, *, cured: bool) -> Program:
    """Turn queries and keys by angles in float32."""
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
    "NVIDIA/apex#837",
    symptom="CrossEntropyLoss(weight=...): expected scalar type Half but found Float.",
    cause="The weights of classes are in float32, the logits in 16 bits.",
    says=r"(nll_loss|cross_entropy).*(bfloat16|float32)",
    truth="nll_loss|cross_entropy|weight",
    cure="Compute the loss inside the context, or from `logits.float()`.",
)
def weights_of_classes(amp: Amp, *, cured: bool) -> Program:
    """Compute a weighted loss outside of autocast."""
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

"""Numbers that leave the range of float16, or vanish in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tests.field.nets import WIDTH, Between, inference, training
from tests.field.report import Program, reports_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from tests.field.report import Amp

report, report_zero = map(reports_of, ("range", "zero and tiny numbers"))


class FeedForward(nn.Module):
    """A gated feed-forward network whose weights were trained in bfloat16."""

    def __init__(self, *, keeps_fp32: bool) -> None:
        super().__init__()
        self.gate, self.wi = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.wo, self.keeps_fp32 = nn.Linear(64, WIDTH), keeps_fp32
        self.norm = nn.LayerNorm(WIDTH)
        for layer in (self.gate, self.wi, self.wo):
            nn.init.constant_(layer.weight, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised numbers."""
        hidden = F.gelu(self.gate(x)) * self.wi(x)
        with torch.autocast("cpu", torch.float16, enabled=not self.keeps_fp32):
            wide = self.wo(hidden.float() if self.keeps_fp32 else hidden)
        return self.norm(wide)  # type: ignore[no-any-return]


@report(
    "huggingface/transformers#5651 huggingface/transformers#9295 "
    "huggingface/transformers#10956 huggingface/transformers#14189",
    symptom="A T5 in fp16: the loss is NaN from the first steps on.",
    cause="The feed-forward network's last layer gives more than 65504.",
    says=r"wo \(linear\): forward range: .*65504.*module:wo=fp32",
    truth=r"\bwo\b",
    cure='Keep that layer in fp32: `policy="lean + module:wo=fp32"`; or bfloat16.',
)
def feed_forward_of_t5(amp: Amp, *, cured: bool) -> Program:
    """Train a feed-forward network of a model that was made for bfloat16."""
    return training(amp, FeedForward(keeps_fp32=cured), x=torch.rand(4, WIDTH) + 1)


@report(
    "pytorch/pytorch#60939 NVIDIA/apex#224 idiap/fast-transformers#32 "
    "LeapLabTHU/FLatten-Transformer#15",
    symptom=(
        "Attention gives NaN after the softmax in fp16. Linear attention runs for "
        "a while in fp16, then NaN comes in."
    ),
    cause=(
        "Products of queries and keys, or of keys and values, pass 65504 before "
        "they are divided."
    ),
    says=r"matmul\): forward range: .*65504",
    truth=r"matmul|q @ k",
    cure=(
        "Divide first: `(q / math.sqrt(d)) @ k.transpose(-1, -2)`, `(k / "
        "k.sum(0)).T @ v`."
    ),
)
def scores_before_division(amp: Amp, *, cured: bool) -> Program:
    """Attend with large queries."""

    def attend(x: Tensor) -> Tensor:
        q = k = x * 400
        if cured:
            scores = (q / (100 * math.sqrt(WIDTH))) @ k.T
        else:
            scores = q @ k.T / (100 * math.sqrt(WIDTH))
        return scores.softmax(-1).to(x.dtype) @ x

    return training(amp, Between(attend), x=3 * torch.ones(4, WIDTH))


@report(
    "pytorch/pytorch#26098 jadore801120/attention-is-all-you-need-pytorch#5",
    symptom="Attention is NaN for some sequences of a batch.",
    cause="All keys of a row are masked: softmax of nothing but -inf.",
    says=r"softmax\): .*mask",
    truth="softmax",
    cure="Leave a key in each row, or set rows that are masked whole to 0 afterwards.",
)
def row_without_keys(amp: Amp, *, cured: bool) -> Program:
    """Mask a sequence that is padding only."""

    def attend(x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4, dtype=torch.bool)
        mask[0, int(cured) :] = True
        scores = (x @ x.T).masked_fill(mask, -math.inf)
        return scores.softmax(-1).to(x.dtype) @ x

    return training(amp, Between(attend))


@report(
    "apple/coremltools#351 facebookresearch/ConvNeXt#71 ml-explore/mlx#4228 "
    "NVIDIA/apex#84 facebookresearch/fairseq#2235",
    symptom=(
        "A hand-written layer norm is wrong or NaN in float16. A hand-written "
        "GELU in fp16: the output is finite, gradients are NaN."
    ),
    cause="Squares or cubes of its inputs pass 65504.",
    says=r"(square|pow)\): forward range: .*65504",
    truth=r"square|pow",
    cure=(
        "Take the statistics of `x.float()`; `nn.LayerNorm`, `F.gelu(x, "
        "approximate='tanh')`."
    ),
)
def norm_by_hand(amp: Amp, *, cured: bool) -> Program:
    """Divide by a standard deviation."""

    def normalise(x: Tensor) -> Tensor:
        wide = (x.float() if cured else x.half()) * 1000
        centred = wide - wide.mean(-1, keepdim=True)
        deviation = centred.square().mean(-1, keepdim=True).sqrt()
        return (wide - deviation) / 1e4

    return training(amp, Between(normalise))


@report_zero(
    "pytorch/pytorch#68425 pytorch/pytorch#52248 pytorch/pytorch#156212",
    symptom="The loss is finite, and all gradients are NaN.",
    cause="The unused branch of torch.where overflows: its gradient is 0 times inf.",
    says=r"\(exp\): forward range: .*clamp its argument",
    truth=r"\bexp\b|Exp|where|Where",
    cure="Clamp the argument, too: `torch.where(ok, f(torch.where(ok, x, 0)), y)`.",
)
def branch_left_out(amp: Amp, *, cured: bool) -> Program:
    """Choose between an exponential and a line."""

    def choose(x: Tensor) -> Tensor:
        wide = x.float() * 1000
        low = wide <= 0
        inside = torch.where(low, wide, 0.0) if cured else wide
        return torch.where(low, inside.exp(), wide * 1e-3 + 1)

    return training(amp, Between(choose))


@report_zero(
    "pytorch/pytorch#64305 pytorch/pytorch#121416",
    symptom="Targets that are missing are masked, and gradients are NaN.",
    cause="The mask comes after the loss: NaN times 0 is NaN on the way back.",
    says=r"mse_loss\): label: a target .*NaN",
    truth=r"target|mse|Mse|pow|Pow|square",
    cure="Mask before the loss: `loss(y[known], target[known])`.",
)
def mask_after_loss(amp: Amp, *, cured: bool) -> Program:
    """Train on targets of which some are missing."""
    target = torch.randn(4, WIDTH)
    target[0, 0] = math.nan
    known = ~target.isnan()

    def loss_of(y: Tensor) -> Tensor:
        if cured:
            return F.mse_loss(y.float()[known], target[known])
        return F.mse_loss(y.float(), target, reduction="none")[known].mean()

    return training(amp, loss_of=loss_of)


@report_zero(
    "pytorch/pytorch#2421 open-mmlab/mmrotate#205 mpariente/pytorch_stoi#14",
    symptom="Gradients are NaN as soon as two points are one.",
    cause="The slope of a square root at 0 is infinite.",
    says=r"sqrt.*0",
    truth="sqrt|Sqrt",
    cure="Add the small number inside: `(d.square().sum(-1) + eps).sqrt()`.",
)
def root_at_zero(amp: Amp, *, cured: bool) -> Program:
    """Measure distances of outputs to themselves."""

    def loss_of(y: Tensor) -> Tensor:
        squares = (y[:, None] - y[None]).float().square().sum(-1)
        return (squares + 1e-6 * cured).sqrt().mean()

    return training(amp, loss_of=loss_of)


@report_zero(
    "pytorch/pytorch#33596 pytorch/pytorch#192017 kornia/kornia#3966 "
    "pyg-team/pytorch_geometric#2106 "
    "AUTOMATIC1111/stable-diffusion-webui#14071",
    symptom=(
        "Normalised vectors are NaN in float16 where they are 0. After "
        "model.half() the noisiest steps of sampling give inf."
    ),
    cause=(
        "A small number (an eps of 1e-8, the last alphas_cumprod) rounds to 0 in "
        "float16: a division by 0."
    ),
    says=r"(div|normalize).*(0|zero)",
    truth="div|Div|normalize",
    cure=(
        "An eps that float16 holds (1e-4), `F.normalize(x.float())`; a schedule "
        "in float32."
    ),
)
def eps_of_a_norm(amp: Amp, *, cured: bool) -> Program:
    """Normalise rows of which one is 0."""

    def normalise(x: Tensor) -> Tensor:
        rows = torch.cat([x[:3], torch.zeros_like(x[:1])]).half()
        with torch.autocast("cpu", enabled=False):
            norms = rows.abs().amax(-1, keepdim=True)
            return rows / (norms + (1e-4 if cured else 1e-8))

    return training(amp, Between(normalise))


@report_zero(
    "NVIDIA/apex#379 pytorch/pytorch#40497 dmlc/gluon-cv#942 "
    "lucidrains/gateloop-transformer#4 facebookresearch/xformers#96",
    symptom=(
        "softmax, then log, then NLL: inf under mixed precision. log(x + 1e-8) is "
        "-inf in float16."
    ),
    cause="Small probabilities, and 1e-8, are 0 in float16, and log(0) is -inf.",
    says=r"log.*(0 at|zero|argument is 0)",
    truth=r"\blog\b|Log",
    cure="`F.log_softmax(logits.float(), -1)`, `torch.log(x.float() + 1e-8)`.",
)
def log_of_softmax(amp: Amp, *, cured: bool) -> Program:
    """Compute a cross entropy in two steps."""

    def loss_of(y: Tensor) -> Tensor:
        logits = y * torch.tensor([60.0] + [-60.0] * (WIDTH - 1))
        if cured:
            return -F.log_softmax(logits.float(), -1).mean()
        return -logits.softmax(-1).half().log().float().mean()

    return training(amp, loss_of=loss_of)


@report(
    "qubvel-org/segmentation_models.pytorch#463 "
    "Lightning-AI/torchmetrics#1380 pytorch/pytorch#44350 NVIDIA/apex#402 "
    "pytorch/pytorch#3651 jcjohnson/neural-style#425",
    symptom=(
        "Dice loss of images of 512 x 512 is NaN under mixed precision. The style "
        "loss is NaN with mixed precision, at any level."
    ),
    cause=(
        "A sum over all pixels, such as a Gram matrix, passes 65504 before it is "
        "divided."
    ),
    says=r"\(sum\): loss function: .*65504",
    truth=r"\bsum\b|Sum",
    cure="Sum in float32, `(p.float() * target).sum()`, or divide first.",
)
def sum_over_an_image(amp: Amp, *, cured: bool) -> Program:
    """Compare masks by their overlap."""

    def loss_of(y: Tensor) -> Tensor:
        p = y.sigmoid().expand(8192, *y.shape)
        p = p.float() if cured else p.half()
        target = torch.ones_like(p)
        return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())

    return training(amp, loss_of=loss_of)


@report(
    "wenet-e2e/wenet#891 flashlight/flashlight#448 NVIDIA/kvpress#250 "
    "NVIDIA/kvpress#268",
    symptom=(
        "A Conformer with relative positions is NaN from epoch 14 on. Generation "
        "in float16 gives only '!!!!'; bfloat16 works."
    ),
    cause="A sum or a product of finite numbers passes 65504 before it is divided.",
    says=r"\(add\): forward range: .*65504",
    truth=r"\badd\b|Add",
    cure=(
        "Divide before: each score by the root of the width, `y.float() / "
        "y.norm() ** 2`."
    ),
)
def sum_of_two_scores(amp: Amp, *, cured: bool) -> Program:
    """Attend by contents and positions."""

    def attend(x: Tensor) -> Tensor:
        contents = positions = x.sigmoid() * 3e4 + 2e4
        if cured:
            scores = contents / 100 + positions / 100
        else:
            scores = (contents + positions) / 100
        return scores.softmax(-1).to(x.dtype)

    return training(amp, Between(attend))


@report(
    "huggingface/diffusers#7188 Comfy-Org/ComfyUI#1401 "
    "huggingface/candle#1060 huggingface/transformers#39972 "
    "huggingface/transformers#36832 huggingface/transformers#19229 "
    "awslabs/sockeye#1051",
    symptom=(
        "Images that SDXL's VAE decodes in fp16 are black. Gemma 3 or LongT5 in "
        "float16 gives empty texts: hidden states are NaN."
    ),
    cause=(
        "Activations of a convolution, or the residual stream of a model that was "
        "made for bfloat16, pass 65504; the norm makes NaN of inf."
    ),
    command="find_nonfinite",
    says=r"conv_out \(conv\w*\) produced inf.*65504",
    truth="conv_out",
    cure="Run it in bfloat16 or float32: `vae.to(torch.float32)`.",
)
def decoder_of_images(amp: Amp, *, cured: bool) -> Program:
    """Decode latents."""
    del amp
    model = nn.Sequential()
    model.add_module("conv_in", nn.Conv2d(4, 8, 1))
    model.add_module("conv_out", nn.Conv2d(8, 8, 3, padding=1))
    model.add_module("norm", nn.GroupNorm(2, 8))
    nn.init.constant_(model.conv_in.weight, 100.0)
    nn.init.constant_(model.conv_out.weight, 10.0)
    dtype = torch.float32 if cured else torch.float16
    return inference(model.to(dtype), torch.rand(1, 4, 8, 8, dtype=dtype) + 1)


@report(
    "tracel-ai/burn#5374 apple/coremltools#2814 sbryngelson/ANEForge#113 "
    "vanderschaarlab/synthcity#331 lucidrains/DALLE2-pytorch#138 "
    "pyg-team/pytorch_geometric#500 NVIDIA/apex#812",
    symptom=(
        "A hand-written softplus gives inf in fp16, and NaN gradients. The KL "
        "term of a VAE becomes inf."
    ),
    cause="exp(x) is inf from 11.1 on in float16.",
    says=r"\(exp\): forward range: ",
    truth=r"\bexp\b|Exp",
    cure="`F.softplus(x)`; `logvar.float().clamp(-30, 20).exp()`.",
)
def softplus_by_hand(amp: Amp, *, cured: bool) -> Program:
    """Make positive what a layer gives."""

    def softplus(x: Tensor) -> Tensor:
        wide = (x * 20).half()
        if cured:
            return wide.clamp(min=0) + (-wide.abs()).exp().log1p()
        return (1 + wide.exp()).log()

    return training(amp, Between(softplus), x=3 * torch.randn(4, WIDTH))


@report(
    "facebookresearch/swav#67 facebookresearch/dinov2#583 "
    "huggingface/sentence-transformers#2774",
    symptom="Sinkhorn's assignments are NaN with a small temperature.",
    cause="exp(score / 0.04) is inf, in float32, too; inf / inf is NaN.",
    says=r"\(exp\): .*(maximum|clamp)",
    truth=r"\bexp\b|Exp",
    cure="Subtract the maximum first: `(s - s.amax(-1, keepdim=True)).exp()`.",
)
def exp_of_scores(amp: Amp, *, cured: bool) -> Program:
    """Assign outputs to prototypes."""

    def loss_of(y: Tensor) -> Tensor:
        scores = 10 * y.float() / 0.04
        if cured:
            scores = scores - scores.amax(-1, keepdim=True)
        shares = scores.exp()
        return (shares / shares.sum(-1, keepdim=True)).square().mean()

    return training(amp, loss_of=loss_of)


@report(
    "pytorch/pytorch#63719",
    symptom="With targets of millions every step is skipped, at any loss scale.",
    cause="The gradient of the loss, 2 * (y - target), is beyond float16 unscaled.",
    says=r"loss function: .*though the loss scale is 1.*normalise its targets",
    truth="(?i)mse|loss passes|target",
    cure="Train on normalised targets: `(target - mean) / std`.",
)
def large_targets(amp: Amp, *, cured: bool) -> Program:
    """Predict amounts of money."""
    target = 1e9 * torch.randn(4, WIDTH)
    target = target / 1e9 if cured else target

    def loss_of(y: Tensor) -> Tensor:
        return F.mse_loss(y.float(), target)

    return training(amp, loss_of=loss_of)

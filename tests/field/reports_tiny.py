"""Numbers that vanish in 16 bits, and what is not defined at 0, at 1 or of nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tests.field.nets import WIDTH, training
from tests.field.report import Program, reports_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("zero and tiny numbers")


@report(
    "lucidrains/vector-quantize-pytorch#106 open-mmlab/mmcv#2178 "
    "NVIDIA/cuvs#991 anthonymlortiz/lcn#4 megvii-research/TLC#3",
    symptom=(
        "Distances to a codebook are NaN now and then. A hand-written norm is NaN "
        "where the image is uniform."
    ),
    cause=(
        "A difference that cannot be negative (a*a + b*b - 2ab, mean(x*x) - "
        "mean(x)**2) is rounded to below 0: no square root."
    ),
    says=r"sqrt\): .*negative",
    truth="sqrt|Sqrt",
    cure=(
        "`torch.cdist(a.float(), b.float())`, `x.float().var(-1)`, or "
        "`d.clamp(min=1e-6).sqrt()`."
    ),
)
def distances_by_expansion(amp: Amp, *, cured: bool) -> Program:
    """Measure distances by a matmul."""

    def loss_of(y: Tensor) -> Tensor:
        a = y + 10
        b = a.detach()
        squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
        return (squares.clamp(min=1e-3) if cured else squares).sqrt().mean()

    x = torch.randn(64, WIDTH)
    return training(amp, loss_of=loss_of, x=x)


@report(
    "papagina/RotationContinuity#11 naver/roma#9 banctilrobitaille/torch-vectorized#7",
    symptom="The angle between rotations is NaN as soon as they agree.",
    cause="Rounding puts the cosine at 1 or above, where acos has no slope.",
    says=r"acos.*(-1|inside)",
    truth="acos|Acos",
    cure="`cosine.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()`.",
)
def angle_of_equal_vectors(amp: Amp, *, cured: bool) -> Program:
    """Measure angles to a copy."""

    def loss_of(y: Tensor) -> Tensor:
        unit = F.normalize(y.float(), dim=-1)
        cosine = (unit * unit.detach()).sum(-1)
        if cured:
            cosine = cosine.clamp(-1 + 1e-4, 1 - 1e-4)
        return cosine.acos().mean()

    return training(amp, loss_of=loss_of)


@report(
    "pytorch/pytorch#70348 pytorch/pytorch#75181 pytorch/pytorch#116349 "
    "OpenRLHF/OpenRLHF#583",
    symptom="Fine-tuning shows a loss of NaN for some batches.",
    cause="All labels of a batch are -100: a mean over nothing.",
    says=r"label: .*-100",
    truth=r"nll|Nll|cross_entropy|-100",
    cure="Leave out such batches, or divide a sum by `max(count, 1)`.",
)
def no_label_left(amp: Amp, *, cured: bool) -> Program:
    """Train on an answer that was cut off."""
    labels = torch.full((4,), -100)
    labels[0] = 1 if cured else -100

    def loss_of(y: Tensor) -> Tensor:
        return F.cross_entropy(y.float(), labels)

    return training(amp, loss_of=loss_of)


@report(
    "microsoft/LMOps#38 yenchenlin/nerf-pytorch#28 ultralytics/yolov5#2376",
    symptom=(
        "A distillation loss is NaN after some hundred steps. CIoU of two equal "
        "boxes is NaN."
    ),
    cause=(
        "0 / 0: the mask of a batch is empty, or eps was added to 1 and rounded away."
    ),
    says=r"div\): zero: its divisor is 0",
    truth="div|Div",
    cure=(
        "`total / mask.sum().clamp(min=1)`; add eps last: `v / ((1 - iou + v) + eps)`."
    ),
)
def mean_over_an_empty_mask(amp: Amp, *, cured: bool) -> Program:
    """Average over tokens that count, of which there are none."""
    mask = torch.zeros(4)

    def loss_of(y: Tensor) -> Tensor:
        count = mask.sum().clamp(min=1) if cured else mask.sum()
        return (y.float().square().mean(-1) * mask).sum() / count

    return training(amp, loss_of=loss_of)


@report(
    "kornia/kornia#918",
    symptom="Focal loss with gamma below 1: gradients are NaN for easy samples.",
    cause="(1 - p) ** gamma has an infinite slope at p = 1.",
    says=r"pow.*slope is infinite",
    truth=r"\bpow\b|Pow",
    cure="`(1 - p + 1e-6).pow(gamma)`.",
)
def focal_loss(amp: Amp, *, cured: bool) -> Program:
    """Weigh samples by how wrong they are."""

    def loss_of(y: Tensor) -> Tensor:
        p = (y.float() * 1e3).sigmoid()
        wrong = 1 - p + 1e-3 * cured
        return (wrong.pow(0.5) * (p + 1e-3)).mean()

    return training(amp, loss_of=loss_of)


@report(
    "MakazhanAlpamys/Soup#719",
    symptom="Reverse KL distillation: the loss is finite, gradients are NaN.",
    cause="The student's probabilities are the target of kl_div, and some are 0.",
    says=r"xlogy\): zero: its slope is infinite: its argument is 0",
    truth=r"kl_div|KlDiv|xlogy|Xlogy|\blog\b",
    cure="Stay in logs: `F.kl_div(teacher, student, log_target=True)`.",
)
def reverse_kl(amp: Amp, *, cured: bool) -> Program:
    """Distil with a low temperature."""
    teacher = torch.randn(4, WIDTH).log_softmax(-1)

    def loss_of(y: Tensor) -> Tensor:
        logits = y.float() * 1e3
        if cured:
            student = logits.log_softmax(-1).clamp(min=-50)
            return F.kl_div(teacher, student, reduction="sum", log_target=True)
        return F.kl_div(teacher, logits.softmax(-1), reduction="sum")

    return training(amp, loss_of=loss_of)


@report(
    "fastino-ai/GLiNER2#155 pytorch/pytorch#40497",
    symptom="The loss looks normal, and one backward pass makes all weights NaN.",
    cause="1 - 1e-6 is 1 in 16 bits: the clamp before log1p(-p) does nothing.",
    says=r"log1p\): .*-1.*float16",
    truth="log1p|Log1P",
    cure="`torch.log1p(-p.float().clamp(max=1 - 1e-6))`, or `F.logsigmoid(-logits)`.",
)
def clamp_next_to_one(amp: Amp, *, cured: bool) -> Program:
    """Multiply the chances that nothing happens."""

    def loss_of(y: Tensor) -> Tensor:
        p = (y * 100).sigmoid()
        p = p.float() if cured else p.half()
        most = torch.tensor(1 - 1e-6, dtype=p.dtype)  # torch 2.15 masks by a number
        survival = (-torch.minimum(p, most)).log1p()
        return (1 - survival.float().sum(-1).exp()).mean()

    return training(amp, loss_of=loss_of)


@report(
    "NVIDIA-NeMo/Automodel#3850 huggingface/trl#7252",
    symptom=(
        "InfoNCE is finite; the gradient of its learnt temperature is NaN. An "
        "entropy bonus is NaN as soon as some tokens are masked."
    ),
    cause=(
        "Logits are masked by -inf, then multiplied or divided: 0 times inf is NaN."
    ),
    says=r"(div|mul)\): .*infinity",
    truth="div|Div|mul|Mul",
    cure="Divide first, then mask: `(logits / t).masked_fill(mask, -inf)`.",
)
def mask_before_temperature(amp: Amp, *, cured: bool) -> Program:
    """Compare with negatives of which some are padding."""
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    mask[:, -1] = True
    model = nn.Linear(WIDTH, WIDTH)
    model.temperature = nn.Parameter(torch.tensor(0.5))

    def loss_of(y: Tensor) -> Tensor:
        logits, t = y.float(), model.temperature
        if cured:
            logits = (logits / t).masked_fill(mask, -math.inf)
        else:
            logits = logits.masked_fill(mask, -math.inf) / t
        return F.cross_entropy(logits, torch.arange(4))

    return training(amp, model, loss_of=loss_of)


@report(
    "candle-org/MindAct#1633 sooftware/kospeech#37",
    symptom="With label smoothing the loss is inf; without it training works.",
    cause="Smoothing gives masked classes a share, and their log p is -inf.",
    says=r"masked_fill\): loss function: .*non-finite constant.*finite one",
    truth="(?i)masked|smoothing",
    cure="Mask by a finite number: `logits.masked_fill(mask, -1e4)`.",
)
def smoothing_of_masked_classes(amp: Amp, *, cured: bool) -> Program:
    """Smooth labels over classes of which some are masked."""
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    mask[:, -1] = True

    def loss_of(y: Tensor) -> Tensor:
        logits = y.float().masked_fill(mask, -1e4 if cured else -math.inf)
        return F.cross_entropy(logits, torch.arange(4), label_smoothing=0.1)

    return training(amp, loss_of=loss_of)


@report(
    "pytorch/pytorch#14335 wenet-e2e/wenet#2299",
    symptom="CTC loss is inf for some recordings.",
    cause="The input is shorter than its text.",
    says=r"ctc_loss\): label: an input is too short",
    truth="ctc|Ctc",
    cure="`nn.CTCLoss(zero_infinity=True)`, or leave such pairs out.",
)
def recording_too_short(amp: Amp, *, cured: bool) -> Program:
    """Align 4 frames with a text of 6 letters."""
    text, frames, letters = torch.tensor([[1, 2, 3, 1, 2, 3]]), [4], [6]

    def loss_of(y: Tensor) -> Tensor:
        logp = y.float().log_softmax(-1)[:, None]
        lengths = torch.tensor(frames), torch.tensor(letters)
        return F.ctc_loss(logp, text, *lengths, zero_infinity=cured)

    return training(amp, loss_of=loss_of)

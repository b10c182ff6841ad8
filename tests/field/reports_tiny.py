"""Numbers that vanish in 16 bits, and what is not defined at 0, at 1 or of nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tests.field.nets import WIDTH, training
from tests.field.report import Program, report
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from tests.field.report import Amp


@report(says=r"sqrt\): .*negative", truth="sqrt|Sqrt")
def distances_by_expansion(amp: Amp, *, cured: bool) -> Program:

    def loss_of(y: Tensor) -> Tensor:
        a = y + 10
        b = a.detach()
        squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
        return (squares.clamp(min=1e-3) if cured else squares).sqrt().mean()

    x = torch.randn(64, WIDTH)
    return training(amp, loss_of=loss_of, x=x)


@report(says=r"acos.*(-1|inside)", truth="acos|Acos")
def angle_of_equal_vectors(amp: Amp, *, cured: bool) -> Program:

    def loss_of(y: Tensor) -> Tensor:
        unit = F.normalize(y.float(), dim=-1)
        cosine = (unit * unit.detach()).sum(-1)
        if cured:
            cosine = cosine.clamp(-1 + 1e-4, 1 - 1e-4)
        return cosine.acos().mean()

    return training(amp, loss_of=loss_of)


@report(says=r"label: .*-100", truth=r"nll|Nll|cross_entropy|-100")
def no_label_left(amp: Amp, *, cured: bool) -> Program:
    labels = torch.full((4,), -100)
    labels[0] = 1 if cured else -100

    def loss_of(y: Tensor) -> Tensor:
        return F.cross_entropy(y.float(), labels)

    return training(amp, loss_of=loss_of)


@report(says=r"div\): zero: its divisor is 0", truth="div|Div")
def mean_over_an_empty_mask(amp: Amp, *, cured: bool) -> Program:
    mask = torch.zeros(4)

    def loss_of(y: Tensor) -> Tensor:
        count = mask.sum().clamp(min=1) if cured else mask.sum()
        return (y.float().square().mean(-1) * mask).sum() / count

    return training(amp, loss_of=loss_of)


@report(says=r"pow.*slope is infinite", truth=r"\bpow\b|Pow")
def focal_loss(amp: Amp, *, cured: bool) -> Program:

    def loss_of(y: Tensor) -> Tensor:
        p = (y.float() * 1e3).sigmoid()
        wrong = 1 - p + 1e-3 * cured
        return (wrong.pow(0.5) * (p + 1e-3)).mean()

    return training(amp, loss_of=loss_of)


@report(
    says=r"xlogy\): zero: its slope is infinite: its argument is 0",
    truth=r"kl_div|KlDiv|xlogy|Xlogy|\blog\b",
)
def reverse_kl(amp: Amp, *, cured: bool) -> Program:
    teacher = torch.randn(4, WIDTH).log_softmax(-1)

    def loss_of(y: Tensor) -> Tensor:
        logits = y.float() * 1e3
        if cured:
            student = logits.log_softmax(-1).clamp(min=-50)
            return F.kl_div(teacher, student, reduction="sum", log_target=True)
        return F.kl_div(teacher, logits.softmax(-1), reduction="sum")

    return training(amp, loss_of=loss_of)


@report(says=r"log1p\): .*-1.*float16", truth="log1p|Log1P")
def clamp_next_to_one(amp: Amp, *, cured: bool) -> Program:

    def loss_of(y: Tensor) -> Tensor:
        p = (y * 100).sigmoid()
        p = p.float() if cured else p.half()
        most = torch.tensor(1 - 1e-6, dtype=p.dtype)  # torch 2.15 masks by a number
        survival = (-torch.minimum(p, most)).log1p()
        return (1 - survival.float().sum(-1).exp()).mean()

    return training(amp, loss_of=loss_of)


@report(says=r"(div|mul)\): .*infinity", truth="div|Div|mul|Mul")
def mask_before_temperature(amp: Amp, *, cured: bool) -> Program:
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
    says=r"masked_fill\): loss function: .*non-finite constant.*finite one",
    truth="(?i)masked|smoothing",
)
def smoothing_of_masked_classes(amp: Amp, *, cured: bool) -> Program:
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    mask[:, -1] = True

    def loss_of(y: Tensor) -> Tensor:
        logits = y.float().masked_fill(mask, -1e4 if cured else -math.inf)
        return F.cross_entropy(logits, torch.arange(4), label_smoothing=0.1)

    return training(amp, loss_of=loss_of)


@report(says=r"ctc_loss\): label: an input is too short", truth="ctc|Ctc")
def recording_too_short(amp: Amp, *, cured: bool) -> Program:
    text, frames, letters = torch.tensor([[1, 2, 3, 1, 2, 3]]), [4], [6]

    def loss_of(y: Tensor) -> Tensor:
        logp = y.float().log_softmax(-1)[:, None]
        lengths = torch.tensor(frames), torch.tensor(letters)
        return F.ctc_loss(logp, text, *lengths, zero_infinity=cured)

    return training(amp, loss_of=loss_of)

"""Numbers that leave the range of float16, or vanish in it; what is not defined."""

import math

import torch
from tests.field.nets import WIDTH, Between, inference, trained, training
from tests.field.report import Amp, Program, report
from torch import Tensor, nn
from torch.nn import (  # noqa: N812
    functional as F,
)


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
        hidden = F.gelu(self.gate(x)) * self.wi(x)
        with torch.autocast("cpu", torch.float16, enabled=not self.keeps_fp32):
            wide = self.wo(hidden.float() if self.keeps_fp32 else hidden)
        return self.norm(wide)


@report(says=r"wo \(linear\): forward range: .*65504.*module:wo=fp32", truth=r"\bwo\b")
def feed_forward_of_t5(amp: Amp, *, cured: bool) -> Program:
    return training(amp, FeedForward(keeps_fp32=cured), x=torch.rand(4, WIDTH) + 1)


@report(says=r"matmul\): forward range: .*65504", truth=r"matmul|q @ k")
@trained(Between, x=3 * torch.ones(4, WIDTH))
def scores_before_division(x: Tensor, *, cured: bool) -> Tensor:
    q = k = x * 400
    if cured:
        scores = (q / (100 * math.sqrt(WIDTH))) @ k.T
    else:
        scores = q @ k.T / (100 * math.sqrt(WIDTH))
    return scores.softmax(-1).to(x.dtype) @ x


@report(says=r"softmax\): .*mask", truth="softmax")
@trained(Between)
def row_without_keys(x: Tensor, *, cured: bool) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, int(cured) :] = True
    scores = (x @ x.T).masked_fill(mask, -math.inf)
    return scores.softmax(-1).to(x.dtype) @ x


@report(says=r"(square|pow)\): forward range: .*65504", truth=r"square|pow")
@trained(Between)
def norm_by_hand(x: Tensor, *, cured: bool) -> Tensor:
    wide = (x.float() if cured else x.half()) * 1000
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return (wide - deviation) / 1e4


@report(
    says=r"\(exp\): forward range: .*clamp its argument",
    truth=r"\bexp\b|Exp|where|Where",
)
@trained(Between)
def branch_left_out(x: Tensor, *, cured: bool) -> Tensor:
    wide = x.float() * 1000
    low = wide <= 0
    inside = torch.where(low, wide, 0.0) if cured else wide
    return torch.where(low, inside.exp(), wide * 1e-3 + 1)


@report(
    says=r"mse_loss\): label: a target .*NaN", truth=r"target|mse|Mse|pow|Pow|square"
)
def mask_after_loss(amp: Amp, *, cured: bool) -> Program:
    target = torch.randn(4, WIDTH)
    target[0, 0] = math.nan
    known = ~target.isnan()

    def loss_of(y: Tensor) -> Tensor:
        if cured:
            return F.mse_loss(y.float()[known], target[known])
        return F.mse_loss(y.float(), target, reduction="none")[known].mean()

    return training(amp, loss_of=loss_of)


@report(says=r"sqrt.*0", truth="sqrt|Sqrt")
@trained()
def root_at_zero(y: Tensor, *, cured: bool) -> Tensor:
    squares = (y[:, None] - y[None]).float().square().sum(-1)
    return (squares + 1e-6 * cured).sqrt().mean()


@report(says=r"(div|normalize).*(0|zero)", truth="div|Div|normalize")
@trained(Between)
def eps_of_a_norm(x: Tensor, *, cured: bool) -> Tensor:
    rows = torch.cat([x[:3], torch.zeros_like(x[:1])]).half()
    with torch.autocast("cpu", enabled=False):
        norms = rows.abs().amax(-1, keepdim=True)
        return rows / (norms + (1e-4 if cured else 1e-8))


@report(says=r"log.*(0 at|zero|argument is 0)", truth=r"\blog\b|Log")
@trained()
def log_of_softmax(y: Tensor, *, cured: bool) -> Tensor:
    logits = y * torch.tensor([60.0] + [-60.0] * (WIDTH - 1))
    if cured:
        return -F.log_softmax(logits.float(), -1).mean()
    return -logits.softmax(-1).half().log().float().mean()


@report(says=r"\(sum\): loss function: .*65504", truth=r"\bsum\b|Sum")
@trained()
def sum_over_an_image(y: Tensor, *, cured: bool) -> Tensor:
    p = y.sigmoid().expand(8192, *y.shape)
    p = p.float() if cured else p.half()
    target = torch.ones_like(p)
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


@report(says=r"\(add\): forward range: .*65504", truth=r"\badd\b|Add")
@trained(Between)
def sum_of_two_scores(x: Tensor, *, cured: bool) -> Tensor:
    contents = positions = x.sigmoid() * 3e4 + 2e4
    scores = (contents + positions) / 100
    if cured:
        scores = contents / 100 + positions / 100
    return scores.softmax(-1).to(x.dtype)


@report(says=r"conv_out \(conv\w*\) produced inf.*65504", truth="conv_out")
def decoder_of_images(amp: Amp, *, cured: bool) -> Program:
    del amp
    model = nn.Sequential()
    model.add_module("conv_in", nn.Conv2d(4, 8, 1))
    model.add_module("conv_out", nn.Conv2d(8, 8, 3, padding=1))
    model.add_module("norm", nn.GroupNorm(2, 8))
    nn.init.constant_(model.conv_in.weight, 100.0)
    nn.init.constant_(model.conv_out.weight, 10.0)
    dtype = torch.float32 if cured else torch.float16
    return inference(model.to(dtype), torch.rand(1, 4, 8, 8, dtype=dtype) + 1)


@report(says=r"\(exp\): forward range: ", truth=r"\bexp\b|Exp")
def softplus_by_hand(amp: Amp, *, cured: bool) -> Program:

    def softplus(x: Tensor) -> Tensor:
        wide = (x * 20).half()
        if cured:
            return wide.clamp(min=0) + (-wide.abs()).exp().log1p()
        return (1 + wide.exp()).log()

    return training(amp, Between(softplus), x=3 * torch.randn(4, WIDTH))


@report(says=r"\(exp\): .*(maximum|clamp)", truth=r"\bexp\b|Exp")
@trained()
def exp_of_scores(y: Tensor, *, cured: bool) -> Tensor:
    scores = 10 * y.float() / 0.04
    if cured:
        scores = scores - scores.amax(-1, keepdim=True)
    shares = scores.exp()
    return (shares / shares.sum(-1, keepdim=True)).square().mean()


@report(
    says=r"loss function: .*though the loss scale is 1.*normalise its targets",
    truth="(?i)mse|loss passes|target",
)
def large_targets(amp: Amp, *, cured: bool) -> Program:
    target = 1e9 * torch.randn(4, WIDTH)
    target = target / 1e9 if cured else target

    def loss_of(y: Tensor) -> Tensor:
        return F.mse_loss(y.float(), target)

    return training(amp, loss_of=loss_of)


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
@trained()
def angle_of_equal_vectors(y: Tensor, *, cured: bool) -> Tensor:
    unit = F.normalize(y.float(), dim=-1)
    cosine = (unit * unit.detach()).sum(-1)
    if cured:
        cosine = cosine.clamp(-1 + 1e-4, 1 - 1e-4)
    return cosine.acos().mean()


@report(says=r"label: .*-100", truth=r"nll|Nll|cross_entropy|-100")
@trained()
def no_label_left(y: Tensor, *, cured: bool) -> Tensor:
    labels = torch.full((4,), -100)
    labels[0] = 1 if cured else -100
    return F.cross_entropy(y.float(), labels)


@report(says=r"div\): zero: its divisor is 0", truth="div|Div")
@trained()
def mean_over_an_empty_mask(y: Tensor, *, cured: bool) -> Tensor:
    mask = torch.zeros(4)
    count = mask.sum().clamp(min=1) if cured else mask.sum()
    return (y.float().square().mean(-1) * mask).sum() / count


@report(says=r"pow.*slope is infinite", truth=r"\bpow\b|Pow")
@trained()
def focal_loss(y: Tensor, *, cured: bool) -> Tensor:
    p = (y.float() * 1e3).sigmoid()
    wrong = 1 - p + 1e-3 * cured
    return (wrong.pow(0.5) * (p + 1e-3)).mean()


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
@trained()
def clamp_next_to_one(y: Tensor, *, cured: bool) -> Tensor:
    p = (y * 100).sigmoid()
    p = p.float() if cured else p.half()
    most = torch.tensor(1 - 1e-6, dtype=p.dtype)  # torch 2.15 masks by a number
    survival = (-torch.minimum(p, most)).log1p()
    return (1 - survival.float().sum(-1).exp()).mean()


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
@trained()
def smoothing_of_masked_classes(y: Tensor, *, cured: bool) -> Tensor:
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    mask[:, -1] = True
    logits = y.float().masked_fill(mask, -1e4 if cured else -math.inf)
    return F.cross_entropy(logits, torch.arange(4), label_smoothing=0.1)


@report(says=r"ctc_loss\): label: an input is too short", truth="ctc|Ctc")
@trained()
def recording_too_short(y: Tensor, *, cured: bool) -> Tensor:
    text, frames, letters = torch.tensor([[1, 2, 3, 1, 2, 3]]), [4], [6]
    logp = y.float().log_softmax(-1)[:, None]
    lengths = torch.tensor(frames), torch.tensor(letters)
    return F.ctc_loss(logp, text, *lengths, zero_infinity=cured)

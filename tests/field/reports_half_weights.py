"""Models whose weights are stored in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.field.nets import (
    WIDTH,
    inference,
    is_nonfinite,
    loop,
    mean_square,
    unchanged,
)
from tests.field.report import Program, reports_of
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("weights in 16 bits")


@report(
    "afiaka87/glide-finetune#5 sanghyun-son/EDSR-PyTorch#36 "
    "suvojit-0x55aa/mixed-precision-pytorch#2",
    symptom="After `model.half()` the first step of Adam makes all weights NaN.",
    cause="Adam's eps of 1e-8 is 0 in float16.",
    says=r"eps.*(0 in|rounds to 0|underflow).*",
    truth=r"\beps\b",
    cure="Keep weights in fp32 (autocast, or O2's masters), or `eps=1e-4`.",
)
def eps_of_adam(amp: Amp, *, cured: bool) -> Program:
    """Train a model that was cast as a whole."""
    del amp
    model = nn.Linear(WIDTH, WIDTH).half()
    eps = 1e-4 if cured else 1e-8
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=eps, foreach=False)
    x = torch.randn(4, WIDTH).half() * 1e-3

    def loss_of() -> torch.Tensor:
        return (model(x) * 1e-2).float().mean()

    return loop(None, model, loss_of, optimizer, is_sick=is_nonfinite(model.weight))


@report(
    "meta-pytorch/torchtune#2254 pytorch/ao#1124 pytorch/pytorch#120376",
    symptom="With bf16 weights and a small learning rate the loss hardly moves.",
    cause="Updates below 1/256 of a weight are rounded away.",
    says=r"updates were rounded away",
    truth=r"(?i)rounding|lost|master",
    cure='`halfstep.prepare(..., "O2")` with fp32 masters; or a larger rate.',
)
def updates_lost(amp: Amp, *, cured: bool) -> Program:
    """Fine-tune a model in bfloat16."""
    del amp
    dtype = torch.float32 if cured else torch.bfloat16
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    x, before = torch.randn(4, WIDTH, dtype=dtype), model.weight.detach().clone()

    def is_sick() -> bool:
        return float((model.weight == before).float().mean()) > 0.9

    given = {"model": model, "optimizer": optimizer}
    more = {"is_sick": is_sick, "given": given}
    return loop(None, model, lambda: mean_square(model(x)), optimizer, **more)


@report(
    "pytorch/pytorch#74739 huggingface/transformers#23165 "
    "Lightning-AI/pytorch-lightning#5140 huggingface/diffusers#6442 "
    "mk-minchul/AdaFace#127 yk7333/d3po#6 haotian-liu/LLaVA#363",
    symptom="ValueError: Attempting to unscale FP16 gradients.",
    cause="Weights that are trained are in float16 already, so gradients are, too.",
    command="run",
    says=r"unscale FP16 gradients.*(float32|fp32|float\(\))",
    truth=r"float32|fp32|\.float\(\)",
    cure="Load trained weights in float32: `model.float()`; autocast casts them.",
)
def gradients_in_half(amp: Amp, *, cured: bool) -> Program:
    """Train a model that was loaded in float16 under a scaler."""
    model = nn.Linear(WIDTH, 1)
    model = model if cured else model.half()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amp.scaler()
    x = torch.randn(4, WIDTH)
    return loop(amp, model, lambda: mean_square(model(x)), optimizer, scaler)


@report(
    "warner-benjamin/optimi#15 soumith/cudnn.torch#377",
    symptom="With weights in float16 Adam's first steps are huge, though eps is 1e-6.",
    cause="Squares of gradients below 2e-4 are 0 in float16: eps alone divides.",
    says=r"eps=1e-06 is all that it divides by",
    truth=r"\beps\b|exp_avg_sq",
    cure="Keep weights in fp32 (autocast, or O2's masters).",
)
def squares_of_gradients(amp: Amp, *, cured: bool) -> Program:
    """Train a half model on small gradients."""
    del amp
    dtype = torch.float32 if cured else torch.float16
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)
    x, before = torch.ones(4, WIDTH, dtype=dtype), model.weight.detach().clone()

    def loss_of() -> torch.Tensor:
        return (model(x) * 5e-4).float().mean()

    def is_sick() -> bool:
        # Adam moves a weight by at most the learning rate a step.
        return not float((model.weight - before).abs().max()) < 4 * 2e-3

    return loop(None, model, loss_of, optimizer, is_sick=is_sick)


@report(
    "Nerogar/OneTrainer#996",
    symptom="Weight decay has no effect on weights in bf16.",
    cause="lr * weight_decay is far below 1/256 of a weight: it is rounded away.",
    says=r"weight decay has no effect in bf16",
    truth=r"(?i)weight.decay",
    cure='`halfstep.prepare(..., "O2")` with fp32 masters.',
)
def weight_decay_lost(amp: Amp, *, cured: bool) -> Program:
    """Decay weights that get no gradients."""
    del amp
    dtype = torch.float32 if cured else torch.bfloat16
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    x = torch.zeros(4, WIDTH, dtype=dtype)

    given = {"model": model, "optimizer": optimizer}
    more = {"is_sick": unchanged(model.weight), "given": given}
    return loop(None, model, lambda: mean_square(model(x)), optimizer, **more)


@report(
    "deepspeedai/DeepSpeed#2768 deepspeedai/DeepSpeed#1800 "
    "NVIDIA/Megatron-LM#372 mlnomadpy/flaxchat#6",
    symptom="In bf16 many micro-batches give a smaller gradient than one batch.",
    cause="Gradients are added up in bf16: what is below 1/256 of the sum is lost.",
    says=r"gradients: those of 33 backward passes are added up in bf16.*lost",
    truth=r"(?i)accumulat|micro-batch|added up",
    cure='`halfstep.prepare(model, optimizer, "O2", accumulate=33)` adds in fp32.',
)
def gradients_added_in_bf16(amp: Amp, *, cured: bool) -> Program:
    """Accumulate over 33 micro-batches, of which the first has large inputs."""
    del amp
    dtype = torch.float32 if cured else torch.bfloat16
    model = nn.Linear(WIDTH, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, sums = torch.ones(1, WIDTH, dtype=dtype), []

    def step() -> None:
        optimizer.zero_grad()
        for size in [256.0] + 32 * [1.0]:
            model(size * x).float().sum().backward()
        sums.append(float(model.weight.grad.mean()))
        optimizer.step()

    return Program(model, step, lambda: sums[-1] < 280)


@report(
    "tracel-ai/burn#5699 facebookresearch/fairscale#263",
    symptom="With a hand-written clipping by norm, float16 weights never change.",
    cause="Squares of gradients above 255 are inf in float16, and 1 / inf is 0.",
    says=r"square of gradients: makes inf of finite numbers in float16.*65504",
    truth=r"\bpow\b|square",
    cure="`torch.nn.utils.clip_grad_norm_`, or square `grad.float()`.",
)
def norm_of_gradients_by_hand(amp: Amp, *, cured: bool) -> Program:
    """Clip gradients of 300 to a norm of 1."""
    del amp
    model = nn.Linear(WIDTH, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((4, WIDTH), 300.0).half()

    def clip() -> None:
        grads = [p.grad for p in model.parameters()]
        wide = [g.float() if cured else g for g in grads]
        norm = sum(g.square().sum() for g in wide) ** 0.5
        for grad in grads:
            grad.mul_((1 / norm).to(grad.dtype))

    def loss_of() -> torch.Tensor:
        return model(x).float().mean()  # type: ignore[no-any-return]

    hooks = {"after_backward": clip, "is_sick": unchanged(model.weight)}
    return loop(None, model, loss_of, optimizer, **hooks)


@report(
    "tensorflow/tensorflow#43719",
    symptom="A converted model gives NaN, though no activation is large.",
    cause="A constant of 1e30 among the weights is inf in float16, and 0 * inf is NaN.",
    command="find_nonfinite",
    says=r"holds? inf.*(buffer|parameter) gate .*cast to float16.*65504",
    truth=r"\bgate\b",
    cure="Clamp before the cast: `w.clamp(-65504, 65504).half()`; or use bfloat16.",
)
def constant_among_weights(amp: Amp, *, cured: bool) -> Program:
    """Convert a model with a large constant."""
    del amp

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + 0 * self.gate

    model = Gated()
    model.gate.data.fill_(1e30)
    if cured:
        model.gate.data.clamp_(-65504, 65504)
    return inference(model.half(), torch.randn(4, WIDTH).half())

"""Evaluation between steps, and models whose weights are stored in 16 bits."""

from contextlib import nullcontext

import torch
from tests.field.nets import (
    WIDTH,
    batch,
    distance,
    inference,
    is_nonfinite,
    linear,
    loop,
    mean_square,
    unchanged,
)
from tests.field.report import Amp, Program, report
from torch import nn


@report(says="outside (of )?autocast|evaluation .*autocast", truth="autocast")
def evaluation_without_autocast(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, _ = linear(amp)
    model.bfloat16()
    x = batch()

    @torch.no_grad()
    def validate() -> None:
        with amp.autocast(torch.bfloat16) if cured else nullcontext():
            model(x)

    more = {"dtype": torch.bfloat16, "after_step": validate}
    return loop(amp, model, lambda: distance(model(x)), optimizer, **more)


@report(says="stored in float16: keep weights in float32", truth="(?i)weight")
def validation_casts_weights(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    @torch.no_grad()
    def validate() -> None:
        if not cured:
            model.half()(x.half())
            return
        with amp.autocast():
            model(x)

    more = {"after_step": validate}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **more)


@report(
    says=r"weights .*(rounded|cast) to (float16|fp16)",
    truth="(?i)rounded|precision|bits",
)
def weights_to_half_and_back(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, lr=1e-6)
    x, before = batch(), model.weight.detach().clone()
    before = before if cured else before.half().float()

    def validate() -> None:
        with torch.no_grad(), amp.autocast():
            if not cured:
                model.half()
            model(x)
            model.float()

    def is_sick() -> bool:
        return torch.equal(model.weight, before)

    more = {"after_step": validate, "is_sick": is_sick}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **more)


@report(says=r"eps.*(0 in|rounds to 0|underflow).*", truth=r"\beps\b")
def eps_of_adam(amp: Amp, *, cured: bool) -> Program:
    del amp
    model = nn.Linear(WIDTH, WIDTH).half()
    eps = 1e-4 if cured else 1e-8
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=eps, foreach=False)
    x = torch.randn(4, WIDTH).half() * 1e-3

    def loss_of() -> torch.Tensor:
        return (model(x) * 1e-2).float().mean()

    return loop(None, model, loss_of, optimizer, is_sick=is_nonfinite(model.weight))


@report(says=r"updates were rounded away", truth=r"(?i)rounding|lost|master")
def updates_lost(amp: Amp, *, cured: bool) -> Program:
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
    says=r"unscale FP16 gradients.*(float32|fp32|float\(\))",
    truth=r"float32|fp32|\.float\(\)",
)
def gradients_in_half(amp: Amp, *, cured: bool) -> Program:
    model = nn.Linear(WIDTH, 1)
    model = model if cured else model.half()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amp.scaler()
    x = torch.randn(4, WIDTH)
    return loop(amp, model, lambda: mean_square(model(x)), optimizer, scaler)


@report(says=r"eps=1e-06 is all that it divides by", truth=r"\beps\b|exp_avg_sq")
def squares_of_gradients(amp: Amp, *, cured: bool) -> Program:
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


@report(says=r"weight decay has no effect in bf16", truth=r"(?i)weight.decay")
def weight_decay_lost(amp: Amp, *, cured: bool) -> Program:
    del amp
    dtype = torch.float32 if cured else torch.bfloat16
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    x = torch.zeros(4, WIDTH, dtype=dtype)

    given = {"model": model, "optimizer": optimizer}
    more = {"is_sick": unchanged(model.weight), "given": given}
    return loop(None, model, lambda: mean_square(model(x)), optimizer, **more)


@report(
    says=r"gradients: those of 33 backward passes are added up in bf16.*lost",
    truth=r"(?i)accumulat|micro-batch|added up",
)
def gradients_added_in_bf16(amp: Amp, *, cured: bool) -> Program:
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
    says=r"square of gradients: makes inf of finite numbers in float16.*65504",
    truth=r"\bpow\b|square",
)
def norm_of_gradients_by_hand(amp: Amp, *, cured: bool) -> Program:
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
        return model(x).float().mean()

    hooks = {"after_backward": clip, "is_sick": unchanged(model.weight)}
    return loop(None, model, loss_of, optimizer, **hooks)


@report(
    says=r"holds? inf.*(buffer|parameter) gate .*cast to float16.*65504",
    truth=r"\bgate\b",
)
def constant_among_weights(amp: Amp, *, cured: bool) -> Program:
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

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
from tests.field.report import Program, report
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp


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

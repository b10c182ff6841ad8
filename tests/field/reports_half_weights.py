"""Models whose weights are stored in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.field.report import Program, report
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp

AREA = "weights in 16 bits"
WIDTH = 8


@report(
    "afiaka87/glide-finetune#5",
    "sanghyun-son/EDSR-PyTorch#36",
    "suvojit-0x55aa/mixed-precision-pytorch#2",
    area=AREA,
    symptom="After `model.half()` the first step of Adam makes all weights NaN.",
    cause="Adam's eps of 1e-8 is 0 in float16.",
    command="diagnose",
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

    def step() -> None:
        optimizer.zero_grad()
        (model(x) * 1e-2).float().mean().backward()
        optimizer.step()

    return Program(model, step, lambda: not bool(model.weight.isfinite().all()))


@report(
    "meta-pytorch/torchtune#2254",
    "pytorch/ao#1124",
    "pytorch/pytorch#120376",
    area=AREA,
    symptom="With bf16 weights and a small learning rate the loss hardly moves.",
    cause="Updates below 1/256 of a weight are rounded away.",
    command="diagnose",
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

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    def is_sick() -> bool:
        return float((model.weight == before).float().mean()) > 0.9

    return Program(model, step, is_sick, given={"model": model, "optimizer": optimizer})

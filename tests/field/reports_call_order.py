"""Calls of autocast and GradScaler in the wrong order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.field.report import Program, report
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp

AREA = "call order"


@report(
    "Lightning-AI/pytorch-lightning#9330",
    "Lightning-AI/pytorch-lightning#9694",
    "milesial/Pytorch-UNet#468",
    "pytorch/examples#1196",
    area=AREA,
    symptom="With gradient clipping the loss stands still under GradScaler.",
    cause="Gradients are clipped while they are scaled.",
    command="diagnose",
    says=r"gradients were multiplied by .* before unscale_",
    truth="unscale_",
    cure="Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
)
def clip_before_unscale(amp: Amp, *, cured: bool) -> Program:
    """Train a layer with clipped gradients."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.scaler()
    x, before = torch.randn(16, 8), model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = (model(x).float() - 3).square().mean()
        scaler.scale(loss).backward()
        if cured:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def is_sick() -> bool:
        return bool((model.weight - before).norm() < 1e-3)

    return Program(model, step, is_sick)

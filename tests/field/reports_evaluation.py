"""Evaluation between steps: its dtypes, what it does to weights, what it adds up."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from tests.field.nets import batch, distance, linear, loop
from tests.field.report import Program, report

if TYPE_CHECKING:
    from tests.field.report import Amp


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

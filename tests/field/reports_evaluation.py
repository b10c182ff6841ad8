"""Evaluation between steps: its dtypes, what it does to weights, what it adds up."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from tests.field.nets import batch, distance, linear, loop
from tests.field.report import Program, reports_of

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("evaluation")


@report(
    "cnulab/RealNet#76 showlab/Tune-A-Video#65",
    symptom="Training runs; validation: input and weights should be of the same type.",
    cause="Validation runs outside autocast, on weights in 16 bits.",
    says="outside (of )?autocast|evaluation .*autocast",
    truth="autocast",
    cure="Open the same autocast context for validation.",
)
def evaluation_without_autocast(amp: Amp, *, cured: bool) -> Program:
    """Validate weights in bfloat16 on data in float32."""
    model, optimizer, _ = linear(amp)
    model.bfloat16()
    x = batch()

    @torch.no_grad()
    def validate() -> None:
        with amp.autocast(torch.bfloat16) if cured else nullcontext():
            model(x)

    more = {"dtype": torch.bfloat16, "after_step": validate}
    return loop(amp, model, lambda: distance(model(x)), optimizer, **more)


@report(
    "huggingface/diffusers#13895 huggingface/diffusers#13899 "
    "huggingface/diffusers#9628",
    symptom="Attempting to unscale FP16 gradients, at the first step after validation.",
    cause="Validation casts the live model to float16, in place.",
    command="run",
    says="stored in float16: keep weights in float32",
    truth="(?i)weight",
    cure="Cast a copy: `copy.deepcopy(model).half()`; or validate under autocast.",
)
def validation_casts_weights(amp: Amp, *, cured: bool) -> Program:
    """Validate the live model in half precision."""
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
    "huggingface/diffusers#13510",
    symptom="With validation after each step, small updates are lost.",
    cause="Weights are cast to float16 and back: bits of float32 are gone.",
    says=r"weights .*(rounded|cast) to (float16|fp16)",
    truth="(?i)rounded|precision|bits",
    cure="Cast a copy: `copy.deepcopy(model).half()`; or validate under autocast.",
)
def weights_to_half_and_back(amp: Amp, *, cured: bool) -> Program:
    """Validate in half precision, and cast the weights back."""
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

"""Schedules that count skipped steps, averages, and what checkpoints lose."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tests.field.nets import batch, distance, linear, loop, updates_of
from tests.field.report import Program, reports_of
from torch import nn

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("schedule and checkpoint")


@report(
    "Lightning-AI/pytorch-lightning#5558 Lightning-AI/pytorch-lightning#18828 "
    "pytorch/pytorch#44511 huggingface/transformers#11106",
    symptom="lr_scheduler.step() before optimizer.step(), though the order is right.",
    cause="The schedule moves on at a step that the scaler has skipped.",
    says="it moved after a step that was skipped",
    truth="skipped",
    cure="Step the schedule only if `scaler.get_scale()` did not fall in `update()`.",
)
def schedule_on_skipped_steps(amp: Amp, *, cured: bool) -> Program:
    """Warm the learning rate up over steps, the first of which are skipped."""
    model, optimizer, scaler = linear(amp, scale=2.0**16)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    x, updates = batch(), updates_of(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = (model(x) - 3).abs().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if not cured or scaler.get_scale() >= scale:
            schedule.step()

    return Program(model, step, lambda: schedule.last_epoch > len(updates))


@report(
    "d8ahazard/sd_dreambooth_extension#1415 "
    "d8ahazard/sd_dreambooth_extension#1417 AndreasBergmeister/ram#6 "
    "huggingface/transformers#8561",
    symptom=(
        "Averaged weights never change. The running loss in the log stops "
        "growing, and its mean goes to 0."
    ),
    cause=(
        "The moving average, or the sum of losses, is kept in 16 bits: small "
        "steps are rounded away."
    ),
    says="averaged or summed in place in fp16, .* did not change",
    truth="fp16|float16",
    cure=(
        "Keep it in float32: `copy.deepcopy(model).float()`, `total += loss.item()`."
    ),
)
def average_in_half(amp: Amp, *, cured: bool) -> Program:
    """Average weights with a decay of 0.9999."""
    model, optimizer, scaler = linear(amp)
    average = copy.deepcopy(model.weight.detach())
    average = average if cured else average.half()
    x, before = batch(), average.clone()

    @torch.no_grad()
    def update() -> None:
        average.lerp_(model.weight.to(average.dtype), 1e-4)

    more = {"after_step": update, "is_sick": lambda: torch.equal(average, before)}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **more)


@report(
    "allenai/tango#154 pytorch/torchtitan#146 huggingface/transformers#11663 "
    "pfnet/pytorch-pfn-extras#690",
    symptom="After resuming the first steps are skipped, and results differ.",
    cause="The state of the GradScaler is not in the checkpoint.",
    says=r"GradScaler.* (anew|state_dict)",
    truth=r"GradScaler.* state|state_dict",
    cure="Save `scaler.state_dict()`, and load it before the first step.",
)
def scaler_not_saved(amp: Amp, *, cured: bool) -> Program:
    """Train, and resume with a new scaler."""
    x = batch()

    def start() -> tuple[Any, ...]:
        model = nn.Linear(8, 1)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3), amp.scaler()

    def trained(model: Any, optimizer: Any, scaler: Any, **more: Any) -> Program:
        loss = lambda: (model(x) - 3).abs().sum()  # noqa: E731
        return loop(amp, model, loss, optimizer, scaler, **more)

    first, resumed = start(), start()
    run = trained(*first)
    for _ in range(40):
        run.step()
    for number in range(3 if cured else 2):
        resumed[number].load_state_dict(first[number].state_dict())
    updates = updates_of(resumed[1])
    return trained(*resumed, is_sick=lambda: len(updates) < 4)


@report(
    "lucidrains/lightweight-gan#103 PaddlePaddle/PaddleNLP#6853",
    symptom="RuntimeError: The source state dict is empty, when resuming with fp16.",
    cause="The checkpoint was saved with a GradScaler that was switched off.",
    command="run",
    says="saved from a disabled instance of GradScaler",
    truth="disabled instance",
    cure="Load it only `if state:`; a new scaler finds its scale in a few steps.",
)
def scaler_saved_disabled(amp: Amp, *, cured: bool) -> Program:
    """Train in fp32, and resume in fp16."""
    model, optimizer, scaler = linear(amp)
    state = amp.scaler(enabled=False).state_dict()
    if state or not cured:
        scaler.load_state_dict(state)
    x = batch()
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler)


@report(
    "ultralytics/ultralytics#24085 facebookresearch/fairseq2#212",
    symptom="The loss explodes at the first step after resuming.",
    cause="Adam's second moments were saved in float16, where they are 0.",
    says=r"exp_avg_sq",
    truth="exp_avg_sq|second moment",
    cure="Save `optimizer.state_dict()` as it is, in float32.",
    steps=1,
)
def moments_saved_in_half(amp: Amp, *, cured: bool) -> Program:
    """Resume from a checkpoint that was halved to save space."""
    model, x = nn.Linear(8, 1), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler, moves = amp.scaler(init_scale=1024.0), []

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = distance(model(x)) * 1e-3
        scaler.scale(loss).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moves.append(float((model.weight.detach() - before).abs().max()))

    for _ in range(100):
        step()
    state = optimizer.state_dict()
    for each in state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            each[name] = each[name] if cured else each[name].half()
    optimizer.load_state_dict(state)
    return Program(model, step, lambda: moves[-1] > 5 * moves[-2])


@report(
    "TheLastBen/fast-stable-diffusion#576 open-mmlab/mmsegmentation#283 "
    "ultralytics/ultralytics#21283",
    symptom="After resuming, the loss differs in the third digit.",
    cause="Weights were saved in float16, and the bits of float32 are lost.",
    says=r"weights .*(rounded|saved).* (float16|fp16)",
    truth="(?i)rounded|precision|bits",
    cure="Save `model.state_dict()` in float32; halve a copy for inference only.",
    steps=1,
)
def weights_saved_in_half(amp: Amp, *, cured: bool) -> Program:
    """Resume from a checkpoint that was halved to save space."""
    model, optimizer, scaler = linear(amp)
    resumed, x = copy.deepcopy(model), batch()
    state = (model if cured else copy.deepcopy(model).half()).state_dict()
    resumed.load_state_dict(state)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=1e-6)
    begin = resumed.weight.detach().clone()

    def is_sick() -> bool:
        return not torch.equal(begin, model.weight)

    more = {"is_sick": is_sick}
    return loop(amp, resumed, lambda: distance(resumed(x)), optimizer, scaler, **more)

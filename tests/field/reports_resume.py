"""Schedules that count skipped steps, averages, what checkpoints lose, and speed."""

import copy
from typing import Any

import torch
from tests.field.nets import batch, distance, linear, loop, updates_of
from tests.field.report import Amp, Program, report
from torch import Tensor, nn


@report(says="it moved after a step that was skipped", truth="skipped")
def schedule_on_skipped_steps(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, scale=2.0**16)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    x, updates, scales = batch(), updates_of(optimizer), [scaler.get_scale()]

    def move_on() -> None:
        scales.append(scaler.get_scale())
        if not cured or scales[-1] >= scales[-2]:
            schedule.step()

    loss_of = lambda: (model(x) - 3).abs().sum()  # noqa: E731
    more = {"after_step": move_on}
    more["is_sick"] = lambda: schedule.last_epoch > len(updates)
    return loop(amp, model, loss_of, optimizer, scaler, **more)


@report(
    says="averaged or summed in place in fp16, .* did not change", truth="fp16|float16"
)
def average_in_half(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    average = copy.deepcopy(model.weight.detach())
    average = average if cured else average.half()
    x, before = batch(), average.clone()

    @torch.no_grad()
    def update() -> None:
        average.lerp_(model.weight.to(average.dtype), 1e-4)

    more = {"after_step": update, "is_sick": lambda: torch.equal(average, before)}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **more)


@report(says=r"GradScaler.* (anew|state_dict)", truth=r"GradScaler.* state|state_dict")
def scaler_not_saved(amp: Amp, *, cured: bool) -> Program:
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


@report(says="saved from a disabled instance of GradScaler", truth="disabled instance")
def scaler_saved_disabled(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    state = amp.scaler(enabled=False).state_dict()
    if state or not cured:
        scaler.load_state_dict(state)
    x = batch()
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler)


@report(says=r"exp_avg_sq", truth="exp_avg_sq|second moment", steps=1)
def moments_saved_in_half(amp: Amp, *, cured: bool) -> Program:
    """Resume from a checkpoint that was halved to save space."""
    model, x = nn.Linear(8, 1), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    weights = [model.weight.detach().clone()]

    def note() -> None:
        weights.append(model.weight.detach().clone())

    def is_sick() -> bool:
        before, last = ((weights[n] - weights[n - 1]).abs().max() for n in (-2, -1))
        return bool(last > 5 * before)

    more = {"after_step": note, "is_sick": is_sick}
    loss_of = lambda: distance(model(x)) * 1e-3  # noqa: E731
    scaler = amp.scaler(init_scale=1024.0)
    program = loop(amp, model, loss_of, optimizer, scaler, **more)
    for _ in range(100):
        program.step()
    state = optimizer.state_dict()
    for each in state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            each[name] = each[name] if cured else each[name].half()
    optimizer.load_state_dict(state)
    return program


@report(
    says=r"weights .*(rounded|saved).* (float16|fp16)",
    truth="(?i)rounded|precision|bits",
    steps=1,
)
def weights_saved_in_half(amp: Amp, *, cured: bool) -> Program:
    model, _, scaler = linear(amp)
    resumed, x = copy.deepcopy(model), batch()
    state = (model if cured else copy.deepcopy(model).half()).state_dict()
    resumed.load_state_dict(state)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=1e-6)
    begin = resumed.weight.detach().clone()
    more = {"is_sick": lambda: not torch.equal(begin, model.weight)}
    return loop(amp, resumed, lambda: distance(resumed(x)), optimizer, scaler, **more)


@report(
    says=r"of a step of .* in fp32 matmuls.*inside the autocast", truth="autocast|fp32"
)
def only_the_loss_in_autocast(amp: Amp, *, cured: bool) -> Program:
    # Products large enough to take most of a step, also on a busy machine.
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, dtypes = torch.randn(512, 256), set()

    def forward() -> Tensor:
        y = model(x)
        dtypes.add(y.dtype)
        return y

    def step() -> None:
        optimizer.zero_grad()
        y = None if cured else forward()
        with amp.autocast(torch.bfloat16):
            y = forward() if y is None else y
            loss = y.float().square().mean()
        loss.backward()
        optimizer.step()

    return Program(model, step, lambda: dtypes == {torch.float32})

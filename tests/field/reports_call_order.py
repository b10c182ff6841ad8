"""Calls of autocast and GradScaler in the wrong order."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from tests.field.nets import (
    batch,
    distance,
    is_nonfinite,
    linear,
    loop,
    unchanged,
    updates_of,
)
from tests.field.report import Amp, Program, report
from torch import Tensor, nn


@report(says=r"gradients were multiplied by .* before unscale_", truth="unscale_")
def clip_before_unscale(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, lr=0.1, scale=2.0**16)
    x = batch()

    def clip() -> None:
        if cured:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def loss_of() -> Tensor:
        return (model(x).float() - 3).square().mean()

    hooks = {"after_backward": clip, "is_sick": unchanged(model.weight, 1e-3)}
    return loop(amp, model, loss_of, optimizer, scaler, **hooks)


@report(says=r"gradients were changed .* before unscale_", truth="unscale_")
def noise_before_unscale(amp: Amp, *, cured: bool) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amp.scaler(init_scale=1024.0)
    x, rest = batch(), []

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = (model(x).float() - 3).square().mean()
        (true,) = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
        scaler.scale(loss).backward()
        if cured:
            scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad += torch.randn_like(param) * 0.5
        scaler.step(optimizer)
        rest.append(float((model[0].weight.grad - true).std()))
        scaler.update()

    return Program(model, step, lambda: max(rest) < 0.1)


@report(
    says=r"the scaler was not asked: they were updated with scaled gradients",
    truth=r"scaler\.step",
)
def optimizer_step_without_scaler(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x, losses = batch(), []

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = distance(model(x))
        scaler.scale(loss).backward()
        losses.append(float(loss))
        if cured:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    return Program(model, step, lambda: max(losses) > 5 * losses[0])


@report(
    says=r"optimizer\.step\(\) .*(again|besides|twice).*scaler\.step",
    truth=r"optimizer\.step\(\)",
)
def step_besides_scaler(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, scale=2.0**16)
    x = batch()
    more = {"after_step": bool if cured else optimizer.step}
    more["is_sick"] = is_nonfinite(model.weight)
    loss_of = lambda: (model(x) - 3).square().sum()  # noqa: E731
    return loop(amp, model, loss_of, optimizer, scaler, **more)


def accumulation(
    amp: Amp, *, clips: tuple[int, ...] = (), updates: tuple[int, ...] = (2,)
) -> Program:
    model, optimizer, scaler = linear(amp)
    batches = torch.randn(2, 16, 8)

    def step() -> None:
        optimizer.zero_grad()
        for number, x in enumerate(batches, 1):
            with amp.autocast():
                loss = distance(model(x)) / len(batches)
            scaler.scale(loss).backward()
            if number in clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number == len(batches):
                scaler.step(optimizer)
            if number in updates:
                scaler.update()

    return Program(model, step)


@report(
    says=r"first call was at .*\.py:\d+; .* after the last micro-batch",
    truth=r"unscale_\(\)",
)
def unscale_each_micro_batch(amp: Amp, *, cured: bool) -> Program:
    return accumulation(amp, clips=(2,) if cured else (1, 2))


@report(
    says=r"scaled gradients were added to .*unscale_|backward.* after unscale_",
    truth="unscale_",
)
def backward_after_unscale(amp: Amp, *, cured: bool) -> Program:
    program = accumulation(amp, clips=(2,) if cured else (1,))
    stays = unchanged(program.model.weight, 1)
    program.is_sick = lambda: not stays()
    return program


@report(
    says=r"step\(\) has already been called since the last update\(\)",
    truth=r"update\(\)",
)
def update_forgotten(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = distance(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if cured:
            scaler.update()

    return Program(model, step)


@report(says=r"update\(\) .*between .*(steps|optimizers)", truth=r"update\(\)")
def update_between_optimizers(amp: Amp, *, cured: bool) -> Program:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)
    model = nn.Sequential(first, second)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in model]
    scaler = amp.scaler(init_scale=2.0**15)
    x, moves = batch(), []

    def step() -> None:
        with amp.autocast():
            hidden = first(x * 4)
            loss = hidden.float().square().sum() + second(hidden.detach()).mean()
        (true,) = torch.autograd.grad(loss, [second.weight], retain_graph=True)
        model.zero_grad()
        scaler.scale(loss).backward()
        before = second.weight.detach().clone()
        for optimizer in optimizers:
            scaler.step(optimizer)
            if not cured:
                scaler.update()
        if cured:
            scaler.update()
        moves.append(float((before - second.weight).norm() / (0.01 * true.norm())))

    return Program(model, step, lambda: any(move > 1.5 for move in moves))


@report(says=r"two GradScalers|scaled by (two|2|another)", truth="scalers")
def two_scalers_of_one_model(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, main = linear(amp, outputs=2)
    other = main if cured else amp.scaler(init_scale=4.0)
    x, before = batch(), model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            first, second = (model(x).float() - 1).abs().mean(0)
        main.scale(first).backward(retain_graph=True)
        other.scale(second).backward()
        main.step(optimizer)
        main.update()

    def is_sick() -> bool:
        moved = (model.weight - before).norm(dim=1)
        return bool(moved[1] < moved[0] / 10)

    return Program(model, step, is_sick)


@report(
    says=r"GivenGradient.* (does not|loss scale)|not proportional to the loss scale",
    truth="GivenGradient",
)
def gradient_at_scale_one(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    class GivenGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor, given: Tensor) -> Tensor:
            ctx.save_for_backward(given)
            return output.new_ones(())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (given,) = ctx.saved_tensors
            return (given * grad if cured else given), None

    def loss_of() -> Tensor:
        main = GivenGradient.apply(model(x).float(), x[:, :1] / len(x))
        return main + 1e-4 * model.weight.square().sum()

    is_sick = unchanged(model.weight, 1e-3)
    return loop(amp, model, loss_of, optimizer, scaler, is_sick=is_sick)


@report(says="each step makes a new GradScaler", truth="GradScaler")
def scaler_each_epoch(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, once = linear(amp, scale=2.0**16)
    x, updates = batch(), updates_of(optimizer)
    loss_of = lambda: (model(x) - 3).abs().sum()  # noqa: E731

    def epoch() -> None:
        scaler = once if cured else amp.scaler()
        updates.clear()
        program = loop(amp, model, loss_of, optimizer, scaler)
        for _ in range(10):
            program.step()

    return Program(model, epoch, lambda: len(updates) < 10)


@report(
    says=r"dropped between scaler\.unscale_\(optimizer\) and scaler\.step",
    truth="zero_grad",
)
def zero_grad_before_step(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    def between() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not cured:
            optimizer.zero_grad()

    hooks = {"after_backward": between, "is_sick": unchanged(model.weight)}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **hooks)


@report(says=r"not cleared after a skipped step|zero_grad", truth="zero_grad", steps=12)
def zero_grad_only_after_step(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, scale=2.0**16)
    x, updates = batch(), updates_of(optimizer)

    def step() -> None:
        with amp.autocast():
            loss = (model(x) - 3).abs().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if cured or scaler.get_scale() >= scale:
            optimizer.zero_grad()

    return Program(model, step, lambda: not updates)


@report()
def unscale_after_load(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
    x = batch()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = distance(model(x))
        scaled = scaler.scale(loss) if cured else loss * scaler.get_scale()
        scaled.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@report(says="they are frozen", truth="frozen|requires_grad")
def frozen_parameters(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    head, x = nn.Linear(1, 1), batch()
    model.requires_grad_(cured)
    return loop(amp, model, lambda: distance(head(model(x))), optimizer, scaler)


@report(says="a loss that does not depend on them", truth="not depend")
def loss_from_numbers(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    def loss_of() -> Tensor:
        loss = distance(model(x))
        return loss if cured else torch.tensor(float(loss), requires_grad=True)

    return loop(amp, model, loss_of, optimizer, scaler)


@report(
    says="an optimizer over another model's parameters",
    truth="optimizer (over|before)|another model",
)
def optimizer_of_old_parameters(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    trained = model if cured else copy.deepcopy(model)
    x = batch()
    return loop(amp, trained, lambda: distance(trained(x)), optimizer, scaler)


@report(
    says=r"penalty.* scale|autograd\.grad.* scale|not proportional to the loss scale",
    truth=r"unscale|divide|get_scale|proportional",
    steps=8,
)
def penalty_of_scaled_gradients(amp: Amp, *, cured: bool) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler, updates = amp.scaler(init_scale=2.0**13), updates_of(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        x = batch().requires_grad_()
        with amp.autocast():
            score = model(x).float().mean()
        (slope,) = torch.autograd.grad(scaler.scale(score), x, create_graph=True)
        if cured:
            slope = slope / scaler.get_scale()
        penalty = ((slope * len(x)).norm(dim=1) - 1).square().mean()
        scaler.scale(score + penalty).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, lambda: len(updates) < 4)


@report()
def closure(amp: Amp, *, cured: bool) -> Program:
    model, _, scaler = linear(amp)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with nullcontext() if cured else amp.autocast():
            loss = (model(x).float() - 1).square().mean()
        (loss if cured else scaler.scale(loss)).backward()
        return loss

    def step() -> None:
        if cured:
            optimizer.step(closure)
            return
        scaler.step(optimizer, closure=closure)
        scaler.update()

    return Program(model, step)


@report(
    says=r"(norm|gradients) .*(read|taken|logged) .*before unscale_", truth="unscale_"
)
def norm_of_scaled_gradients(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x, norms = batch(), []

    def log() -> None:
        if cured:
            scaler.unscale_(optimizer)
        norms.append(float(model.weight.grad.norm()))

    hooks = {"after_backward": log, "is_sick": lambda: max(norms) > 100}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **hooks)


@report(says=r"Call step\(optimizer\) before update\(\)", truth=r"step\(")
def update_each_micro_batch(amp: Amp, *, cured: bool) -> Program:
    return accumulation(amp, updates=(2,) if cured else (1, 2))

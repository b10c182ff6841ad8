"""Calls of autocast and GradScaler in the wrong order."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tests.field.nets import batch, distance, linear, loop, unchanged, updates_of
from tests.field.report import Program, reports_of
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.field.report import Amp

report = reports_of("call order")


@report(
    "Lightning-AI/pytorch-lightning#9330 Lightning-AI/pytorch-lightning#9694 "
    "milesial/Pytorch-UNet#468 pytorch/examples#1196 rwth-i6/returnn#1590 "
    "catalyst-team/catalyst#1319",
    symptom=(
        "With gradient clipping, by norm or by value, the loss stands still under "
        "GradScaler."
    ),
    cause="Gradients are clipped while they are scaled.",
    says=r"gradients were multiplied by .* before unscale_",
    truth="unscale_",
    cure=(
        "Call `scaler.unscale_(optimizer)` before `clip_grad_norm_` or "
        "`clip_grad_value_`."
    ),
)
def clip_before_unscale(amp: Amp, *, cured: bool) -> Program:
    """Train a layer with clipped gradients."""
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


@report(
    "rwth-i6/returnn#1595",
    symptom="Gradient noise has no effect under GradScaler, however large.",
    cause="Noise is added to gradients while they are scaled: then it is divided, too.",
    says=r"gradients were changed .* before unscale_",
    truth="unscale_",
    cure="Call `scaler.unscale_(optimizer)` before gradients are changed.",
)
def noise_before_unscale(amp: Amp, *, cured: bool) -> Program:
    """Train two layers with noise on the gradients."""
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
            assert param.grad is not None
            param.grad += torch.randn_like(param) * 0.5
        scaler.step(optimizer)
        assert model[0].weight.grad is not None
        rest.append(float((model[0].weight.grad - true).std()))
        scaler.update()

    return Program(model, step, lambda: max(rest) < 0.1)


@report(
    "nerfstudio-project/nerfacc#307",
    symptom="The loss explodes in the first steps, though it is fine in fp32.",
    cause="optimizer.step() takes gradients that GradScaler has scaled.",
    says=r"the scaler was not asked: they were updated with scaled gradients",
    truth=r"scaler\.step",
    cure="Call `scaler.step(optimizer)` in place of `optimizer.step()`.",
)
def optimizer_step_without_scaler(amp: Amp, *, cured: bool) -> Program:
    """Scale the loss, and step the optimizer as in fp32."""
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
    "IAHispano/Applio#860",
    symptom="NaN in the weights after the first overflow, though GradScaler skips it.",
    cause="optimizer.step() is called besides scaler.step(optimizer).",
    says=r"optimizer\.step\(\) .*(again|besides|twice).*scaler\.step",
    truth=r"optimizer\.step\(\)",
    cure="Remove `optimizer.step()`: `scaler.step(optimizer)` calls it.",
)
def step_besides_scaler(amp: Amp, *, cured: bool) -> Program:
    """Step by the scaler, then by the optimizer itself."""
    model, optimizer, scaler = linear(amp, scale=2.0**16)
    x = batch()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = (model(x) - 3).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not cured:
            optimizer.step()
        scaler.update()

    return Program(model, step, lambda: not bool(model.weight.isfinite().all()))


@report(
    "microsoft/Swin-Transformer#311 huggingface/transformers#24449 "
    "hiyouga/LlamaFactory#77 pytorch/pytorch#36601 Haian-Jin/LVSM#19 "
    "espnet/espnet#2362",
    symptom="RuntimeError: unscale_() has already been called on this optimizer.",
    cause=(
        "unscale_ is called after each micro-batch, or a step that the program "
        "skips itself skips scaler.update(), too."
    ),
    command="run",
    says=r"first call was at .*\.py:\d+; .* after the last micro-batch",
    truth=r"unscale_\(\)",
    cure=(
        "Call `scaler.unscale_(optimizer)` after the last micro-batch only, and "
        "`scaler.update()` in each iteration."
    ),
)
def unscale_each_micro_batch(amp: Amp, *, cured: bool) -> Program:
    """Accumulate two micro-batches, and clip after each."""
    model, optimizer, scaler = linear(amp)
    batches = torch.randn(2, 16, 8)

    def step() -> None:
        optimizer.zero_grad()
        for number, x in enumerate(batches, 1):
            with amp.autocast():
                loss = distance(model(x)) / len(batches)
            scaler.scale(loss).backward()
            if number == len(batches) or not cured:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@report(
    "pytorch/pytorch#36601 huggingface/accelerate#641",
    symptom="With accumulation under GradScaler only the first micro-batch counts.",
    cause="Scaled gradients are added to gradients that are unscaled already.",
    says=r"scaled gradients were added to .*unscale_|backward.* after unscale_",
    truth="unscale_",
    cure="Call `scaler.unscale_(optimizer)` after the last micro-batch.",
)
def backward_after_unscale(amp: Amp, *, cured: bool) -> Program:
    """Accumulate two micro-batches, and clip after the first."""
    model, optimizer, scaler = linear(amp)
    batches, before = torch.randn(2, 16, 8), model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        for number, x in enumerate(batches, 1):
            with amp.autocast():
                loss = distance(model(x)) / len(batches)
            scaler.scale(loss).backward()
            if number == (2 if cured else 1):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, lambda: bool((model.weight - before).norm() > 1))


@report(
    "Azure/MS-AMP#45 HorizonRobotics/alf#1770",
    symptom="RuntimeError: step() has already been called since the last update().",
    cause=(
        "scaler.update() is missing: in the loop, or between two steps of one "
        "optimizer."
    ),
    command="run",
    says=r"step\(\) has already been called since the last update\(\)",
    truth=r"update\(\)",
    cure=(
        "Call `scaler.update()` after each `scaler.step(optimizer)` of one optimizer."
    ),
)
def update_forgotten(amp: Amp, *, cured: bool) -> Program:
    """Never call update."""
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


@report(
    "huggingface/accelerate#439 neosr-project/neosr#9",
    symptom="With two optimizers one of them makes jumps of twice the size.",
    cause="update() moves the loss scale before the second optimizer is unscaled.",
    says=r"update\(\) .*between .*(steps|optimizers)",
    truth=r"update\(\)",
    cure="Call `scaler.update()` once, after the steps of all optimizers.",
)
def update_between_optimizers(amp: Amp, *, cured: bool) -> Program:
    """Train two layers, each with an optimizer; the first overflows once."""
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


@report(
    "OpenBMB/BMTrain#39",
    symptom="With a GradScaler for each loss one of the losses gets no weight.",
    cause="Two scalers add gradients of different scales into one model.",
    says=r"two GradScalers|scaled by (two|2|another)",
    truth="scalers",
    cure="Scale all losses of a model by one `GradScaler`.",
)
def two_scalers_of_one_model(amp: Amp, *, cured: bool) -> Program:
    """Give each of two losses a scaler; the second's scale has fallen."""
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
    "ashawkey/stable-dreamfusion#158",
    symptom="Beside a regulariser the main loss has no effect under GradScaler.",
    cause="A custom backward returns a gradient of its own, at scale 1.",
    says=r"GivenGradient.* (does not|loss scale)|not proportional to the loss scale",
    truth="GivenGradient",
    cure="Multiply in the incoming gradient: `return grad * ctx.saved_tensors[0]`.",
)
def gradient_at_scale_one(amp: Amp, *, cured: bool) -> Program:
    """Hand a gradient that was computed elsewhere to the backward pass."""
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


@report(
    "conservationtechlab/animl-py#298 mosaicml/composer#1376",
    symptom="The first steps of each epoch are skipped.",
    cause="A new GradScaler in each epoch searches for its scale again.",
    says="each step makes a new GradScaler",
    truth="GradScaler",
    cure="Make the `GradScaler` once, before the first epoch.",
)
def scaler_each_epoch(amp: Amp, *, cured: bool) -> Program:
    """Train epochs of ten batches."""
    model, optimizer, once = linear(amp, scale=2.0**16)
    x, updates = batch(), updates_of(optimizer)

    def epoch() -> None:
        scaler = once if cured else amp.scaler()
        updates.clear()
        for _ in range(10):
            optimizer.zero_grad()
            with amp.autocast():
                loss = (model(x) - 3).abs().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return Program(model, epoch, lambda: len(updates) < 10)


@report(
    "IDEA-Research/DN-DETR#18",
    symptom="Weights do not change, and there is no message.",
    cause="zero_grad() between unscale_ and step clears the gradients.",
    says=r"dropped between scaler\.unscale_\(optimizer\) and scaler\.step",
    truth="zero_grad",
    cure="Call `optimizer.zero_grad()` before the backward pass or after the step.",
)
def zero_grad_before_step(amp: Amp, *, cured: bool) -> Program:
    """Clear the gradients before they are used."""
    model, optimizer, scaler = linear(amp)
    x = batch()

    def between() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not cured:
            optimizer.zero_grad()

    hooks = {"after_backward": between, "is_sick": unchanged(model.weight)}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **hooks)


@report(
    "espnet/espnet#3283",
    symptom="After one overflow every step is skipped, and the scale falls to 0.",
    cause="Gradients are cleared only after a step that was applied.",
    says=r"not cleared after a skipped step|zero_grad",
    truth="zero_grad",
    cure="Call `optimizer.zero_grad()` in each iteration.",
    steps=12,
)
def zero_grad_only_after_step(amp: Amp, *, cured: bool) -> Program:
    """Clear gradients only where the scale says that a step was made."""
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


@report(
    "facebookresearch/fairseq2#1346",
    symptom="AssertionError: Attempted unscale_ but _scale is None, after resuming.",
    cause="torch's scaler has no scale between load_state_dict and the first scale().",
    command="impossible",
    cure="Scale the loss by `scaler.scale(loss)`, not by `scaler.get_scale()`.",
)
def unscale_after_load(amp: Amp, *, cured: bool) -> Program:
    """Resume, and scale the loss by hand."""
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


@report(
    "thisserand/alpaca-lora-finetune-language#4 d8ahazard/sd_dreambooth_extension#1002",
    symptom="AssertionError: No inf checks were recorded for this optimizer.",
    cause="All parameters of the optimizer are frozen.",
    command="run",
    says="they are frozen",
    truth="frozen|requires_grad",
    cure="Set `requires_grad_(True)` on the parameters to train.",
)
def frozen_parameters(amp: Amp, *, cured: bool) -> Program:
    """Train a head over an adapter that is frozen."""
    model, optimizer, scaler = linear(amp)
    head, x = nn.Linear(1, 1), batch()
    model.requires_grad_(cured)
    return loop(amp, model, lambda: distance(head(model(x))), optimizer, scaler)


@report(
    "open-mmlab/mmsegmentation#3230 Haochen-Wang409/HPM#10",
    symptom="AssertionError: No inf checks were recorded for this optimizer.",
    cause="The loss is a new tensor, which does not depend on the weights.",
    command="run",
    says="a loss that does not depend on them",
    truth="not depend",
    cure="Compute the loss from the output: no `torch.tensor(value)`, no `.item()`.",
)
def loss_from_numbers(amp: Amp, *, cured: bool) -> Program:
    """Build the loss of numbers."""
    model, optimizer, scaler = linear(amp)
    x = batch()

    def loss_of() -> Tensor:
        loss = distance(model(x))
        return loss if cured else torch.tensor(float(loss), requires_grad=True)

    return loop(amp, model, loss_of, optimizer, scaler)


@report(
    "huggingface/accelerate#328",
    symptom="AssertionError: No inf checks were recorded for this optimizer.",
    cause="The optimizer was made before the model was moved or replaced.",
    command="run",
    says="an optimizer over another model's parameters",
    truth="optimizer (over|before)|another model",
    cure="Move the model, then make the optimizer from `model.parameters()`.",
)
def optimizer_of_old_parameters(amp: Amp, *, cured: bool) -> Program:
    """Wrap a copy of the model after the optimizer was made."""
    model, optimizer, scaler = linear(amp)
    trained = model if cured else copy.deepcopy(model)
    x = batch()
    return loop(amp, trained, lambda: distance(trained(x)), optimizer, scaler)


@report(
    "lucidrains/stylegan2-pytorch#101 lucidrains/stylegan2-pytorch#100 "
    "pytorch/pytorch#44667",
    symptom="A gradient penalty overflows at any loss scale; without it all works.",
    cause="The penalty is computed from scaled gradients.",
    says=r"penalty.* scale|autograd\.grad.* scale|not proportional to the loss scale",
    truth=r"unscale|divide|get_scale|proportional",
    cure="Divide the result of `autograd.grad` by `scaler.get_scale()` first.",
    steps=8,
)
def penalty_of_scaled_gradients(amp: Amp, *, cured: bool) -> Program:
    """Train a critic with a penalty on its gradients."""
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


@report(
    "pfnet/pytorch-pfn-extras#636 skorch-dev/skorch#826",
    symptom="RuntimeError: Closure use is not currently supported by GradScaler.",
    cause="torch's scaler cannot step an optimizer that takes a closure.",
    command="impossible",
    cure="Train with LBFGS in fp32, or use `halfstep.GradScaler`.",
)
def closure(amp: Amp, *, cured: bool) -> Program:
    """Train with LBFGS."""
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
    "languini-kitchen/languini-kitchen#7 wandb/wandb#4369 wandb/wandb#9092 "
    "Lightning-AI/pytorch-lightning#4151",
    symptom="The gradient norm in the log is 65536 times too large, and jumps.",
    cause="It is computed from scaled gradients.",
    says=r"(norm|gradients) .*(read|taken|logged) .*before unscale_",
    truth="unscale_",
    cure="Call `scaler.unscale_(optimizer)` before the norm is computed.",
)
def norm_of_scaled_gradients(amp: Amp, *, cured: bool) -> Program:
    """Log the norm of the gradients."""
    model, optimizer, scaler = linear(amp)
    x, norms = batch(), []

    def log() -> None:
        if cured:
            scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        norms.append(float(model.weight.grad.norm()))

    hooks = {"after_backward": log, "is_sick": lambda: max(norms) > 100}
    return loop(amp, model, lambda: distance(model(x)), optimizer, scaler, **hooks)


@report(
    "pytorch/pytorch#36601",
    symptom="AssertionError: No inf checks were recorded prior to update.",
    cause="scaler.update() is called after each micro-batch, not once a step.",
    command="run",
    says=r"Call step\(optimizer\) before update\(\)",
    truth=r"step\(",
    cure="Call `scaler.update()` in iterations that call `scaler.step(optimizer)`.",
)
def update_each_micro_batch(amp: Amp, *, cured: bool) -> Program:
    """Accumulate two micro-batches, and update after each."""
    model, optimizer, scaler = linear(amp)
    batches = torch.randn(2, 16, 8)

    def step() -> None:
        optimizer.zero_grad()
        for number, x in enumerate(batches, 1):
            with amp.autocast():
                loss = distance(model(x)) / len(batches)
            scaler.scale(loss).backward()
            if number == len(batches):
                scaler.step(optimizer)
            if number == len(batches) or not cured:
                scaler.update()

    return Program(model, step)

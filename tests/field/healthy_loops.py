"""Loops of many kinds, as people write them around a small model."""

import copy
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from tests.field.healthy import HEALTHY, healthy
from tests.field.nets import loop
from tests.field.report import Amp, Program
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler

import halfstep as hs

BF16 = torch.bfloat16


def net(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, outputs),
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 16), torch.randint(4, (32,))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def classifying(
    amp: Amp,
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    **more: Any,
) -> Program:
    model, (x, y) = model or net(), batch()
    optimizer = optimizer or adamw(model)
    if "dtype" not in more:
        scaler = scaler or amp.scaler()

    def loss_of() -> Tensor:
        return F.cross_entropy(model(x), y)

    return loop(amp, model, loss_of, optimizer, scaler, **more)


# Gradients between the backward pass and the step


@healthy
def clip_norm(amp: Amp) -> Program:
    return clipped(amp, net(), amp.scaler())


def clipped(amp: Amp, model: nn.Module, scaler: Any, **more: Any) -> Program:
    optimizer = adamw(model)

    def clip() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    more |= {"optimizer": optimizer, "scaler": scaler, "after_backward": clip}
    return classifying(amp, model, **more)


@healthy
def clip_value(amp: Amp) -> Program:
    """Clip each number after `unscale_`; cleared gradients stay as zeros."""
    model, (x, y) = net(), batch()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), amp.scaler()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with amp.autocast():
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@healthy
def accumulation(amp: Amp) -> Program:
    model, (x, y) = net(), batch()
    optimizer, scaler = adamw(model), amp.scaler()

    def step() -> None:
        for inputs, classes in zip(x.chunk(4), y.chunk(4), strict=True):
            with amp.autocast():
                loss = F.cross_entropy(model(inputs), classes) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Program(model, step)


@healthy
def micro_batch_at_a_time(amp: Amp) -> Program:
    """The same, where each call is an iteration and each fourth steps."""
    model, (x, y) = net(), batch()
    optimizer, scaler, calls = adamw(model), amp.scaler(), count(1)

    def step() -> None:
        with amp.autocast():
            loss = F.cross_entropy(model(x), y) / 4
        scaler.scale(loss).backward()
        if next(calls) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return Program(model, step)


@healthy
def mean_of_gradients_by_hand(amp: Amp) -> Program:
    """Gradients are divided by the number of micro-batches while they are scaled."""
    model, (x, y) = net(), batch()
    optimizer, scaler = adamw(model), amp.scaler()

    def step() -> None:
        optimizer.zero_grad()
        for inputs, classes in zip(x.chunk(4), y.chunk(4), strict=True):
            with amp.autocast():
                loss = F.cross_entropy(model(inputs), classes)
            scaler.scale(loss).backward()
        for param in model.parameters():
            param.grad /= 4
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@healthy
def gradient_penalty(amp: Amp) -> Program:
    """The penalty is taken of unscaled gradients, outside autocast."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x, y = batch()
    optimizer, scaler = adamw(model), amp.scaler()
    params = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        scaled = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
        grads = [grad / scaler.get_scale() for grad in scaled]
        with amp.autocast():
            norm = sum(grad.square().sum() for grad in grads) ** 0.5
            loss = loss + 0.1 * norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


# Optimizers


@healthy
def fused_adamw(amp: Amp) -> Program:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return classifying(amp, model, optimizer=optimizer)


@healthy
def lbfgs(amp: Amp) -> Program:
    model, x = nn.Linear(16, 1), torch.randn(64, 16)
    y = x @ torch.randn(16, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with amp.autocast(BF16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        return loss

    return Program(model, lambda: optimizer.step(closure))


@healthy
def sharpness_aware(amp: Amp) -> Program:
    """Two backward passes a step, the second from weights that are moved uphill."""
    model, (x, y) = net(), batch()
    optimizer, params = adamw(model), list(model.parameters())

    def backward() -> None:
        optimizer.zero_grad()
        with amp.autocast(BF16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    def step() -> None:
        backward()
        grads = [param.grad for param in params]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        uphill = [0.05 * grad / norm for grad in grads]
        with torch.no_grad():
            torch._foreach_add_(params, uphill)
        backward()
        with torch.no_grad():
            torch._foreach_sub_(params, uphill)
        optimizer.step()

    return Program(model, step)


@healthy
def two_optimizers(amp: Amp) -> Program:
    """One for weights, one for biases; one update of the scale."""
    model, (x, y) = net(), batch()
    weights = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    optimizers = torch.optim.SGD(weights, lr=0.05), torch.optim.Adam(others, lr=1e-3)
    scaler = amp.scaler()

    def step() -> None:
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    return Program(model, step)


@healthy
def scaler_that_is_off(amp: Amp) -> Program:
    """The general form, with bfloat16 and a scaler that is not enabled."""
    return clipped(amp, net(), amp.scaler(enabled=False), dtype=BF16)


@healthy
def training_in_fp32(amp: Amp) -> Program:
    del amp
    model, (x, y) = net(), batch()
    return loop(None, model, lambda: F.cross_entropy(model(x), y), adamw(model))


# Schedules and averages


@healthy
def one_cycle(amp: Amp) -> Program:
    """The schedule steps with each batch, and no step is skipped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    more = {"scaler": amp.scaler(init_scale=2.0**10), "after_step": schedule.step}
    return classifying(amp, model, optimizer=optimizer, **more)


@healthy
def schedule_of_applied_steps(amp: Amp) -> Program:
    model, scaler = net(), amp.scaler(init_scale=2.0**22)
    optimizer, scales = adamw(model), [2.0**22]
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    def move_on() -> None:
        scales.append(scaler.get_scale())
        if scales[-1] >= scales[-2]:
            schedule.step()

    more = {"scaler": scaler, "after_step": move_on}
    return classifying(amp, model, optimizer=optimizer, **more)


@healthy
def warm_up_from_zero(amp: Amp) -> Program:
    """The first rate is 0, and groups have their own decay."""
    model = net()
    rest = {"params": model[1:].parameters(), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, rest], lr=1e-3)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    more = {"dtype": BF16, "after_step": schedule.step}
    return classifying(amp, model, optimizer=optimizer, **more)


@healthy
def moving_average(amp: Amp) -> Program:
    model = net()
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def update() -> None:
        pairs = zip(average.parameters(), model.parameters(), strict=True)
        for mean, param in pairs:
            mean.mul_(0.999).add_(param, alpha=0.001)

    return classifying(amp, model, after_step=update)


# Several models, several losses


def gan(amp: Amp, *, own_scalers: bool) -> Program:
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
    discriminator = nn.Sequential(
        nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
    )
    generator_step, discriminator_step = (
        torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for each in (generator, discriminator)
    )
    real, noise = torch.randn(32, 16), torch.randn(32, 4)
    first = amp.scaler()
    second = amp.scaler() if own_scalers else first

    def step() -> None:
        with amp.autocast():
            fake = generator(noise)
            scores = discriminator(real), discriminator(fake.detach())
            loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        discriminator_step.zero_grad()
        first.scale(loss).backward()
        first.step(discriminator_step)
        if own_scalers:
            first.update()
        with amp.autocast():
            loss = F.softplus(-discriminator(fake)).mean()
        generator_step.zero_grad()
        second.scale(loss).backward()
        second.step(generator_step)
        second.update()

    return Program(nn.ModuleList([generator, discriminator]), step)


HEALTHY["gan_of_one_scaler"] = partial(gan, own_scalers=False)
HEALTHY["gan_of_two_scalers"] = partial(gan, own_scalers=True)


@healthy
def several_losses(amp: Amp) -> Program:
    """Two losses of one graph, each scaled and sent back by itself."""
    model, (x, y) = net(5), batch()
    optimizer, scaler = adamw(model), amp.scaler()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            outputs = model(x)
            classes = F.cross_entropy(outputs[:, :4], y)
            value = F.mse_loss(outputs[:, 4].float(), x[:, 0])
        scaler.scale(classes).backward(retain_graph=True)
        scaler.scale(0.5 * value).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


# What else happens in a loop


@healthy
def evaluation_between_steps(amp: Amp) -> Program:
    model, (x, y) = net(), batch()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad(), amp.autocast():
            (model(x).argmax(-1) == y).float().mean().item()
        model.train()

    return classifying(amp, model, after_step=evaluate)


@healthy
def resumed(amp: Amp) -> Program:
    def start(model: nn.Module) -> tuple[tuple[Any, ...], Program]:
        optimizer, scaler = adamw(model), amp.scaler()
        program = classifying(amp, model, optimizer=optimizer, scaler=scaler)
        return (model, optimizer, scaler), program

    parts, program = start(net())
    program.step()
    states = [copy.deepcopy(each.state_dict()) for each in parts]
    parts, program = start(net())
    for each, state in zip(parts, states, strict=True):
        each.load_state_dict(state)
    return program


@healthy
def inference(amp: Amp) -> Program:
    model, (x, _) = net().eval(), batch()

    @torch.no_grad()
    def step() -> None:
        with amp.autocast(BF16):
            model(x).float().softmax(-1)

    return Program(model, step)


@healthy
def compiled(amp: Amp) -> Program:
    model, (x, y) = net(), batch()
    fast = torch.compile(model, backend="eager")
    loss = lambda: F.cross_entropy(fast(x), y)  # noqa: E731
    return loop(amp, model, loss, adamw(model), amp.scaler())


@healthy
def custom_function(amp: Amp) -> Program:
    """A square in float32, with the decorators of either library."""
    decorators = {"torch": torch.amp, "halfstep": hs}[amp.name]

    class Square(torch.autograd.Function):
        @staticmethod
        @decorators.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @decorators.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    model, (x, y) = net(), batch()
    loss = lambda: F.cross_entropy(Square.apply(model(x)), y)  # noqa: E731
    return loop(amp, model, loss, adamw(model), amp.scaler())


@healthy
def data_parallel(amp: Amp) -> Program:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return clipped(amp, nn.parallel.DistributedDataParallel(net()), amp.scaler())


# Sessions


def in_session(_: Amp, level: str, dtype: str, **options: Any) -> Program:
    """Return the loop of a session; it needs no classes."""
    model, (x, y) = net(), batch()
    session = hs.prepare(model, adamw(model), level, dtype=dtype, **options)

    def step() -> None:
        with session.autocast():
            loss = F.cross_entropy(session.model(x), y)
        session.backward(loss)
        session.step()

    return Program(model, step, given={"session": session})


HEALTHY |= {
    "session O1 fp16": partial(
        in_session, level="O1", dtype="fp16", clip_grad_norm=0.1
    ),
    "session O2 fp16": partial(in_session, level="O2", dtype="fp16"),
    "session O2 bf16": partial(in_session, level="O2", dtype="bf16", accumulate=4),
}

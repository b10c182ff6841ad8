"""Autocast contexts in the wrong place, or over the wrong thing; several processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.field.nets import (
    batch,
    distance,
    is_nonfinite,
    linear,
    loop,
    mean_square,
    unchanged,
    updates_of,
)
from tests.field.report import Amp, Program, report
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


@report(
    says="the backward pass ran inside autocast",
    truth="backward.* (inside|under|in) autocast",
)
def backward_inside_autocast(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x, updates = batch() * 1e5, updates_of(optimizer)

    class Fp32Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            with torch.autocast("cpu", enabled=False):
                return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return None, grad.T @ x

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            loss = distance(Fp32Linear.apply(x, model.weight) / 1e5)
            loss = loss + (model(x / 1e5) - 1).abs().mean()
            if not cured:
                scaler.scale(loss).backward()
        if cured:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, lambda: len(updates) < 4)


@report(says="loss was computed outside autocast", truth="(?i)huber|loss")
def loss_outside_autocast(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x = batch()

    def step() -> None:
        with amp.autocast():
            output = model(x)
        if cured:
            output = output.float()
        scaler.scale(nn.functional.huber_loss(output, x[:, :1])).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@report(says=r"module 'quantizer'.*Autocast was off.* cast by hand", truth="quantizer")
def disabled_block(amp: Amp, *, cured: bool) -> Program:

    class Quantizer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float() if cured else x)

    model, x = nn.Sequential(), batch()
    model.add_module("encoder", nn.Linear(8, 8))
    model.add_module("quantizer", Quantizer(8, 1))

    def step() -> None:
        with amp.autocast():
            loss = mean_square(model(x))
        loss.backward()

    return Program(model, step)


@report(says=r"(thread|Thread).*autocast|autocast.*(thread|Thread)", truth="thread")
def forward_in_thread(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x, outputs = batch(), []

    def forward(part: Tensor) -> Tensor:
        with amp.autocast() if cured else nullcontext():
            return model(part)

    def loss_of() -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            outputs[:] = pool.map(forward, x.chunk(2))
        return distance(torch.cat(outputs))

    def is_sick() -> bool:
        return outputs[0].dtype == torch.float32

    return loop(amp, model, loss_of, optimizer, scaler, is_sick=is_sick)


@report(says="generator")
def decorated_generator(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    x, outputs = batch(), []

    @amp.autocast()
    def forward() -> Iterator[Tensor]:
        for part in x.chunk(2):
            with amp.autocast() if cured else nullcontext():
                output = model(part)
            yield output

    def loss_of() -> Tensor:
        outputs[:] = forward()
        return distance(torch.cat(outputs))

    is_sick = lambda: outputs[0].dtype == torch.float32  # noqa: E731
    return loop(None, model, loss_of, optimizer, scaler, is_sick=is_sick)


def output_of(context: Callable[[], Any]) -> Program:
    model, x, dtypes = nn.Linear(8, 1), batch(), []

    def step() -> None:
        with context():
            output = model(x)
        output.float().mean().backward()
        dtypes.append(output.dtype)

    return Program(model, step, lambda: dtypes[-1] == torch.float32)


@report(says="CUDA is not available")
def autocast_of_another_device(amp: Amp, *, cured: bool) -> Program:
    return output_of(lambda: amp.context("cpu" if cured else "cuda", torch.float16))


@report(says="the target dtype is not supported")
def autocast_to_float32(amp: Amp, *, cured: bool) -> Program:
    return output_of(lambda: amp.autocast(torch.bfloat16 if cured else torch.float32))


@report()
def steps_inside_one_context(amp: Amp, *, cured: bool) -> Program:
    model = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = batch(), []

    def update() -> None:
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))

    def step() -> None:
        losses.clear()
        if not cured:
            with amp.autocast(torch.bfloat16):
                for _ in range(3):
                    update()
            return
        for _ in range(3):
            with amp.autocast(torch.bfloat16):
                update()

    return Program(model, step, lambda: losses[0] == losses[2])


@report(
    says=r"weights .*changed .*(inside|within) .*autocast|stale",
    truth="stale|cache|cast",
)
def weights_swapped_inside_context(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp)
    reference = torch.randn_like(model.weight)
    x, gaps = batch(), []

    def reference_output() -> Tensor:
        trained = model.weight.data
        model.weight.data = trained.clone()
        model.weight.data.copy_(reference)
        with torch.no_grad():
            output = model(x)
        model.weight.data.copy_(trained)
        return output

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            output = model(x)
            other = None if cured else reference_output()
        if other is None:
            with amp.autocast():
                other = reference_output()
        gaps.append(float((output - other).abs().max()))
        scaler.scale(distance(output)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, lambda: max(gaps) < 0.1)


@report(says="bf16 with loss scale dynamic", truth="bf16|bfloat16")
def scaler_with_bf16(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, scaler = linear(amp, lr=1e-36, scale=2.0**16)
    scaler = amp.scaler(enabled=False) if cured else scaler
    x, updates = batch(), updates_of(optimizer)
    return loop(
        amp,
        model,
        lambda: distance(model(x)) * 1e35,
        optimizer,
        scaler,
        dtype=torch.bfloat16,
        is_sick=lambda: len(updates) < 4,
    )


@report(
    says="fp16 without a loss scale: gradients below .* become 0",
    truth="(?i)gradscaler|loss scale",
)
def scaler_switched_off(amp: Amp, *, cured: bool) -> Program:
    model, optimizer, _ = linear(amp, lr=1e7)
    scaler = amp.scaler(enabled=cured)  # as GradScaler("cuda") on a CPU
    x = batch()

    def loss_of() -> Tensor:
        return mean_square(model(x)) * 1e-8

    return loop(amp, model, loss_of, optimizer, scaler, is_sick=unchanged(model.weight))


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return nn.parallel.DistributedDataParallel(model)


@report(says=r"fp16_compress_hook", truth="compress_hook")
def compressed_gradients(amp: Amp, *, cured: bool) -> Program:
    layer = nn.Linear(8, 1)
    model = data_parallel(layer)
    if not cured:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9)
    x = 300 * torch.randn(16, 8)

    def loss_of() -> torch.Tensor:
        return (model(x).float() - 1000).square().mean()

    low = torch.bfloat16
    is_sick = is_nonfinite(layer.weight)
    return loop(amp, model, loss_of, optimizer, dtype=low, is_sick=is_sick)

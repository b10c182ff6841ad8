"""Autocast contexts: opened in the wrong place, or over the wrong thing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tests.field.nets import (
    batch,
    distance,
    linear,
    loop,
    mean_square,
    unchanged,
    updates_of,
)
from tests.field.report import Program, reports_of
from torch import Tensor, nn

import halfstep as hs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.field.report import Amp

report = reports_of("autocast context")


@report(
    "luyug/GradCache#17 pytorch/pytorch#177287 pytorch/pytorch#120930",
    symptom="Gradients overflow, or errors are weird, with a whole step in autocast.",
    cause="backward() runs inside autocast, which casts its operations again.",
    says="the backward pass ran inside autocast",
    truth="backward.* (inside|under|in) autocast",
    cure="Leave the autocast context before `backward()`.",
)
def backward_inside_autocast(amp: Amp, *, cured: bool) -> Program:
    """Train by a custom matmul whose gradient needs the range of fp32."""
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


@report(
    "pytorch/pytorch#50941 cvlab-stonybrook/PathLDM#16 Megvii-BaseDetection/YOLOX#731",
    symptom="RuntimeError: Found dtype Float but expected Half, in backward().",
    cause="The loss is computed outside autocast, from 16-bit predictions.",
    command="run",
    says="loss was computed outside autocast",
    truth="(?i)huber|loss",
    cure="Compute the loss inside the context, or from `predictions.float()`.",
)
def loss_outside_autocast(amp: Amp, *, cured: bool) -> Program:
    """Compute a Huber loss after the context."""
    model, optimizer, scaler = linear(amp)
    x = batch()

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast():
            output = model(x)
        if cured:
            output = output.float()
        loss = nn.functional.huber_loss(output, x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step)


@report(
    "pytorch/pytorch#79085",
    symptom="expected m1 and m2 to have the same dtype, but got Half and Float.",
    cause="A block with autocast disabled gets the 16-bit output of what comes before.",
    command="run",
    says=r"module 'quantizer'.*Autocast was off.* cast by hand",
    truth="quantizer",
    cure="Begin the block with `x = x.float()`.",
)
def disabled_block(amp: Amp, *, cured: bool) -> Program:
    """Compute a quantizer outside of autocast, of what the encoder gives."""

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


@report(
    "pytorch/pytorch#116183 catalyst-team/catalyst#992 pytorch/pytorch#50170",
    symptom="Autocast has no effect: outputs are fp32, and memory is as before.",
    cause="The forward pass runs in a thread, and autocast is a thread's own state.",
    says=r"(thread|Thread).*autocast|autocast.*(thread|Thread)",
    truth="thread",
    cure="Open `torch.autocast` in the function that the thread runs.",
)
def forward_in_thread(amp: Amp, *, cured: bool) -> Program:
    """Run the forward pass in a pool of threads."""
    model, optimizer, scaler = linear(amp)
    x, outputs = batch(), []

    def forward(part: Tensor) -> Tensor:
        with amp.autocast() if cured else nullcontext():
            return model(part)  # type: ignore[no-any-return]

    def loss_of() -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            outputs[:] = pool.map(forward, x.chunk(2))
        return distance(torch.cat(outputs))

    def is_sick() -> bool:
        return outputs[0].dtype == torch.float32

    return loop(amp, model, loss_of, optimizer, scaler, is_sick=is_sick)


@report(
    "ai2cm/ace#733",
    symptom="Autocast has no effect on a function that yields.",
    cause="The decorator leaves the context before the generator's body runs.",
    says="generator",
    cure="Open the context inside the generator, around each forward pass.",
)
def decorated_generator(amp: Amp, *, cured: bool) -> Program:
    """Yield one forward pass after another."""
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

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(model, step, lambda: outputs[0].dtype == torch.float32)


@report(
    "ai-forever/Real-ESRGAN#12 pytorch/pytorch#67676 pytorch/pytorch#83733",
    symptom="Autocast has no effect on a CPU.",
    cause='The context is opened for "cuda".',
    command="run",
    says="CUDA is not available",
    cure="Open `torch.autocast(x.device.type)`.",
)
def autocast_of_another_device(amp: Amp, *, cured: bool) -> Program:
    """Train on a CPU under a context for CUDA."""
    model, x, dtypes = nn.Linear(8, 1), batch(), []
    autocast = torch.autocast if amp.name == "torch" else hs.autocast

    def step() -> None:
        with autocast("cpu" if cured else "cuda", dtype=torch.float16):
            output = model(x)
        output.float().mean().backward()
        dtypes.append(output.dtype)

    return Program(model, step, lambda: dtypes[-1] == torch.float32)


@report(
    "pytorch/pytorch#100565 huggingface/diffusers#9628",
    symptom="Autocast has no effect on a CPU.",
    cause="Its dtype is float32.",
    command="run",
    says="the target dtype is not supported",
    cure="Open the context with `dtype=torch.bfloat16`.",
)
def autocast_to_float32(amp: Amp, *, cured: bool) -> Program:
    """Train under a context for float32."""
    model, x, dtypes = nn.Linear(8, 1), batch(), []

    def step() -> None:
        with amp.autocast(torch.bfloat16 if cured else torch.float32):
            output = model(x)
        output.float().mean().backward()
        dtypes.append(output.dtype)

    return Program(model, step, lambda: dtypes[-1] == torch.float32)


@report(
    "X-GenGroup/Flow-Factory#186",
    symptom="The loss of a fine-tuned fp32 model stays flat within each outer loop.",
    cause="One autocast context spans several steps, and keeps its casts of weights.",
    command="impossible",
    cure="Open a context for each forward pass.",
)
def steps_inside_one_context(amp: Amp, *, cured: bool) -> Program:
    """Make three updates within one context."""
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
    "X-GenGroup/Flow-Factory#186",
    symptom="The KL divergence to the reference, or the averaged weights, is 0.",
    cause="Weights are swapped through .data where autocast has kept their casts.",
    says=r"weights .*changed .*(inside|within) .*autocast|stale",
    truth="stale|cache|cast",
    cure="Leave the autocast context before weights are swapped.",
)
def weights_swapped_inside_context(amp: Amp, *, cured: bool) -> Program:
    """Compare outputs with those of reference weights, put in through .data."""
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


@report(
    "huggingface/accelerate#1036 decoderesearch/SAELens#723 ecmwf/WeatherGenerator#874",
    symptom="Steps of bf16 training are skipped, and each is unscaled for nothing.",
    cause="A GradScaler is used with bfloat16, which has the range of fp32.",
    says="bf16 with loss scale dynamic",
    truth="bf16|bfloat16",
    cure="Make it `GradScaler(enabled=dtype == torch.float16)`.",
)
def scaler_with_bf16(amp: Amp, *, cured: bool) -> Program:
    """Scale the loss of a bf16 model."""
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
    "dianwen-ng/Keyword-Spotting-ConvMixer#5 fideus-labs/KonfAI#178 "
    "engichang1467/Open-Rig3R#35 NVlabs/tiny-cuda-nn#472",
    symptom=(
        "float16 autocast trains, but the loss stands still early, without an error."
    ),
    cause=(
        'There is no GradScaler, or `GradScaler()`, which is for "cuda", switches '
        "itself off on a CPU: small gradients are 0."
    ),
    says="fp16 without a loss scale: gradients below .* become 0",
    truth="(?i)gradscaler|loss scale",
    cure='`GradScaler("cpu")`, or bfloat16.',
)
def scaler_switched_off(amp: Amp, *, cured: bool) -> Program:
    """Train by gradients below the range of float16."""
    model, optimizer, _ = linear(amp, lr=1e7)
    scaler = amp.scaler(enabled=cured)  # as GradScaler("cuda") on a CPU
    x = batch()

    def loss_of() -> Tensor:
        return mean_square(model(x)) * 1e-8

    return loop(amp, model, loss_of, optimizer, scaler, is_sick=unchanged(model.weight))

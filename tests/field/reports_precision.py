"""Finite numbers that are wrong: too coarse, or an overflow that nobody sees."""

import contextlib
import functools
from collections.abc import Callable

import torch
from tests.field.nets import WIDTH, mean_square
from tests.field.report import Amp, Program, report
from torch import Tensor, nn


class Middle(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def checked(
    dtype: torch.dtype, *, length: int, factor: float = 1.0
) -> Callable[[Callable[..., Tensor]], Callable[..., Program]]:
    """Make a function `f(x, *, cured)` the middle of a model that is checked."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Program]:
        @functools.wraps(function)
        def build(amp: Amp, *, cured: bool) -> Program:
            middle = Middle(functools.partial(function, cured=cured))
            layers = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)
            model = nn.Sequential(*layers)
            nn.init.eye_(model[0].weight)
            x, outputs = factor * torch.randn(2, length, WIDTH), []

            def step() -> None:
                with torch.no_grad(), amp.autocast(dtype):
                    inputs = model[0](x)
                    low = middle(inputs).float()
                outputs[:] = [low, middle(inputs.float())]

            def is_sick() -> bool:
                low, right = outputs
                return bool((low - right).norm() > 0.1 * right.norm())

            check = {"level": "O1", "dtype": dtype, "steps": 0, "batch": x}
            check["loss_fn"] = lambda model, batch: mean_square(model(batch))
            return Program(model, step, is_sick, check=check)

        return build

    return decorate


@report(
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth=r"Middle|positions|angles",
)
@checked(torch.bfloat16, length=2000)
def rotary_angles(x: Tensor, *, cured: bool) -> Tensor:
    dtype = torch.float32 if cured else x.dtype
    positions = torch.arange(x.shape[1], dtype=dtype)
    rates = 10 ** -torch.linspace(0, 3, WIDTH // 2).to(dtype)
    angles = positions[:, None] * rates
    return x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)


@report(says=r"1 \(mul\): .*65504.*module:1=fp32", truth="mul")
@checked(torch.float16, length=16, factor=1000.0)
def squares_of_a_norm(x: Tensor, *, cured: bool) -> Tensor:
    wide = x.float() if cured else x
    return (x * (wide * wide).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


@report(
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|positions",
)
@checked(torch.bfloat16, length=64)
def positions_in_a_matmul(x: Tensor, *, cured: bool) -> Tensor:
    positions = 65536.0 + torch.arange(x.shape[1])
    off = torch.autocast("cpu", enabled=False)
    with off if cured else contextlib.nullcontext():
        angles = positions[:, None] @ torch.ones(1, WIDTH)
    return x * angles.float().cos().to(x.dtype)


@report(
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|index|order",
)
@checked(torch.float16, length=8192)
def indices_as_floats(x: Tensor, *, cured: bool) -> Tensor:
    order = torch.arange(x.shape[1] - 10)
    order = order if cured else order.to(x.dtype).long()
    return x[:, order]


@report(
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32", truth="Middle|cumsum"
)
@checked(torch.bfloat16, length=1024)
def window_of_cumulative_sums(x: Tensor, *, cured: bool) -> Tensor:
    dtype = torch.float32 if cured else x.dtype
    sums = (x + 5).cumsum(1, dtype=torch.float32).to(dtype)
    return ((sums[:, 4:] - sums[:, :-4]) / 4 - 5).to(x.dtype)


@report(says=r"log_softmax: ran in bf16, .*a ratio .* is not 1", truth="log_softmax")
def two_precisions_of_one_policy(amp: Amp, *, cured: bool) -> Program:
    model = nn.Linear(WIDTH, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x, ratios = torch.randn(16, WIDTH), []

    def step() -> None:
        with torch.no_grad(), amp.autocast(torch.bfloat16):
            old = model(x).float().log_softmax(-1)
        optimizer.zero_grad()
        with amp.autocast(torch.bfloat16):
            logits = model(x)
        new = (logits.float() if cured else logits).log_softmax(-1)
        ratio = (new.float() - old).exp()
        ratios.append(ratio.detach())
        ratio.mean().backward()
        optimizer.step()

    return Program(model, step, lambda: bool((ratios[0] - 1).abs().max() > 1e-3))

"""Finite numbers that are wrong: too coarse, or an overflow that nobody sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.field.report import Program, report
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.field.report import Amp

AREA = "precision"
WIDTH = 8


class Middle(nn.Module):
    """The report's own code."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes of it."""
        return self.function(x)


def checked(
    amp: Amp,
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    *,
    length: int,
    factor: float = 1.0,
) -> Program:
    """Return a program whose outputs are compared with those in fp32."""
    middle = Middle(function)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    nn.init.eye_(model[0].weight)
    x, outputs = factor * torch.randn(2, length, WIDTH), []

    def step() -> None:
        with torch.no_grad(), amp.autocast(dtype):
            inputs = model[0](x)
            outputs[:] = [middle(inputs).float(), middle(inputs.float())]

    def is_sick() -> bool:
        low, right = outputs
        return bool((low - right).norm() > 0.1 * right.norm())

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    word = "bf16" if dtype == torch.bfloat16 else "fp16"
    check = {"level": "O1", "dtype": word, "steps": 0}
    return Program(
        model, step, is_sick, check={"loss_fn": loss_fn, "batch": x, **check}
    )


@report(
    "huggingface/diffusers#13920",
    "EleutherAI/gpt-neox#1003",
    "huggingface/transformers#25681",
    area=AREA,
    symptom="With rotary embeddings in bf16 long contexts are worse.",
    cause="Positions and angles are computed in bf16: from 256 on they skip integers.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth=r"Middle|positions|angles",
    cure='Compute angles in fp32, or `policy="lean + module:rope=fp32"`.',
)
def rotary_angles(amp: Amp, *, cured: bool) -> Program:
    """Turn features by angles that follow from positions."""

    def turn(x: Tensor) -> Tensor:
        dtype = torch.float32 if cured else x.dtype
        positions = torch.arange(x.shape[1], dtype=dtype)
        rates = 10 ** -torch.linspace(0, 3, WIDTH // 2).to(dtype)
        angles = positions[:, None] * rates
        return x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)

    return checked(amp, turn, torch.bfloat16, length=2000)


@report(
    "facebookresearch/ConvNeXt#71",
    "ml-explore/mlx#4228",
    "microsoft/onnxruntime#29043",
    area=AREA,
    symptom="A norm by hand is far from fp32 in float16, with no inf in sight.",
    cause="x * x overflows, and 1 / inf is 0.",
    command="check",
    says=r"1 \(mul\): .*65504.*module:1=fp32",
    truth="mul",
    cure='Square `x.float()`, or `policy="lean + module:norm=fp32"`.',
)
def squares_of_a_norm(amp: Amp, *, cured: bool) -> Program:
    """Divide by a root mean square."""

    def normalise(x: Tensor) -> Tensor:
        wide = x.float() if cured else x
        return (x * (wide * wide).mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    return checked(amp, normalise, torch.float16, length=16, factor=1000.0)


@report(
    "tracel-ai/burn#4109",
    "google-ai-edge/LiteRT#9249",
    "numpy/numpy#7930",
    area=AREA,
    symptom="A mean over many positions is 0 in float16.",
    cause="Their number, or their sum, passes 65504, and x / inf is 0.",
    command="check",
    says=r"1 \(.*65504.*module:1=fp32",
    truth="mul|sum|cumsum",
    cure="Count and sum in fp32: `mask.sum(dtype=torch.float32)`.",
)
def count_of_positions(amp: Amp, *, cured: bool) -> Program:
    """Weigh features by how many there are."""

    def weigh(x: Tensor) -> Tensor:
        many = torch.full((1,), 300.0, dtype=torch.float32 if cured else x.dtype)
        return x * (9e4 / (many * many)).to(x.dtype) + x

    return checked(amp, weigh, torch.float16, length=16)

"""Finite numbers that are wrong: too coarse, or an overflow that nobody sees."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from tests.field.nets import WIDTH, mean_square
from tests.field.report import Program, reports_of
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.field.report import Amp

report = reports_of("precision")


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
            low = middle(inputs).float()
        outputs[:] = [low, middle(inputs.float())]

    def is_sick() -> bool:
        low, right = outputs
        return bool((low - right).norm() > 0.1 * right.norm())

    check = {"level": "O1", "dtype": dtype, "steps": 0, "batch": x}
    check["loss_fn"] = lambda model, batch: mean_square(model(batch))
    return Program(model, step, is_sick, check=check)


@report(
    "huggingface/diffusers#13920 EleutherAI/gpt-neox#1003 "
    "huggingface/transformers#25681 huggingface/diffusers#9405 "
    "modelscope/DiffSynth-Studio#562 utensils/mold#786 "
    "kohya-ss/musubi-tuner#729",
    symptom=(
        "With rotary embeddings in bf16 long contexts are worse. A diffusion "
        "model in bf16 sees timestep 1000 in place of 998.4."
    ),
    cause=(
        "Positions, timesteps and angles are computed in bf16: from 256 on they "
        "skip integers."
    ),
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
    "facebookresearch/ConvNeXt#71 ml-explore/mlx#4228 "
    "microsoft/onnxruntime#29043 pytorch/pytorch#69512 zhuchen03/FreeLB#8 "
    "pytorch/vision#3371 zylo117/Yet-Another-EfficientDet-Pytorch#153 "
    "MultimediaTechLab/YOLO#234 tracel-ai/burn#4109 "
    "google-ai-edge/LiteRT#9249 numpy/numpy#7930",
    symptom=(
        "A hand-written norm is far from fp32 in float16, without any inf. "
        "cosine_similarity gives 0 for float16. NMS in float16 suppresses "
        "nothing: all boxes stay. A mean over many positions is 0 in float16."
    ),
    cause=(
        "A product (x * x, of two norms, of areas, of counts) passes 65504, and x "
        "/ inf is 0."
    ),
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
    "huggingface/diffusers#13922 nkalyanv99/UNI-D2#6",
    symptom="Under autocast a rotary embedding written in float32 gives one colour.",
    cause="Autocast casts the matmul of positions and rates: 65536 + i is 65536.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|positions",
    cure='Compute the table inside `torch.autocast("cuda", enabled=False)`.',
)
def positions_in_a_matmul(amp: Amp, *, cured: bool) -> Program:
    """Multiply positions and rates as matrices."""

    def turn(x: Tensor) -> Tensor:
        positions = 65536.0 + torch.arange(x.shape[1])
        off = torch.autocast("cpu", enabled=False)
        with off if cured else contextlib.nullcontext():
            angles = positions[:, None] @ torch.ones(1, WIDTH)
        return x * angles.float().cos().to(x.dtype)

    return checked(amp, turn, torch.bfloat16, length=64)


@report(
    "pytorch/pytorch#70179 pytorch/pytorch#17584 pytorch/pytorch#94816 "
    "pytorch/pytorch#96429 princeton-vl/RAFT#54",
    symptom=(
        "Rows are mixed up in float16 once there are more than 2048. Optical flow "
        "in float16 has steps: it moves by whole pixels."
    ),
    cause="Indices and coordinates are floating numbers: 2049 is 2048 in float16.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|index|order",
    cure="Keep indices as integers, `order.long()`, and coordinates in float32.",
)
def indices_as_floats(amp: Amp, *, cured: bool) -> Program:
    """Pick rows by numbers that were stored among features."""

    def pick(x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1] - 10)
        order = order if cured else order.to(x.dtype).long()
        return x[:, order]

    return checked(amp, pick, torch.float16, length=8192)


@report(
    "numpy/numpy#24443 pytorch/pytorch#180150",
    symptom="A box filter by cumulative sums is noise towards the end, in 16 bits.",
    cause="Sums of thousands are coarse, and a difference of two keeps the error.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|cumsum",
    cure="`x.cumsum(1, dtype=torch.float32)`, and take the difference before a cast.",
)
def window_of_cumulative_sums(amp: Amp, *, cured: bool) -> Program:
    """Average over 4 neighbours."""

    def average(x: Tensor) -> Tensor:
        dtype = torch.float32 if cured else x.dtype
        sums = (x + 5).cumsum(1, dtype=torch.float32).to(dtype)
        return ((sums[:, 4:] - sums[:, :-4]) / 4 - 5).to(x.dtype)

    return checked(amp, average, torch.bfloat16, length=1024)


@report(
    "huggingface/trl#454 CarperAI/trlx#107 jingyaogong/minimind#813",
    symptom="PPO's ratio is not 1 before the first update.",
    cause="Old log-probabilities are computed under autocast, new ones in bf16.",
    says=r"log_softmax: ran in bf16, .*a ratio .* is not 1",
    truth="log_softmax",
    cure="Take `logits.float().log_softmax(-1)` in both places.",
)
def two_precisions_of_one_policy(amp: Amp, *, cured: bool) -> Program:
    """Compare a policy with itself."""
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

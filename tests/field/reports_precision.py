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
    "huggingface/transformers#25681",
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
    "facebookresearch/ConvNeXt#71 ml-explore/mlx#4228 microsoft/onnxruntime#29043",
    symptom="A hand-written norm is far from fp32 in float16, without any inf.",
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
    "tracel-ai/burn#4109 google-ai-edge/LiteRT#9249 numpy/numpy#7930",
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


@report(
    "huggingface/diffusers#9405 modelscope/DiffSynth-Studio#562 "
    "utensils/mold#786 kohya-ss/musubi-tuner#729",
    symptom="A diffusion model in bf16 sees timestep 1000 in place of 998.4.",
    cause="Timesteps from 512 to 1024 are multiples of 4 in bf16.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|timestep",
    cure="Keep timesteps in float32 up to the embedding, and cast that.",
)
def timesteps(amp: Amp, *, cured: bool) -> Program:
    """Embed timesteps by sines."""

    def embed(x: Tensor) -> Tensor:
        dtype = torch.float32 if cured else x.dtype
        t = torch.linspace(1000, 0, x.shape[1]).to(dtype)
        angles = t[:, None] * torch.ones(WIDTH // 2, dtype=dtype)
        return x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)

    return checked(amp, embed, torch.bfloat16, length=50)


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
    "pytorch/pytorch#70179 pytorch/pytorch#17584",
    symptom="Rows are mixed up in float16 once there are more than 2048.",
    cause="Indices are kept as floating numbers: 2049 is 2048 in float16.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|index|order",
    cure="Keep indices as integers: `order.long()`.",
)
def indices_as_floats(amp: Amp, *, cured: bool) -> Program:
    """Pick rows by numbers that were stored among features."""

    def pick(x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1] - 10)
        order = order if cured else order.to(x.dtype).long()
        return x[:, order]

    return checked(amp, pick, torch.float16, length=8192)


@report(
    "pytorch/pytorch#94816 pytorch/pytorch#96429 princeton-vl/RAFT#54",
    symptom="Optical flow in float16 has steps: it moves by whole pixels.",
    cause="From column 2048 on float16 has no fractions.",
    command="check",
    says=r"1 \(Middle\): its output is .* away .*module:1=fp32",
    truth="Middle|columns|grid",
    cure="Keep coordinates in float32: `grid.float()`; only features are cast.",
)
def sampling_grid(amp: Amp, *, cured: bool) -> Program:
    """Sample between columns."""

    def sample(x: Tensor) -> Tensor:
        dtype = torch.float32 if cured else x.dtype
        columns = torch.arange(x.shape[1] - 2).to(dtype) + 0.4
        left = columns.floor()
        share = (columns - left)[:, None].to(x.dtype)
        first = x[:, left.long()]
        return first + share * (x[:, left.long() + 1] - first)

    return checked(amp, sample, torch.float16, length=8192)


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
    "pytorch/vision#3371 zylo117/Yet-Another-EfficientDet-Pytorch#153 "
    "MultimediaTechLab/YOLO#234",
    symptom="NMS in float16 suppresses nothing: all boxes stay.",
    cause="The union of two areas passes 65504, so each overlap is x / inf = 0.",
    command="check",
    says=r"1 \((mul|add)\): .*65504.*module:1=fp32",
    truth=r"\bmul\b|\badd\b|area",
    cure="Compute areas in float32: `boxes.float()`.",
)
def overlap_of_boxes(amp: Amp, *, cured: bool) -> Program:
    """Divide an intersection by a union."""

    def overlap(x: Tensor) -> Tensor:
        sides = (x.float() if cured else x).sigmoid() * 100 + 200
        areas, inside = sides * sides, (sides / 2) * (sides / 2)
        return (inside / (areas + areas - inside)).to(x.dtype) * x

    return checked(amp, overlap, torch.float16, length=16)


@report(
    "pytorch/pytorch#69512 zhuchen03/FreeLB#8",
    symptom="cosine_similarity gives 0 for float16.",
    cause="The product of two norms passes 65504, and x / inf is 0.",
    command="check",
    says=r"1 \(mul\): .*65504.*module:1=fp32",
    truth=r"\bmul\b",
    cure="Divide each vector by its norm first, or take `x.float()`.",
)
def product_of_norms(amp: Amp, *, cured: bool) -> Program:
    """Compare vectors with their neighbours."""

    def compare(x: Tensor) -> Tensor:
        a, b = x, x.roll(1, dims=1)
        with torch.autocast("cpu", enabled=False):  # a half model has no fp32 norm
            norms = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
            if cured:
                return (a / norms[0]) * (b / norms[1])
            return a * (b / (norms[0] * norms[1]))

    return checked(amp, compare, torch.float16, length=16, factor=400.0)


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

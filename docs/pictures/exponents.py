"""Draw gradient exponents against fp16's range, with and without a loss scale.

`python docs/pictures/exponents.py` writes exponents.svg beside this file, and prints
the shares that the pages name.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import nn

LAYERS, WIDTH, STEPS = 4, 64, 100
FLUSHED, SMALLEST_NORMAL, LARGEST = -25, -14, 15  # exponents of fp16
SHIFT = 16  # exponent of the loss scale that is drawn
LOW, HIGH = -42, 27  # of the axis
# Readable on light and on dark pages.
TEXT, BARS = "#808080", "#3d85d0"
RED, YELLOW, GREEN = "#e05545", "#e0b030", "#4caf50"
ZONES = (
    (LOW, FLUSHED, RED, "becomes 0"),
    (FLUSHED, SMALLEST_NORMAL, YELLOW, "loses bits"),
    (SMALLEST_NORMAL, LARGEST + 1, GREEN, "full fp16 precision"),
    (LARGEST + 1, HIGH, RED, "becomes inf"),
)


class Posts(nn.Module):
    """A small transformer encoder that puts texts of token ids in six classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, 6) of tokens (batch, length)."""
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def collect(output: object, grads: list[torch.Tensor]) -> None:
    """Append the gradient of a module's output, once there is one."""
    if isinstance(output, torch.Tensor):
        output.register_hook(grads.append)


def gradient_exponents() -> torch.Tensor:
    """Train in fp32; return the exponents of all non-zero gradients of the last step.

    Those of weights, and those that flow back through the outputs of modules, which are
    smaller: a backward pass in fp16 computes, and so must hold, both.
    """
    torch.manual_seed(0)
    model = Posts()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(1000, (64, 32))
    labels = torch.arange(64) % 6
    grads: list[torch.Tensor] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda _module, _inputs, output: collect(output, grads)
        )
    for _ in range(STEPS):
        grads.clear()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    grads += [weight.grad for weight in model.parameters()]
    numbers = torch.cat([grad.flatten() for grad in grads])
    return torch.frexp(numbers[numbers != 0]).exponent - 1


def draw(exponents: torch.Tensor, path: Path) -> None:
    """Draw the histogram without a scale above the one with 2**SHIFT."""
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color")
    style = dict.fromkeys([*colors, "ytick.color"], TEXT)
    with plt.rc_context({"svg.hashsalt": "halfstep", "font.size": 11, **style}):
        figure, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="tight")
        for axis, by in zip(axes, (0, SHIFT), strict=True):
            values = exponents + by
            for low, high, color, name in ZONES:
                axis.axvspan(low - 0.5, high - 0.5, color=color, alpha=0.16, lw=0)
                middle = (low + high - 1) / 2
                axis.text(middle, 23, name, ha="center", va="top", fontsize=10)
            shown = values[values >= LOW]
            counts = torch.bincount(shown - LOW, minlength=HIGH - LOW + 1)
            axis.bar(range(LOW, HIGH + 1), 100 * counts / len(values), color=BARS)
            lost = 100 * (values < FLUSHED).double().mean()
            scale = f"Loss scale {2**by}" if by else "No loss scale"
            axis.set_title(
                f"{scale}: {lost:.1f} % of the gradients become 0", loc="left"
            )
            axis.set_ylabel("% of gradients")
            axis.set_ylim(0, 24.5)
            axis.patch.set_alpha(0)
        ticks = range(-40, HIGH, 10)
        axes[1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
        axes[1].set_xlabel("magnitude of a gradient, times the loss scale")
        axes[1].set_xlim(LOW - 0.5, HIGH - 0.5)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    exponents = gradient_exponents()
    draw(exponents, Path(__file__).with_suffix(".svg"))
    for scale in (0, 8, SHIFT, 24):
        lost = (exponents + scale < FLUSHED).double().mean()
        coarse = (exponents + scale < SMALLEST_NORMAL).double().mean()
        over = int((exponents + scale > LARGEST).sum())
        print(f"2^{scale}: {lost:.2%} become 0, {coarse:.2%} below 2^-14, {over} inf")

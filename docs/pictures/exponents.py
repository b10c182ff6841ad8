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
# Seen on light pages and on dark ones.
TEXT, BARS, BAND = "#777777", "#3d85d0", "#4caf50"


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
    with plt.rc_context({"svg.hashsalt": "halfstep", **style}):
        figure, axes = plt.subplots(2, 1, figsize=(7, 4.2), sharex=True, layout="tight")
        low, high = int(exponents.min()), int(exponents.max()) + SHIFT
        for axis, by in zip(axes, (0, SHIFT), strict=True):
            values = exponents + by
            counts = torch.bincount(values - low, minlength=high - low + 1)
            axis.axvspan(FLUSHED - 0.5, SMALLEST_NORMAL - 0.5, color=BAND, alpha=0.15)
            axis.axvspan(SMALLEST_NORMAL - 0.5, LARGEST + 0.5, color=BAND, alpha=0.3)
            axis.bar(range(low, high + 1), 100 * counts / len(values), color=BARS)
            lost = 100 * (values < FLUSHED).double().mean()
            title = f"loss scale 2^{by}" if by else "no loss scale"
            axis.set_title(f"{title}: {lost:.1f} % become 0 in fp16", loc="left")
            axis.set_ylabel("% of gradients")
            axis.patch.set_alpha(0)
        axes[1].set_xlabel("exponent e of |gradient| in [2^e, 2^(e+1)); shaded: fp16")
        axes[1].set_xlim(-50, 20)
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

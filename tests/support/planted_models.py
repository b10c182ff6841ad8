"""Small models in which faults are planted: six kinds, each with named places.

In: a name. Out: a model, a batch, and a loss as a healthy run computes it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, CLASSES, TEXTS, PLACES = 16, 20, 5, 3, 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(functional.gelu(self.fc1(x)))
        hidden = self.drop(functional.relu(self.fc2(hidden)))
        return self.head(hidden)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images of shape (B, 1, H, W)."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        x = functional.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Rms(nn.Module):
    """Root-mean-square norm in fp32, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide


class Attention(nn.Module):
    """Two heads over places that a mask allows."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return what x finds in other; the mask is added to the scores."""
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(other), self.v(other))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // 2)
        if mask is not None:
            scores = scores + mask
        found = scores.softmax(-1) @ v
        return self.o(found.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, 2 * WIDTH)
        self.wo = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(functional.relu(self.wi(x)))


class Layer(nn.Module):
    """Attention, perhaps a second one across, and the layers between; norms first."""

    def __init__(self, norm: Callable[[], nn.Module], *, across: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = norm(), Attention()
        if across:
            self.norm3, self.across = norm(), Attention()
        self.norm2, self.ff = norm(), Feed()
        self.drop = nn.Dropout(0.1)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None
    ) -> Tensor:
        normed = self.norm1(x)
        x = x + self.drop(self.attention(normed, normed, mask))
        if memory is not None:
            x = x + self.drop(self.across(self.norm3(x), memory, None))
        return x + self.drop(self.ff(self.norm2(x)))


def layer_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


class Stack(nn.Module):
    """Layers one after the other, perhaps computed again in the backward pass."""

    def __init__(self, norm: Callable[[], nn.Module], *, across: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm, across=across) for _ in range(2))
        self.recompute: str = ""
        """"" for no, "reentrant", or "plain" for the other way."""

    def forward(self, x: Tensor, *rest: Tensor | None) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                again = self.recompute == "reentrant"
                x = checkpoint(layer, x, *rest, use_reentrant=again)
            else:
                x = layer(x, *rest)
        return x


class Bert(nn.Module):
    """Padding is masked with -inf, which is added; the first place is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.encoder = Stack(layer_norm)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        """Return logits; keep is True where there is a token."""
        mask = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)[:, None, None, :]
        hidden = self.encoder(self.norm(self.words(ids)), mask)
        return self.head(torch.tanh(self.pooler(hidden[:, 0])))


class Gpt(nn.Module):
    """A causal mask lies in a buffer; the head is tied to the embedding."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.2)
        self.h = Stack(layer_norm)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        future = torch.full((PLACES, PLACES), -math.inf).triu(1)
        self.register_buffer("mask", future)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.h(self.words(ids), self.mask)))


class T5(nn.Module):
    """An encoder, and a decoder that looks across; norms in fp32."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder = Stack(Rms)
        self.middle = Rms()
        self.decoder = Stack(Rms, across=True)
        self.last = Rms()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        future = torch.full((PLACES, PLACES), -math.inf).triu(1)
        self.register_buffer("mask", future)

    def forward(self, ids: Tensor, before: Tensor) -> Tensor:
        memory = self.middle(self.encoder(self.shared(ids), None))
        found = self.decoder(self.shared(before), self.mask, memory)
        return self.head(self.last(found))


class Lstm(nn.Module):
    """Two directions over features, the last state classified."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.lstm(functional.gelu(self.inner(x)))
        return self.head(functional.gelu(self.outer(found[:, -1])))


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "bert": Bert,
    "gpt": Gpt,
    "t5": T5,
    "lstm": Lstm,
}

INNER = {
    "mlp": "fc2",
    "cnn": "conv2",
    "bert": "encoder.layers.1.ff.wo",
    "gpt": "h.layers.0.attention.v",
    "t5": "decoder.layers.1.ff.wo",
    "lstm": "outer",
}
"""A layer in the middle of each, whose inputs come from other layers."""

BEFORE = {
    "mlp": "norm",
    "cnn": "bn1",
    "bert": "encoder.layers.0.norm2",
    "gpt": "h.layers.1.norm1",
    "t5": "decoder.layers.0.norm3",
    "lstm": "lstm",
}
"""A place whose result a product takes next."""

NEXT = {
    "mlp": "fc2",
    "cnn": "conv2",
    "bert": "encoder.layers.0.ff.wi",
    "gpt": "h.layers.1.attention.q",
    "t5": "decoder.layers.0.across.q",
    "lstm": "outer",
}
"""That product."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (TEXTS, PLACES), generator=draw)
    labels = torch.randint(0, CLASSES, (TEXTS,), generator=draw)
    following = ids.roll(-1, 1)
    following[:, -1] = -100
    keep = torch.ones(TEXTS, PLACES, dtype=torch.bool)
    keep[0, 4:] = False
    return {
        "mlp": {"x": torch.randn(8, WIDTH, generator=draw), "labels": labels[[0] * 8]},
        "cnn": {"x": torch.randn(TEXTS, 1, 8, 8, generator=draw), "labels": labels},
        "bert": {"ids": ids, "keep": keep, "labels": labels},
        "gpt": {"ids": ids, "labels": following},
        "t5": {"ids": ids, "before": ids.roll(1, 1), "labels": following},
        "lstm": {
            "x": torch.randn(TEXTS, PLACES, WIDTH, generator=draw),
            "labels": labels,
        },
    }[name]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy; -100 is left out."""
    return functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100
    )


def inside(model: nn.Module, path: str, change: Callable[[Any], Any]) -> None:
    """Let a module change what it gives, within its forward pass."""
    module = model.get_submodule(path)
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if isinstance(out, tuple):
            return change(out[0]), *out[1:]
        return change(out)

    module.forward = changed

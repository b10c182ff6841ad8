"""Models of many kinds, each trained by the loop of torch's examples."""

from itertools import pairwise
from typing import Any

import torch
from tests.field.healthy import healthy, loop
from tests.field.report import Amp, Program
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint


def classification(model: Any, batch: Any) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def classified(*shape: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randint(classes, shape[:1])


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


@healthy
def cnn_with_batch_norm(amp: Amp) -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return loop(amp, model, classification, classified(8, 3, 16, 16), optimizer=sgd)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(9, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        coarse = F.silu(self.norm(self.down(image)))
        return self.head(torch.cat([self.up(coarse), image], dim=1))


@healthy
def segmentation(amp: Amp) -> Program:
    """Cross entropy and a Dice loss with its sums in float32."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        logits, masks = model(batch[0]).float(), batch[1]
        shares = logits.sigmoid()
        dice = (2 * (shares * masks).sum() + 1) / (shares.sum() + masks.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice

    batch = torch.randn(4, 1, 16, 16), (torch.rand(4, 1, 16, 16) > 0.5).float()
    return loop(amp, Segmenter(), loss_of, batch)


class Tagger(nn.Module):
    """A recurrent layer over embedded tokens, packed by their lengths."""

    def __init__(self, recurrent: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.recurrent = recurrent(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = rnn.pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = rnn.pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(states)


def tagging(model: Any, batch: Any) -> Tensor:
    """Return the cross entropy of tokens; padding has no label."""
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def padded_tokens() -> tuple[Tensor, Tensor]:
    """Return tokens with 0 for padding, and labels with -100 there."""
    tokens, labels = torch.randint(1, 50, (4, 9)), torch.randint(5, (4, 9))
    for row, length in enumerate((9, 7, 4, 2)):
        tokens[row, length:], labels[row, length:] = 0, -100
    return tokens, labels


@healthy
def lstm_with_ignored_labels(amp: Amp) -> Program:
    return loop(amp, Tagger(nn.LSTM), tagging, padded_tokens(), dtype=torch.bfloat16)


class Decoder(nn.Module):
    """A language model with tied weights, and attention with a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.positions = nn.Parameter(0.02 * torch.randn(12, 32))
        self.norm = nn.LayerNorm(32)
        self.queries_keys_values = nn.Linear(32, 96)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        mask = torch.full((12, 12), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        query, key, value = self.queries_keys_values(self.norm(x)).chunk(3, dim=-1)
        scores = query @ key.mT / 32**0.5 + self.mask
        return self.head(x + scores.softmax(-1) @ value)


@healthy
def language_model_with_tied_weights(amp: Amp) -> Program:
    tokens = torch.randint(40, (4, 13))
    return loop(amp, Decoder(), tagging, (tokens[:, :-1], tokens[:, 1:]))


@healthy
def transformer_encoder_with_padding(amp: Amp) -> Program:
    """Layers of torch's own layers, with dropout, and rows that are padded."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(32, 4)})
    padding = torch.arange(10) >= torch.tensor([[10], [8], [5], [3]])

    def loss_of(model: Any, batch: Any) -> Tensor:
        states = model["encoder"](batch[0], src_key_padding_mask=padding)
        return F.cross_entropy(model["head"](states[:, 0]), batch[1])

    return loop(amp, model, loss_of, classified(4, 10, 32))


@healthy
def ctc(amp: Amp) -> Program:
    """Letters from frames; the loss takes log-probabilities in float32."""
    lengths = torch.full((4,), 20), torch.full((4,), 5)
    batch = torch.randn(4, 20, 8), torch.randint(1, 6, (4, 5))

    def loss_of(model: Any, batch: Any) -> Tensor:
        scores = model(batch[0]).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch[1], *lengths, zero_infinity=True)

    return loop(amp, mlp(8, 32, 6), loss_of, batch)


@healthy
def contrastive(amp: Amp) -> Program:
    towers = nn.ModuleDict({"image": mlp(16, 32, 8), "text": mlp(12, 32, 8)})
    towers.register_parameter("temperature", nn.Parameter(torch.tensor(2.66)))

    def loss_of(model: Any, batch: Any) -> Tensor:
        image, text = (
            F.normalize(model[name](x), dim=-1)
            for name, x in zip(("image", "text"), batch, strict=True)
        )
        logits = model.temperature.exp() * image @ text.mT
        pairs = torch.arange(len(logits))
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.mT, pairs)) / 2

    return loop(amp, towers, loss_of, (torch.randn(16, 16), torch.randn(16, 12)))


@healthy
def variational_autoencoder(amp: Amp) -> Program:
    model = nn.ModuleDict({"encoder": mlp(16, 32, 8), "decoder": mlp(4, 32, 16)})

    def loss_of(model: Any, batch: Any) -> Tensor:
        mean, log_variance = model["encoder"](batch).float().chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = mean.square() + log_variance.exp() - 1 - log_variance
        return F.mse_loss(model["decoder"](latent), batch) + 0.05 * divergence.mean()

    return loop(amp, model, loss_of, torch.randn(32, 16))


class MixtureOfExperts(nn.Module):
    """Each row goes to the two experts of four that the gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(mlp(16, 32, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores, choices = self.gate(x).float().softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (choices == number).nonzero(as_tuple=True)
            share = scores[row, place, None]
            mixed.index_add_(0, row, (share * expert(x[row])).to(mixed.dtype))
        return self.head(x + mixed)


@healthy
def mixture_of_experts(amp: Amp) -> Program:
    """An expert may get no row, and then no gradient."""
    return loop(amp, MixtureOfExperts(), classification, classified(16, 16))


@healthy
def normalised_weights(amp: Amp) -> Program:
    model = mlp(16, 32, 32, 4)
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return loop(amp, model, classification, classified(32, 16))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(16, 32, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@healthy
def activation_checkpointing(amp: Amp) -> Program:
    return loop(amp, Checkpointed(), classification, classified(32, 16))


@healthy
def frozen_backbone(amp: Amp) -> Program:
    """Only the head learns; the rest is in evaluation mode."""
    backbone, head = mlp(16, 64, 16).requires_grad_(requires_grad=False), mlp(16, 4)
    model = nn.ModuleDict({"backbone": backbone.eval(), "head": head})

    def loss_of(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            features = model["backbone"](batch[0])
        return F.cross_entropy(model["head"](features), batch[1])

    sgd = torch.optim.SGD(head.parameters(), lr=0.1)
    return loop(amp, model, loss_of, classified(32, 16), optimizer=sgd)


@healthy
def distillation(amp: Amp) -> Program:
    teacher, student = mlp(16, 64, 4).eval(), mlp(16, 16, 4)

    def loss_of(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch).float().div(2).softmax(-1)
        answer = model(batch).float().div(2).log_softmax(-1)
        return 4 * F.kl_div(answer, wanted, reduction="batchmean")

    return loop(amp, student, loss_of, torch.randn(32, 16))


@healthy
def head_in_fp32(amp: Amp) -> Program:
    """The last layer stands in a block where autocast is off."""
    model = nn.ModuleDict({"body": mlp(16, 32, 16), "head": nn.Linear(16, 4)})

    def loss_of(model: Any, batch: Any) -> Tensor:
        features = F.gelu(model["body"](batch[0]))
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(model["head"](features.float()), batch[1])

    return loop(amp, model, loss_of, classified(32, 16))


@healthy
def targets_that_are_missing(amp: Amp) -> Program:
    """NaN stands for what was not measured, and is left out of the loss."""
    targets = torch.randn(32, 3)
    targets[torch.rand(32, 3) < 0.3] = torch.nan

    def loss_of(model: Any, batch: Any) -> Tensor:
        measured = ~batch[1].isnan()
        return F.smooth_l1_loss(model(batch[0])[measured].float(), batch[1][measured])

    return loop(amp, mlp(16, 32, 3), loss_of, (torch.randn(32, 16), targets))


@healthy
def policy_gradient(amp: Amp) -> Program:
    """Actions that are not allowed have a logit of -inf."""
    allowed = torch.rand(32, 6) > 0.4
    allowed[:, 0] = True
    actions = allowed.float().multinomial(1).squeeze(1)

    def loss_of(model: Any, batch: Any) -> Tensor:
        logits = model(batch[0]).float().masked_fill(~allowed, -torch.inf)
        chosen = torch.distributions.Categorical(logits=logits)
        return -(chosen.log_prob(actions) * batch[1]).mean()

    return loop(amp, mlp(16, 32, 6), loss_of, (torch.randn(32, 16), torch.randn(32)))


class Observer(nn.Module):
    """Keeps the range of what passes; before the first pass it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min()))
            self.high.copy_(torch.maximum(self.high, x.max()))
        return x


@healthy
def observed_ranges(amp: Amp) -> Program:
    """A buffer that begins at inf; another is never written."""
    model = mlp(16, 32, 4)
    model.append(Observer())
    model.register_buffer("unused", torch.tensor(torch.inf))
    return loop(amp, model, classification, classified(32, 16))


@healthy
def sparse_embedding(amp: Amp) -> Program:
    embedding = nn.EmbeddingBag(100, 16, sparse=True, mode="mean")
    model = nn.Sequential(embedding, nn.Linear(16, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randint(100, (16, 5)), torch.randint(4, (16,))
    return loop(amp, model, classification, batch, optimizer=sgd)


@healthy
def binary_labels(amp: Amp) -> Program:
    """Logits, a weight for the rare class, and labels in float32."""
    labels = (torch.rand(32, 5) > 0.9).float()

    def loss_of(model: Any, batch: Any) -> Tensor:
        weight = torch.full((5,), 9.0)
        return F.binary_cross_entropy_with_logits(
            model(batch[0]), batch[1], pos_weight=weight
        )

    return loop(amp, mlp(16, 32, 5), loss_of, (torch.randn(32, 16), labels))

"""`halfstep bench encoder`, `decoder` and `conv`: models of transformers.

All train from scratch on synthetic data that they learn within a hundred steps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import commands, loops, training
from halfstep.errors import UserError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator

SIZES: dict[str, tuple[str, float, float]] = {
    "layers": ("layers", 4, 12),
    "hidden": ("width of the residual stream", 256, 768),
    "heads": ("attention heads", 4, 12),
    "batch": ("texts of a micro-batch", 16, 32),
    "lr": ("learning rate of AdamW", 3e-4, 1e-4),
}
"""Flag -> help, default on a CPU, on cuda: BERT base, which needs a lower lr."""

CLASSES, GROUP = 4, 8  # of texts: number of labels, and tokens in the group of each
_FAVOURED = 0.2  # share of tokens drawn from the label's group, besides chance
_STEP = 4  # of random walks: a token is at most so much larger than the one before it
_IMAGE_CLASSES = 10


def check(arguments: Namespace) -> None:
    """Fill in the defaults of the device; reject what does not fit."""
    for name, (_, cpu, cuda) in SIZES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, cpu if arguments.device == "cpu" else cuda)
    if arguments.hidden % arguments.heads:
        raise UserError(
            f"--hidden {arguments.hidden} must be a multiple of --heads "
            f"{arguments.heads}."
        )
    _check_steps(arguments)


def _check_steps(arguments: Namespace) -> None:
    """Reject a number of steps of which none is timed."""
    if arguments.steps <= training.WARM_UP:
        raise UserError(
            f"--steps {arguments.steps} must be at least {training.WARM_UP + 1}; the "
            f"first {training.WARM_UP} are not timed."
        )


def _endless(
    draw: Callable[[Namespace, torch.Generator], dict[str, Tensor]],
) -> training.DrawBatches:
    """Return what yields the micro-batches of each step, given what draws one."""

    @functools.wraps(draw)
    def batches(work: Namespace, seed: int) -> Iterator[list[dict[str, Tensor]]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            drawn = [draw(work, generator) for _ in range(work.accumulate)]
            yield [{k: v.to(work.device) for k, v in one.items()} for one in drawn]

    return batches


def make_bert(work: Namespace) -> nn.Module:
    """Build a BERT classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {
        "vocab_size": CLASSES * GROUP,
        "num_labels": CLASSES,
        "num_hidden_layers": work.layers,
        "hidden_size": work.hidden,
        "intermediate_size": 4 * work.hidden,
        "num_attention_heads": work.heads,
        "max_position_embeddings": work.length,
        "hidden_dropout_prob": work.dropout,
        "attention_probs_dropout_prob": work.dropout,
        "attn_implementation": work.attention,
    }
    return BertForSequenceClassification(BertConfig(**settings))


@_endless
def draw_texts(work: Namespace, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw texts; the label is the group of tokens that is overrepresented."""
    shape = work.batch, work.length
    labels = torch.randint(CLASSES, (work.batch,), generator=draw)
    any_group = torch.randint(CLASSES * GROUP, shape, generator=draw)
    offsets = torch.randint(GROUP, shape, generator=draw)
    own_group = offsets + labels[:, None] * GROUP
    favoured = torch.rand(shape, generator=draw) < _FAVOURED
    return {"input_ids": torch.where(favoured, own_group, any_group), "labels": labels}


def make_gpt(work: Namespace) -> nn.Module:
    """Build a GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    settings: dict[str, Any] = dict.fromkeys(dropout, work.dropout)
    settings |= {
        "vocab_size": work.vocabulary,
        "n_embd": work.hidden,
        "n_layer": work.layers,
        "n_head": work.heads,
        "n_positions": work.length,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
        "attn_implementation": work.attention,
    }
    return GPT2LMHeadModel(GPT2Config(**settings))


@_endless
def draw_walks(work: Namespace, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw random walks over the vocabulary, whose next token can be predicted."""
    first = torch.randint(work.vocabulary, (work.batch, 1), generator=draw)
    steps = torch.randint(1, _STEP + 1, (work.batch, work.length), generator=draw)
    ids = (first + steps.cumsum(1)) % work.vocabulary
    return {"input_ids": ids, "labels": ids}


def make_resnet(work: Namespace) -> nn.Module:
    """Build a ResNet of four stages, each of twice the channels of the one before."""
    from transformers import ResNetConfig, ResNetForImageClassification

    settings: dict[str, Any] = {
        "embedding_size": work.channels,
        "hidden_sizes": [work.channels * 2**stage for stage in range(4)],
        "depths": [work.layers] * 4,
        "layer_type": "basic",
        "num_labels": _IMAGE_CLASSES,
    }
    model: Any = ResNetForImageClassification(ResNetConfig(**settings))
    converted: nn.Module = model.to(memory_format=_memory_format(work))
    return converted


def _memory_format(work: Namespace) -> torch.memory_format:
    is_last = work.format == "channels-last"
    return torch.channels_last if is_last else torch.contiguous_format


@_endless
def draw_images(work: Namespace, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw images of noise whose mean brightness is shifted by their class."""
    labels = torch.randint(_IMAGE_CLASSES, (work.batch,), generator=draw)
    images = torch.randn(work.batch, 3, work.pixels, work.pixels, generator=draw)
    images += (labels / _IMAGE_CLASSES - 0.5)[:, None, None, None]
    images = images.contiguous(memory_format=_memory_format(work))
    return {"pixel_values": images, "labels": labels}


def make_optimizer(
    parameters: Iterable[Tensor], work: Namespace
) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, work.lr)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes."""
    loss: Tensor = model(**batch).loss
    return loss


# Workloads


def _run_flags(steps: int) -> commands.Flags:
    return {
        "accumulate": commands.flag(commands.ACCUMULATE, 1),
        "steps": commands.flag(
            "steps of each run; the first three are not timed", steps
        ),
        "seeds": commands.flag("runs of each candidate", 3),
    }


_TRANSFORMER_FLAGS: commands.Flags = {
    **{
        name: commands.flag(
            f"{text} (default {cpu:g}; {cuda:g} on cuda)",
            read=commands.share if name == "lr" else commands.positive_int,
        )
        for name, (text, cpu, cuda) in SIZES.items()
    },
    "length": commands.flag("tokens of a text", 128),
    **_run_flags(150),
    "dropout": commands.flag("dropout everywhere", 0.1, commands.share, "P"),
    "attention": commands.choice(
        "eager: softmax is an operation of its own", "eager", "sdpa"
    ),
}
_KINDS = loops.pick(
    *("fp32", "torch.amp", "O1 torch", "O1 lean", "O2", "O2-split", "O3"),
)
_WITH_DROPOUT = _KINDS | loops.pick("torch.amp-fast", "O2-fast")
_MODEL: Any = {"make_optimizer": make_optimizer, "loss_of": loss_of}
_ENCODER = _MODEL | {"make_model": make_bert, "draw_batches": draw_texts}
BENCHES = {
    "encoder": training.Training(
        title="Training an encoder",
        description="Train a BERT encoder from scratch on synthetic texts, several "
        "seeds of each candidate; print time, memory and losses.",
        flags=_TRANSFORMER_FLAGS,
        kinds=_WITH_DROPOUT,
        check=check,
        **_ENCODER,
    ),
    "decoder": training.Training(
        title="Training a decoder",
        description="Train a small GPT from scratch on synthetic texts, several seeds "
        "of each candidate; print time, memory and losses. Its largest matmul is the "
        "one over the vocabulary.",
        flags=_TRANSFORMER_FLAGS
        | {"vocabulary": commands.flag("tokens of the vocabulary", 4096)},
        kinds=_WITH_DROPOUT,
        check=check,
        make_model=make_gpt,
        draw_batches=draw_walks,
        **_MODEL,
    ),
    "conv": training.Training(
        title="Training a convolutional network",
        description="Train a small ResNet from scratch on synthetic images, several "
        "seeds of each candidate; print time, memory and losses.",
        flags={
            "layers": commands.flag("blocks of each of the four stages", 2),
            "channels": commands.flag("channels of the first stage", 32),
            "pixels": commands.flag("rows and columns of an image", 96),
            "batch": commands.flag("images of a micro-batch", 16),
            **_run_flags(40),
            "lr": commands.flag("learning rate of AdamW", 1e-3, commands.share, "X"),
            "format": commands.choice(
                "memory format", "channels-first", "channels-last"
            ),
        },
        kinds=_KINDS,
        check=_check_steps,
        make_model=make_resnet,
        draw_batches=draw_images,
        **_MODEL,
    ),
}

"""`halfstep bench decoder`: training steps of a small GPT.

Next-token prediction on random walks over the vocabulary: a token follows from the last
one up to a small step, so that the loss falls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import commands, encoder
from halfstep.bench.training import training

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

_STEP = 4  # a token is at most so much larger than the one before it


def make_model(work: Namespace) -> nn.Module:
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


def draw_batches(work: Namespace, seed: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each step, without end."""
    draw = torch.Generator().manual_seed(seed)
    shape = work.batch, work.length

    def batch() -> dict[str, Tensor]:
        first = torch.randint(work.vocabulary, (work.batch, 1), generator=draw)
        steps = torch.randint(1, _STEP + 1, shape, generator=draw)
        ids = ((first + steps.cumsum(1)) % work.vocabulary).to(work.device)
        return {"input_ids": ids, "labels": ids}

    while True:
        yield [batch() for _ in range(work.accumulate)]


BENCHES = {
    "decoder": training(
        title="Training a decoder",
        description="Train a small GPT from scratch on synthetic texts, several seeds "
        "of each candidate; print time, memory and losses. Its largest matmul is the "
        "one over the vocabulary.",
        flags=encoder.transformer_flags("tokens of a text")
        | {"vocabulary": commands.flag("tokens of the vocabulary", 4096)},
        kinds=encoder.WITH_DROPOUT,
        check=encoder.check,
        make_model=make_model,
        draw_batches=draw_batches,
        make_optimizer=encoder.make_optimizer,
        loss_of=encoder.loss_of,
    ),
}

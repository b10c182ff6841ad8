"""A check before training on models of transformers and others, healthy and not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.train import parallelize

if TYPE_CHECKING:
    from halfstep.diagnostics.preflight import CheckReport

transformers = pytest.importorskip("transformers")


WORDS = 200
IDS = torch.randint(0, WORDS, (8, 12), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[:4, 8:] = 0


def bert() -> nn.Module:
    """Return an encoder with a head."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt() -> nn.Module:
    """Return a checkpointed decoder, whose head is its embedding."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    parallelize.checkpoint_activations(model)
    return model  # type: ignore[no-any-return]


def t5() -> nn.Module:
    """Return an encoder and a decoder."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """Reads texts from left to right."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.body = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.logits = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        """Compute."""
        return self.logits(self.body(self.words(input_ids))[0])  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's own loss, or that of its logits."""
    out = model(**batch)
    if isinstance(out, Tensor):
        return functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
    return out.loss  # type: ignore[no-any-return]


def checked(make: Any, level: str, dtype: str) -> CheckReport:
    """Check a model."""
    torch.manual_seed(0)
    model = make().train()
    labels = IDS[:, 0] % 2 if make is bert else IDS
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    return hs.check(model, loss, given, level=level, dtype=dtype, steps=0)


@pytest.mark.parametrize("make", [bert, gpt, t5, Lstm])
@pytest.mark.parametrize(("level", "dtype"), [("O2", "fp16"), ("O1", "bf16")])
def test_healthy(make: Any, level: str, dtype: str) -> None:
    """Law: no false alarm: masks, tied weights and checkpoints are no faults."""
    report = checked(make, level, dtype)
    assert report.verdict == "good"
    assert not report.findings

"""A check before training on models of transformers and others, healthy and not."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.diagnostics.test_replay_libraries import hub
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.diagnostics.preflight import CheckReport
from halfstep.train import parallelize

WORDS = 20
IDS = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[:4, 6:] = 0


def gpt() -> nn.Module:
    model = hub("gpt2")
    parallelize.checkpoint_activations(model)
    return model


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.body = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.logits = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.logits(self.body(self.words(input_ids))[0])


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's own loss, or that of its logits."""
    out = model(**batch)
    if isinstance(out, Tensor):
        return functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
    return out.loss


def checked(make: Any, level: str, dtype: str) -> CheckReport:
    torch.manual_seed(0)
    model = make().train()
    is_bert = hasattr(model, "bert")
    labels = IDS[:, 0] % 2 if is_bert else IDS
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    return hs.check(model, loss, given, level=level, dtype=dtype, steps=0)


@pytest.mark.parametrize(
    ("make", "level", "dtype"),
    [
        (partial(hub, "bert"), "O2", "fp16"),
        (gpt, "O1", "bf16"),
        (partial(hub, "t5"), "O1", "bf16"),
        (Lstm, "O2", "fp16"),
    ],
)
def test_healthy(make: Any, level: str, dtype: str) -> None:
    """Law: no false alarm: masks, tied weights and checkpoints are no faults."""
    report = checked(make, level, dtype)
    assert report.verdict == "good"
    assert not report.findings

"""Quality against hand-made counts, and predictions that count each example once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.distributed import World
from halfstep.train.batches import Encoded
from halfstep.train.data import Example
from halfstep.train.evaluate import EVAL_BATCH, baseline_accuracy, judge, predict

PAD = 0
CPU = torch.device("cpu")
LABELS = ("a", "b", "c")


class Reader(nn.Module):
    """A model whose logits are the first token of each text, and minus it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2)
        self.seen: list[list[int]] = []
        self.widths: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Note what was asked, and answer."""
        assert not self.training
        assert not torch.is_grad_enabled()
        assert torch.equal(attention_mask.bool(), input_ids != PAD)
        first = input_ids[:, 0]
        self.seen.append(first.tolist())
        self.widths.append(input_ids.shape[1])
        return SimpleNamespace(logits=torch.stack([first, -first], -1).bfloat16())


def session_of(model: nn.Module) -> Any:
    """Return what `predict` needs of a session."""
    return SimpleNamespace(model=model, autocast=nullcontext)


def numbered(count: int) -> Encoded:
    """Return texts of 1 to 9 tokens; the first token is their number, from 1."""
    ids = [[number] * (1 + number % 9) for number in range(1, count + 1)]
    return Encoded.build(ids, [number % 2 for number in range(1, count + 1)])


def with_answers(*guesses: int) -> torch.Tensor:
    """Return logits of three classes whose largest is the guess."""
    return nn.functional.one_hot(torch.tensor(guesses), 3).float()


def test_by_hand() -> None:
    """Law: precision, recall, F1 and their mean are those of the textbook."""
    truth = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    quality = judge(with_answers(0, 0, 0, 1, 1, 0, 1), truth, LABELS)
    # a: 3 of 4 guesses right, 3 of 4 found. b: 1 of 3, 1 of 2. c: never guessed.
    expected = [
        ("a", 3 / 4, 3 / 4, 3 / 4, 4),
        ("b", 1 / 3, 1 / 2, 2 / 5, 2),
        ("c", 0.0, 0.0, 0.0, 1),
    ]
    for row, right in zip(quality.per_class, expected, strict=True):
        assert row == (right[0], *map(pytest.approx, right[1:4]), right[4])
    assert quality.accuracy == pytest.approx(4 / 7)
    assert quality.macro_f1 == pytest.approx((3 / 4 + 2 / 5) / 3)


def test_loss_by_hand() -> None:
    """Law: the loss is the mean of minus the log of the true class's probability."""
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
    quality = judge(shares.log(), torch.tensor([0, 2]), LABELS)
    assert quality.loss == pytest.approx((math.log(2) + math.log(8)) / 2)


def test_a_class_without_examples() -> None:
    """Law: a class that the split lacks counts as zero, without a warning."""
    quality = judge(with_answers(0, 1), torch.tensor([0, 1]), LABELS)
    assert quality.per_class[2] == ("c", 0.0, 0.0, 0.0, 0)
    assert quality.macro_f1 == pytest.approx(2 / 3)
    assert quality.accuracy == 1.0


def test_table() -> None:
    """Law: the table ends with the mean of each column and the sum of examples."""
    quality = judge(with_answers(0, 1, 0), torch.tensor([0, 1, 1]), LABELS)
    table = quality.table("Quality on dev")
    assert table.title == "Quality on dev"
    assert table.columns == ("label", "precision", "recall", "F1", "examples")
    assert table.rows[:3] == quality.per_class
    name, precision, recall, f1, examples = table.rows[3]
    assert (name, examples) == ("mean of classes", 3)
    assert precision == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert recall == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert f1 == pytest.approx(quality.macro_f1)
    assert f"accuracy {2 / 3:.4f}" in table.notes[0]


@pytest.mark.parametrize("count", [1, 2, EVAL_BATCH, EVAL_BATCH + 1, 3 * EVAL_BATCH])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_example_once(count: int, size: int) -> None:
    """Law: whatever the number of processes, each example is computed once.

    Without a process group nothing is summed, so each process shows its own places.
    """
    encoded = numbered(count)
    summed = torch.zeros(count, 2)
    seen: list[int] = []
    for rank in range(size):
        model = Reader().train()
        logits, truth = predict(session_of(model), encoded, World(rank, size, CPU), PAD)
        assert model.training
        assert logits.dtype == torch.float32
        assert torch.equal(truth, encoded.labels)
        summed += logits
        seen += [number for batch in model.seen for number in batch]
    assert sorted(seen) == list(range(1, count + 1))
    # bf16 holds whole numbers up to 256, and rounds larger ones.
    first = torch.arange(1, count + 1).bfloat16().float()
    assert torch.equal(summed, torch.stack([first, -first], -1))


def test_longest_first() -> None:
    """Law: batches come longest first, so that memory peaks at the start."""
    model = Reader()
    predict(session_of(model), numbered(3 * EVAL_BATCH), World(0, 1, CPU), PAD)
    assert model.widths == sorted(model.widths, reverse=True)
    assert len(model.widths) == 3


def test_the_bare_model_is_asked() -> None:
    """Law: a wrapper for data parallelism, which would wait for others, is left out."""
    wrapper = nn.Module()
    wrapper.module = Reader()
    logits, _ = predict(session_of(wrapper), numbered(2), World(0, 1, CPU), PAD)
    assert logits[:, 0].tolist() == [1, 2]


def test_baseline() -> None:
    """Law: the baseline learns what characters tell, and nothing else."""
    train = [Example(text, label) for text, label in (("xxy", 0), ("zzw", 1))] * 5
    test = [Example("yx", 0), Example("wz", 1)]
    assert baseline_accuracy(train, test) == 1.0
    flipped = [Example(example.text, 1 - example.label) for example in test]
    assert baseline_accuracy(train, flipped) == 0.0
    # 1-grams alone cannot tell these; the order can.
    ordered = [Example("abc", 0), Example("cba", 1)] * 5
    assert baseline_accuracy(ordered, ordered[:2]) == 1.0

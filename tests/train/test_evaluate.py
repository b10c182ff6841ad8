"""What a model says of a split: each example once, as one at a time."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.distributed.process_group import World
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts, TokenColumn
from halfstep.train.objective import (
    BinaryCrossEntropy,
    CrossEntropy,
    Objective,
    SquaredError,
)
from halfstep.train.tasks import EVAL_BATCH, TASKS, collect_outputs

PAD = 0
OUTPUTS = 3
WORDS = 11
MEAN, SCALE = 3.0, 2.0
OBJECTIVES: dict[str, Objective] = {
    "class": CrossEntropy(torch.tensor([1.0, 2.0, 3.0]), 0.1),
    "multi_label": BinaryCrossEntropy(torch.tensor([1.0, 2.0, 3.0])),
    "regression": SquaredError(MEAN, SCALE),
    "ner": CrossEntropy(),
}
"""Weights and smoothing count in training only."""
EPS = torch.finfo(torch.float32).eps


class Reader(nn.Module):
    """A model whose logits hang on the tokens of a text, and on no padding."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        outputs = 1 if problem == "regression" else OUTPUTS
        self.config = SimpleNamespace(num_labels=outputs)
        self.table = nn.Embedding(WORDS, outputs)
        self.each = problem == "ner"
        self.widths: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        assert torch.equal(attention_mask.bool(), input_ids != PAD)
        self.widths.append(input_ids.shape[1])
        logits = self.table(input_ids)
        if not self.each:
            logits = (logits * attention_mask[..., None]).sum(1)
        return SimpleNamespace(logits=logits)


def ask(
    model: nn.Module, problem: str, encoded: EncodedTexts
) -> tuple[torch.Tensor, float]:
    """Return what is noted of each example, and the mean loss."""
    session: Any = SimpleNamespace(model=model, autocast=nullcontext)
    alone = World(0, 1, torch.device("cpu"))
    objective = OBJECTIVES[problem]
    steps = SimpleNamespace(pad_id=PAD, multiple=4, world=alone, objective=objective)
    job: Any = SimpleNamespace(
        corpus=SimpleNamespace(labels=(), dev=None),
        steps=steps,
        encoded={"dev": encoded},
        plan=SimpleNamespace(config=SimpleNamespace(problem=problem)),
    )
    found = collect_outputs(session, job, "dev")
    assert found.encoded is encoded
    return found.outputs, found.loss


def texts_of(count: int) -> list[list[int]]:
    drawn = torch.randint(1, WORDS, (count, 9)).tolist()
    return [ids[: 1 + number % 9] for number, ids in enumerate(drawn)]


def labelled(problem: str, count: int) -> EncodedTexts:
    """Return texts with a class, a set of labels or a number each."""
    numbers = np.arange(count)
    labels = {
        "class": numbers % OUTPUTS,
        "multi_label": (numbers[:, None] % [2, 3, 4] == 0).astype(np.float32),
        "regression": (numbers % 7).astype(np.float32),
    }[problem]
    return replace(EncodedTexts.build(texts_of(count)), labels=labels)


def tags(count: int) -> EncodedTexts:
    """Return texts whose tokens have a tag each, but for the first, and its target."""
    made = EncodedTexts.build(texts_of(count))
    ids, firsts = made.columns["input_ids"]
    starts = np.arange(len(ids))
    ends, stored = starts + 1, starts % OUTPUTS
    ends[firsts], stored[firsts] = starts[firsts], IGNORED
    more = {"char_starts": starts, "char_ends": ends, "tags": stored}
    columns = {name: TokenColumn(each, firsts) for name, each in more.items()}
    return replace(
        made,
        columns={**made.columns, **columns},
        per_text={"num_targets": made.lengths - 1},
        meaning=np.array([0, 1, 2, IGNORED]),
    )


def one_at_a_time(model: Any, problem: str, encoded: EncodedTexts) -> tuple[Any, float]:
    """Return what is noted when each text is alone, without padding, and the loss."""
    made = TASKS[problem].empty_outputs(encoded, model.config.num_labels)
    losses = []
    model.eval()
    for number in range(len(encoded)):
        index = np.array([number])
        inputs = encoded.collate(index, PAD)
        targets = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs).logits
        TASKS[problem].write_outputs(made, encoded, index, logits)
        logits = logits.double()
        if problem == "multi_label":
            oracle = nn.functional.binary_cross_entropy_with_logits
            loss = oracle(logits, targets.double())[None]
        elif problem == "regression":
            loss = (logits.flatten() - (targets - MEAN) / SCALE) ** 2
        else:
            kept = targets.flatten() != IGNORED
            flat = logits.reshape(-1, OUTPUTS)[kept]
            targets = targets.flatten()[kept]
            loss = nn.functional.cross_entropy(flat, targets, reduction="none")
        losses.append(loss)
    return made, float(torch.cat(losses).mean())


@pytest.mark.parametrize("problem", OBJECTIVES)
def test_as_one_at_a_time(problem: str) -> None:
    """Law: in batches the same is noted as of texts alone, and the mean is right.

    Batches come longest first, padded to the multiple that is asked for. A token of no
    character, as each first one, has no tag.
    """
    count = 2 * EVAL_BATCH + 5
    encoded = tags(count) if problem == "ner" else labelled(problem, count)
    model = Reader(problem).train()
    found, loss = ask(model, problem, encoded)
    assert model.training
    assert model.widths == sorted(model.widths, reverse=True)
    assert len(model.widths) == 3
    assert {width % 4 for width in model.widths} == {0}
    right, right_loss = one_at_a_time(model, problem, encoded)
    if problem != "ner":
        # Sums of at most nine numbers, padding's zeros between them.
        torch.testing.assert_close(found, right, rtol=9 * EPS, atol=36 * EPS)
    else:
        assert torch.equal(found, right)
        assert found.any()
        assert not found[encoded.begins[:-1]].any()
    assert loss == pytest.approx(right_loss, rel=EVAL_BATCH * 9 * EPS)


def test_no_targets() -> None:
    """Law: texts that have no token to tag have no loss, and no nan."""
    _, loss = ask(Reader("ner"), "ner", tags(1))
    assert loss == 0.0

"""What a model says of a split: each example once, as one at a time."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.distributed.process_group import World
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.tasks import EVAL_BATCH, TASKS, collect_outputs

PAD = 0
OUTPUTS = 3
WORDS = 11
EPS = torch.finfo(torch.float32).eps


class Reader(nn.Module):
    """A model whose logits hang on the tokens of a text, and on no padding."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=OUTPUTS)
        self.table = nn.Embedding(WORDS, OUTPUTS)
        self.each = task == "ner"
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


def ask(model: nn.Module, task: str, encoded: EncodedTexts) -> Any:
    """Return what is noted of each example, and the mean loss."""
    session: Any = SimpleNamespace(model=model, autocast=nullcontext)
    alone = World(0, 1, torch.device("cpu"))
    steps = SimpleNamespace(pad_id=PAD, multiple=4, world=alone)
    job: Any = SimpleNamespace(corpus=SimpleNamespace(task=task), steps=steps)
    return collect_outputs(session, job, encoded)


def texts_of(count: int) -> list[list[int]]:
    drawn = torch.randint(1, WORDS, (count, 9)).tolist()
    return [ids[: 1 + number % 9] for number, ids in enumerate(drawn)]


def classes(count: int) -> EncodedTexts:
    return EncodedTexts.build(texts_of(count), [n % OUTPUTS for n in range(count)])


def tags(count: int) -> EncodedTexts:
    """Return texts whose tokens have a tag each, but for the first, and its target."""
    made = EncodedTexts.build(texts_of(count))
    firsts = made.starts[:-1]
    numbers = np.arange(len(made.ids))
    offsets = numbers.astype(np.int32)[:, None] + np.array([0, 1], np.int32)
    offsets[firsts] = 0
    stored = (numbers % OUTPUTS).astype(np.int16)
    stored[firsts] = IGNORED
    return EncodedTexts(
        made.ids,
        made.starts,
        made.rows,
        tags=stored,
        offsets=offsets,
        stored_counts=(made.lengths - 1).astype(np.int32),
        meaning=np.array([0, 1, 2, IGNORED]),
    )


def one_at_a_time(model: Any, task: str, encoded: EncodedTexts) -> tuple[Any, float]:
    """Return what is noted when each text is alone, without padding, and the loss."""
    made = TASKS[task].empty_outputs(encoded, OUTPUTS)
    losses = []
    model.eval()
    for number in range(len(encoded)):
        index = np.array([number])
        inputs = encoded.collate(index, PAD)
        targets = inputs.pop("labels").flatten()
        with torch.no_grad():
            logits = model(**inputs).logits
        TASKS[task].write_outputs(made, encoded, index, logits)
        kept = targets != IGNORED
        flat = logits.reshape(-1, OUTPUTS).double()[kept]
        loss = nn.functional.cross_entropy(flat, targets[kept], reduction="none")
        losses.append(loss)
    return made, float(torch.cat(losses).mean())


@pytest.mark.parametrize("task", ["classify", "ner"])
def test_as_one_at_a_time(task: str) -> None:
    """Law: in batches the same is noted as of texts alone, and the mean is right.

    Batches come longest first, padded to the multiple that is asked for. A token of no
    character, as each first one, has no tag.
    """
    count = 2 * EVAL_BATCH + 5
    encoded = classes(count) if task == "classify" else tags(count)
    model = Reader(task).train()
    found, loss = ask(model, task, encoded)
    assert model.training
    assert model.widths == sorted(model.widths, reverse=True)
    assert len(model.widths) == 3
    assert {width % 4 for width in model.widths} == {0}
    right, right_loss = one_at_a_time(model, task, encoded)
    if task == "classify":
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

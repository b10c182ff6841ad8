"""What each step reads: all examples, shared out, the same however it is prepared."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import same
from torch import Tensor
from torch.utils.data import get_worker_info

from halfstep.distributed.process_group import World
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.objective import CrossEntropy
from halfstep.train.step_dataset import (
    Order,
    StepBatch,
    StepDataset,
    TokenMasking,
    iterate_steps,
    padding_fraction,
)

PLAIN = CrossEntropy()
MASK = 1


def example(index: int, length: int) -> list[int]:
    return [100 + index] * length


def held(count: int) -> EncodedTexts:
    draw = random.Random(count)  # noqa: S311 -- lengths are no secret
    lists = [example(index, draw.randint(1, 9)) for index in range(count)]
    return EncodedTexts.build(lists, [index % 2 for index in range(count)])


def steps(
    encoded: EncodedTexts,
    order: Order,
    rank: int = 0,
    size: int = 1,
    *,
    objective: CrossEntropy = PLAIN,
    hiding: TokenMasking | None = None,
) -> StepDataset:
    world = World(rank, size, torch.device("cpu"))
    told = {"pad_id": 0, "multiple": 1}
    return StepDataset(encoded, order, objective, world, **told, masking=hiding)


def indices(part: dict[str, Tensor]) -> list[int]:
    ids, mask = part["input_ids"], part["attention_mask"]
    found = [int(index) for index in ids[:, 0] - 100]
    for row, shown, index in zip(ids, mask, found, strict=True):
        assert row[shown == 1].tolist() == example(index, int(shown.sum()))
        assert not row[shown == 0].any()
    assert part["labels"].tolist() == [index % 2 for index in found]
    return found


@settings(max_examples=40)
@given(*(st.integers(*ends) for ends in ((1, 50), (1, 20), (1, 4), (1, 3), (0, 99))))
def test_all_parts_make_up_each_epoch(
    count: int, batch_size: int, accumulate: int, size: int, seed: int
) -> None:
    """Law: each example counts once an epoch; the ranks' parts make up the batch.

    Where texts run out, a stand-in keeps the shape of the step and does not count.
    """
    encoded = held(count)
    order = Order(batch_size, 2, accumulate, seed)
    ranks = [steps(encoded, order, rank, size) for rank in range(size)]
    full, rest = divmod(count, batch_size)
    sizes = sorted([rest] * (rest > 0) + [batch_size] * full)
    for at in range(2):
        batches = []
        for number in range(at * len(sizes) + 1, (at + 1) * len(sizes) + 1):
            works = [rank[number] for rank in ranks]
            batch = [index for work in works for index in own(work)]
            for work in works:
                assert (work.number, work.epoch) == (number, at)
                assert (work.size, work.weight) == (len(batch), float(len(batch)))
                assert len(work.parts) == len(work.is_real) == accumulate
                tokens = sum(int(encoded.lengths[index]) for index in own(work))
                places = sum(part["input_ids"].numel() for part in work.parts)
                assert (work.tokens, work.padded_tokens) == (tokens, places)
                pairs = zip(work.parts, work.is_real, strict=True)
                spare = [indices(part) for part, real in pairs if not real]
                assert all(len(one) == 1 and one[0] in batch for one in spare)
            batches.append(batch)
        assert sorted(map(len, batches)) == sizes
        assert sorted(index for batch in batches for index in batch) == [*range(count)]


def own(work: StepBatch) -> list[int]:
    pairs = zip(work.parts, work.is_real, strict=True)
    return [index for part, real in pairs if real for index in indices(part)]


def test_the_weight_is_that_of_the_whole_batch() -> None:
    """Law: every process divides by the weights of all targets, its own or not."""
    objective = CrossEntropy(torch.tensor([0.5, 3.0]))
    encoded, order = held(11), Order(4, 1, 2, 0)
    ranks = [steps(encoded, order, rank, 3, objective=objective) for rank in range(3)]
    for number in range(1, ranks[0].per_epoch + 1):
        works = [rank[number] for rank in ranks]
        every = [index for work in works for index in own(work)]
        expected = sum((0.5, 3.0)[index % 2] for index in every)
        assert [work.weight for work in works] == [expected] * 3


HIDING = TokenMasking(0.5, MASK, torch.tensor([0, 100]))


def test_workers_and_resuming_change_nothing() -> None:
    """Law: the same work with 0 or 2 workers, from the start or from the middle."""
    order = Order(4, 3, 2, 7)
    made = steps(held(18), order, hiding=HIDING)
    last = 3 * made.per_epoch
    here = list(iterate_steps(made, 1, last, workers=0, pin=False))
    assert [work.number for work in here] == list(range(1, last + 1))
    assert [work.epoch for work in here] == [0] * 5 + [1] * 5 + [2] * 5
    assert same(list(iterate_steps(made, 1, last, workers=2, pin=False)), here)
    for workers in (0, 2):
        fresh = steps(held(18), order, hiding=HIDING)
        assert same(
            list(iterate_steps(fresh, 8, last, workers=workers, pin=False)), here[7:]
        )
    assert list(iterate_steps(made, last + 1, last, workers=0, pin=False)) == []
    other = steps(held(18), Order(4, 3, 2, 8), hiding=HIDING)
    assert not same(list(iterate_steps(other, 1, last, workers=0, pin=False)), here)


def test_hiding() -> None:
    """Law: special tokens stay; of the others the share is hidden, within 5 sigma."""
    count = 40_000
    ids = torch.tensor([0, 100, 101, 102] * (count // 4))
    for share in (0.0, 0.3, 0.9):
        hiding = TokenMasking(share, MASK, torch.tensor([0, 100]))
        got = hiding.mask(ids, torch.Generator().manual_seed(0))
        changed = got != ids
        assert (got[changed] == MASK).all()
        assert not changed[ids <= 100].any()
        others = count / 2
        sigma = (others * share * (1 - share)) ** 0.5
        assert abs(int(changed.sum()) - others * share) <= 5 * sigma
    assert ids.tolist() == [0, 100, 101, 102] * (count // 4)


def test_padding_and_targets_are_never_hidden() -> None:
    """Law: hiding changes tokens of a step alone: no mask, no class, no padding.

    It draws other numbers than dropout, or texts would lose the same places twice.
    """
    encoded, order = held(18), Order(6, 1, 2, 0)
    bare, hidden = steps(encoded, order), steps(encoded, order, hiding=HIDING)
    changed = 0
    for number in range(1, bare.per_epoch + 1):
        one, other = bare[number], hidden[number]
        assert (one.tokens, one.padded_tokens) == (other.tokens, other.padded_tokens)
        for plain, masked in zip(one.parts, other.parts, strict=True):
            assert torch.equal(plain["labels"], masked["labels"])
            assert torch.equal(plain["attention_mask"], masked["attention_mask"])
            differs = plain["input_ids"] != masked["input_ids"]
            assert (masked["input_ids"][differs] == MASK).all()
            assert not differs[plain["attention_mask"] == 0].any()
            changed += int(differs.sum())
    assert changed
    of_dropout = torch.Generator().manual_seed(hidden.seed_of(1))
    drawn = HIDING.mask(bare[1].parts[0]["input_ids"], of_dropout)
    assert not drawn.equal(hidden[1].parts[0]["input_ids"])


def test_no_two_steps_share_a_seed() -> None:
    """Law: steps, processes and seeds of a run's neighbours all draw apart."""
    encoded = held(10)
    found = [
        steps(encoded, Order(2, 3, 1, seed), rank, 2).seed_of(number)
        for seed in range(3)
        for rank in range(2)
        for number in range(1, 16)
    ]
    assert len({*found}) == len(found)


class Signalled(StepDataset):
    """Steps whose preparation is struck by signals in the middle."""

    def __getitem__(self, number: int) -> StepBatch:
        assert get_worker_info() is not None
        for name in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), name)
        return super().__getitem__(number)


def test_workers_ignore_signals() -> None:
    """Law: a signal to the whole group leaves the steps under way whole."""
    order, world = Order(4, 1, 1, 0), World(0, 1, torch.device("cpu"))
    told = {"pad_id": 0, "multiple": 1, "masking": None}
    struck = Signalled(held(18), order, PLAIN, world, **told)
    handlers = [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)]
    got = list(iterate_steps(struck, 1, struck.per_epoch, workers=1, pin=False))
    calm = steps(held(18), order)
    assert same(got, list(iterate_steps(calm, 1, calm.per_epoch, workers=0, pin=False)))
    # The process that trains keeps its own.
    names = (signal.SIGTERM, signal.SIGINT)
    assert [signal.getsignal(name) for name in names] == handlers


def test_the_share_of_padding() -> None:
    """Law: it is what the last epoch's batches, made as tensors, really hold."""
    for batch_size in (1, 4, 100):
        encoded, order = held(30), Order(batch_size, 9, 1, 3)
        made = steps(encoded, order)
        last = range(8 * made.per_epoch + 1, 9 * made.per_epoch + 1)
        masks = [made[n].parts[0]["attention_mask"] for n in last]
        places = sum(mask.numel() for mask in masks)
        padding = sum(int((mask == 0).sum()) for mask in masks)
        # One division and one subtraction from 1, each rounded once.
        close = pytest.approx(padding / places, rel=0, abs=2 * np.finfo(float).eps)
        assert padding_fraction(encoded.lengths, order) == close

"""The plan: defaults by data and model, what was told, and the schedule."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_corpora import classified

from halfstep.distributed.process_group import World
from halfstep.train.config import TrainConfig
from halfstep.train.data.corpus import Corpus, Split
from halfstep.train.plan import Plan, lr_factor, resolve_config, resolve_plan

CPU, GPU = World(0, 1, torch.device("cpu")), World(0, 1, torch.device("cuda", 0))


@pytest.fixture(scope="module")
def split() -> Split:
    return classified([("x", "a"), ("y", "b")], "ab")


def plan_of(
    split: Split, count: int, *, scratch: bool, world: World = CPU, **given: Any
) -> Plan:
    train = dataclasses.replace(split, rows=np.zeros(count, np.int64))
    corpus = Corpus("c", "classify", ("a", "b"), train, split, split, "print", 0)
    return resolve_plan(TrainConfig(**given), corpus, world, scratch=scratch)


@given(st.integers(1, 500), st.floats(0, 1, exclude_max=True), st.integers(0, 99))
def test_rate_properties(total: int, warmup: float, more: int) -> None:
    """Law: each step has a rate above 0; one peak of 1; straight lines beside it.

    Steps beyond the plan, if any come, stand still.
    """
    rates = [lr_factor(applied, total, warmup) for applied in range(total + 1)]
    assert all(0 < rate <= 1 for rate in rates[:-1])
    assert max(rates) == 1
    assert rates[-1] == lr_factor(total + more, total, warmup) == 0
    peak = rates.index(1)
    assert peak <= max(0, math.ceil(warmup * total) - 1)
    steps = [after - before for before, after in pairwise(rates)]
    rise, fall = steps[:peak], steps[peak + 1 :]
    for part, sign in ((rise, 1), (fall, -1)):
        assert all(step * sign > 0 for step in part)
        assert part == pytest.approx(part[:1] * len(part))


@pytest.mark.parametrize(
    ("count", "scratch", "epochs", "rate", "mask"),
    [
        (4999, True, 10, 5e-4, 0.3),
        (5000, True, 3, 5e-4, 0.3),
        (10, False, 3, 3e-5, 0.0),
    ],
)
def test_defaults(
    split: Split, count: int, scratch: bool, epochs: int, rate: float, mask: float
) -> None:
    """Law: defaults are those that the help states, by texts and by model."""
    plan = plan_of(split, count, scratch=scratch)
    steps = math.ceil(count / 32)
    assert (plan.order.epochs, plan.lr, plan.mask_tokens) == (epochs, rate, mask)
    assert (plan.eval_every, plan.total_steps) == (steps, steps * epochs)
    assert (plan.dropout, plan.device) == (0.1 if scratch else None, "cpu")
    assert (plan.order.batch_size, plan.order.accumulate, plan.order.seed) == (32, 1, 0)


def test_as_told(split: Split) -> None:
    """Law: what is set is taken, zeros included."""
    told: dict[str, Any] = {"epochs": 2, "lr": 0.1, "dropout": 0.0, "mask_tokens": 0.0}
    told |= {"eval_every": 7, "batch_size": 3, "accumulate": 2, "seed": 5, "keep": 1}
    told |= {"warmup": 0.0, "best_by": "loss", "patience": 6, "parallel": "fsdp2"}
    plan = plan_of(split, 10, scratch=True, **told)
    assert dataclasses.astuple(plan.order) == (3, 2, 2, 5)
    assert plan.total_steps == 2 * 4
    for name, value in told.items():
        place = next(o for o in (plan.order, plan, plan.config) if hasattr(o, name))
        assert getattr(place, name) == value, name


@pytest.mark.parametrize(
    ("told", "epochs", "total"),
    [
        ({"max_steps": 5}, 1, 5),
        ({"max_steps": 10}, 1, 10),
        ({"max_steps": 25}, 3, 25),
        ({"max_steps": 25, "epochs": 2}, 2, 20),
        ({"max_steps": 15, "epochs": 2}, 2, 15),
    ],
)
def test_most_steps(
    split: Split, told: dict[str, int], epochs: int, total: int
) -> None:
    """Law: with 10 steps an epoch, --max-steps repeats texts, --epochs limits it."""
    plan = plan_of(split, 20, scratch=True, batch_size=2, **told)
    assert (plan.order.epochs, plan.total_steps) == (epochs, total)
    assert plan.eval_every == 10


def test_every_default_is_filled_in(split: Split) -> None:
    """Law: settings that were resolved resolve to the same plan again."""
    given: dict[str, Any] = {"batch_size": 1, "label_smoothing": 0.1}
    plan = plan_of(split, 2, scratch=True, world=GPU, **given)
    full = resolve_config(plan, "O2", "bf16")
    assert (full.level, full.dtype, full.label_smoothing) == ("O2", "bf16", 0.1)
    assert (full.device, full.loss_scale, full.dropout) == ("cuda", "none", 0.1)
    again = plan_of(split, 2, scratch=False, **full.data_dict())
    assert dataclasses.replace(again, device="cuda", config=plan.config) == plan
    left = {name for name, value in full.data_dict().items() if value is None}
    # None has a meaning of its own for these: all, the data's own, none.
    assert left == {
        *("data", "text_column", "label_column", "labels", "limit", "freeze"),
        *("encoding", "delimiter", "label_separator"),
        *("max_steps", "class_weights", "patience", "compare_fp32"),
    }


def test_the_scale_is_filled_in(split: Split) -> None:
    """Law: the scale is what the help says of each format, or what was told."""
    auto = {"fp32": "none", "bf16": "none", "fp16": "dynamic"}
    for told, scales in (("auto", auto), ("1024", {"fp16": "1024"})):
        plan = plan_of(split, 2, scratch=True, loss_scale=told)
        for dtype, scale in scales.items():
            assert resolve_config(plan, "O2", dtype).loss_scale == scale


def test_a_models_own_dropout(split: Split) -> None:
    """Law: a fine-tuned model keeps its own rates, which no one number says."""
    for told in (None, 0.0, 0.3):
        plan = plan_of(split, 2, scratch=False, dropout=told)
        assert resolve_config(plan, "O0", "fp32").dropout == told

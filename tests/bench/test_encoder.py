"""`halfstep bench encoder`: its task, its measure of memory, and its tables."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.bench import encoder
from halfstep.bench.loops import Loop, PlainLoop, SessionLoop
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = encoder.Workload(
    "cpu",
    "bf16",
    layers=1,
    hidden=8,
    heads=2,
    length=16,
    batch=2,
    steps=5,
    seeds=2,
    dropout=0.1,
    lr=1e-3,
    attention="eager",
)


@pytest.fixture(autouse=True, scope="module")
def _measured() -> Iterator[None]:
    """Plant rates that warn of nothing; a small model gains nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
        patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
        yield
    torch.set_num_threads(threads)


def test_batches_are_the_seeds() -> None:
    """Law: a seed's batches are the same each time, and no other seed's."""
    first, again, other = (list(encoder.draw_batches(WORK, s)) for s in (0, 0, 1))
    assert len(first) == WORK.steps
    for one, same, another in zip(first, again, other, strict=True):
        assert one["input_ids"].shape == (2, 16)
        assert torch.equal(one["input_ids"], same["input_ids"])
        assert torch.equal(one["labels"], same["labels"])
        assert not torch.equal(one["input_ids"], another["input_ids"])


def test_counting_solves_the_task() -> None:
    """Law: the label is the group of tokens that a text holds most of, mostly."""
    work = replace(WORK, batch=500, length=128, steps=1)
    (batch,) = encoder.draw_batches(work, 0)
    groups = batch["input_ids"] // encoder._GROUP
    counts = nn.functional.one_hot(groups, encoder._CLASSES).sum(1)
    right = counts.argmax(-1) == batch["labels"]
    assert right.double().mean() > 0.95
    assert set(batch["labels"].tolist()) == set(range(encoder._CLASSES))


def test_contenders_begin_alike() -> None:
    """Law: all contenders of a seed begin with the same weights; seeds differ."""
    loops = [encoder.make_loop(name, WORK, 3) for name in encoder.CONTENDERS]
    other = encoder.make_loop("fp32", WORK, 4)
    first = list(loops[0].model.parameters())
    for loop in loops[1:]:
        pairs = zip(first, loop.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    pairs = zip(first, other.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_attention_is_as_asked() -> None:
    """Law: eager attention shows softmax, sdpa has none."""
    for attention in ("eager", "sdpa"):
        loop = encoder.make_loop("fp32", replace(WORK, attention=attention), 0)
        loss = loop.forward(next(encoder.draw_batches(WORK, 0)))
        seen, nodes = set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [below for below, _ in node.next_functions]
        softmax = any(node.name() == "SoftmaxBackward0" for node in seen)
        assert softmax is (attention == "eager")


def layers(dtype: torch.dtype | None, *, session: bool) -> Loop:
    """Return a loop over two linear layers with tanh between them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    if session:
        made = hs.prepare(model, optimizer, "O1", dtype="bf16", policy="torch")
        return SessionLoop(made, loss_of)
    return PlainLoop(model, optimizer, loss_of, "cpu", dtype)


@pytest.mark.parametrize(
    ("dtype", "session", "activations", "casts"),
    [
        (None, False, 4 * 8 * 4 + 4 * 16 * 4, 0),
        (torch.bfloat16, False, 4 * 8 * 2 + 4 * 16 * 2, 16 * 4 * 2),
        (torch.bfloat16, True, 4 * 8 * 2 + 4 * 16 * 2, 16 * 4 * 2),
    ],
)
def test_saved_for_backward(
    dtype: torch.dtype | None, *, session: bool, activations: int, casts: int
) -> None:
    """Law: each piece of memory counts once, weights not, their casts apart.

    Kept are the input (4 x 8) and tanh's output (4 x 16), which is also the second
    layer's input; and the second layer's weight (16 x 4), for the gradient of tanh's
    output. The input needs no gradient, and so not the first weight.
    """
    loop = layers(dtype, session=session)
    batch: Any = torch.randn(4, 8)
    assert encoder.saved_for_backward(loop, batch) == (activations, casts)


def test_what_comes_from_a_weight() -> None:
    """Law: casts and views of a leaf that learns come from a weight, nothing else."""
    weight = nn.Parameter(torch.randn(3, 4))
    low = weight.to(torch.bfloat16)
    assert encoder.comes_from_weight(low)
    assert encoder.comes_from_weight(low.t())
    assert encoder.comes_from_weight(weight.view(4, 3).to(torch.bfloat16))
    assert not encoder.comes_from_weight(low * 2)
    assert not encoder.comes_from_weight(
        nn.functional.embedding(torch.ones(1).long(), weight)
    )
    assert not encoder.comes_from_weight(torch.randn(3))


def test_every_contender_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the task is easy, each contender's loss falls well below chance's.

    Chance is log 4 = 1.386; an easy text draws half of its tokens from one group.
    """
    monkeypatch.setattr(encoder, "_FAVOURED", 0.5)
    easy = replace(WORK, layers=2, hidden=32, length=32, batch=16, steps=40, lr=3e-3)
    found = {name: encoder.TrainingResult() for name in encoder.CONTENDERS}
    encoder._train(easy, 0, found)
    for each in found.values():
        assert len(each.losses[0]) == 40
        assert len(each.seconds) == 37
        assert each.last_losses()[0] < 1.0


def test_last() -> None:
    """Law: a last loss is the mean over a run's last tenth, one step at least."""
    found = encoder.TrainingResult(losses=[[9.0] * 18 + [1.0, 3.0], [9.0, 5.0]])
    assert found.last_losses() == [2.0, 5.0]


def test_tables() -> None:
    """Law: a row a contender, fp32 off itself by 0; and losses of each seed."""
    table, curves = encoder.tables(Namespace(**asdict(WORK)))
    assert [row[0] for row in table.rows] == list(encoder.CONTENDERS)
    rows = dict(zip(encoder.CONTENDERS, table.rows, strict=True))
    assert rows["torch.amp"][2] == 1.0
    assert rows["fp32"][7] == 0.0
    assert rows["fp32"][4] == 0.0
    for name in ("torch.amp", "O1 torch", "O1 lean"):
        for column in (3, 4):
            cell = rows[name][column]
            assert isinstance(cell, float)
            assert cell > 0
        assert rows[name][3] < rows["fp32"][3]  # type: ignore[operator]
        assert rows[name][5] is None
    assert curves.columns == ("seed", "steps", *encoder.CONTENDERS)
    assert [row[:2] for row in curves.rows] == [
        (seed, f"{step} to {step}") for seed in (0, 1) for step in (1, 2, 3, 4, 5)
    ]
    # Five steps have no more than one in the last tenth.
    ends = [row[2:] for row in curves.rows if row[1] == "5 to 5"]
    means = [(a + b) / 2 for a, b in zip(*ends, strict=True)]
    assert [row[6] for row in table.rows] == pytest.approx(means)
    span = abs(ends[0][0] - ends[1][0])  # type: ignore[operator]
    assert f"fp32's own last losses span {span:.4f} over 2 seeds" in table.notes


def test_what_no_flag_sets() -> None:
    """Law: sizes that no flag sets are the device's; others stay."""
    given = asdict(WORK) | {"layers": None, "lr": None, "heads": 4}
    work = encoder.work_of(Namespace(**given))
    assert (work.layers, work.lr, work.heads, work.hidden) == (4, 3e-4, 4, 8)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"heads": 3}, "--hidden 8 must be a multiple of --heads 3."),
        ({"steps": 3}, "--steps 3 must be at least 4; the first 3 are not timed."),
    ],
)
def test_refusals(given: dict[str, int], line: str) -> None:
    """Law: flags that contradict each other are refused, and what to set is said."""
    with pytest.raises(UserError) as caught:
        encoder.tables(Namespace(**asdict(WORK) | given))
    assert str(caught.value) == line


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a missing library is named, with the command that installs it."""
    monkeypatch.setattr(encoder, "find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        encoder.tables(Namespace(**asdict(WORK)))
    assert str(caught.value) == (
        "bench encoder needs transformers: install with pip install 'halfstep[train]'."
    )

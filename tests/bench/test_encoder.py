"""`halfstep bench encoder` and `bench probe`: the task, memory, and the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bench_runs import flags, rejected, rows, run
from torch import Tensor, nn

import halfstep as hs
from halfstep.bench import encoder
from halfstep.bench.contenders import ENCODER
from halfstep.bench.loops import Loop, PlainLoop, SessionLoop
from halfstep.diagnostics.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = "--layers 1 --hidden 8 --heads 2 --length 16 --batch 2 --steps 5 --seeds 2"
SMALL += " --lr 1e-3 --device cpu"
WORK = encoder.workload_of(flags("encoder", SMALL))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A small model gains nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
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
    groups = batch["input_ids"] // encoder.GROUP
    counts = nn.functional.one_hot(groups, encoder.CLASSES).sum(1)
    correct = counts.argmax(-1) == batch["labels"]
    assert correct.double().mean() > 0.95
    assert set(batch["labels"].tolist()) == set(range(encoder.CLASSES))


def test_contenders_begin_alike() -> None:
    """Law: all contenders of a seed begin with the same weights; seeds differ."""
    loops = [encoder.make_loop(name, WORK, 3) for name in ENCODER]
    other = encoder.make_loop("fp32", WORK, 4)
    first = list(loops[0].model.parameters())
    for loop in loops[1:]:
        assert all(map(torch.equal, first, loop.model.parameters()))
    assert not all(map(torch.equal, first, other.model.parameters()))


def test_attention_is_as_asked() -> None:
    """Law: eager attention shows softmax, sdpa has none."""
    for attention in ("eager", "sdpa"):
        loop = encoder.make_loop("fp32", replace(WORK, attention=attention), 0)
        loss = loop.forward(next(encoder.draw_batches(WORK, 0)))
        visited, nodes = set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in visited:
                visited.add(node)
                nodes += [below for below, _ in node.next_functions]
        softmax = any(node.name() == "SoftmaxBackward0" for node in visited)
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

    Saved are the input (4 x 8) and tanh's output (4 x 16), which is also the second
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
    for cast in (low, low.t(), weight.view(4, 3).to(torch.bfloat16)):
        assert encoder.comes_from_weight(cast)
    embedded = nn.functional.embedding(torch.ones(1).long(), weight)
    for other in (low * 2, embedded, torch.randn(3)):
        assert not encoder.comes_from_weight(other)


def test_every_contender_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the task is easy, each contender's loss falls well below chance's.

    Chance is log 4 = 1.386; an easy text draws half of its tokens from one group. The
    first three steps are not timed.
    """
    monkeypatch.setattr(encoder.draw_batches, "__defaults__", (0.5,))
    easy = replace(WORK, layers=2, hidden=32, length=32, batch=16, steps=40, lr=3e-3)
    loops = {name: encoder.make_loop(name, easy, 0) for name in ENCODER}
    seconds: dict[str, list[float]] = {name: [] for name in ENCODER}
    for losses in encoder.train_in_turn(loops, easy, 0, seconds).values():
        assert len(losses) == 40
        assert encoder.last_losses([losses])[0] < 1.0
    assert all(len(each) == 37 and min(each) > 0 for each in seconds.values())


def test_last_losses() -> None:
    """Law: a last loss is the mean over a run's last tenth, one step at least."""
    losses = [[9.0] * 18 + [1.0, 3.0], [9.0, 5.0]]
    assert encoder.last_losses(losses) == [2.0, 5.0]


def test_tables() -> None:
    """Law: a row a contender, fp32 off itself by 0; and losses of each seed."""
    table, curves = encoder.tables(flags("encoder", SMALL))
    cells: dict[Any, Any] = {row["contender"]: row for row in rows(table)}
    assert list(cells) == list(ENCODER)
    assert cells["torch.amp"]["x torch.amp"] == 1.0
    assert cells["fp32"]["most off fp32"] == cells["fp32"]["casts MiB"] == 0.0
    for name in ("torch.amp", "O1 torch", "O1 lean"):
        saved = cells[name]["activations MiB"]
        assert 0 < saved < cells["fp32"]["activations MiB"]
        assert cells[name]["casts MiB"] > 0
        assert cells[name]["GPU peak MiB"] is None
    assert curves.columns == ("seed", "steps", *ENCODER)
    assert [row[:2] for row in curves.rows] == [
        (seed, f"{step} to {step}") for seed in (0, 1) for step in (1, 2, 3, 4, 5)
    ]
    # Five steps have no more than one in the last tenth.
    ends: list[Any] = [row[2:] for row in curves.rows if row[1] == "5 to 5"]
    means = [(a + b) / 2 for a, b in zip(*ends, strict=True)]
    assert [row["last loss"] for row in cells.values()] == pytest.approx(means)
    span = abs(ends[0][0] - ends[1][0])
    assert f"fp32's own last losses span {span:.4f} over 2 seeds" in table.notes


def test_what_no_flag_sets() -> None:
    """Law: sizes that no flag sets are the device's; others stay."""
    work = encoder.workload_of(flags("encoder", "--heads 2 --hidden 8 --device cpu"))
    assert (work.layers, work.lr, work.heads, work.hidden) == (4, 3e-4, 2, 8)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--heads 3", "--hidden 8 must be a multiple of --heads 3."),
        ("--steps 3", "--steps 3 must be at least 4; the first 3 are not timed."),
    ],
)
def test_rejected(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: flags that contradict each other are rejected, with what to set."""
    assert rejected("encoder", f"{SMALL} {words}", capsys) == line


def test_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a missing library is named, with the command that installs it."""
    monkeypatch.setattr(encoder, "find_spec", lambda _: None)
    assert rejected("encoder", SMALL, capsys) == (
        "bench encoder needs transformers: install with pip install 'halfstep[train]'."
    )


# With a probe


def test_probes_do_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with any probe the weights are the same bits; each probe does its part."""
    models, make = [], encoder.make_loop

    def keep(*arguments: Any) -> Loop:
        loop = make(*arguments)
        models.append(loop.model)
        return loop

    monkeypatch.setattr(encoder, "make_loop", keep)
    seconds: dict[str, list[float]] = {name: [] for name in encoder.PROBES}
    probes = encoder.train_probed("O1 lean", WORK, 0, seconds)
    weights = [[*model.parameters()] for model in models]
    assert len(weights) == 4
    assert all(all(map(torch.equal, weights[0], other)) for other in weights)
    assert {len(each) for each in seconds.values()} == {2}  # of five, without three
    assert list(probes) == ["flags", "between samples", "full"]
    flags, between, full = probes.values()
    for each, mode in ((flags, "flags"), (between, "sampled"), (full, "full")):
        assert isinstance(each, Probe)
        assert (each.mode, each.steps) == (mode, WORK.steps)
    assert (flags.arrived, between.arrived, full.arrived) == (5, 1, 5)
    assert full.stats.keys() >= {name for name in full.names if ".dense" in name}


def test_probe_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: ratios are to the step without a probe; some rows have targets.

    Of ten steps one samples, the others do not: 0.9 x 1 + 0.1 x 2 seconds.
    """

    class Full:
        class Counted:
            count = 3_000_000

        stats = {"x": Counted}  # noqa: RUF012

    def take(loop: str, _: Any, __: int, seconds: dict[str, list[float]]) -> Any:
        assert loop == "O1 lean"
        for name, each in zip(seconds, (1.0, 1.25, 1.0, 2.0), strict=True):
            seconds[name] += [each] * 2
        return {"full": Full}

    monkeypatch.setattr(encoder, "train_probed", take)
    (table,) = encoder.probe_tables(flags("probe", f"{SMALL} --every 10"))
    assert table.rows == (
        ("none", 1000.0, 1.0, 0.0, None, None),
        ("flags", 1250.0, 1.25, 0.0, 1.03, False),
        ("between samples", 1000.0, 1.0, 0.0, None, None),
        ("full", 2000.0, 2.0, 0.0, None, None),
        ("sampled", 1100.0, pytest.approx(1.1), 0.0, 1.03, False),
    )
    mean = "of 10 steps one as 'full', the others as 'between samples'"
    assert f"sampled: computed; {mean}" in table.notes
    assert "full: 3.0 million numbers counted and cast twice a step" in table.notes
    assert capsys.readouterr().err.splitlines()[0] == "seed 1/2: done"


def test_probe_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the command prints a row for each contender, and its own line."""
    assert run("probe", f"{SMALL} --seeds 1 --loop torch.amp") == 0
    out = capsys.readouterr().out
    for name in (*encoder.PROBES, encoder.SAMPLED):
        assert f"\n{name} " in out
    assert "halfstep bench probe --layers 1" in out
    assert "--every 100 --loop torch.amp --device cpu" in out

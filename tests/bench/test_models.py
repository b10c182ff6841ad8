"""The models of `bench encoder`, `decoder` and `conv`."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from bench_runs import Candidate, flags, rejected, rows, tables
from torch import nn

from halfstep.bench import commands, models, training
from halfstep.fast_dropout import FastDropout

TEXTS = "--layers 1 --hidden 8 --heads 2 --length 16 --batch 2 --lr 1e-3"
SMALL = {
    "encoder": TEXTS,
    "decoder": f"{TEXTS} --vocabulary 32",
    "conv": "--layers 1 --channels 4 --pixels 32 --batch 2",
}
RUN = "--steps 5 --seeds 2 --device cpu"


def work(bench: str, **more: Any) -> Namespace:
    settings = flags(bench, f"{SMALL[bench]} {RUN}")
    vars(settings).update(more)
    return settings


@pytest.mark.parametrize("bench", SMALL)
def test_batches_are_the_seeds(bench: str) -> None:
    """Law: a seed's batches are the same each time, and no other seed's."""
    draw = models.BENCHES[bench].draw_batches
    first, again, other = (draw(work(bench), seed) for seed in (0, 0, 1))
    for _ in range(3):
        (one,), (same,), (another,) = next(first), next(again), next(other)
        inputs, _ = one
        assert torch.equal(one[inputs], same[inputs])
        assert torch.equal(one["labels"], same["labels"])
        assert not torch.equal(one[inputs], another[inputs])


def test_counting_solves_the_task() -> None:
    """Law: the label is the group of tokens that a text holds most of, mostly."""
    (batch,) = next(models.draw_texts(work("encoder", batch=500, length=128), 0))
    groups = batch["input_ids"] // models.GROUP
    counts = nn.functional.one_hot(groups, models.CLASSES).sum(1)
    correct = counts.argmax(-1) == batch["labels"]
    assert correct.double().mean() > 0.95
    assert set(batch["labels"].tolist()) == set(range(models.CLASSES))


@pytest.mark.parametrize("bench", SMALL)
def test_models_learn(bench: str) -> None:
    """Law: the loss of each model falls, in fp32 and at O2, from the same weights."""
    easy = {
        "encoder": {"hidden": 32, "batch": 16, "lr": 3e-3},
        "decoder": {"hidden": 32, "batch": 16, "lr": 1e-2},
        "conv": {"batch": 8, "lr": 3e-3},
    }[bench]
    settings = work(bench, **easy)
    for name in ("fp32", "O2"):
        loop = training.make_loop(commands.load(bench), name, settings, seed=0)  # type: ignore[arg-type]
        torch.manual_seed(0)
        batches = next(models.BENCHES[bench].draw_batches(settings, 0))
        losses = [loop.step(batches).item() for _ in range(12)]
        assert losses[-1] < losses[0] - 0.1, name


def test_channels_last() -> None:
    """Law: the format of images and weights is the one that was asked for."""
    settings = work("conv", format="channels-last")
    (batch,) = next(models.draw_images(settings, 0))
    assert batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_as_asked(attention: str) -> None:
    """Law: eager attention shows softmax, sdpa has none."""
    settings = work("encoder", attention=attention)
    (batch,) = next(models.draw_texts(settings, 0))
    loss = models.loss_of(models.make_bert(settings), batch)
    visited, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [below for below, _ in node.next_functions]
    softmax = any(node.name() == "SoftmaxBackward0" for node in visited)
    assert softmax is (attention == "eager")


@pytest.mark.parametrize("bench", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["torch.amp", "O2"])
def test_fast_dropout(bench: str, name: str) -> None:
    """Law: the candidate with fast dropout has it, and the other does not."""
    for candidate, expected in ((name, nn.Dropout), (f"{name}-fast", FastDropout)):
        loop = training.make_loop(models.BENCHES[bench], candidate, work(bench), 0)
        layers = {type(m) for m in loop.model.modules() if isinstance(m, nn.Dropout)}
        assert layers == {expected}


def test_seeds_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each seed trains all candidates anew, and its first steps are not timed."""
    log: list[Any] = []

    class Here(Candidate):
        def request(self, question: Any = None) -> Any:
            log.append((self.name, *question.items()))
            return super().request(question)

    monkeypatch.setattr(training, "WorkerProcess", Here)
    names = ["fp32", "O1 torch"]
    words = f"{SMALL['encoder']} {RUN} --candidates '{','.join(names)}'"
    (table,) = tables("encoder", words)
    steps = [(name, ("steps", 1)) for name in (*names, *names[::-1])]
    assert log == [
        each
        for seed in (0, 1)
        for each in (*((name, ("seed", seed)) for name in names), *steps)
    ]
    fp32, low = rows(table)
    assert fp32["loss"] == pytest.approx(low["loss"], rel=2**-6)
    assert low["saved MiB"] < fp32["saved MiB"]  # type: ignore[operator]
    assert fp32["x torch.amp"] is None
    assert any(note.startswith("x torch.amp: empty, since") for note in table.notes)


def test_what_no_flag_sets() -> None:
    """Law: sizes that no flag sets are the device's; others stay."""
    settings = flags("encoder", "--heads 2 --hidden 8 --device cpu")
    models.check(settings)
    sizes = (settings.layers, settings.lr, settings.heads, settings.hidden)
    assert sizes == (4, 3e-4, 2, 8)


def test_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: flags that contradict each other are rejected, with what to set."""
    for bench, words, line in (
        ("decoder", "--heads 3", "--hidden 8 must be a multiple of --heads 3."),
        ("conv", "--steps 3", "--steps 3 must be at least 4; the first 3 are not ti"),
    ):
        got = rejected(bench, f"{SMALL[bench]} {RUN} {words}", capsys)
        assert got.startswith(line)


def test_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a missing library is named, with the command that installs it."""
    absent = {"transformers": None}
    monkeypatch.setattr(
        commands.dependencies, "find_spec", lambda name: absent.get(name, name)
    )
    line = "halfstep bench encoder needs transformers: install with pip install "
    assert rejected("encoder", "", capsys).startswith(line)

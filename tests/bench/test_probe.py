"""`halfstep bench probe`: contenders train alike, and its table says what they took."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.bench.test_encoder import WORK

from halfstep import cli
from halfstep.bench import encoder, measure, probe
from halfstep.diagnostics.probe import Probe
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = {
    "device": "cpu",
    "dtype": "bf16",
    "layers": 1,
    "hidden": 8,
    "heads": 2,
    "length": 16,
    "batch": 2,
    "steps": 5,
    "seeds": 2,
    "dropout": 0.1,
    "lr": 1e-3,
    "attention": "eager",
    "every": 10,
    "loop": "O1 lean",
}


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


def test_contenders_train_alike() -> None:
    """Law: with any probe the weights are the same bits; each probe does its part."""
    weights, probes = [], {}
    for name in probe.CONTENDERS:
        contender = probe.contender(name, "O1 lean", WORK, 0)
        for number, batch in enumerate(encoder.draw_batches(WORK, 0)):
            torch.manual_seed(number)
            contender.step(batch)
        weights.append([*contender.loop.model.parameters()])
        probes[name] = contender.probe
    for other in weights[1:]:
        assert all(map(torch.equal, weights[0], other))
    none, flags, between, full = probes.values()
    assert none is None
    for each, mode in ((flags, "flags"), (between, "sampled"), (full, "full")):
        assert isinstance(each, Probe)
        assert (each.mode, each.steps) == (mode, WORK.steps)
    assert (flags.arrived, between.arrived, full.arrived) == (5, 1, 5)
    assert full.stats.keys() >= {name for name in full.names if ".dense" in name}


def test_amortised() -> None:
    """Law: of a number of steps one samples, the others do not, round by round."""
    found = {probe.BETWEEN: [1.0, 2.0], probe.FULL: [11.0, 2.0]}
    assert probe.amortised(found, 10) == [2.0, 2.0]


def test_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: ratios are to the step without a probe; some rows have targets."""

    def take(_: Any, loop: str, __: int, found: dict[str, list[float]]) -> int:
        assert loop == "O1 lean"
        for name, seconds in zip(probe.CONTENDERS, (1.0, 1.25, 1.0, 2.0), strict=True):
            found[name] += [seconds] * 2
        return 3_000_000

    monkeypatch.setattr(probe, "take_times", take)
    (table,) = probe.tables(Namespace(**FLAGS))
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


def test_times() -> None:
    """Law: each contender has a time for each step after the first three."""
    found: dict[str, list[float]] = {name: [] for name in probe.CONTENDERS}
    assert probe.take_times(WORK, "torch.amp", 0, found) > 1000
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(
        probe.CONTENDERS, 2
    )
    assert all(time > 0 for times in found.values() for time in times)
    assert measure.Times(found).median(probe.NONE) > 0


def test_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the command prints a row for each contender, and its own line."""
    words = "--layers 1 --hidden 8 --heads 2 --batch 2 --length 16 --steps 4 --seeds 1"
    assert cli.run(["bench", "probe", "--device", "cpu", *words.split()]) == 0
    out = capsys.readouterr().out
    for name in (*probe.CONTENDERS, probe.SAMPLED):
        assert f"\n{name} " in out
    assert "halfstep bench probe --layers 1" in out
    assert "--every 100 --loop O1 lean --device cpu" in out

"""`halfstep bench accumulate`: its contenders train the same, and its table."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halfstep.bench import accumulate, measure
from halfstep.bench.loops import SessionLoop
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = accumulate.Workload("cpu", "bf16", layers=2, width=8, batch=4, accumulate=3)
WEIGHTS = 2 * 2  # of two layers, with their biases


@pytest.fixture(autouse=True, scope="module")
def _measured() -> Iterator[None]:
    """Plant rates that warn of nothing."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
        patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
        yield


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.amp", 3 * WEIGHTS),  # its cache ends with each micro-batch
        ("O1 torch", WEIGHTS),  # once a step
        ("O1 lean", WEIGHTS),
        ("O2 lean", WEIGHTS),  # rounded from the masters after each step
    ],
)
def test_casts_of_weights(name: str, expected: int) -> None:
    """Law: casts of weights are counted, whether torch shows them or not."""
    loop, batches = accumulate.make_loop(name, WORK), accumulate.draw_batches(WORK)
    loop.step(batches)
    assert accumulate.weight_casts(loop, batches) == expected


def test_contenders_begin_alike() -> None:
    """Law: all contenders begin with the same weights, and read the same batches."""
    first, *others = (accumulate.make_loop(n, WORK) for n in accumulate.CONTENDERS)
    for other in others:
        own, its = first.model.parameters(), other.model.parameters()
        assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(own, its, strict=True))
    one, same = accumulate.draw_batches(WORK), accumulate.draw_batches(WORK)
    assert len(one) == 3
    for (a, b), (c, d) in zip(one, same, strict=True):
        assert a.shape == b.shape == (4, 8)
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def change(name: str) -> torch.Tensor:
    """Return by what two steps of a contender move the weights, masters if any."""
    loop, batches = accumulate.make_loop(name, WORK), accumulate.draw_batches(WORK)

    def weights() -> torch.Tensor:
        if isinstance(loop, SessionLoop):
            held = list(loop._session.weights().values())
        else:
            held = list(loop.model.parameters())
        return torch.cat([weight.detach().flatten() for weight in held])

    before = weights()
    for _ in range(2):
        loop.step(batches)
    return weights() - before


@pytest.mark.parametrize("name", [*accumulate.CONTENDERS][1:])
def test_contenders_learn_alike(name: str) -> None:
    """Law: steps take weights the same way: bf16 has 8 bits, and a few are lost.

    A gradient that is summed instead of averaged, or not cleared, would be off by 1.
    """
    theirs, ours = change("torch.amp"), change(name)
    assert (ours - theirs).norm() < 2**-5 * theirs.norm()


def test_memory_in_a_process_of_its_own() -> None:
    """Law: a process apart tells its peak in bytes; with torch in it, 100 MiB or more.

    The twin in this process takes two steps and asks the machine, on that device.
    """
    task = asdict(WORK) | {"contender": "torch.amp"}
    found = measure.run_in_subprocess("halfstep.bench.accumulate", task)
    assert found.keys() == {"peak_bytes"}
    assert 100 * 2**20 < found["peak_bytes"] < 2**40


def test_memory_is_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: memory is asked for after two steps, on the device of the work."""
    steps: list[int] = []

    class Loop:
        def step(self, batches: accumulate.Batches) -> None:
            steps.append(len(batches))

    monkeypatch.setattr(accumulate, "make_loop", lambda *_: Loop())
    asked = {"cpu": 7}
    monkeypatch.setattr(hardware, "peak_memory", lambda d: asked[d] + 10 * len(steps))
    task = asdict(WORK) | {"contender": "O2 lean"}
    assert accumulate.peak(task) == {"peak_bytes": 27}
    assert steps == [3, 3]


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a row each, the baseline at 1; memory is that of the process apart."""

    def apart(module: str, task: dict[str, Any]) -> dict[str, Any]:
        assert module == "halfstep.bench.accumulate"
        order = list(accumulate.CONTENDERS)
        mebibytes = 1 + order.index(task["contender"])
        if task["batch"] == 1:
            assert task["contender"] == "torch.amp"
            mebibytes = 77
        return {"peak_bytes": mebibytes * 2**20}

    monkeypatch.setattr(measure, "run_in_subprocess", apart)
    flags = asdict(WORK) | {"rounds": 2}
    (table,) = accumulate.tables(Namespace(**flags))
    assert table.title == "Gradient accumulation"
    assert [row[0] for row in table.rows] == [
        "torch.amp",
        "O1 torch",
        "O1 lean",
        "O2 lean",
    ]
    assert table.rows[0][2:4] == (1.0, 0.0)
    assert [row[4] for row in table.rows] == [1.0, 2.0, 3.0, 4.0]
    assert [row[5] for row in table.rows] == [12, 4, 4, 4]
    assert "loss: of the last micro-batch after 4 steps" in table.notes
    assert any("two steps; 77 MiB for width 8" in note for note in table.notes)

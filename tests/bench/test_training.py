"""The harness for training steps, and `bench recipe`."""

from argparse import Namespace
from dataclasses import replace
from typing import Any, Self
from unittest.mock import Mock

import pytest
import torch
from bench_runs import flags, planted_rates, rows, tables
from processes import group_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from halfstep.bench import commands, loops, recipe, training
from halfstep.diagnostics.preflight.model_copy import SavedBytes
from halfstep.errors import UserError

SMALL = "--layers 2 --width 8 --batch 4 --accumulate 3 --device cpu"
BENCH: Any = commands.load("recipe")
ALL = replace(BENCH, kinds=loops.CANDIDATES)


def work(**more: Any) -> Namespace:
    settings = flags("recipe", SMALL)
    vars(settings).update(more)
    return settings


@pytest.fixture(autouse=True)
def _floor(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_rates(monkeypatch)


# Who runs


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: who cannot keep memory here has a reason: the device, or the C library."""
    libc = ["glibc"]
    monkeypatch.setattr(training.platform, "libc_ver", lambda: libc)

    def absent(device: str) -> dict[str, str]:
        own = work(device=device)
        reasons = {n: training.why_absent(c, own) for n, c in BENCH.kinds.items()}
        return {name: why for name, why in reasons.items() if why is not None}

    kept = ("torch.amp-kept", "torch.amp-fused-kept", "O2-kept")
    assert absent("cpu") == {}
    assert absent("cuda") == dict.fromkeys(kept, "of CPU memory only")
    libc[0] = ""
    assert absent("cpu") == dict.fromkeys(kept, "of glibc only")


def test_kept_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the candidates that keep memory, and no others, ask for it."""
    kept = Mock()
    monkeypatch.setattr(training.hardware, "keep_memory", kept)
    training.worker("recipe", "O2", vars(work()))
    kept.assert_not_called()
    training.worker("recipe", "O2-kept", vars(work()))
    kept.assert_called_once_with()


# The table

SECONDS = {
    "torch.amp": (4.0, 2.0, 8.0),
    "torch.amp-kept": (2.0, 2.0, 2.0),
    "O2": (1.0, 1.0, 1.0),
}


class Process:
    """A candidate that answers what is planted."""

    log: list[tuple[str, Any]]

    def __init__(self, name: str, module: str, task: dict[str, Any]) -> None:
        assert module == "halfstep.bench.training"
        assert (task["bench"], task["candidate"]) == ("recipe", name)
        assert task["settings"]["width"] == 8
        self.name, self.turn = name, -1

    def request(self, question: Any) -> dict[str, Any]:
        self.log.append((self.name, question))
        self.turn += 1
        if "seed" in question:
            if self.name == "O2-kahan":
                return {"absent": "rejected: of bf16 only"}
            facts = {"flops": 1e6, "saved_bytes": 2**20, "state_bytes": 10**6}
            return {"absent": None, "casts": 3} | facts
        seconds = SECONDS[self.name][self.turn - 1]
        peak = len(self.name) * 2**20
        losses = [9.0, 1 / self.turn]
        return {"seconds": seconds, "losses": losses, "peak_bytes": peak}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append((self.name, "closed"))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.log = []
    monkeypatch.setattr(training, "WorkerProcess", Process)


SHORT = f"{SMALL} --rounds 3 --steps 5"


@pytest.mark.usefixtures("planted")
def test_table() -> None:
    """Law: ratios are of the same round, the median last; none without a baseline.

    Who is rejected has a row. All take turns; then all are
    closed. Floor: 1 MFLOP at 2 GFLOP/s, and 1 MB at 1 GB/s, are 1.5 ms.
    """
    names = "torch.amp,torch.amp-kept,O2,O2-kahan"
    (table,) = tables("recipe", f"{SHORT} --candidates {names}")
    cells = {row["candidate"]: row for row in rows(table)}
    assert ",".join(map(str, cells)) == names
    # Ratios of O2: to torch.amp 1/4, 1/2, 1/8; quartiles 3/16 and 3/8.
    assert cells["O2"] == {
        "candidate": "O2",
        "ms a step": 1000.0,
        "x torch.amp": 0.25,
        "x torch.amp-kept": 0.5,
        "x pure": None,
        "+-": 3 / 32,
        "result": "faster",
        "floor ms": pytest.approx(1.5),
        "of floor": pytest.approx(1.5e-3),
        "MFU": pytest.approx(0.5e-3),
        "peak MiB": 2.0,
        "saved MiB": 1.0,
        "casts": 3,
        "loss": 1 / 3,
        "not run": None,
    }
    amp = cells["torch.amp"]
    # Of torch.amp to itself with memory kept: 2, 1, 4.
    assert (amp["x torch.amp"], amp["x torch.amp-kept"]) == (1.0, 2.0)
    assert (amp["+-"], amp["result"]) == (0.0, None)
    assert list(cells["O2-kahan"].values())[1:] == [*[None] * 13, "rejected"]
    assert "O2-kahan rejected: of bf16 only" in table.notes
    why = "x pure: empty, since pure did not run: not among --candidates"
    assert [note for note in table.notes if "empty, since" in note] == [why]
    started = ["torch.amp", "torch.amp-kept", "O2"]
    turns = started + started[::-1] + started
    assert Process.log == [
        *((name, {"seed": 0}) for name in [*started, "O2-kahan"]),
        *((name, {"steps": 5}) for name in turns),
        *((name, "closed") for name in ["O2-kahan", *started[::-1]]),
    ]


def test_recipe_in_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: in processes, torch.amp trains the same with memory kept, to the bit."""
    names = "torch.amp,torch.amp-kept"
    words = f"{SMALL} --rounds 1 --steps 1 --candidates {names}"
    (table,) = tables("recipe", words)
    plain, kept = rows(table)
    assert plain["loss"] == kept["loss"]
    for row in (plain, kept):
        assert row["ms a step"] > 0  # type: ignore[operator]
        assert -1 < row["peak MiB"] < 2**10  # type: ignore[operator]
        assert row["not run"] is None
    err = capsys.readouterr().err.splitlines()
    assert err == [f"{name}: ready" for name in names.split(",")]


def test_loss_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the loss is the mean over seeds, each of its last steps."""

    class Seeded(Process):
        losses = iter([9.0, 1.0, 9.0, 2.0])

        def __init__(self, name: str, *_: object) -> None:
            self.name = name

        def request(self, question: Any) -> dict[str, Any]:
            self.turn = 0  # of few planted seconds
            answer = super().request(question)
            if "steps" in question:
                answer["losses"] = [next(self.losses)]
            return answer

    Process.log = []
    monkeypatch.setattr(training, "WorkerProcess", Seeded)
    words = "--steps 5 --seeds 2 --candidates torch.amp --device cpu"
    (table,) = tables("conv", words)
    assert rows(table)[0]["loss"] == 1.5


# How they train


def make_loop(name: str, settings: Namespace) -> loops.Loop:
    return training.make_loop(ALL, name, settings, seed=1)


def batches_of(settings: Namespace) -> list[tuple[Tensor, Tensor]]:
    return next(recipe.draw_batches(settings, 0))


@pytest.mark.parametrize("optimizer", recipe.MOMENTUM)
def test_the_loss_falls(optimizer: str) -> None:
    """Law: each optimizer, as it is set, learns at any size.

    A loss that stays put would show no candidate's fault.
    """
    for width, batch in ((8, 64), (64, 4)):
        losses = trained(
            "fp32", work(optimizer=optimizer, width=width, batch=batch), 12
        )
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] * (1 - 2**-8)  # which bf16 would show


def trained(name: str, own: Namespace | None = None, steps: int = 4) -> list[float]:
    settings = own or work()
    loop, batches = make_loop(name, settings), batches_of(settings)
    return [loop.step(batches).item() for _ in range(steps)]


_LOST = 2 * 2 * 2**-9


@pytest.mark.parametrize(
    "name",
    ["torch.amp", "torch.amp-fused", "naive-O2", "pure", "O1", "O1 torch", "O2", "O3"],
)
def test_candidates_learn_alike(name: str) -> None:
    """Law: losses are those of fp32, but for what bf16 loses.

    That is 2**-9 in weights and in activations of each of two layers, at worst all one
    way: less than the way that the loss has come. A gradient summed over micro-batches
    instead of averaged, or not cleared, would take the loss twice as far.
    """
    own = work(width=64, optimizer="sgd-momentum")
    theirs, ours = trained("fp32", own), trained(name, own)
    assert theirs[0] - theirs[-1] > _LOST
    assert ours == pytest.approx(theirs, rel=_LOST)


@pytest.mark.parametrize("name", ["torch.amp", "O1"])
def test_fused(name: str) -> None:
    """Law: the fused candidate has the same optimizer, but for its kernel."""
    settings = work(optimizer="adamw")
    plain, fused = (
        make_loop(f"{name}{suffix}", settings).optimizer.param_groups[0]
        for suffix in ("", "-fused")
    )
    assert fused["fused"] is True
    changed = {"fused", "params"}
    assert {k: v for k, v in plain.items() if k not in changed} == {
        k: v for k, v in fused.items() if k not in changed
    }


@pytest.mark.parametrize(
    ("name", "saved"),
    [("fp32", 4 * (4 * 8 + 4 * 16)), ("O1 torch", 2 * (4 * 8 + 4 * 16 + 16 * 4))],
)
def test_saved_for_backward(name: str, saved: int) -> None:
    """Law: each piece of memory counts once, weights do not, their casts do.

    Saved are the input (4 x 8) and tanh's output (4 x 16), which is also the second
    layer's input; and the cast of the second layer's weight (16 x 4), for the gradient
    of tanh's output. The input needs no gradient, and so not the first weight.
    """
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    task = loops.Task(model, sgd, lambda module, x: module(x).sum(), work())
    loop = loops.CANDIDATES[name].loop(task)
    assert loop.forward
    counter = SavedBytes(loop.model)
    with counter.counting():
        loop.forward(torch.randn(4, 8))
    assert counter.bytes == saved


def test_saved_in_parts() -> None:
    """Law: weights that FSDP2 gathers for a forward pass are not saved activations."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with group_of_one():
        counter = SavedBytes(fully_shard(model))
        with counter.counting():
            model(torch.randn(4, 8))
    assert counter.bytes == 4 * (4 * 8 + 4 * 16)


# In the process of a candidate


def test_server() -> None:
    """Law: a seed builds the candidate; a turn gives seconds, losses, and memory.

    FLOPs of two layers: forward, gradient of weights, and of the second's inputs; state
    of SGD is the weights alone. Casts are the input, two weights, two biases, and their
    gradients, in each of three micro-batches; the loss casts output and target.
    """
    server = training.worker("recipe", "torch.amp", vars(work()))
    facts = server({"seed": 1})
    assert facts["absent"] is None
    assert facts["flops"] == 3 * (2 + 2 + 1) * 2 * 4 * 8 * 8
    assert facts["state_bytes"] == 4 * 2 * (8 * 8 + 8)
    assert facts["casts"] > 3 * 5
    turn = server({"steps": 2})
    assert turn["seconds"] > 0
    assert turn["losses"] == trained("torch.amp", steps=5)[training.WARM_UP :]
    server({"seed": 1})
    assert server({"steps": 2})["losses"] == turn["losses"]


def test_rejections_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what `prepare` rejects is an answer; any other fault is raised."""
    reject = Mock(side_effect=UserError("no such master"))
    server = training.worker("recipe", "O3", vars(work()))
    monkeypatch.setattr(loops, "prepare", reject)
    assert server({"seed": 0}) == {"absent": "rejected: no such master"}
    monkeypatch.setattr(loops, "prepare", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server({"seed": 0})

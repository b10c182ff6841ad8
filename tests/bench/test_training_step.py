"""`halfstep bench recipe` and `bench accumulate`: contenders, and the tables."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from bench_runs import flags, rows, run
from torch import Tensor, nn

from halfstep.bench import loops, training_step
from halfstep.bench.contenders import ACCUMULATE, RECIPE, StepContender
from halfstep.bench.loops import ManualLoop, PlainLoop, draw_batches
from halfstep.bench.training_step import StepServer, Workload, make_loop
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

WORK = Workload("cpu", "bf16", 2, 8, 4, 3)
"""Two layers of 8 x 8, three micro-batches of 4."""
WEIGHTS = 2 * 2  # of two layers, with their biases


# Who runs


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: who cannot run here has a reason: the package, the device, or the dtype."""
    specs = {"accelerate": None, "lightning_fabric": object()}
    monkeypatch.setattr(training_step, "find_spec", specs.__getitem__)
    libc = ["glibc"]
    monkeypatch.setattr(training_step.platform, "libc_ver", lambda: libc)
    fp16 = replace(WORK, dtype="fp16")

    def absent(work: Workload) -> dict[str, str]:
        reasons = {n: training_step.why_absent(n, c, work) for n, c in RECIPE.items()}
        return {name: why for name, why in reasons.items() if why is not None}

    missing = {"accelerate": "not installed"}
    kept = ("torch.amp-kept", "O2-kept")
    fabric = dict.fromkeys(("fabric-mixed", "fabric-true"), "no fp16 on a CPU")
    assert absent(WORK) == missing
    assert absent(fp16) == missing | fabric
    on_cuda = replace(fp16, device="cuda")
    assert absent(on_cuda) == missing | dict.fromkeys(kept, "of CPU memory only")
    libc[0] = ""
    assert absent(WORK) == missing | dict.fromkeys(kept, "of glibc only")


def test_tunables_are_added() -> None:
    """Law: tunables that are set stay; ours come last, and count."""
    ours = training_step.KEEP_MEMORY
    assert training_step.keep_memory({}) == {"GLIBC_TUNABLES": ours}
    both = training_step.keep_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert both == {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=1:{ours}"}


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the version is that of the distribution, whatever that is called.

    Lightning's `lightning_fabric` has metadata of its own, or those of two other
    packages, or none.
    """
    installed = {"accelerate": ["accelerate"]}
    metadata = training_step.metadata
    monkeypatch.setattr(metadata, "packages_distributions", lambda: installed)
    numbers = {"accelerate": "1.2", "lightning": "2.5", "pytorch-lightning": "2.5.1"}
    monkeypatch.setattr(metadata, "version", numbers.__getitem__)
    packages = [RECIPE[n].package for n in ("accelerate", "fabric-mixed", "O2")]
    expected = "accelerate 1.2, lightning_fabric of unknown version"
    assert training_step.versions(packages) == [expected]
    installed["lightning_fabric"] = ["pytorch-lightning", "lightning"]
    (note,) = training_step.versions([*packages, "lightning_fabric"])
    assert note == "accelerate 1.2, lightning 2.5 and pytorch-lightning 2.5.1"
    assert training_step.versions([None]) == []


# The tables

SECONDS = {
    "torch.amp": (4.0, 2.0, 8.0),
    "torch.amp-kept": (2.0, 2.0, 2.0),
    "O2": (1.0, 1.0, 1.0),
}


class Process:
    """A contender that answers what is planted."""

    log: list[tuple[str, Any]]

    def __init__(
        self, name: str, module: str, task: dict[str, Any], env: Mapping[str, str]
    ) -> None:
        assert module == "halfstep.bench.training_step"
        assert StepContender(**task["contender"]) == RECIPE[name]
        assert Workload(**task["work"]) == WORK
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
        kept = "glibc.malloc.mmap_max=0" in env.get("GLIBC_TUNABLES", "")
        assert kept == name.endswith("-kept")
        self.name, self.turn = name, -1

    def request(self, question: Any) -> dict[str, Any]:
        """Answer as planted."""
        self.log.append((self.name, question))
        if self.name == "O2-kahan":
            return {"refused": "of bf16 only"}
        self.turn += 1
        seconds = 99.0 if self.turn == 0 else SECONDS[self.name][self.turn - 1]
        loss, peak = 1.0 / (1 + self.turn), len(self.name) * 2**20
        return {"refused": None, "seconds": seconds, "loss": loss, "peak_bytes": peak}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append((self.name, "closed"))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process start; nothing besides torch is installed."""
    Process.log = []
    monkeypatch.setattr(training_step, "WorkerProcess", Process)
    monkeypatch.setattr(training_step, "find_spec", lambda _: None)


SMALL = "--layers 2 --width 8 --batch 4 --accumulate 3 --device cpu"
SHORT = f"{SMALL} --rounds 3 --steps 5"


@pytest.mark.usefixtures("planted")
def test_recipe_table() -> None:
    """Law: ratios are of the same round, the median last; none without a baseline.

    Who is not installed, or refuses, has a row. All take turns; then all are closed.
    """
    names = "torch.amp,torch.amp-kept,accelerate,O2,O2-kahan"
    (table,) = training_step.recipe(flags("recipe", f"{SHORT} --contenders {names}"))
    cells = {row[0]: row[1:] for row in table.rows}
    assert ",".join(map(str, cells)) == names
    # Ratios of O2: to torch.amp 1/4, 1/2, 1/8; quartiles 3/16 and 3/8.
    assert cells["O2"] == (1000.0, 0.25, 0.5, None, 3 / 32, 2.0, 0.25, None)
    # Of torch.amp to itself with memory kept: 2, 1, 4.
    assert cells["torch.amp"] == (4000.0, 1.0, 2.0, None, 0.0, 9.0, 0.25, None)
    assert cells["torch.amp-kept"][1:4] == (0.5, 1.0, None)
    assert cells["accelerate"] == (*[None] * 7, "not installed")
    assert cells["O2-kahan"] == (*[None] * 7, "rejected")
    assert "O2-kahan rejected: of bf16 only" in table.notes
    why = "x pure: empty, since pure did not run: not among --contenders"
    assert [note for note in table.notes if "empty, since" in note] == [why]
    assert any("of 17 steps" in note for note in table.notes)
    assert any("OMP_WAIT_POLICY=PASSIVE" in note for note in table.notes)
    started = ["torch.amp", "torch.amp-kept", "O2"]
    turns = started + started[::-1] + started
    assert Process.log == [
        *((name, 2) for name in [*started, "O2-kahan"]),
        *((name, 5) for name in turns),
        *((name, "closed") for name in ["O2-kahan", *started[::-1]]),
    ]


@pytest.mark.usefixtures("planted")
def test_baselines_that_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each column of "-" has its reason under the table, +- with the first."""
    monkeypatch.setattr(training_step.platform, "libc_ver", lambda: [""])
    words = f"{SHORT} --contenders torch.amp-kept,O2"
    unasked = "not among --contenders"
    (table,) = training_step.recipe(flags("recipe", words))
    assert [note for note in table.notes if "empty, since" in note] == [
        f"x torch.amp and +-: empty, since torch.amp did not run: {unasked}",
        "x torch.amp-kept: empty, since torch.amp-kept did not run: of glibc only",
        f"x pure: empty, since pure did not run: {unasked}",
    ]


@pytest.mark.usefixtures("planted")
def test_measurements_outlive_a_defect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: whatever fails after the last turn, all turns are on disk and printed."""

    def defect(*_: object) -> list[str]:
        message = "no metadata"
        raise LookupError(message)

    monkeypatch.setattr(training_step, "versions", defect)
    words = f"{SHORT} --contenders torch.amp,O2 --json {tmp_path / 'result'}"
    with pytest.raises(LookupError, match="no metadata"):
        run("recipe", words)
    lines = (tmp_path / "result.part").read_text(encoding="utf-8").splitlines()
    seconds = [(each["name"], each["seconds"]) for each in map(json.loads, lines)]
    assert seconds == [
        *(("torch.amp", 4.0), ("O2", 1.0), ("O2", 1.0)),
        *(("torch.amp", 2.0), ("torch.amp", 8.0), ("O2", 1.0)),
    ]
    assert not (tmp_path / "result").exists()
    err = capsys.readouterr().err
    assert "Measured so far" in err
    assert [line.split() for line in err.splitlines() if "seconds" in line] == [
        ["torch.amp", "seconds", "3", "4.000000"],
        ["O2", "seconds", "3", "1.000000"],
    ]


def test_recipe_in_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: in processes, torch.amp trains the same with memory kept, to the bit.

    O2 does as both, but for rounding.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on it
    names = "torch.amp,torch.amp-kept,O2"
    words = f"{SMALL} --width 64 --rounds 1 --steps 1 --contenders {names}"
    (table,) = training_step.recipe(flags("recipe", words))
    plain, kept, ours = rows(table)
    assert plain["loss"] == kept["loss"] == pytest.approx(ours["loss"], rel=2**-8)
    for row in table.rows:
        seconds, ratio, peak = row[1], row[2], row[6]
        assert seconds > 0  # type: ignore[operator]
        assert ratio > 0  # type: ignore[operator]
        assert -1 < peak < 2**10  # type: ignore[operator]
        assert row[8] is None
    err = capsys.readouterr().err.splitlines()
    assert err == [f"{name}: ready" for name in names.split(",")]


def test_accumulate_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a row each, the baseline at 1; casts of weights are counted.

    torch.amp's cache ends with each micro-batch; ours casts once a step. Each trains as
    torch.amp does, but for rounding in bf16.
    """

    class Here(contextlib.nullcontext[Any]):
        def __init__(self, _name: str, _module: str, task: Any, _env: Any) -> None:
            super().__init__(self)
            self.request = training_step.worker(**json.loads(json.dumps(task)))

    monkeypatch.setattr(training_step, "WorkerProcess", Here)
    (table,) = training_step.accumulate(flags("accumulate", f"{SMALL} --rounds 2"))
    assert [row["contender"] for row in rows(table)] == list(ACCUMULATE)
    assert table.rows[0][2:4] == (1.0, 0.0)
    casts = [row["weights cast"] for row in rows(table)]
    assert casts == [3 * WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS]
    assert any("of 4 steps" in note for note in table.notes)
    losses = [row["loss"] for row in rows(table)]
    assert losses == pytest.approx([losses[0]] * 4, rel=2**-8)


# How they train


def test_contenders_begin_alike() -> None:
    """Law: all contenders begin with the same weights, and read the same batches."""
    first, *others = (make_loop(each, WORK) for each in ACCUMULATE.values())
    for other in others:
        own, its = first.model.parameters(), other.model.parameters()
        assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(own, its, strict=True))
    one, same = draw_batches(WORK), draw_batches(WORK)
    assert len(one) == 3
    for (a, b), (c, d) in zip(one, same, strict=True):
        assert a.shape == b.shape == (4, 8)
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.parametrize("optimizer", training_step.MOMENTUM)
def test_the_loss_falls(optimizer: str) -> None:
    """Law: each optimizer, as it is set, learns at any size.

    A loss that stays put would show no contender's fault.
    """
    for width, batch in ((8, 64), (64, 4)):
        work = replace(WORK, optimizer=optimizer, width=width, batch=batch)
        loop, batches = make_loop(RECIPE["fp32"], work), draw_batches(work)
        losses = [loop.step(batches).item() for _ in range(12)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] * (1 - 2**-8)  # which bf16 would show


def trained(name: str, work: Workload = WORK) -> list[float]:
    """Return the losses of a contender's first steps."""
    loop, batches = make_loop((ACCUMULATE | RECIPE)[name], work), draw_batches(work)
    return [loop.step(batches).item() for _ in range(4)]


_LOST = 2 * 2 * 2**-9


@pytest.mark.parametrize(
    "name", ["torch.amp", "naive-O2", "pure", "O1", "O1 torch", "O2", "O3"]
)
def test_contenders_learn_alike(name: str) -> None:
    """Law: losses are those of fp32, but for what bf16 loses.

    That is 2**-9 in weights and in activations of each of two layers, at worst all one
    way: less than the way that the loss has come. A gradient summed over micro-batches
    instead of averaged, or not cleared, would take the loss twice as far.
    """
    work = replace(WORK, width=64, optimizer="sgd-momentum")
    theirs, ours = trained("fp32", work), trained(name, work)
    assert theirs[0] - theirs[-1] > _LOST
    assert ours == pytest.approx(theirs, rel=_LOST)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_by_hand(dtype: str) -> None:
    """Law: masters move by the rate times the gradient of the 16-bit weights.

    Those follow, rounded. The fp16 gradient comes from a scaled loss. None is left.
    """
    work = replace(WORK, dtype=dtype, accumulate=1)
    loop, twin = make_loop(RECIPE["naive-O2"], work), make_loop(RECIPE["fp32"], work)
    assert isinstance(loop, ManualLoop)
    assert isinstance(twin, PlainLoop)
    assert loop.scaler.is_enabled() == (dtype == "fp16")
    if dtype == "fp16":  # one at which so small a network does not overflow
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = [master.clone() for _, master in loop.pairs]
    for param, master in zip(twin.model.parameters(), before, strict=True):
        assert torch.equal(param, master)
        param.data = master.to(loop.dtype).double()
    ((inputs, targets),) = draw_batches(work)
    loops.loss_of(twin.model, (inputs.double(), targets.double())).backward()
    loop.step([(inputs, targets)])
    rate = loop.optimizer.param_groups[0]["lr"]
    low = torch.finfo(loop.dtype).eps / 2
    for (weight, master), old, param in zip(
        loop.pairs, before, twin.model.parameters(), strict=True
    ):
        assert weight.dtype == loop.dtype
        assert torch.equal(weight, master.to(loop.dtype))
        assert param.grad is not None
        moved, expected = (master - old).double(), -rate * param.grad
        # Inputs, two weights, two outputs, the error: each is rounded once, and the
        # backward pass rounds as often.
        assert (moved - expected).norm() < 12 * low * expected.norm()
        assert weight.grad is master.grad is None


class Every:
    """An optimizer that waits for the last of some micro-batches."""

    def __init__(self, optimizer: Any, every: int) -> None:
        self.inner, self.every, self.count = optimizer, every, 0

    def step(self) -> None:
        """Step after the last micro-batch."""
        if self.count % self.every == 0:
            self.inner.step()

    def zero_grad(self) -> None:
        """Clear after the last micro-batch."""
        if self.count % self.every == 0:
            self.inner.zero_grad()


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: Accelerate gets dtype, device and micro-batches, in the loop it documents.

    With a stand-in that casts nothing, that is fp32.
    """
    given: dict[str, Any] = {}

    class Accelerator:
        def __init__(self, **settings: Any) -> None:
            given.update(settings)

        def prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Every]:
            self.model = model
            self.optimizer = Every(optimizer, given["gradient_accumulation_steps"])
            return model, self.optimizer

        @contextlib.contextmanager
        def accumulate(self, model: nn.Module) -> Iterator[None]:
            assert model is self.model
            self.optimizer.count += 1
            yield

        def backward(self, loss: Tensor) -> None:
            (loss / self.optimizer.every).backward()

    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(**locals()))
    assert trained("accelerate") == trained("fp32")
    assert given == {
        "mixed_precision": "bf16",
        "cpu": True,
        "gradient_accumulation_steps": 3,
    }


@pytest.mark.parametrize("name", ["mixed", "true"])
@pytest.mark.parametrize(("dtype", "number"), [("bf16", "bf16"), ("fp16", "16")])
def test_fabric(
    name: str, dtype: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: Fabric gets precision and one device, in the loop it documents."""
    given: dict[str, Any] = {}

    class Fabric:
        def __init__(self, **settings: Any) -> None:
            given.update(settings)

        def setup(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
            return model, optimizer

        def backward(self, loss: Tensor) -> None:
            loss.backward()

    monkeypatch.setitem(sys.modules, "lightning_fabric", SimpleNamespace(**locals()))
    assert trained(f"fabric-{name}", replace(WORK, dtype=dtype)) == trained("fp32")
    precision = f"{number}-{name}"
    assert given == {"accelerator": "cpu", "devices": 1, "precision": precision}


@pytest.mark.parametrize("name", ["accelerate", "fabric-mixed", "fabric-true"])
def test_other_libraries_themselves(name: str) -> None:
    """Law: where a library is installed, it learns as fp32 does, but for rounding."""
    package = RECIPE[name].package
    if package is None or find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    work = replace(WORK, width=64, optimizer="sgd-momentum")
    assert trained(name, work) == pytest.approx(trained("fp32", work), rel=2**-7)


# In the process of a contender


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a turn takes so many steps; it gives seconds of one, and the last loss.

    Memory is the most beyond what was held before there was any model.
    """
    steps: list[int] = []

    class Loop:
        model = nn.Identity()

        def step(self, batches: loops.Batches) -> Tensor:
            steps.append(len(batches))
            return torch.tensor(0.5 / len(steps))

    monkeypatch.setattr(training_step, "make_loop", lambda *_: Loop())
    monkeypatch.setattr(training_step, "resident", lambda _: 1000 + len(steps))
    monkeypatch.setattr(training_step, "peak_resident", lambda _: 3001)
    measure = training_step.measure
    monkeypatch.setattr(measure, "timed", lambda call, _: (call(), 6.0))
    server = StepServer(RECIPE["O2"], WORK)
    assert steps == [3]  # one on small ones, before memory is asked for
    assert server.answer(2) == {"refused": None}
    assert steps == [3] * 3
    assert server.answer(2) == {
        "refused": None,
        "seconds": 3.0,
        "loss": pytest.approx(0.5 / 5),
        "peak_bytes": 2000,
        "casts": 0,
    }


def test_refusals_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what `prepare` rejects is an answer; any other fault is raised."""

    def refuse(*_: object, **__: object) -> loops.Loop:
        message = "no such master"
        raise UserError(message)

    monkeypatch.setitem(loops.MAKERS, "session", refuse)
    server = StepServer(RECIPE["O3"], WORK)
    assert server.answer(2) == {"refused": "no such master"}
    monkeypatch.setitem(loops.MAKERS, "session", lambda *_, **__: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        StepServer(RECIPE["O3"], WORK).answer(2)

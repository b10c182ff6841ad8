"""`halfstep bench recipe`: who can run, ratios, and the table."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

import pytest

from halfstep import cli
from halfstep.bench import commands, measure, recipe, recipe_loops, worker_process
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

WORK = recipe_loops.Workload("cpu", "bf16", 2, 8, 4, 3, optimizer="sgd")
"""Two layers of 8 x 8, three micro-batches of 4."""


@pytest.fixture(autouse=True, scope="module")
def _measured() -> Iterator[None]:
    """Plant rates that warn of nothing."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
        patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
        yield


def test_words() -> None:
    """Law: the flags' words are those that can be run; the columns' are among them."""
    assert tuple(recipe_loops.CONTENDERS) == commands.PEERS
    assert set(recipe.BASELINES) <= set(commands.PEERS)
    kept = {name for name, each in recipe_loops.CONTENDERS.items() if each.keeps_memory}
    assert kept == {name for name in commands.PEERS if name.endswith("-kept")}


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: who cannot run here has a reason: the package, the device, or the dtype."""
    found = {"accelerate": None, "lightning_fabric": object()}
    monkeypatch.setattr(recipe, "find_spec", found.__getitem__)
    monkeypatch.setattr(recipe.platform, "libc_ver", lambda: ("glibc", "2.36"))
    on_cpu, fp16 = WORK, replace(WORK, dtype="fp16")
    on_cuda = replace(fp16, device="cuda")

    def left_out(work: recipe_loops.Workload) -> dict[str, str]:
        reasons = {name: recipe.why_absent(name, work) for name in commands.PEERS}
        return {name: why for name, why in reasons.items() if why is not None}

    missing = {"accelerate": "not installed"}
    assert left_out(on_cpu) == missing
    no = "no fp16 on a CPU"
    assert left_out(fp16) == missing | {"fabric-mixed": no, "fabric-true": no}
    of_cpu = dict.fromkeys(("torch.amp-kept", "O2-kept"), "of CPU memory only")
    assert left_out(on_cuda) == missing | of_cpu
    monkeypatch.setattr(recipe.platform, "libc_ver", lambda: ("", ""))
    of_glibc = dict.fromkeys(("torch.amp-kept", "O2-kept"), "of glibc only")
    assert left_out(on_cpu) == missing | of_glibc


SECONDS = {
    "torch.amp": (4.0, 2.0, 8.0),
    "torch.amp-kept": (2.0, 2.0, 2.0),
    "O2": (1.0, 1.0, 1.0),
}


class Process:
    """A contender that says what is planted."""

    log: list[tuple[str, Any]]

    def __init__(
        self, name: str, module: str, task: dict[str, Any], env: Mapping[str, str]
    ) -> None:
        assert module == "halfstep.bench.recipe_loops"
        assert task == asdict(WORK) | {"contender": name}
        kept = "glibc.malloc.mmap_max=0" in env.get("GLIBC_TUNABLES", "")
        assert kept == name.endswith("-kept")
        self.name, self.turn = name, -1

    def request(self, question: Any) -> dict[str, Any]:
        """Take the question down; answer as planted."""
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


def run(contenders: str, **flags: Any) -> Any:
    """Return the table of a run with these contenders."""
    work = asdict(WORK) | {"rounds": 3, "steps": 5} | flags
    (table,) = recipe.tables(Namespace(contenders=contenders.split(","), **work))
    return table


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: ratios are of the same round, the median last; none without a baseline.

    Who is not installed, or refuses, has a row. All take turns; then all are closed.
    """
    Process.log = []
    monkeypatch.setattr(worker_process, "WorkerProcess", Process)
    monkeypatch.setattr(recipe, "find_spec", lambda _: None)
    table = run("torch.amp,torch.amp-kept,accelerate,O2,O2-kahan")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == [
        "torch.amp",
        "torch.amp-kept",
        "accelerate",
        "O2",
        "O2-kahan",
    ]
    # Ratios of O2: to torch.amp 1/4, 1/2, 1/8; quartiles 3/16 and 3/8.
    assert rows["O2"] == (1000.0, 0.25, 0.5, None, 3 / 32, 2.0, 0.25, None)
    # Of torch.amp to itself with memory kept: 2, 1, 4.
    assert rows["torch.amp"] == (4000.0, 1.0, 2.0, None, 0.0, 9.0, 0.25, None)
    assert rows["torch.amp-kept"][1:4] == (0.5, 1.0, None)
    assert rows["accelerate"] == (*[None] * 7, "not installed")
    assert rows["O2-kahan"] == (*[None] * 7, "refused")
    assert "O2-kahan refused: of bf16 only" in table.notes
    why = "x pure: empty, since pure did not run: not among --contenders"
    assert [note for note in table.notes if "empty, since" in note] == [why]
    assert any("of 17 steps" in note for note in table.notes)
    assert any("OMP_WAIT_POLICY=PASSIVE" in note for note in table.notes)
    there = ["torch.amp", "torch.amp-kept", "O2"]
    turns = there + there[::-1] + there
    assert Process.log == [
        *((name, 2) for name in [*there, "O2-kahan"]),
        *((name, 5) for name in turns),
        *((name, "closed") for name in ["O2-kahan", *there[::-1]]),
    ]


def test_baselines_that_did_not_run() -> None:
    """Law: each column of "-" has its reason under the table, +- with the first."""
    times = measure.Times({"O2": [1.0], "pure": [1.0]})
    first, second = recipe.unmeasured(times, {"torch.amp-kept": "of glibc only"})
    why = "torch.amp did not run: not among --contenders"
    assert first == f"x torch.amp and +-: empty, since {why}"
    why = "torch.amp-kept did not run: of glibc only"
    assert second == f"x torch.amp-kept: empty, since {why}"


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a package is told by what it came with, whatever that is called.

    Lightning's `lightning_fabric` has metadata of its own, or those of two other
    packages, or none.
    """
    installed = {"accelerate": ["accelerate"]}
    monkeypatch.setattr(recipe.metadata, "packages_distributions", lambda: installed)
    numbers = {"accelerate": "1.2", "lightning": "2.5", "pytorch-lightning": "2.5.1"}
    monkeypatch.setattr(recipe.metadata, "version", numbers.__getitem__)
    names = ["accelerate", "fabric-mixed", "fabric-true", "O2"]
    expected = "accelerate 1.2, lightning_fabric of unknown version"
    assert recipe.versions(names) == [expected]
    installed["lightning_fabric"] = ["pytorch-lightning", "lightning"]
    (note,) = recipe.versions(names)
    assert note == "accelerate 1.2, lightning 2.5 and pytorch-lightning 2.5.1"
    assert recipe.versions(["O2", "pure"]) == []


def test_what_was_measured_outlives_a_defect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: whatever fails after the last turn, all turns are on disk and printed."""

    def defect(*_: object) -> list[str]:
        message = "no metadata"
        raise LookupError(message)

    Process.log = []
    monkeypatch.setattr(worker_process, "WorkerProcess", Process)
    monkeypatch.setattr(recipe, "versions", defect)
    words = "--layers 2 --width 8 --batch 4 --accumulate 3 --rounds 3 --steps 5"
    words += f" --device cpu --contenders torch.amp,O2 --json {tmp_path / 'found'}"
    with pytest.raises(LookupError, match="no metadata"):
        cli.run(["bench", "recipe", *words.split()])
    lines = (tmp_path / "found.part").read_text(encoding="utf-8").splitlines()
    seconds = [(each["name"], each["seconds"]) for each in map(json.loads, lines)]
    order = ["torch.amp", "O2", "O2", "torch.amp", "torch.amp", "O2"]
    assert [name for name, _ in seconds] == order
    assert {name: [s for n, s in seconds if n == name] for name in order} == {
        name: [*SECONDS[name]] for name in order
    }
    assert not (tmp_path / "found").exists()
    err = capsys.readouterr().err
    assert "Measured so far" in err
    assert str(tmp_path / "found.part") in err
    assert [line.split() for line in err.splitlines() if "seconds" in line] == [
        ["torch.amp", "seconds", "3", "4.000000"],
        ["O2", "seconds", "3", "1.000000"],
    ]


def test_help_tells_who_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the help has a line for each contender, and wraps; flags say of what."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.run(["bench", "recipe", "--help"])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("contenders:")
    named = [line.split(maxsplit=1) for line in lines[start + 1 :]]
    assert [name for name, _ in named] == list(commands.PEERS)
    assert max(len(line) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    for noun in ("linear layers, with", "what updates the weights", "16-bit format"):
        assert noun in text


def test_tunables_are_added() -> None:
    """Law: tunables that are set stay; ours come last, and count."""
    assert recipe._keep_memory_env({}) == {"GLIBC_TUNABLES": recipe.KEEP_MEMORY}
    both = recipe._keep_memory_env({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    expected = f"glibc.malloc.arena_max=1:{recipe.KEEP_MEMORY}"
    assert both == {"GLIBC_TUNABLES": expected}


def test_for_real(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: in processes, torch.amp trains the same with memory kept, to the bit.

    O2 does as both, but for rounding.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on it
    table = run("torch.amp,torch.amp-kept,O2", width=64, rounds=1, steps=1)
    plain, kept, ours = table.rows
    assert plain[7] == kept[7] == pytest.approx(ours[7], rel=2**-8)
    assert all(row[1] > 0 and row[2] > 0 and row[8] is None for row in table.rows)
    assert all(-1 < row[6] < 2**10 for row in table.rows)
    err = capsys.readouterr().err.splitlines()
    assert err == [f"{name}: ready" for name in ("torch.amp", "torch.amp-kept", "O2")]


def test_the_command_repeats_the_run() -> None:
    """Law: the command in the notes, read again, gives the very same settings."""
    parser = ArgumentParser()
    commands.BENCHES["recipe"].add_flags(parser)
    words = "--contenders O2,pure --optimizer adamw --accumulate 4 --device cpu"
    given = parser.parse_args(words.split())
    _, command, *_ = measure.conditions("recipe", "cpu", given)
    repeated = command.removeprefix("halfstep bench recipe ").split()
    assert parser.parse_args(repeated) == given


REFUSALS = {
    "--contenders apex": "--contenders: 'apex' must be all or of fp32, torch.amp,",
    "--contenders O2,O2": "--contenders: 'O2' must stand there once",
    "--optimizer lbfgs": "--optimizer: 'lbfgs' is not one of",
    "--accumulate 0": "--accumulate: '0' must be a whole number of at least 1",
    "--steps -1": "--steps: '-1' must be a whole number of at least 1",
    "--dtype fp8": "--dtype: 'fp8' is not one of",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a flag that cannot be used is refused in one line that names it."""
    with pytest.raises(SystemExit) as left:
        cli.run(["bench", "recipe", *words.split()])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: error: argument {REFUSALS[words]}")

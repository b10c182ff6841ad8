"""Two and four processes of `halfstep train` against one: the same run, told once.

Started by `run_ranks`, this file is the program of one process; it trains every case.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import run_ranks
from processes import torchrun
from small_training import (
    assert_same_run,
    small_and_measured,
    without_figures,
    write_letters,
    write_marked,
)

from halfstep import cli
from halfstep.distributed import process_group
from halfstep.train import tasks
from halfstep.train.output.run_directory import RunFolder

TRAIN, DEV = 57, 9  # 57 = 8 * 7 + 1: one batch has a text for one process only
CASES = {
    "O0": ("--level", "O0", "--batch-size", "7", "--probe", "flags"),
    "O1": ("--level", "O1", "--dtype", "bf16", "--batch-size", "7"),
    "O2": (
        *("--level", "O2", "--dtype", "bf16", "--batch-size", "7"),
        *("--compare-fp32", "2"),
    ),
    "O2, accumulating": (
        *("--level", "O2", "--dtype", "bf16"),
        *("--batch-size", "8", "--accumulate", "2", "--compare-fp32", "2"),
    ),
    "O0, entities": (
        *("--task", "ner", "--level", "O0"),
        *("--batch-size", "8", "--accumulate", "2"),
    ),
}
FSDP2 = {"O0, in parts": "O0", "O2, in parts": "O2"}
"""Cases that two processes train with FSDP2 -> the same with DDP."""
FOUR = ("O0", "O2", "O0, in parts")
"""Cases that four processes train; of the last batch, three have no text."""
SAME = ("--lr", "5e-3", "--dropout", "0", "--mask-tokens", "0", "--epochs", "3")


def bound(case: str) -> float:
    """Return how far losses and gradient norms may lie apart, relatively.

    In fp32 only the order of sums differs. A bf16 gradient is rounded by 2**-9 of
    itself in each process; over all steps eight such roundings are allowed.
    """
    return 1e-5 if case.startswith("O0") else 8 * 2**-9


def small_dev_too(patch: pytest.MonkeyPatch) -> None:
    small_and_measured(patch)
    without_figures(patch)
    patch.setattr(tasks, "EVAL_BATCH", 4)


def command(folder: Path, case: str, *more: str) -> list[str]:
    name = "marked.jsonl" if "entities" in case else "letters.json"
    data, out = str(folder / name), str(folder / case)
    model = () if "--model" in more else ("--model", "mini")
    where = ("--data", data, "--config", str(folder / "share.toml"), "--out", out)
    parts = ("--parallel", "fsdp2") if case in FSDP2 else ()
    options = CASES[FSDP2.get(case, case)]
    return ["train", *where, *model, *SAME, *options, *parts, *more]


def write_data(folder: Path) -> None:
    write_letters(folder, TRAIN + DEV, "abc", "def", lengths=(2, 30))
    write_marked(folder, TRAIN + DEV)
    (folder / "share.toml").write_text(f"dev_share = {DEV / (TRAIN + DEV)}\n")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("one")
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_dev_too(patch)
        for case in CASES:
            assert cli.run(command(folder, case)) == 0
        yield folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write_data(folder)
    run_ranks(__file__, str(folder), timeout=300)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    write_data(folder)
    run_ranks(__file__, str(folder), *FOUR, processes=4, timeout=300)
    return folder


def process(folder: Path, *cases: str) -> None:
    told = {}
    orders = {case: command(folder, case) for case in cases or (*CASES, *FSDP2)}
    if not cases:
        orders["again"] = command(folder, "O0")
        orders["resume"] = ["train", "--resume", "--out", str(folder / "O2")]
    with pytest.MonkeyPatch.context() as patch, process_group.join("cpu") as world:
        small_dev_too(patch)
        # One process group for all: torchrun's store takes no second.
        patch.setattr(process_group, "join", lambda _: contextlib.nullcontext(world))
        for name, words in orders.items():
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = cli.run(words)
            told[name] = (status, out.getvalue(), err.getvalue())
    rank = os.environ["RANK"]
    (folder / f"told-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def told(two: Path, name: str) -> list[tuple[int, str, str]]:
    both = [json.loads((two / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    return [tuple(each[name]) for each in both]


def records(place: Path, event: str | None = None) -> list[dict[str, Any]]:
    return [r for r in RunFolder(place).records() if r.get("event") == event]


def assert_near(
    found: list[dict[str, Any]], right: list[dict[str, Any]], case: str
) -> None:
    """Hold that the steps of two runs are the same, within the bound of a case.

    A norm is compared where the weights are the same: in bf16 that is the first step.
    """
    steps = [[(r["step"], r["lr"]) for r in rows] for rows in (found, right)]
    assert steps[0] == steps[1]
    norms = len(right) if case.startswith("O0") else 1
    for key, count in (("loss", len(right)), ("grad_norm", norms)):
        values = [[r[key] for r in rows[:count]] for rows in (found, right)]
        assert values[0] == pytest.approx(values[1], rel=bound(case)), key


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_losses_of_four(one: Path, four: Path, case: str) -> None:
    """Law: four processes see the losses that one sees, step by step, and dev too."""
    alone, shared = one / FSDP2.get(case, case), four / case
    assert_near(records(shared), records(alone), case)
    evals = (records(each, "eval") for each in (shared, alone))
    for mine, theirs in zip(*evals, strict=True):
        assert mine["dev_loss"] == pytest.approx(theirs["dev_loss"], rel=bound(case))
    assert json.loads((shared / "summary.json").read_text())["processes"] == 4


@pytest.mark.parametrize("case", CASES)
def test_two_are_as_one(one: Path, two: Path, case: str) -> None:
    """Law: two processes see the losses that one sees, step by step.

    Nothing is counted twice in dev, or left out. One reports, and each is well.
    """
    alone, shared = records(one / case), records(two / case)
    assert_near(shared, alone, case)
    assert alone[-1]["loss"] < alone[0]["loss"] / 4
    evals = (records(each / case, "eval") for each in (one, two))
    for right, found in zip(*evals, strict=True):
        assert found["dev_loss"] == pytest.approx(right["dev_loss"], rel=bound(case))
        scores = {key for key in right if key.startswith("dev_")} - {"dev_loss"}
        assert scores
        if case.startswith("O0"):
            assert {k: found[k] for k in scores} == {k: right[k] for k in scores}
    summary = json.loads((two / case / "summary.json").read_text())
    assert summary["processes"] == 2
    if "entities" not in case:
        assert sum(row[4] for row in summary["dev"]["per_class"]) == DEV
    first, second = told(two, case)
    assert (first[0], first[2]) == (0, "")
    assert second == (0, "", "")
    assert first[1].count("Quality on dev") == 1
    assert first[1].count("report: ") == 1
    assert " on 2 processes" in first[1]
    lines = [(r["step"], r.get("event")) for r in RunFolder(two / case).records()]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("case", ["O2, accumulating", "O2, in parts"])
def test_compared_with_fp32(one: Path, two: Path, case: str) -> None:
    """Law: two processes compare the steps that one does."""
    alone, shared = (
        json.loads((run / "summary.json").read_text())["fp32"]["loss"]
        for run in (one / FSDP2.get(case, case), two / case)
    )
    assert shared["fp32"] == pytest.approx(alone["fp32"], rel=bound("O0"))
    assert shared["level"] == pytest.approx(alone["level"], rel=bound(case))


def test_resuming_with_as_many(two: Path) -> None:
    """Law: as many processes as before go on where they stopped.

    Without --resume a run is refused by every process, the reason given once.
    """
    first, second = told(two, "resume")
    assert (first[0], second) == (0, (0, "", ""))
    assert ", from step 27\n" in first[1]  # three times nine batches
    first, second = told(two, "again")
    assert first[:2] == second[:2] == (2, "")
    assert first[2].startswith(f"halfstep: error: {two / 'O0'} already holds a run")
    assert second[2] == first[2]


@pytest.mark.parametrize("case", ["O0", "O0, in parts"])
def test_resuming_with_fewer(
    one: Path, two: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: one process goes on with the run of two, in parts or not, and says so."""
    newest, before = RunFolder(two / case).steps()[:2]
    lost = shutil.ignore_patterns(f"step-{newest:08d}", "model", "summary.json")
    out = shutil.copytree(two / case, tmp_path / "run", ignore=lost)
    words = ("--resume", "--parallel", "ddp", "--out", str(out))
    assert cli.run(["train", *words]) == 0
    said = capsys.readouterr().out
    assert f", from step {before}\n" in said
    assert "the run was on 2 processes and is on 1: " in said
    assert_near(records(out), records(one / "O0"), case)


@pytest.mark.parametrize("case", FSDP2)
def test_in_parts(two: Path, case: str) -> None:
    """Law: FSDP2 sees the losses that DDP sees, step by step, and ends as well."""
    assert_near(records(two / case), records(two / FSDP2[case]), case)
    first, second = told(two, case)
    assert (first[0], first[2], second) == (0, "", (0, "", ""))
    assert " on 2 processes, fsdp2" in first[1]


def from_a_model(folder: Path, one: Path) -> list[str]:
    """Write data; return what trains a finished model: no size need be added.

    At a tenth of the rate at which it was trained from scratch: that one throws a
    finished model about, and so any rounding grows from step to step.
    """
    write_data(folder)
    return command(folder, "O2", "--model", str(one / "O0" / "model"), "--lr", "5e-4")


@pytest.mark.slow
def test_two_agents(one: Path, tmp_path: Path) -> None:
    """Law: two machines of one process each train as one machine of two, to the bit."""
    words = from_a_model(tmp_path, one)
    out = tmp_path / "O2"
    torchrun("-m", "halfstep", *words, timeout=300)
    one_machine = out.rename(tmp_path / "one machine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", port),
                *("-m", "halfstep", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [spoken.count("\nreport: ") for spoken, _ in said] == [1, 0]
    assert_same_run(out, one_machine)


if __name__ == "__main__":
    process(Path(sys.argv[1]), *sys.argv[2:])

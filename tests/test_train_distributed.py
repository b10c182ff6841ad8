"""Two processes of `halfstep train` against one: the same run, told once.

Started by torchrun, this file is the program of one process; it trains every case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import torchrun
from small_training import letters, one_thread, small_and_measured

from halfstep import cli, distributed
from halfstep.train import evaluate, result, text
from halfstep.train.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN, DEV = 57, 9  # 57 = 8 * 7 + 1: one batch has a text for one process only
CASES = {
    "O0": ("--level", "O0", "--batch-size", "7"),
    "O0, accumulating": ("--level", "O0", "--batch-size", "8", "--accumulate", "2"),
    "O1": ("--level", "O1", "--dtype", "bf16", "--batch-size", "7"),
    "O2": ("--level", "O2", "--dtype", "bf16", "--batch-size", "7"),
    "O2, accumulating": (
        *("--level", "O2", "--dtype", "bf16"),
        *("--batch-size", "8", "--accumulate", "2"),
    ),
}
SAME = ("--lr", "5e-3", "--dropout", "0", "--mask-tokens", "0", "--epochs", "3")


def bound(case: str) -> float:
    """Return how far losses and gradient norms may lie apart, relatively.

    In fp32 only the order of sums differs. A bf16 gradient is rounded by 2**-9 of
    itself in each process; over all steps eight such roundings are allowed.
    """
    return 1e-5 if case.startswith("O0") else 8 * 2**-9


def small_dev_too(patch: pytest.MonkeyPatch) -> None:
    """Train a small size, draw no figures; let a few texts fill a batch of dev."""
    small_and_measured(patch)
    patch.setattr(result, "page", lambda *_: "<html></html>")
    patch.setattr(evaluate, "EVAL_BATCH", 4)


def command(folder: Path, case: str, *more: str) -> list[str]:
    """Return the words that train a case into `folder / case`."""
    data, out = str(folder / "letters.json"), str(folder / case)
    model = () if "--model" in more else ("--model", "mini")
    share = ("--dev-share", str(DEV / (TRAIN + DEV)))
    where = ("--data", data, *share, "--out", out)
    return ["train", *where, *model, *SAME, *CASES[case], *more]


def write_letters(folder: Path) -> None:
    """Write texts of two alphabets and many lengths."""
    rows = letters(TRAIN + DEV, "abcx", "defx", lengths=(2, 30))
    (folder / "letters.json").write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Sums depend on how many threads share them."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of all cases, each trained by this process."""
    folder = tmp_path_factory.mktemp("one")
    write_letters(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_dev_too(patch)
        for case in CASES:
            assert cli.run(command(folder, case)) == 0
        yield folder


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all cases, each trained by two processes."""
    folder = tmp_path_factory.mktemp("two")
    write_letters(folder)
    torchrun(__file__, str(folder), str(one))
    return folder


def process(folder: Path, one: Path) -> None:
    """Do all of it in one of the processes that torchrun started."""
    told = {}
    orders = {case: command(folder, case) for case in CASES}
    orders["again"] = command(folder, "O0")
    orders["resume one's"] = ["train", "--resume", "--out", str(one / "O2")]
    orders["resume"] = ["train", "--resume", "--out", str(folder / "O2")]
    with pytest.MonkeyPatch.context() as patch, distributed.join("cpu") as world:
        small_dev_too(patch)
        # One process group for all: torchrun's store takes no second.
        patch.setattr(distributed, "join", lambda _: contextlib.nullcontext(world))
        for name, words in orders.items():
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = cli.run(words)
            told[name] = (status, out.getvalue(), err.getvalue())
    rank = os.environ["RANK"]
    (folder / f"told-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def told(two: Path, name: str) -> list[tuple[int, str, str]]:
    """Return status, output and errors of a command on each rank."""
    both = [json.loads((two / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    return [tuple(each[name]) for each in both]


def records(place: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of the steps, or of an event."""
    return [r for r in RunFolder(place).records() if r.get("event") == event]


@pytest.mark.parametrize("case", CASES)
def test_losses(one: Path, two: Path, case: str) -> None:
    """Law: two processes see the losses that one sees, step by step."""
    alone, shared = records(one / case), records(two / case)
    assert [r["step"] for r in shared] == [r["step"] for r in alone]
    assert [r["lr"] for r in shared] == [r["lr"] for r in alone]
    for key in ("loss", "grad_norm"):
        found, right = ([r[key] for r in rows] for rows in (shared, alone))
        assert found == pytest.approx(right, rel=bound(case)), key
    assert alone[-1]["loss"] < alone[0]["loss"] / 4


@pytest.mark.parametrize("case", CASES)
def test_dev(one: Path, two: Path, case: str) -> None:
    """Law: nothing is counted twice in dev, or left out."""
    for alone, shared in zip(
        records(one / case, "eval"), records(two / case, "eval"), strict=True
    ):
        assert shared["dev_loss"] == pytest.approx(alone["dev_loss"], rel=bound(case))
        if case.startswith("O0"):
            assert shared["dev_accuracy"] == alone["dev_accuracy"]
            assert shared["dev_macro_f1"] == alone["dev_macro_f1"]
    summary = json.loads((two / case / "summary.json").read_text())
    assert summary["processes"] == 2
    assert sum(row[4] for row in summary["dev"]["per_class"]) == DEV


@pytest.mark.parametrize("case", CASES)
def test_told_once(two: Path, case: str) -> None:
    """Law: of many processes one reports, and each is well."""
    first, second = told(two, case)
    assert (first[0], first[2]) == (0, "")
    assert second == (0, "", "")
    assert first[1].count("Quality on dev") == 1
    assert first[1].count("report: ") == 1
    assert " on 2 processes" in first[1]
    found = [(r["step"], r.get("event")) for r in RunFolder(two / case).records()]
    assert len(found) == len(set(found))


def test_resuming_with_as_many(two: Path) -> None:
    """Law: as many processes as before go on where they stopped."""
    first, second = told(two, "resume")
    assert (first[0], second) == (0, (0, "", ""))
    assert ", from step 27\n" in first[1]  # three times nine batches


def test_resuming_with_more(two: Path) -> None:
    """Law: another number of processes is refused, both numbers named."""
    for status, out, err in told(two, "resume one's"):
        assert (status, out) == (2, "")
        assert err == (
            "halfstep: error: --resume: the checkpoint was made by 1 processes, this "
            "is 2; resume with 1.\n"
        )


def test_resuming_with_fewer(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: another number of processes is refused, both numbers named."""
    capsys.readouterr()
    before = (two / "O2" / "metrics.jsonl").read_bytes()
    assert cli.run(["train", "--resume", "--out", str(two / "O2")]) == 2
    line = (
        "halfstep: error: --resume: the checkpoint was made by 2 processes, this is 1; "
        "resume with 2.\n"
    )
    assert capsys.readouterr() == ("", line)
    assert (two / "O2" / "metrics.jsonl").read_bytes() == before


def test_a_run_is_not_written_over(two: Path) -> None:
    """Law: an existing run is refused by every process, the reason given once."""
    first, second = told(two, "again")
    assert first[:2] == second[:2] == (2, "")
    assert first[2].startswith(f"halfstep: error: {two / 'O0'} already holds a run")
    assert second[2] == (
        "halfstep: error: the first process could not make the run's folder ready.\n"
    )


@pytest.mark.usefixtures("one")
def test_the_program_itself(tmp_path: Path) -> None:
    """Law: `torchrun -m halfstep train` trains as one process does, and speaks once."""
    write_letters(tmp_path)
    made = text.build("mini", ["abcdefx"] * 2, "01", max_length=32, dropout=0.0)
    RunFolder(tmp_path).publish_model(made.model, made.tokenizer)
    words = command(tmp_path, "O2", "--model", str(tmp_path / "model"))
    done = torchrun("-m", "halfstep", *words)
    assert done.stdout.count("\nreport: ") == 1
    shared = [r["loss"] for r in records(tmp_path / "O2")]
    assert cli.run([*words, "--overwrite"]) == 0
    alone = [r["loss"] for r in records(tmp_path / "O2")]
    assert shared == pytest.approx(alone, rel=bound("O2"))


if __name__ == "__main__":
    process(Path(sys.argv[1]), Path(sys.argv[2]))

"""What a run leaves: its data, and a comparison with an earlier run."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import Candidate, flags, planted_rates, rejected, rows, run

from halfstep.bench import results, training
from halfstep.errors import UserError
from halfstep.machine import hardware

SMALL = "--width 8 --batch 4 --steps 1 --rounds 3 --candidates fp32,O2 --device cpu"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_rates(monkeypatch)
    monkeypatch.setattr(training, "WorkerProcess", Candidate)


@pytest.fixture
def earlier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    file = tmp_path / "earlier.json"
    assert run("recipe", f"{SMALL} --json {file}") == 0
    capsys.readouterr()
    return file


def test_the_run_is_in_the_data(earlier: Path) -> None:
    """Law: the first table has settings, machine, versions and every time."""
    (table,) = json.loads(earlier.read_text(encoding="utf-8"))
    assert table["rows"][0]["candidate"] == "fp32"
    own = table["run"]
    assert own["workload"] == "recipe"
    assert own["settings"]["width"] == 8
    assert own["machine"]["processor"] == hardware.capabilities().cpu
    assert own["versions"]["torch"] == torch.__version__
    assert own["seconds"].keys() == {"fp32", "O2"}
    assert {len(each) for each in own["seconds"].values()} == {3}


def test_against(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: each time has a row, and the candidates may differ; so may the rounds."""
    words = SMALL.replace("--rounds 3", "--rounds 4").replace("fp32,O2", "O2,O1")
    assert run("recipe", f"{words} --against {earlier}") == 0
    out = capsys.readouterr().out
    assert "Against an earlier run" in out
    assert "\nO2 " in out.partition("Against")[2]


def test_ratios_to_an_earlier_run(tmp_path: Path) -> None:
    """Law: a ratio is of medians; within the spread of both runs it is none.

    Of 1, 2, 3 and 2, 4, 6 half of the interquartile range is a quarter of the median.
    """
    versions = {"torch": "2.0"}
    before = {"a": [1.0, 2.0, 3.0], "b": [2.0] * 3, "c": [2.0], "d": [1.0]}
    now = {"a": [2.0, 4.0, 6.0], "b": [1.0] * 3, "c": [1.0], "e": [1.0]}
    table = results.against(tmp_path, {"seconds": before, "versions": versions}, now)
    a, b, c, e = rows(table)
    assert (a["ms before"], a["ms now"], a["x before"]) == (2000.0, 4000.0, 2.0)
    assert a["+-"] == 2 * (1 / 4 + 1 / 4)
    assert a["result"] == "no difference beyond the spread"
    assert (b["x before"], b["+-"], b["result"]) == (0.5, 0.0, "faster")
    assert (c["x before"], c["result"]) == (0.5, None)  # of one round
    assert (e["ms before"], e["x before"]) == (None, None)


def test_other_settings_are_rejected(
    earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a run with other settings is rejected, with the first that differs."""
    for words, line in (
        ("--width 4", "--width was 8 there and is 4 here; "),
        ("--steps 2", "--steps was 1 there and is 2 here; "),
    ):
        got = rejected("recipe", f"{SMALL} {words} --against {earlier}", capsys)
        assert got.startswith(f"--against {earlier}: {line}")


def test_another_machine_is_rejected(earlier: Path) -> None:
    """Law: a run of another machine or workload is rejected by name."""
    whole: Any = json.loads(earlier.read_text(encoding="utf-8"))
    whole[0]["run"]["machine"]["processor"] = "Abacus"
    earlier.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UserError, match="processor was Abacus there and is "):
        results.load_earlier(earlier, flags("recipe", SMALL))
    with pytest.raises(UserError, match="workload was recipe there and is ner"):
        results.load_earlier(earlier, flags("ner", ""))


def test_no_run(tmp_path: Path) -> None:
    """Law: what is no run of a bench is rejected, with what is one."""
    file = tmp_path / "other.json"
    arguments = flags("recipe", SMALL)
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        results.load_earlier(file, arguments)
    run: Any = {"workload": "recipe", "settings": {}, "machine": {}, "seconds": {}}
    broken = [{**run, key: [0]} for key in ("settings", "machine", "seconds")]
    broken += [{}, run | {"seconds": {"torch": ["x"]}}]
    texts = [json.dumps([{"run": each}]) for each in broken]
    for text in ("[]", "{", '[{"rows": []}]', *texts):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="holds no run of halfstep bench: use its"):
            results.load_earlier(file, arguments)


REPEATED = {
    "recipe": "--candidates O2,pure --optimizer adamw --accumulate 4 --device cpu",
    "encoder": "--candidates 'O1 lean,O1 torch' --dropout 0.25 --heads 1 --device cpu",
    "conv": "--format channels-last --dtype fp16 --lr 1e-3 --device cpu",
    "ner": "--data x --lr 1e-3,1e-4 --mask-tokens 0.1 --batch-size 8 --device cpu",
}


@pytest.mark.parametrize("bench", REPEATED)
def test_the_command_repeats_the_run(bench: str) -> None:
    """Law: the command in the notes, read again, gives the very same settings."""
    given = flags(bench, REPEATED[bench])
    when_where, command = results.conditions(given)
    program, word, name, *words = shlex.split(command)
    assert (program, word, name) == ("halfstep", "bench", bench)
    assert flags(bench, shlex.join(words)) == given
    facts = hardware.capabilities()
    for text in (time.strftime("%Y-"), f"torch {torch.__version__}", facts.cpu):
        assert text in when_where
    assert when_where.endswith(f", threads: {torch.get_num_threads()}")


def test_tunables_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what changes the allocator for all candidates stands in the notes."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    notes = results.conditions(flags("recipe", ""))
    assert notes[-1] == "GLIBC_TUNABLES=glibc.malloc.mmap_max=0"

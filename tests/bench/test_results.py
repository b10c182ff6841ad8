"""What a run leaves: its data, a comparison with an earlier run, a picture."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import flags, rejected, rows, run

from halfstep.bench import results
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.reporting.table import Table

SMALL = "--shapes 2x2 --optimizer none --calls 1 --rounds 3 --device cpu"


@pytest.fixture
def earlier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    file = tmp_path / "earlier.json"
    assert run("scaler", f"{SMALL} --json {file}") == 0
    capsys.readouterr()
    return file


def test_the_run_is_in_the_data(earlier: Path) -> None:
    """Law: the first table has settings, machine, versions and every time."""
    (table,) = json.loads(earlier.read_text(encoding="utf-8"))
    assert table["rows"][0]["optimizer"] == "none"
    own = table["run"]
    assert own["workload"] == "scaler"
    assert own["settings"]["shapes"] == ["2x2"]
    assert own["machine"]["processor"] == hardware.capabilities().cpu
    assert own["versions"]["torch"] == torch.__version__
    names = {f"2x2, none: {each}" for each in ("bare", "torch", "halfstep")}
    assert own["seconds"].keys() == names
    assert {len(each) for each in own["seconds"].values()} == {3}


def test_against(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: each time has a row, and the candidates may differ; so may the rounds."""
    words = SMALL.replace("--rounds 3", "--rounds 4")
    assert run("scaler", f"{words} --against {earlier}") == 0
    out = capsys.readouterr().out
    assert "Against an earlier run" in out
    assert "\n2x2, none: halfstep " in out


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
        ("--shapes 3x2", "--shapes was ['2x2'] there and is ['3x2'] here; "),
        ("--calls 2", "--calls was 1 there and is 2 here; "),
    ):
        got = rejected("scaler", f"{SMALL} {words} --against {earlier}", capsys)
        assert got.startswith(f"--against {earlier}: {line}")


def test_another_machine_is_rejected(earlier: Path) -> None:
    """Law: a run of another machine or workload is rejected by name."""
    whole: Any = json.loads(earlier.read_text(encoding="utf-8"))
    whole[0]["run"]["machine"]["processor"] = "Abacus"
    earlier.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UserError, match="processor was Abacus there and is "):
        results.load_earlier(earlier, flags("scaler", SMALL))
    with pytest.raises(UserError, match="workload was scaler there and is comm"):
        results.load_earlier(earlier, flags("comm", ""))


def test_no_run(tmp_path: Path) -> None:
    """Law: what is no run of a bench is rejected, with what is one."""
    file = tmp_path / "other.json"
    arguments = flags("scaler", SMALL)
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        results.load_earlier(file, arguments)
    run: Any = {"workload": "scaler", "settings": {}, "machine": {}, "seconds": {}}
    broken = [{**run, key: [0]} for key in ("settings", "machine", "seconds")]
    broken += [{}, run | {"seconds": {"torch": ["x"]}}]
    texts = [json.dumps([{"run": each}]) for each in broken]
    for text in ("[]", "{", '[{"rows": []}]', *texts):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="holds no run of halfstep bench: use its"):
            results.load_earlier(file, arguments)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    """Law: each row with a figure becomes a bar, in the format of the suffix."""
    cells = (("fp32", 2.0, 0.1), ("O2", 0.5, 0.1), ("O3", None, None))
    table = Table("Times", ("candidate", "x torch.amp", "+-"), cells)
    file = tmp_path / f"bars.{suffix}"
    results.plot([table], file)
    head = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert file.read_bytes().startswith(head)


def test_nothing_to_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: where all candidates were rejected, a line says so."""
    table = Table("Times", ("candidate", "x torch.amp"), (("O3", None),))
    results.plot([table], tmp_path / "x.svg")
    assert "nothing was measured that could be drawn" in capsys.readouterr().err


def test_plots_that_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a suffix, a folder or a library that is missing is named at the start."""
    with pytest.raises(UserError, match=r"x.pdf must end in .png or .svg\."):
        results.check_plot(tmp_path / "x.pdf")
    with pytest.raises(UserError, match="there is no folder "):
        results.check_plot(tmp_path / "none" / "x.svg")
    monkeypatch.setattr(results, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--plot needs matplotlib: pip install "):
        results.check_plot(tmp_path / "x.svg")


REPEATED = {
    "autocast": "--sizes 3,5 --dtype fp16 --device cpu",
    "recipe": "--candidates O2,pure --optimizer adamw --accumulate 4 --device cpu",
    "encoder": "--candidates 'O1 lean,O1 torch' --dropout 0.25 --heads 1 --device cpu",
    "optimizer": "--forms split,torch-fused --optimizer adam --width 8 --device cpu",
    "quality": "--data x --share 0.5 --candidates O2-split,fp32 --device cpu",
    "ner": "--lr 1e-3 --mask-tokens 0.1 --batch-size 8 --device cpu",
    "probe": "--loop 'O1 lean' --device cpu",
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
    notes = results.conditions(flags("autocast", ""))
    assert notes[-1] == "GLIBC_TUNABLES=glibc.malloc.mmap_max=0"

"""`halfstep bench` on the command line: help, data, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halfstep import cli
from halfstep.bench import commands

if TYPE_CHECKING:
    from pathlib import Path

AUTOCAST = ("bench", "autocast", "--sizes", "2", "--calls", "1", "--rounds", "1")


def leave(*words: str) -> int:
    """Run a command; return its exit status, however it leaves."""
    try:
        return cli.run(words)
    except SystemExit as left:
        return int(str(left.code))


def test_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: every bench stands in the help of `bench`, with what it is for."""
    assert leave("bench", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for word, bench in commands.BENCHES.items():
        assert f"{word} {bench.summary}" in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: what is printed is in the data too, numbers as numbers."""
    place = tmp_path / "found.json"
    assert leave(*AUTOCAST, "--device", "cpu", "--json", str(place)) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "stock operations, size 2: done",
        "operations under rules, size 2: done",
    ]
    tables: list[Any] = json.loads(place.read_text(encoding="utf-8"))
    assert len(tables) == 4
    for table in tables:
        assert f"{table['title']}\n" in out
        assert all(isinstance(row[table["columns"][2]], float) for row in table["rows"])


WHOLE = "must be a whole number of at least 1"
SHARE = "must be a number from 0 to below 1"
REFUSALS = {
    "autocast --rounds 0": f"--rounds: '0' {WHOLE}",
    "autocast --calls -5": f"--calls: '-5' {WHOLE}",
    "autocast --sizes 8,x": f"--sizes: 'x' {WHOLE}",
    "accumulate --width 1.5": f"--width: '1.5' {WHOLE}",
    "accumulate --dtype x": "--dtype: 'x' is not one of bf16, fp16",
    "encoder --device x": "--device: 'x' is not one of cpu, cuda",
    "encoder --dropout 1": f"--dropout: '1' {SHARE}",
    "encoder --lr quick": f"--lr: 'quick' {SHARE}",
}
"""Words after `halfstep bench` -> what is said of them."""


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a flag that cannot be used is refused in one line that names it."""
    bench, *flags = words.split()
    assert leave("bench", bench, *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    more = f"see halfstep bench {bench} --help"
    assert err == f"halfstep: error: argument {REFUSALS[words]}; {more}\n"


@pytest.mark.parametrize("bench", ["autocast", "accumulate", "encoder"])
def test_no_cuda(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: --device cuda without CUDA is refused by each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert leave("bench", bench, "--device", "cuda") == 2
    assert capsys.readouterr().err == (
        "halfstep: error: --device cuda: torch sees no CUDA device here; use --device "
        "cpu.\n"
    )


def test_flags_load_no_torch() -> None:
    """Law: to know the flags of every bench takes no torch."""
    program = "import sys, halfstep.bench.commands; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"

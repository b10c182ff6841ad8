"""`halfstep bench` on the command line: help, data, and what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import flags, rejected, run

from halfstep import cli
from halfstep.bench import commands
from halfstep.bench.jobs import NER


def test_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: every bench stands in the help of `bench`, with what it is for."""
    with pytest.raises(SystemExit):
        cli.run(["bench", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for name, bench in commands.BENCHES.items():
        assert f"{name} {bench.summary}" in out


def test_help_describes_the_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the help has a line for each candidate."""
    for bench in ("recipe", "encoder", "plan"):
        assert run(bench, "--help") == 0
        lines = capsys.readouterr().out.splitlines()
        lines = lines[lines.index("candidates:") + 1 :]
        named = [line[2:].partition("  ")[0] for line in lines]
        assert named == list(commands.load(bench).candidates or ())


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: what is printed is in the data too, numbers as numbers."""
    file = tmp_path / "result.json"
    words = f"--sizes 2 --calls 1 --rounds 1 --device cpu --json {file}"
    assert run("autocast", words) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "stock operations, size 2: done",
        "operations under rules, size 2: done",
    ]
    tables: list[Any] = json.loads(file.read_text(encoding="utf-8"))
    assert len(tables) == 3
    for table in tables:
        assert f"{table['title']}\n" in out
        assert all(isinstance(row[table["columns"][2]], float) for row in table["rows"])


WHOLE = "must be a whole number of at least 1"
SHARE = "must be a number from 0 to below 1"
SHAPE = "must be a number of tensors x a size, such as 3x4096"
STEPPED = "must be all or of none, sgd, adamw, sgd-fused, adamw-fused"
REJECTED = {
    "autocast --rounds 0": f"'0' {WHOLE}",
    "autocast --calls -5": f"'-5' {WHOLE}",
    "autocast --sizes 8,x": f"'x' {WHOLE}",
    "recipe --width 1.5": f"'1.5' {WHOLE}",
    "recipe --dtype x": "'x' is not one of bf16, fp16",
    "recipe --optimizer lbfgs": "'lbfgs' is not one of sgd, sgd-momentum, adamw",
    "encoder --device x": "'x' is not one of cpu, cuda",
    "encoder --dropout 1": f"'1' {SHARE}",
    "encoder --lr quick": f"'quick' {SHARE}",
    "ner --lr 1e-3,0": "'0' must be a number above 0",
    "ner --lr 1e-3,0.001": "'1e-3' must stand there once, to six digits",
    "ner --lr nan": "'nan' must be a number above 0",
    "recipe --candidates apex": "'apex' must be all or of fp32, torch.amp,",
    "recipe --candidates O2,O2": "'O2' must stand there once",
    "optimizer --forms apex": "'apex' must be all or of fp32, split,",
    "scaler --optimizer sgd,": f"'' {STEPPED}",
    "scaler --shapes 3": f"'3' {SHAPE}",
    "scaler --shapes 3x0": f"'3x0' {SHAPE}",
    "scaler --shapes 3x4x5": f"'3x4x5' {SHAPE}",
    "scaler --shapes 3x4,x4": f"'x4' {SHAPE}",
}
"""Words after `halfstep bench` -> how the value is rejected."""


@pytest.mark.parametrize("words", REJECTED)
def test_bad_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a flag that cannot be used is rejected in one line that names it."""
    bench, _, more = words.partition(" ")
    line = rejected(bench, more, capsys)
    assert line.startswith(f"argument {more.split()[0]}: {REJECTED[words]}")
    assert line.endswith(f"; see halfstep bench {bench} --help")


def test_names() -> None:
    """Law: "all" are all candidates, in the order of the help, as is the default."""
    assert flags("ner", "").candidates == [*NER]
    assert flags("scaler", "--optimizer all").optimizer == [
        *("none", "sgd", "adamw", "sgd-fused", "adamw-fused")
    ]
    assert flags("recipe", "--candidates O2,fp32").candidates == ["O2", "fp32"]


def test_no_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: --device cuda without CUDA is rejected by each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bench in ("autocast", "encoder", "scaler", "optimizer", "recipe", "quality"):
        assert rejected(bench, "--device cuda", capsys) == (
            "--device cuda: torch sees no CUDA device here; use --device cpu."
        )

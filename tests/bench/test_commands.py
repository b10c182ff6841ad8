"""`halfstep bench` on the command line: help, data, and what is rejected."""

import json
from pathlib import Path

import pytest
import torch
from bench_runs import Candidate, flags, planted_rates, rejected, run

from halfstep import cli
from halfstep.bench import commands, training
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
    for bench in ("recipe", "encoder"):
        assert run(bench, "--help") == 0
        lines = capsys.readouterr().out.splitlines()
        lines = lines[lines.index("candidates:") + 1 :]
        named = [line[2:].partition("  ")[0] for line in lines]
        assert named == list(commands.load(bench).candidates or ())


def test_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what is printed is in the data too, numbers as numbers."""
    planted_rates(monkeypatch)
    monkeypatch.setattr(training, "WorkerProcess", Candidate)
    file = tmp_path / "result.json"
    words = "--width 8 --batch 4 --rounds 1 --steps 1 --candidates fp32,O2"
    assert run("recipe", f"{words} --device cpu --json {file}") == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["fp32: ready", "O2: ready"]
    (table,) = json.loads(file.read_text(encoding="utf-8"))
    assert f"{table['title']}\n" in out
    assert all(isinstance(row["ms a step"], float) for row in table["rows"])


WHOLE = "must be a whole number of at least 1"
SHARE = "must be a number from 0 to below 1"
REJECTED = {
    "recipe --rounds 0": f"'0' {WHOLE}",
    "recipe --steps -5": f"'-5' {WHOLE}",
    "recipe --batch x": f"'x' {WHOLE}",
    "recipe --width 1.5": f"'1.5' {WHOLE}",
    "recipe --dtype x": "'x' is not one of bf16, fp16",
    "recipe --optimizer lbfgs": "'lbfgs' is not one of sgd, sgd-momentum, adamw",
    "encoder --device x": "'x' is not one of cpu, cuda",
    "encoder --dropout 1": f"'1' {SHARE}",
    "encoder --lr quick": f"'quick' {SHARE}",
    "ner --lr 1e-3,0": "'0' must be a number above 0",
    "ner --lr nan": "'nan' must be a number above 0",
    "recipe --candidates apex": "'apex' must be all or of fp32, torch.amp,",
    "recipe --candidates O2,": "'' must be all or of fp32, torch.amp,",
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
    """Law: "all" are all candidates, in the order of the help, as is the default.

    One that is named twice counts once.
    """
    assert flags("ner", "").candidates == [*NER]
    assert flags("ner", "--candidates all").candidates == [*NER]
    assert flags("recipe", "--candidates O2,fp32,O2").candidates == ["O2", "fp32"]


def test_no_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: --device cuda without CUDA is rejected by each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bench in ("recipe", "encoder", "ner"):
        assert rejected(bench, "--device cuda", capsys) == (
            "--device cuda: torch sees no CUDA device here; use --device cpu."
        )

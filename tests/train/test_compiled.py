"""Whole runs with --compile: the same training, and the same after a restart."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import (
    assert_same_run,
    interrupt_before,
    small_settings,
    steps_of,
    write_letters,
)

from halfstep.train.run import run

pytestmark = [
    pytest.mark.usefixtures("small_runs"),
    pytest.mark.slow,  # the first batches take half a minute to compile
    # torch's own, on the way into its compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
STEPS = 6


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a run of a few steps without dropout."""
    source = write_letters(tmp_path, 106)
    more = {"dropout": 0.0, "mask_tokens": 0.0, "lr": 1e-3, "epochs": 1}
    return small_settings(tmp_path, source, eval_every=3, **more)


@pytest.mark.parametrize(
    ("level", "dtype", "tolerance"), [("O0", "auto", 1e-5), ("O2", "bf16", 2**-6)]
)
def test_compiled_is_eager(
    settings: dict[str, Any], tmp_path: Path, level: str, dtype: str, tolerance: float
) -> None:
    """Law: a compiled run takes the steps of an eager one, to the format's rounding."""
    found = []
    for compiled in (False, True):
        more = {"compile": compiled, "level": level, "dtype": dtype}
        out = tmp_path / f"compiled-{compiled}"
        result = run(settings | more | {"out": str(out)})
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        assert config["compile"] is compiled
        found.append(steps_of(result.folder.records()))
    eager, compiled_run = ([record["loss"] for record in each] for each in found)
    assert len(eager) == STEPS
    assert compiled_run == pytest.approx(eager, rel=tolerance)
    assert eager[-1] < eager[0]


def test_resumed(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a compiled run that is cut off goes on to the same end."""
    given = settings | {"compile": True, "level": "O2", "dtype": "bf16"}
    whole = run(given | {"out": str(tmp_path / "whole")})
    interrupt_before(monkeypatch, STEPS - 1)
    with pytest.raises(KeyboardInterrupt):
        run(given | {"out": str(tmp_path / "cut")})
    torch.compiler.reset()
    again = run({"out": str(tmp_path / "cut")}, resume=True)
    assert_same_run(again.folder.path, whole.folder.path)

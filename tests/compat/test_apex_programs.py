"""A whole program of apex, run with nothing changed but what `import apex` finds."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apex_programs.process import LEVELS, fresh
from forks import run_ranks

from halfstep.compat import apex

PROGRAMS = Path(__file__).parents[1] / "support" / "apex_programs"


@pytest.fixture(autouse=True)
def _apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("apex", "apex.amp", "apex.optimizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    apex.install()
    with fresh():
        yield
    for name in list(sys.modules):
        if name.partition(".")[0] in {"apex", "amp_C"}:
            del sys.modules[name]


def program(name: str) -> Callable[..., Any]:
    main: Callable[..., Any] = runpy.run_path(str(PROGRAMS / f"{name}.py"))["main"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return main(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*((level, []) for level in LEVELS), ("O2", ["--larc"]), ("O1", ["--fused"])],
)
def test_imagenet(level: str, optimizer: list[str], tmp_path: Path) -> None:
    """Law: apex's example learns at every level, and resumes to the bit."""
    run = program("imagenet")
    words = ["--opt-level", level, *optimizer, "--save", str(tmp_path / "c")]
    whole = run(words)
    (loss, *_), (last, _, right) = whole
    assert last < loss
    assert right > 75  # per cent; a quarter is chance
    assert run([*words, "--resume", str(tmp_path / "c.1")]) == whole[1:]


def test_two_processes() -> None:
    """Law: ranks that began apart hold equal masters; an inf on one skips on both."""
    first, _ = run_ranks(str(PROGRAMS / "ranks.py"))
    (line,) = [line for line in first.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert set(found) == set(LEVELS)
    for level, seen in found.items():
        expected = {
            "masters equal": True,
            "models equal": True,
            "model is master": True,
            "learnt": True,
            "scales": [65536.0, 32768.0, 32768.0],
        }
        assert seen == expected, level

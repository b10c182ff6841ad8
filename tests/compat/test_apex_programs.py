"""Whole programs of apex, run with nothing changed but what `import apex` finds."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from apex_programs.process import LEVELS, fresh
from processes import torchrun
from small_training import one_thread, same

from halfstep.compat import apex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS = Path(__file__).parents[1] / "support" / "apex_programs"


@pytest.fixture(autouse=True)
def _apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("apex", "apex.amp", "apex.optimizers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    apex.install()
    with one_thread(), fresh():
        yield
    for name in list(sys.modules):
        if name.partition(".")[0] in {"apex", "amp_C"}:
            del sys.modules[name]


def program(name: str) -> Callable[..., Any]:
    """Return a program's main function."""
    main: Callable[..., Any] = runpy.run_path(str(PROGRAMS / f"{name}.py"))["main"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return main(*args, **kwargs)

    return run


def test_only_the_import_is_needed() -> None:
    """Law: the programs import apex, and have no word of us."""
    for name in ("dcgan", "classifier", "accumulate", "imagenet"):
        text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
        assert "from apex import amp" in text
        assert "halfstep" not in text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dcgan(level: str) -> None:
    """Law: two optimizers with three losses train as fp32 does; the twin learns."""
    run = program("dcgan")
    fp32, mixed = run("O0"), run(level)
    assert sum(fp32[-1][:2]) < sum(fp32[0][:2]) / 2
    assert sum(mixed[-1][:2]) < sum(mixed[0][:2]) / 2
    # The first losses are of equal weights: logits below 4 through 6 fp16 layers.
    for one, other in zip(mixed[0][:2], fp32[0][:2], strict=True):
        assert one == pytest.approx(other, abs=6 * 4 * 2.0**-11)


@pytest.mark.parametrize("level", LEVELS)
def test_classifier_learns_and_resumes(level: str) -> None:
    """Law: it learns at every level; stopped and resumed, it is the same to the bit."""
    run = partial(program("classifier"), level)
    whole = run()
    assert whole["losses"][-1] < whole["losses"][0]
    assert whole["accuracy"] > 0.75  # of four classes
    half = run(steps=11)
    rest = run(start=11, checkpoint=half["checkpoint"])
    assert half["losses"] + rest["losses"] == whole["losses"]
    assert same(rest["checkpoint"], whole["checkpoint"])


def test_levels_agree() -> None:
    """Law: after one step all levels have the loss of fp32, as fp16 holds it."""
    run = program("classifier")
    first = {level: run(level, steps=1)["losses"][0] for level in LEVELS}
    for level in LEVELS:
        # Logits below 4 through five fp16 layers.
        assert first[level] == pytest.approx(first["O0"], abs=5 * 4 * 2.0**-11)


GRID = list(
    itertools.product(
        LEVELS, (None, "1.0", "128.0", "dynamic"), (None, "True", "False")
    )
)


@pytest.mark.parametrize(("level", "scale", "keep"), GRID)
def test_runs_repeat(level: str, scale: str | None, keep: str | None) -> None:
    """Law: levels x scales x batch norms: two runs are one, to the bit."""
    keep = None if level == "O1" else keep
    run = partial(program("classifier"), level, keep, scale, 3)
    first, second = run(), run()
    assert same(first, second)
    assert all(map(torch.isfinite, map(torch.tensor, first["losses"])))


@pytest.mark.parametrize("level", LEVELS)
def test_scales_do_not_change_fp32(level: str) -> None:
    """Law: a power of two as a scale changes no bit where gradients are fp32."""
    run = partial(program("classifier"), level, steps=3)
    one, other = run(loss_scale="1.0"), run(loss_scale="128.0")
    assert same(one["checkpoint"]["model"], other["checkpoint"]["model"]) == (
        level == "O0"
    )


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation(level: str) -> None:
    """Law: sums with delay_unscale and without are alike, and both learn."""
    run = program("accumulate")
    late, weights = run(level, delay=True)
    soon, others = run(level, delay=False)
    assert late[-1] < late[0] / 2
    assert soon[-1] < soon[0] / 2
    if level == "O0":
        assert same((late, weights), (soon, others))
    # The sum is made in fp16 at O2 and O3, and the rate bounds what a step moves.
    for one, other in zip(weights, others, strict=True):
        assert (one - other).abs().max() <= 2 * 10 * 0.02


@pytest.mark.parametrize("optimizer", [[], ["--larc"], ["--fused"]])
@pytest.mark.parametrize("level", LEVELS)
def test_imagenet(level: str, optimizer: list[str], tmp_path: Path) -> None:
    """Law: apex's example learns at every level, and resumes to the bit."""
    run = program("imagenet")
    words = ["--opt-level", level, *optimizer, "--save", str(tmp_path / "c")]
    whole = run(words)
    (loss, *_), (last, _, right) = whole
    assert last < loss
    assert right > 75  # per cent; a quarter is chance
    assert run([*words, "--resume", str(tmp_path / "c.1")]) == whole[1:]


def test_imagenet_with_the_imports_edited() -> None:
    """Law: with its imports edited it needs no alias, and gives the same numbers."""
    words = ["--opt-level", "O2", "--loss-scale", "128.0", "--sync_bn"]
    words += ["--keep-batchnorm-fp32", "True", "--epochs", "1"]
    text = (PROGRAMS / "imagenet.py").read_text(encoding="utf-8")
    edited = text.replace("from apex", "from halfstep.compat.apex")
    assert "import apex" not in edited
    names: dict[str, Any] = {"__name__": "edited"}
    exec(edited, names)  # noqa: S102 -- a program is what is tested
    with fresh():
        found = names["main"]([word for word in words if word != "--sync_bn"])
    assert found == program("imagenet")([w for w in words if w != "--sync_bn"])


def test_two_processes() -> None:
    """Law: ranks that began apart hold equal masters; an inf on one skips on both."""
    done = torchrun(str(PROGRAMS / "ranks.py"))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
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

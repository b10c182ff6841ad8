"""Programs in examples/ run, and end where those end that they replace."""

import functools
import importlib.util
import json
import math
from typing import Any

import pytest
import torch
from forks import run_forked, run_ranks
from tests.examples import page, programs
from tests.examples.programs import Program

from halfstep import LossScaleCollapse

MAX_LINES = 80
AFTERS = [p for folder in programs.folders() for p in programs.afters(folder)]
TOLERANCE = {"lbfgs": 1.0, "sam": 0.05, "several_models": 0.05}
"""Beyond rounding: what a line search, or steps that are skipped at first, do."""
NO_FP16 = {
    "packed_sequences": "torch has no fp16 LSTM for CPUs",
    "custom_function_fp32": "its first steps overflow under torch.amp, too",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:dtype=fp16. this cpu runs"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def runnable(program: Program, dtype: str = "bfloat16") -> Program:
    """Return a program in a format, or skip what cannot run here."""
    if program.folder == "cuda_graphs" and not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a GPU")
    if "from apex import" in program.text and not importlib.util.find_spec("apex"):
        pytest.skip("apex is not installed")
    return program.with_dtype(dtype)


def output(program: Program) -> str:
    """Return what a program prints; some cannot run in this process."""
    if not (program.needs_torchrun or program.needs_own_process):
        return program.run()
    with program.file() as file:
        if program.needs_torchrun:
            processes = min(2, torch.cuda.device_count()) or 2
            ended = run_ranks(str(file), processes=processes, timeout=300)
        else:
            variable = "bf16" if program.form == "run" else ""
            ended = run_forked(str(file), environments=[{"HALFSTEP": variable}])
    assert not any(each.returncode for each in ended), ended[0].stderr
    return "".join(each.stdout for each in ended)


@functools.cache
def loss_before(folder: str, dtype: str) -> float:
    """Return the last loss of what a program replaces."""
    return programs.final_loss(output(runnable(programs.before(folder), dtype)))


def check_same_end(program: Program, dtype: str) -> None:
    """Run a program and the one it replaces."""
    loss = programs.final_loss(output(runnable(program, dtype)))
    expected = loss_before(program.folder, dtype)
    tolerance = TOLERANCE.get(program.folder, 0.02)
    if program.form == "drop_in" and program.folder not in TOLERANCE:
        tolerance = 0.0
    assert loss == pytest.approx(expected, rel=tolerance, abs=1e-9)


def check_overflow(program: Program) -> None:
    """Run the program that never learns, or the one that names and fixes the cause."""
    assert math.isnan(programs.final_loss(programs.before("overflow").run()))
    if program.form == "drop_in":
        with pytest.raises(LossScaleCollapse, match=r"linear .* float16 holds 65504"):
            program.run()
    else:
        printed = program.run()
        assert "LossScaleCollapse: 17 steps in a row were skipped" in printed
        assert "narrow (linear) produced inf" in printed
        assert "policy='lean + module:narrow=fp32'" in printed
        assert programs.final_loss(printed) < 1


@pytest.mark.parametrize("program", AFTERS, ids=lambda p: f"{p.folder}-{p.form}")
def test_same_end(program: Program) -> None:
    """Law: the last loss is the original's within rounding; of a drop-in, the same."""
    if program.folder == "overflow":
        check_overflow(program)
        return
    if program.folder == "apex":
        assert programs.final_loss(output(program)) < 1  # the data's variance
        return
    check_same_end(program, "bfloat16")


@pytest.mark.parametrize(
    "program",
    [p for p in AFTERS if "else torch.bfloat16" in p.text and not p.needs_torchrun],
    ids=lambda p: f"{p.folder}-{p.form}",
)
def test_with_a_loss_scale(program: Program) -> None:
    """Law: the same with fp16 on a CPU, where losses are scaled."""
    if program.folder in NO_FP16:
        pytest.skip(NO_FP16[program.folder])
    check_same_end(program, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("program", AFTERS, ids=lambda p: f"{p.folder}-{p.form}")
def test_on_a_gpu(program: Program) -> None:
    """Law: the same on a GPU, where the format is fp16."""
    if program.folder in {"apex", "ddp_several_devices"}:
        pytest.skip("it needs apex, or several GPUs")
    if program.folder == "overflow":
        check_overflow(program)
    else:
        check_same_end(program, "bfloat16")


@pytest.mark.parametrize("folder", programs.folders())
def test_they_are_short(folder: str) -> None:
    """Law: a program fits on a page, and says what it is."""
    for program in (programs.before(folder), *programs.afters(folder)):
        assert len(program.text.splitlines()) <= MAX_LINES
        assert program.text.startswith('"""')
        assert program.summary.endswith((".", ").", ":"))


@pytest.mark.parametrize(
    "program", [p for p in AFTERS if p.is_adapter], ids=lambda p: p.folder
)
def test_an_adapter_changes_two_lines(program: Program) -> None:
    """Law: a program of another library trains at a level after at most two lines."""
    assert program.changed_lines(programs.before(program.folder)) <= 2


def test_the_page_is_up_to_date() -> None:
    """Law: docs/examples.md is what `python -m tests.examples.page` writes."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page()


def test_the_notebook() -> None:
    """Law: its cells run from the first to the last."""
    notebook = json.loads((programs.FOLDER / "first_steps.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {}
    cells = [
        "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"
    ]
    for cell in cells:
        exec(compile(cell, "first_steps.ipynb", "exec"), names)  # noqa: S102
    assert names["losses"][-1] < names["losses"][0]

"""Plans are files: written, read, edited, and refused where they do not fit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.graph import Plan, load_plan


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).split(8, dim=-1)
        hidden = value * gate.exp()
        scores: Tensor = self.down(hidden)
        counts = torch.ones(4)
        counts += 1
        return scores * counts


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, list[Tensor], Plan]:
    torch.manual_seed(0)
    model, inputs = Gated(), [torch.randn(4, 8)]
    return model, inputs, hs.plan(model, inputs, method="painting")


@pytest.fixture
def saved(planned: Any, tmp_path: Path) -> tuple[nn.Module, list[Tensor], Plan, Path]:
    path = tmp_path / "plan.toml"
    planned[2].save(path)
    return *planned, path


def test_what_is_written_is_read(saved: Any) -> None:
    """Law: a plan is the same from its file, and so is what it makes of the model."""
    model, inputs, plan, path = saved
    again = load_plan(path, model, inputs)
    assert (again.nodes, again.dtype, again.method) == (
        plan.nodes,
        plan.dtype,
        plan.method,
    )
    assert {(c.tensor, c.to) for c in again.casts} == {
        (c.tensor, c.to) for c in plan.casts
    }
    assert again.slowdown == plan.slowdown
    assert again.fp32_ms == plan.fp32_ms  # casts are timed anew
    expected = hs.rewrite(model, plan)(*inputs)
    assert hs.rewrite(model, again)(*inputs).equal(expected)


def test_an_edited_format(saved: Any) -> None:
    """Law: what a person writes is what runs, casts included."""
    model, inputs, plan, path = saved
    text = path.read_text()
    line = next(one for one in text.splitlines() if 'name = "exp"' in one)
    assert 'runs_in = "fp32"' in line
    path.write_text(text.replace(line, line.replace('"fp32"', '"bf16"')))
    again = load_plan(path, model, inputs)
    assert again.low == plan.low | {"exp"}
    assert next(node for node in again.nodes if node.name == "exp").low_ms > 0
    assert hs.rewrite(model, again)(*inputs).dtype == torch.float32


def edit(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text, count=1)


REFUSED = {
    "cannot be read as a plan": lambda _: "nodes = [",
    "dtype is 'fp8'; it must be 'bf16' or 'fp16'": edit('"bf16"', '"fp8"'),
    "it needs nodes, and painting or min-cut": edit("painting", "banana"),
    "'methode' must be one of dtype, method,": edit("dtype", "methode = 1\\ndtype"),
    "'run_in' must be one of name, op,": edit("kind = ", "run_in = 1, kind = "),
    "node 1 needs op, a text": edit('op = "linear"', "op = 1"),
    "linear has runs_in = 'int8'; it must be bf16 or fp32": edit(
        'runs_in = "bf16"', 'runs_in = "int8"'
    ),
    "slowdown is .* must be fp32 and low, both above 0": edit(
        "low = [0-9]", "low = -1"
    ),
    "has times that are none": edit(r"fp32_ms = [\d.e-]+", "fp32_ms = nan"),
    r"operation 1 of this Gated is linear \(linear of up\); the file's "
    r"linear \(linear of down\)": edit('module = "up"', 'module = "down"'),
    "ends there": edit(r"  \{.*\},\n\]", "]"),
    r"ends before operation \d+ of the file, more": edit(
        r"(  \{.*\},\n)\]",
        r'\1  {name = "more", op = "", module = "", source = "", '
        r'runs_in = "fp32", kind = "deny", reason = "", low_ms = 0, fp32_ms = 0},\n]',
    ),
    "ones must run in fp32: ": edit(r'(name = "ones".*runs_in = )"fp32"', r'\1"bf16"'),
    "getitem and split share memory": edit(
        r'(name = "getitem".*runs_in = )"bf16"', r'\1"fp32"'
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(saved: Any, message: str) -> None:
    """Law: a file that does not fit is refused with the place."""
    model, inputs, _, path = saved
    before = path.read_text()
    path.write_text(REFUSED[message](before))
    assert path.read_text() != before
    with pytest.raises(hs.UserError, match=message):
        load_plan(path, model, inputs)


def test_files_that_are_not_there(saved: Any, tmp_path: Path) -> None:
    """Law: reading and writing where nothing is ends in one line."""
    model, inputs, plan, _ = saved
    with pytest.raises(hs.UserError, match="cannot be read as a plan"):
        load_plan(tmp_path / "none.toml", model, inputs)
    with pytest.raises(hs.UserError, match="cannot be written"):
        plan.save(tmp_path / "none" / "plan.toml")

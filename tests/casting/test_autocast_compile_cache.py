"""torch.compile's cache on disk: what one process compiled, another finds.

Started as a program, this file is one such process.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.casting.autocast_mode import autocast

POLICIES = ["torch", "lean", "torch + op:exp=fp32"]
TYPES = ("cpu", "cuda", "xpu", "mps", "ipu", "maia", "mtia", "hpu")
DEVICES = tuple(filter(torch.amp.is_autocast_available, TYPES))


def run(m: Tensor) -> tuple[Tensor, ...]:
    """Run one operation that each policy treats in its own way."""
    return m.mm(m), m.mv(m[0]), m.bfloat16().exp()


def dtypes(policy: str, function: Any) -> list[str]:
    with autocast("cpu", policy=policy):
        return [str(result.dtype) for result in function(torch.ones(4, 4))]


def sign(policy: str) -> list[tuple[str, str]]:
    """Return what torch says of every type of device in a region."""
    with autocast("cpu", policy=policy):
        on = {d: torch.get_autocast_dtype(d) for d in DEVICES if _on(d)}
        return sorted((device, str(dtype)) for device, dtype in on.items())


def _on(device: str) -> bool:
    return torch.is_autocast_enabled(device)


def process(what: str, policies: list[str], cache: Path) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, what, *policies],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.filterwarnings("ignore:policy rule")
def test_a_policy_looks_the_same_in_every_process(tmp_path: Path) -> None:
    """Law: torch's state tells policies apart, in whatever order they come.

    That state is part of the key under which torch.compile stores what it compiled.
    """
    here = [sign(policy) for policy in POLICIES]
    assert process("sign", POLICIES[::-1], tmp_path) == here[::-1]
    assert len(set(map(str, here))) == len(POLICIES)


@pytest.mark.slow
def test_compiled_code_is_found_under_its_own_policy(tmp_path: Path) -> None:
    """Law: a process never runs what another compiled under another policy."""
    eager = [dtypes(policy, run) for policy in POLICIES]
    assert len(set(map(str, eager))) == len(POLICIES)
    for policy, expected in zip(POLICIES, eager, strict=True):
        assert process("compile", [policy], tmp_path) == [expected]


if __name__ == "__main__":
    for_one: Any = sign
    if sys.argv[1] == "compile":
        compiled = torch.compile(run, fullgraph=True)

        def for_one(policy: str) -> list[str]:
            return dtypes(policy, compiled)

    sys.stdout.write(str([for_one(policy) for policy in sys.argv[2:]]))

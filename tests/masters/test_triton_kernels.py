"""Fused updates in Triton's interpreter, and compiled for a GPU that is not there.

The cases run in a process of their own, for Triton interprets only what it was told to
interpret before its import.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from triton_cases import CASES

from halfstep.errors import UserError
from halfstep.masters import triton_kernels as tk

PROGRAM = """
import json
import triton_cases
print(json.dumps(triton_cases.verdicts()))
"""

COMPILE = """
import inspect, json, re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from halfstep.masters import triton_jit as triton_code

TYPES = {"table": "*i64", "rows": "i32", "sums": "*fp64"}
numbered = "constants" in inspect.signature(ASTSource).parameters
said = []
for name, constants in json.loads(sys.argv[1]):
    kernel = triton_code.load()[name]
    signature = {p.name: TYPES.get(p.name, "*fp32") for p in kernel.params}
    for constant in constants:
        # Triton 3.2 has another word for them, and takes them from the signature.
        signature[constant] = "constexpr"
    if numbered:
        signature = {n: t for n, t in signature.items() if n not in constants}
    keyword = {"constants" if numbered else "constexprs": constants}
    source = ASTSource(kernel, signature=signature, **keyword)
    options = {"enable_fp_fusion": False}
    done = compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    said.append(re.findall(r"(?:(?:ld|st)[.]global|fma)[.:\\w]*", done.asm["ptx"]))
print(json.dumps(said))
"""

triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")


def said_by(program: str, *words: str, **more: str) -> Any:
    path = {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1] / "support"), *sys.path]
        )
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | path | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", name="interpreted")
def _interpreted() -> Any:
    return said_by(PROGRAM, TRITON_INTERPRET="1")


@triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted: dict[str, str], name: str) -> None:
    """Law: kernels give what torch's operations give, to the bit."""
    assert not interpreted[name], interpreted[name]


@triton
def test_compiled(tmp_path: Path) -> None:
    """Law: kernels compile; whole blocks move 16 bytes at once; nothing is contracted.

    A product contracted with a sum is rounded once, where torch rounds twice.
    """
    kinds = {
        "rule": "adam",
        "encoding": "split",
        "weights": "bf16",
        "gradients": "bf16",
    }
    update = kinds | {"states": "fp32", "flags": 3, "block": tk.BLOCK}
    looked = {"gradients": "bf16", "norm": True, "aligned": True}
    wanted = [
        ("update", update | {"aligned": True}),
        ("update", update | {"aligned": False}),
        ("check_finite", looked | {"block": tk.CHECK_BLOCK}),
        ("correct", {"block": 128}),
    ]
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    aligned, askew, look, correct = said_by(COMPILE, json.dumps(wanted), **cache)
    # Eight numbers a thread: three tensors of 16 bits, two of 32 in two pieces each.
    assert aligned.count("ld.global.v4.b32") == 7
    assert aligned.count("st.global.v4.b32") == 6
    assert not [word for word in askew if ".v4" in word]
    assert look.count("ld.global.v4.b32") == 4
    assert not [word for word in aligned + askew if "fma" in word]
    assert [word for word in correct if "fma" in word], "they would be seen"


def test_triton_is_not_imported() -> None:
    """Law: without CUDA nothing imports Triton, and no device is available."""
    program = """
import sys, torch
from halfstep.masters import triton_kernels as tk
tk.describe()
print(int(tk.available(torch.device("cpu")) or "triton" in sys.modules))
"""
    assert said_by(program) == 0


def test_no_gradients() -> None:
    """Law: without a gradient there is no device to answer on."""
    with pytest.raises(UserError, match="nothing to look at"):
        tk.check_finite([], norm=True)

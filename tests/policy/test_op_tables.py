"""The tables' names, reasons and composition, against torch's dispatcher."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from halfstep.policy import op_tables
from halfstep.policy.op_tables import (
    FP32,
    LEAN,
    LOW,
    NAMED,
    TABLES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
}
DEVICES = pytest.mark.parametrize("device", KEYS)


# torch's


REGISTERED = """
import json, torch
keys = {keys}
names = torch._C._dispatch_get_registrations_for_dispatch_key
print(json.dumps({{device: names(key) for device, key in keys.items()}}))
"""


@cache
def registrations() -> dict[str, list[str]]:
    """Return what torch registers for casting, by device.

    A fresh interpreter is asked: in this one other tests may have put kernels there.
    """
    program = REGISTERED.format(keys=KEYS)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def registered(device: str) -> set[str]:
    """Return the operations of torch's own that it registers for casting.

    Without those on named dimensions: torch 2.9 casts them, later versions do not.
    """
    found = [name for name in registrations()[device] if name.startswith("aten::")]
    found = [name.removeprefix("aten::") for name in found]
    # Only builds with cuDNN register it; it re-packs weights, and has no row.
    found = [name for name in found if "imname" not in name and ".names_" not in name]
    return {*found} - {"_cudnn_rnn"}


def moved(device: str, names: AbstractSet[str], rows: Iterable[str]) -> str:
    """Return what torch gained and lost against the rows, "" where they agree."""
    gained, lost = sorted(names - set(rows)), sorted(set(rows).difference(names))
    if not gained and not lost:
        return ""
    return f"{device}: torch gained {gained} and lost {lost}; mend optable.TABLES"


@DEVICES
def test_names_are_those_registered(device: str) -> None:
    """Law: the table holds exactly the operations that torch registers for casting."""
    found = moved(device, registered(device), TABLES[device])
    assert not found, found


def test_operations_that_torch_lacks_have_no_row() -> None:
    """Law: a row needs an operation of this torch, overload included.

    Twin: without its overload the operation is there.
    """
    names = "mm no_such_operation mm.no_such_overload sum.dim_IntList"
    rows = op_tables._rows("a source", (FP32, "a reason", names))
    assert [*rows] == ["mm", "sum.dim_IntList"]


def test_operations_that_torch_does_not_cast_have_no_row() -> None:
    """Law: torch's table has what torch casts: matrix products, not views."""
    rows = op_tables._rows("a source", (LOW, "a reason", "mm view"))
    assert len(rows) == 2
    for device in KEYS:
        assert [*op_tables._registered(device, rows)] == ["mm"]


def test_what_moved_is_named() -> None:
    """Law: the check above can fail, and says what came and what went."""
    assert not moved("cpu", {"mm"}, ["mm"])
    assert moved("cpu", {"mm", "new"}, ["mm", "old"]) == (
        "cpu: torch gained ['new'] and lost ['old']; mend optable.TABLES"
    )


@DEVICES
def test_what_has_no_row(device: str) -> None:
    """Law: operations that torch runs as called have neither kernel nor row."""
    for operation in ("relu", "gelu", "embedding", "add.Tensor"):
        assert operation not in TABLES[device]
        assert operation not in registered(device), operation


@pytest.mark.parametrize("base", NAMED)
@DEVICES
def test_rows_say_why_and_where(device: str, base: str) -> None:
    """Law: a reason is a phrase that fits a line, the source a file or lean itself."""
    files = {f"aten/src/ATen/autocast_mode.{suffix}" for suffix in ("h", "cpp")}
    for operation, row in NAMED[base][device].items():
        assert 20 < len(row.reason) <= 80, operation
        assert not row.reason.endswith("."), operation
        assert row.source in (files if base == "torch" else {"halfstep lean"})


def test_reasons_differ_by_kind() -> None:
    """Law: the reason speaks of the operation, not of its treatment alone."""
    reasons = {name: row.reason for name, row in TABLES["cpu"].items()}
    kinds = ["mse_loss", "linalg_qr", "fft_fft", "quantile", "polar", "max_pool3d"]
    assert len({reasons[kind] for kind in kinds}) == len(kinds)
    assert reasons["mse_loss"] == reasons["l1_loss"]
    assert "16-bit kernel" in reasons["linalg_qr"]
    assert "probabilities" in TABLES["cuda"]["binary_cross_entropy"].reason


def test_no_operation_stands_twice() -> None:
    """Law: no row hides another: rows are as many as names were written."""
    shared = (*op_tables._ACCELERATORS, *op_tables._CUDA_AND_XPU, op_tables._BAN)
    groups = {
        "cpu": op_tables._CPU,
        "cuda": (*shared, *op_tables._CUDA),
        "xpu": shared,
        "mps": (*op_tables._ACCELERATORS, *op_tables._MPS),
    }
    for device, written in groups.items():
        names = [name for *_, names in written for name in names.split()]
        assert len(names) == len(set(names))
        assert {*names} >= TABLES[device].keys()


# Lean

CPU_ALONE = {
    *("lstm.input", "lstm.data"),
    *("gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data"),
    *("rnn_relu.input", "rnn_relu.data"),
}


def test_lean_is_the_same_everywhere() -> None:
    """Law: one table for all, but for recurrent layers on CPU and one gap of MPS."""
    assert LEAN["cuda"] == LEAN["xpu"]
    assert LEAN["cpu"].keys() - LEAN["cuda"] == CPU_ALONE
    assert LEAN["cpu"].items() >= LEAN["cuda"].items()
    gap = "conv_transpose3d.input"
    assert LEAN["cuda"] | {gap: LEAN["mps"][gap]} == LEAN["mps"]
    assert (LEAN["cuda"][gap].category, LEAN["mps"][gap].category) == (LOW, FP32)


def test_lean_has_no_row_for_statistics() -> None:
    """Law: batch and instance norm run as called: their weights stay fp32 themselves.

    Twin: torch has a row on MPS.
    """
    assert TABLES["mps"]["batch_norm"].category == FP32
    for device in LEAN:
        assert not {"batch_norm", "instance_norm"} & LEAN[device].keys()


def test_lean_names_real_operations() -> None:
    """Law: each row of lean is an operation of torch, overload included."""
    known = {*torch._C._dispatch_get_all_op_names()}
    assert {f"aten::{name}" for name in LEAN["cpu"]} <= known


# Modules


def test_modules_name_real_operations() -> None:
    """Law: each type is torch's, and its operation is aten's, overload included."""
    for name, operation in op_tables.OPERATION_OF.items():
        assert issubclass(getattr(nn, name), nn.Module)
        packet, _, overload = operation.partition(".")
        assert (overload or "default") in getattr(torch.ops.aten, packet).overloads()

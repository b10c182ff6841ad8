"""What the one decider answers: totality, devices, and casts by category."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep as hs
from halfstep.errors import UserError
from halfstep.policy import CATEGORIES, LEAN, Policy, Rule, decide
from halfstep.policy.op_tables import FOLLOW, LOW, NAMED, TABLES

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASTABLE = FLOATS[:3]
OPERATIONS = sorted(
    {op for table in NAMED.values() for rows in table.values() for op in rows}
)


# Casts


@given(
    category=st.sampled_from(CATEGORIES),
    dtypes=st.lists(st.sampled_from(FLOATS), max_size=4),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_dtype_follows_from_category(
    category: str, dtypes: list[torch.dtype], low: torch.dtype
) -> None:
    """Law: the category and the operands that autocast sees give the dtype."""
    rules = Policy((Rule("op", "x", category),))
    found = decide("x", dtypes, "cpu", policy=rules, low=low).dtype
    seen = [dtype for dtype in dtypes if dtype != torch.float64]
    if category in ("keep", "banned") or not seen:
        assert found is None
    elif category == "promote":
        # No operand may lose a digit or range.
        assert all(torch.promote_types(found or low, dtype) == found for dtype in seen)
        assert found in (low, torch.float32)
        assert (found == low) == all(dtype == low for dtype in seen)
    else:
        assert found == {"low": low, "fp32": torch.float32}[category]


def test_unknown_device() -> None:
    """Law: a device without a table is refused with those that have one."""
    with pytest.raises(UserError) as caught:
        decide("mm", [torch.float32], "tpu")
    assert str(caught.value) == (
        "device='tpu' has no table; choose cpu, cuda, mps, xpu."
    )


def test_name_without_overload() -> None:
    """Law: a name of which only overloads have rows is answered with those."""
    found = decide("softmax", [torch.bfloat16], "cuda")
    assert found.category == "keep"
    assert found.reason == "no row: it runs as it is called; the table has softmax.int"


@pytest.mark.parametrize("operation", ["layer_norm", "softmax.int"])
def test_follow(operation: str) -> None:
    """Law: the first operand decides, where autocast sees it; else nothing is cast."""
    for first, others in product(FLOATS, [(), *product(FLOATS)]):
        found = decide(operation, [first, *others], "cpu", policy=LEAN)
        assert found.category == FOLLOW
        assert found.dtype == (first if first in CASTABLE else None)
    assert decide(operation, [], "cpu", policy=LEAN).dtype is None


def test_powers_leave_the_range_of_fp16_alone() -> None:
    """Law: lean takes a power in fp32 where the format is fp16, and as called in bf16.

    40 ** 3 = 64000 fits fp16, 41 ** 3 = 68921 is above its largest number, 65504.
    """
    for low, dtype in ((torch.float16, torch.float32), (torch.bfloat16, None)):
        found = decide("pow.Tensor_Scalar", [low], "cpu", policy=LEAN, low=low)
        assert found.dtype == dtype
        x = torch.tensor([40.0, 41.0], dtype=low)
        with hs.autocast("cpu", low, policy="lean"):
            cubes = x**3
        assert cubes.dtype == (dtype or low)
        assert cubes.isfinite().all()


@given(
    operation=st.sampled_from(OPERATIONS),
    dtypes=st.lists(st.sampled_from(FLOATS), max_size=4),
    device=st.sampled_from([*TABLES]),
    base=st.sampled_from([*NAMED]),
    rule=st.none() | st.sampled_from(CATEGORIES),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_decide_is_total(
    operation: str,
    dtypes: list[torch.dtype],
    device: str,
    base: str,
    rule: str | None,
    low: torch.dtype,
) -> None:
    """Law: every question has an answer, with a category, a reason and a row.

    The dtype is one that autocast casts to; the rule decides where there is one.
    """
    rules = () if rule is None else (Rule("op", operation, rule, "mine"),)
    found = decide(operation, dtypes, device, policy=Policy(rules, base), low=low)
    row = NAMED[base][device].get(operation)
    assert found.dtype in (None, low, torch.float32, *dtypes)
    assert found.dtype != torch.float64
    if rule:
        assert (found.category, found.reason) == (rule, "mine")
        assert found.row == f"op:{operation}={rule}"
    else:
        assert found.category == (row.category if row else "keep")
        assert found.reason == (
            row.reason if row else "no row: it runs as it is called"
        )
        assert found.row == f"{base} {device} table: {operation}={found.category}"


def test_a_row_of_lean_by_hand() -> None:
    """Law: the row names the policy, the device, the operation and the category."""
    found = decide("mv", [torch.float32], "cpu", policy=LEAN)
    assert (found.row, found.category) == ("lean cpu table: mv=low", LOW)
    assert found.dtype == torch.bfloat16
    # torch has no row for it on CPU.
    found = decide("mv", [torch.float32], "cpu")
    assert (found.row, found.dtype) == ("torch cpu table: mv=keep", None)

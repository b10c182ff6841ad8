"""Rules on operations against what torch has: nothing is misspelt in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from halfstep.errors import UserError
from halfstep.policy import LEAN, TORCH, Policy, Rule, check_ops, matching_ops

if TYPE_CHECKING:
    from collections.abc import Iterator


def ops(pattern: str) -> tuple[str, ...]:
    """Return the operations that a pattern speaks of."""
    return matching_ops(Rule("op", pattern, "fp32"))


@pytest.fixture
def library() -> Iterator[str]:
    """Register operations of somebody's own while a test runs."""
    make: Any = torch.library.Library
    own = make("halfstep_test", "DEF")
    own.define("smooth(Tensor x, float by) -> Tensor")
    own.define("smooth.twice(Tensor x, float by, float again) -> Tensor")
    own.define("smooth_(Tensor(a!) x, float by) -> Tensor(a!)")
    yield "halfstep_test"
    own._destroy()


# Which operations


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("mm", ["aten::mm", "aten::mm.dtype"]),
        ("aten::bmm", ["aten::bmm", "aten::bmm.dtype"]),
        ("pow.Scalar", ["aten::pow.Scalar"]),
        ("/(layer|group)_norm/", ["aten::group_norm", "aten::layer_norm"]),
        # A list of tensors, and optional tensors, are operands too.
        ("stack", ["aten::stack"]),
        ("index_put", ["aten::index_put"]),
        # In place, with out=, views, and without a tensor: none to cast.
        ("relu_", []),
        ("mm.out", []),
        ("view", []),
        ("chunk", []),
        ("arange", []),
        ("nonsense", []),
    ],
)
def test_matching_ops(pattern: str, names: list[str]) -> None:
    """Law: full names of those that take a tensor, write none, return no view."""
    assert sorted(ops(pattern)) == names


def test_a_glob_for_all() -> None:
    """Law: `*` means what models call, aten above all, and no machinery of torch."""
    names = ops("*")
    assert len(names) == len({*names}) > 1000
    assert {"aten::mm", "aten::softmax.int", "aten::gru.input"} <= {*names}
    machinery = ("prims::", "quantized::", "profiler::", "c10d::", "_c10d_functional::")
    assert not [name for name in names if name.startswith(machinery)]
    # An independent reading of the schemas, through torch.ops.
    for name in names:
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            call = getattr(getattr(torch.ops.aten, packet), overload or "default")
            assert not call._schema.is_mutable, name
            assert "Tensor" in str(call._schema).split("->", maxsplit=1)[0], name


def test_other_kinds_speak_of_none() -> None:
    """Law: a rule on modules or types matches no operation, whatever its pattern."""
    assert not matching_ops(Rule("module", "*", "fp32"))
    assert not matching_ops(Rule("type", "mm", "fp32"))


def test_operations_of_others(library: str) -> None:
    """Law: operations registered later are seen, named with their namespace."""
    both = (f"{library}::smooth", f"{library}::smooth.twice")
    assert ops(f"{library}::smooth") == both
    assert ops(f"{library}::*") == both
    assert ops(f"{library}::smooth.twice") == both[1:]
    assert not ops("smooth")
    check_ops(LEAN + f"op:{library}::smooth=fp32")


# Which rules pass


@pytest.mark.parametrize(
    "word",
    [
        "torch",
        "lean + op:softmax=fp32",
        "torch + op:softmax.int=low + op:aten::mm=keep",
        "torch + op:/lay.*norm/=fp32 + op:*_loss=fp32",
        "torch + module:nonsense=fp32 + type:Nonsense=fp32",
    ],
)
def test_rules_that_pass(word: str) -> None:
    """Law: known names pass; rules on modules are not this check's business."""
    check_ops(Policy.parse(word))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "op:sofmax=fp32",
            (
                "rule 'op:sofmax=fp32' matches no operation; did you mean "
                "'op:softmax=fp32'?"
            ),
        ),
        (
            "op:aten::sofmax.int=low",
            (
                "rule 'op:aten::sofmax.int=low' matches no operation; did you mean "
                "'op:aten::softmax.int=low'?"
            ),
        ),
        (
            "op:/zzz+/=low",
            (
                "rule 'op:/zzz+/=low' matches no operation; write aten's name, as in "
                "'op:softmax', or 'op:library::name'."
            ),
        ),
        (
            "op:relu_=low",
            (
                "rule 'op:relu_=low' matches only operations that write in place, "
                "return views or take no tensor, and those cannot be cast: name others."
            ),
        ),
    ],
)
def test_rules_without_effect(rule: str, message: str) -> None:
    """Law: a rule that would change nothing is refused, with what to write."""
    with pytest.raises(UserError) as caught:
        check_ops(TORCH + "op:mm=low" + rule)
    assert str(caught.value) == message


def test_names_are_torchs() -> None:
    """Law: what is matched can be called by that name."""
    for name in ops("/(mm|gelu|softmax).*/"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        call = getattr(getattr(torch.ops.aten, packet), overload or "default")
        assert call.name() == name
    assert isinstance(torch.ops.aten.gelu.default(torch.ones(1)), Tensor)

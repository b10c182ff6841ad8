"""Painting and the minimum cut, on random graphs beside brute force."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from halfstep.graph.problem import (
    ALLOW,
    CLEAR,
    DENY,
    INFER,
    KINDS,
    Operation,
    Problem,
    TensorUse,
    minimum_cut,
    paint,
)

MOST = 9  # operations: brute force tries 2**9 assignments


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    costs = st.integers(0, 20)
    operations = {
        f"op{index}": Operation(draw(st.sampled_from(KINDS)), draw(costs), draw(costs))
        for index in range(draw(st.integers(1, MOST)))
    }
    names = list(operations)
    tensors = []
    for index, name in enumerate(names[:-1]):
        later = st.lists(st.sampled_from(names[index + 1 :]), max_size=3, unique=True)
        if consumers := draw(later):
            tensors.append(TensorUse(name, tuple(consumers), draw(costs)))
    tied = []
    if len(names) > 1 and draw(st.booleans()):
        pair = st.lists(st.sampled_from(names), min_size=2, max_size=2, unique=True)
        tied.append(frozenset(draw(pair)))
    stored_low = frozenset[str]()
    if tensors and draw(st.booleans()):  # a parameter, before all operations
        operations["weight"] = Operation(DENY)
        tensors.append(TensorUse("weight", tensors[0].consumers, draw(costs)))
        stored_low = frozenset({"weight"})
    return Problem(operations, tuple(tensors), tuple(tied), stored_low)


def is_valid(problem: Problem, low: frozenset[str]) -> bool:
    """Say whether no operation that is denied is low, and no tied group is split."""
    denied = any(problem.operations[name].kind == DENY for name in low)
    return not denied and not any(tie & low and tie - low for tie in problem.tied)


@given(problems())
def test_no_assignment_is_cheaper(problem: Problem) -> None:
    """Law: the cut is valid and none costs less; painting is valid, not cheaper."""
    names = [name for name in problem.operations if name not in problem.low_weights]
    choices = itertools.product((False, True), repeat=len(names))
    assignments = (
        frozenset(name for name, low in zip(names, choice, strict=True) if low)
        for choice in choices
    )
    least = min(problem.cost(low) for low in assignments if is_valid(problem, low))
    cut, painted = minimum_cut(problem), paint(problem)
    assert is_valid(problem, cut)
    assert is_valid(problem, painted)
    assert problem.cost(cut) == least <= problem.cost(painted)


def chain(*kinds: str) -> Problem:
    operations = {"input": Operation(DENY)}
    operations |= {str(index): Operation(kind) for index, kind in enumerate(kinds)}
    names = list(operations)
    tensors = [TensorUse(a, (b,), 1) for a, b in itertools.pairwise(names)]
    return Problem(operations, tuple(tensors))


def test_painting_by_hand() -> None:
    """Law: TensorFlow's five steps."""
    cases = {
        (ALLOW, INFER, ALLOW): "012",  # between two allowed
        (INFER, ALLOW, INFER): "1",  # an end that is inferred gains nothing
        (CLEAR, ALLOW, CLEAR): "012",  # what moves values goes with its neighbour
        (ALLOW, DENY, INFER, ALLOW): "03",  # behind a denied operation
        (ALLOW, DENY, CLEAR, ALLOW): "023",  # but it may be cast before it is moved
        (ALLOW, DENY, CLEAR, INFER, ALLOW): "04",
    }
    for kinds, low in cases.items():
        assert paint(chain(*kinds)) == frozenset(low), kinds


def test_one_cast_a_tensor() -> None:
    """Law: two low consumers of an fp32 tensor share its cast."""
    operations = {name: Operation(ALLOW, 1, 9) for name in "ab"}
    operations["x"] = Operation(DENY)
    problem = Problem(operations, (TensorUse("x", ("a", "b"), 10),))
    assert minimum_cut(problem) == {"a", "b"}
    assert problem.cost({"a", "b"}) == 12
    assert [cast.to_low for cast in problem.casts({"a"})] == [True]

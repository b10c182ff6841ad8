"""Assigns formats to the operations of a graph: by a minimum cut, or by painting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.graph.problem import ALLOW, CLEAR, DENY, INFER, reachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfstep.graph.problem import Problem

_LOW, _FP32 = ("low",), ("fp32",)


def minimum_cut(problem: Problem) -> frozenset[str]:
    """Return the operations in 16 bits of an assignment of least cost.

    It is a minimum s-t cut. The source side runs in 16 bits, the sink side in fp32; the
    capacity of the cut is the assignment's cost. A tensor is cast once for all
    consumers in the other format.

    Example:
        >>> from halfstep.graph.problem import ALLOW, Operation, Problem, TensorUse
        >>> operations = {"x": Operation(DENY), "mm": Operation(ALLOW, 10, 30)}
        >>> problem = Problem(operations, (TensorUse("x", ("mm",), 25),))
        >>> minimum_cut(problem), problem.cost(())  # a cast costs more than it gains
        (frozenset(), 30)
    """
    import networkx as nx  # a dependency of torch

    graph = nx.DiGraph()
    graph.add_nodes_from([_LOW, _FP32])
    for name, operation in problem.operations.items():
        if name in problem.low_weights:
            graph.add_edge(_LOW, name)  # infinite capacity: it is never cut
            continue
        graph.add_edge(_LOW, name, capacity=operation.fp32_cost)
        if operation.kind == DENY:
            graph.add_edge(name, _FP32)
        else:
            graph.add_edge(name, _FP32, capacity=operation.low_cost)
    for index, use in enumerate(problem.tensors):
        up, down = ("up", index), ("down", index)
        graph.add_edge(use.producer, up, capacity=use.cast_cost)
        graph.add_edge(down, use.producer, capacity=use.cast_cost)
        for consumer in use.consumers:
            graph.add_edge(up, consumer)
            graph.add_edge(consumer, down)
    for group in problem.tied:
        first, *others = sorted(group)
        for other in others:
            graph.add_edge(first, other)
            graph.add_edge(other, first)
    _, (low_side, _) = nx.minimum_cut(graph, _LOW, _FP32)
    low = frozenset(name for name in problem.operations if name in low_side)
    return low - problem.low_weights


def paint(problem: Problem) -> frozenset[str]:
    """Return the operations in 16 bits by TensorFlow's rule, without costs.

    "allow" operations run in 16 bits. "deny" operations run in fp32, and so does what
    follows them through "infer" operations. Operations between "allow" operations run
    in 16 bits, and so do adjacent "clear" ones. Parameters stored in 16 bits, which
    TensorFlow does not have, count as "allow".

    References:
        TensorFlow, core/grappler/optimizers/auto_mixed_precision.cc.

    Example:
        >>> from halfstep.graph.problem import Operation, Problem, TensorUse
        >>> kinds = {"x": DENY, "mm": ALLOW, "relu": CLEAR, "mm2": ALLOW, "exp": DENY}
        >>> names = list(kinds)
        >>> uses = [TensorUse(a, (b,), 1) for a, b in zip(names, names[1:])]
        >>> problem = Problem({n: Operation(k) for n, k in kinds.items()}, (*uses,))
        >>> sorted(paint(problem))
        ['mm', 'mm2', 'relu']
    """
    kinds = {name: operation.kind for name, operation in problem.operations.items()}
    after, before = problem.neighbours()
    allowed = {name for name, kind in kinds.items() if kind == ALLOW}
    allowed |= problem.low_weights
    denied = _denied(kinds, after, before)
    passing = {n for n, kind in kinds.items() if kind in (INFER, CLEAR)} - denied
    downstream = reachable(allowed, after, passing)
    upstream = reachable(allowed, before, passing)
    low = allowed | (downstream & upstream)
    clear = {name for name in passing if kinds[name] == CLEAR}
    low |= reachable(low, after, clear) | reachable(low, before, clear)
    for group in problem.tied:
        if group & allowed and not group & denied:
            low |= group
    while split := [
        group & low for group in problem.tied if group & low and group - low
    ]:
        low -= frozenset().union(*split)
    return frozenset(low) - problem.low_weights


def _denied(
    kinds: Mapping[str, str],
    after: Mapping[str, set[str]],
    before: Mapping[str, set[str]],
) -> set[str]:
    """Return the operations that are fp32 because a denied operation precedes them.

    Parameters and inputs do not deny their consumers: they are cast when used.
    """
    sources = {n for n, kind in kinds.items() if kind == DENY and before.get(n)}
    passing = {name for name, kind in kinds.items() if kind in (INFER, CLEAR)}
    reached = reachable(sources, after, passing)
    inferred = {name for name in reached if kinds[name] == INFER}
    # "clear" operations are denied only if a denied one follows them, too.
    followed = reachable(sources | inferred, before, passing)
    return sources | inferred | (reached & followed)

"""Finds the assignment of formats with the least predicted time: a minimum s-t cut.

The source side runs in 16 bits, the sink side in fp32; the capacity of the cut is the
assignment's cost. A tensor is cast once for all consumers in the other format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.graph.problem import DENY

if TYPE_CHECKING:
    from halfstep.graph.problem import Problem

_LOW, _FP32 = ("low",), ("fp32",)


def cheapest(problem: Problem) -> frozenset[str]:
    """Return the operations in 16 bits of an assignment of least cost.

    Example:
        >>> from halfstep.graph.problem import ALLOW, Operation, Problem, TensorUse
        >>> operations = {"x": Operation(DENY), "mm": Operation(ALLOW, 10, 30)}
        >>> problem = Problem(operations, (TensorUse("x", ("mm",), 25),))
        >>> cheapest(problem), problem.cost(())  # a cast would cost more than it gains
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

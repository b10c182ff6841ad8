"""Formats of a graph's operations as a two-color problem with costs, and its solvers.

`Problem` computes what an assignment costs and which casts it needs. `minimum_cut` and
`paint` assign formats. This module does not depend on torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ALLOW = "allow"
"""Faster in 16 bits: matmuls and convolutions."""
INFER = "infer"
"""Safe in 16 bits but not faster by itself: it runs as its neighbors do."""
CLEAR = "clear"
"""Passes values on or moves them: any format will do."""
DENY = "deny"
"""Stays fp32."""
KINDS = (ALLOW, INFER, CLEAR, DENY)
"""TensorFlow's names."""


@dataclass(frozen=True)
class Operation:
    """Kind and costs of one operation, in nanoseconds, forward and backward."""

    kind: str
    """One of `KINDS`."""
    low_cost: int = 0
    fp32_cost: int = 0


@dataclass(frozen=True)
class TensorUse:
    """One tensor, and the operations that need it in their own format."""

    producer: str
    """Name of an operation; parameters and inputs are operations of kind DENY."""
    consumers: tuple[str, ...]
    cast_cost: int
    """Nanoseconds of one cast in either direction, forward and backward."""


@dataclass(frozen=True)
class Cast:
    """One cast, shared by all consumers of its tensor in the other format."""

    producer: str
    to_low: bool
    cost: int
    """Nanoseconds."""


@dataclass(frozen=True)
class Problem:
    """Operations that are to run in 16 bits or fp32.

    Attributes:
        operations: Name -> operation, in the order in which they run.
        tensors: One entry for each tensor that a plan may cast.
        tied: Groups of operations that must have one format: a tuple and its parts.
        low_weights: Parameters stored in 16 bits; assignments do not list them.
    """

    operations: Mapping[str, Operation]
    tensors: tuple[TensorUse, ...]
    tied: tuple[frozenset[str], ...] = ()
    low_weights: frozenset[str] = frozenset()

    def neighbours(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Return name -> consumers, and name -> producers."""
        after: dict[str, set[str]] = defaultdict(set)
        before: dict[str, set[str]] = defaultdict(set)
        for use in self.tensors:
            for consumer in use.consumers:
                after[use.producer].add(consumer)
                before[consumer].add(use.producer)
        for group in self.tied:  # a tuple and its parts have no TensorUse
            for name in group:
                after[name] |= group - {name}
                before[name] |= group - {name}
        return after, before

    def casts(self, low: Collection[str]) -> list[Cast]:
        """Return the casts that the assignment `low` needs, at most one per tensor."""
        low = self.low_weights.union(low)
        return [
            Cast(use.producer, use.producer not in low, use.cast_cost)
            for use in self.tensors
            if any((name in low) != (use.producer in low) for name in use.consumers)
        ]

    def cost(self, low: Collection[str]) -> int:
        """Return the nanoseconds of an assignment, including casts."""
        low = frozenset(low)
        own = (
            operation.low_cost if name in low else operation.fp32_cost
            for name, operation in self.operations.items()
        )
        return sum(own) + sum(cast.cost for cast in self.casts(low))


def reachable(
    starts: Collection[str], edges: Mapping[str, set[str]], through: Collection[str]
) -> set[str]:
    """Return the names reachable from `starts` through names in `through`."""
    reached: set[str] = set()
    to_visit = list(starts)
    while to_visit:
        for name in edges.get(to_visit.pop(), ()):
            if name in through and name not in reached:
                reached.add(name)
                to_visit.append(name)
    return reached


_LOW, _FP32 = ("low",), ("fp32",)
"""Source and sink of the flow network."""


def minimum_cut(problem: Problem) -> frozenset[str]:
    """Return the operations in 16 bits of an assignment of least cost.

    It is a minimum s-t cut. The source side runs in 16 bits, the sink side in fp32; the
    capacity of the cut is the assignment's cost. A tensor is cast once for all
    consumers in the other format.

    Example:
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

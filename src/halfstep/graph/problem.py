"""Formats of a graph's operations as a two-color problem with costs.

`Problem` computes what an assignment costs and which casts it needs; `solvers` solve
it. This module does not depend on torch.
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
        """Return the casts that an assignment needs, at most one per tensor.

        Args:
            low: Names of the operations in 16 bits.
        """
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

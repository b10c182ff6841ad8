"""The precision of a graph as a problem of two colours: operations, tensors, costs.

In: operations with what each costs in either format, and the tensors between them. Out:
`Problem`, which knows what an assignment costs and which casts it needs. `painting` and
`min_cut` solve it; nothing here knows torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ALLOW = "allow"
"""Gains by 16 bits: matrix products and convolutions."""
INFER = "infer"
"""Safe in 16 bits, and gains nothing by itself: it goes with its neighbours."""
CLEAR = "clear"
"""Passes values on or moves them: any format does."""
DENY = "deny"
"""Stays fp32."""
KINDS = (ALLOW, INFER, CLEAR, DENY)
"""TensorFlow's words."""


@dataclass(frozen=True)
class Operation:
    """What is known of one operation; costs are nanoseconds, forward and backward."""

    kind: str
    """One of `KINDS`."""
    low_cost: int = 0
    fp32_cost: int = 0


@dataclass(frozen=True)
class TensorUse:
    """One tensor, and the operations that would need it in their own format."""

    producer: str
    """An operation; parameters and inputs of the graph are operations of kind DENY."""
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
    """Operations to be coloured low or fp32.

    Attributes:
        operations: By name, in the order in which they run.
        tensors: One for each tensor that a plan may cast.
        tied: Groups of operations that have one format: parts of one result, and what
            is changed in place.
        low_weights: Parameters stored in 16 bits; they are no choice, so no assignment
            names them.
    """

    operations: Mapping[str, Operation]
    tensors: tuple[TensorUse, ...]
    tied: tuple[frozenset[str], ...] = ()
    low_weights: frozenset[str] = frozenset()

    def neighbours(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Return what uses each operation's result, and whose results it uses."""
        after: dict[str, set[str]] = defaultdict(set)
        before: dict[str, set[str]] = defaultdict(set)
        for use in self.tensors:
            for consumer in use.consumers:
                after[use.producer].add(consumer)
                before[consumer].add(use.producer)
        for group in self.tied:  # a result and its parts, which no tensor links
            for name in group:
                after[name] |= group - {name}
                before[name] |= group - {name}
        return after, before

    def casts(self, low: Collection[str]) -> list[Cast]:
        """Return the casts that an assignment needs, one a tensor.

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
        """Return the nanoseconds of an assignment, casts included."""
        low = frozenset(low)
        own = (
            operation.low_cost if name in low else operation.fp32_cost
            for name, operation in self.operations.items()
        )
        return sum(own) + sum(cast.cost for cast in self.casts(low))

    def is_valid(self, low: Collection[str]) -> bool:
        """Say whether no operation of kind DENY is low, and no tied group is split."""
        low = frozenset(low)
        denied = any(self.operations[name].kind == DENY for name in low)
        split = any(group & low and group - low for group in self.tied)
        return not denied and not split


def reachable(
    starts: Collection[str], edges: Mapping[str, set[str]], through: Collection[str]
) -> set[str]:
    """Return what is reached from some names by edges between names in `through`."""
    reached: set[str] = set()
    to_visit = list(starts)
    while to_visit:
        for name in edges.get(to_visit.pop(), ()):
            if name in through and name not in reached:
                reached.add(name)
                to_visit.append(name)
    return reached

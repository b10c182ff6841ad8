"""Chooses formats like TensorFlow's automatic mixed precision, without costs.

"allow" operations run in 16 bits. "deny" operations run in fp32, and so does what
follows them through "infer" operations. Operations between "allow" operations run in 16
bits, and so do adjacent "clear" ones. Source: TensorFlow,
core/grappler/optimizers/auto_mixed_precision.cc. Parameters stored in 16 bits, which
TensorFlow does not have, count as "allow".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.graph.problem import ALLOW, CLEAR, DENY, INFER, reachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfstep.graph.problem import Problem


def paint(problem: Problem) -> frozenset[str]:
    """Return the operations that painting puts in 16 bits.

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

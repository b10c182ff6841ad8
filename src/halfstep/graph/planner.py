"""Decides which operations of a model run in 16 bits, once for the whole graph.

In: a model, example inputs, a policy. Out: a `Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from halfstep.casting.convert_model import low_parameters
from halfstep.errors import UserError, require, require_type
from halfstep.graph import capture, ranges
from halfstep.graph.op_times import OpTimes, preserve_rng
from halfstep.graph.plan import Plan, PlannedCast, PlannedNode, Slowdown
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
    reachable,
)
from halfstep.graph.rewrite import rewrite_graph
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.policy.rules import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from halfstep.graph.capture import NodeFacts
    from halfstep.graph.ranges import Range

METHODS = ("painting", "min-cut")


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    dtype: str | torch.dtype = "bf16",
    policy: Policy | str = "lean",
    method: str = "min-cut",
    level: str = "O1",
    kinds: Mapping[str, str] | None = None,
    calibrate: Callable[[nn.Module], object] | None = None,
    refresh: bool = False,
) -> Plan:
    """Decide for each operation of a model in which format it runs.

    Args:
        model: In the mode (train or eval) in which it will run, with fp32 parameters.
        example_inputs: Positional arguments of one batch, with the shapes to plan for.
        dtype: "bf16" or "fp16".
        policy: Tables and rules, as for `autocast`: which operations must stay fp32.
        method: "min-cut" minimizes the predicted time, casts included, with times of
            the operations measured on this machine. "painting" is TensorFlow's rule,
            without costs.
        level: Level of the training to come. "O1": weights are fp32 and cast where they
            are used. "O2": the weights that `prepare(model, optimizer, "O2",
            policy=policy)` stores in 16 bits need no cast.
        kinds: Name in `torch.ops.aten` -> "allow", "deny", "infer" or "clear", instead
            of what the policy implies.
        calibrate: Function of the fp32 model that runs a few training steps, forward
            and backward: operations whose values or gradients come within a factor of
            4 of fp16's largest number stay fp32. Only for fp16. None: the values of one
            forward pass of the example inputs are used.
        refresh: Measure all operations again, and ignore cached times.

    Returns:
        The plan; `print` it, `save` it, or run it with `rewrite`.

    Raises:
        UserError: If an argument is wrong, or the model cannot be captured as one
            graph.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1))
        >>> plan = hs.plan(model, [torch.randn(8, 64)], method="painting")
        >>> [(node.op, node.low) for node in plan.nodes]
        [('linear', True), ('softmax.int', False)]
        >>> {(cast.tensor, cast.to) for cast in plan.casts} >= {("linear", "fp32")}
        True
    """
    format_, chosen, kinds = check_options(dtype, policy, method, kinds)
    fits = calibrate is None or format_ is formats.FP16
    require("calibrate", calibrate, fits, "None with bf16, which has fp32's range")
    is_step = calibrate is None or callable(calibrate)
    require_type("calibrate", calibrate, is_step, "a function of the model, or None")
    require("level", level, level in ("O1", "O2"), "O1 or O2")
    graph_module = capture.capture(model, example_inputs)
    low_ids = {id(p) for p in low_parameters(model, levels.parse(level), chosen)}
    device = device_of(model, example_inputs)
    fp32_ranges: dict[str, Range] = {}
    if format_ is formats.FP16:
        inputs = capture.own_copies(example_inputs)
        run = calibrate or (lambda model: model(*inputs))
        grad = torch.set_grad_enabled(calibrate is not None)
        with grad, preserve_rng(device):
            fp32_ranges = ranges.measure(graph_module, run)
    return plan_graph(
        graph_module,
        device,
        format_,
        chosen,
        method,
        kinds=kinds,
        fp32_ranges=fp32_ranges,
        refresh=refresh,
        low_weights=[
            name
            for name, param in graph_module.named_parameters(remove_duplicate=False)
            if id(param) in low_ids
        ],
        batch=example_inputs,
    )


def check_options(
    dtype: str | torch.dtype,
    policy: Policy | str,
    method: str,
    kinds: Mapping[str, str] | None,
) -> tuple[formats.FloatFormat, Policy, Mapping[str, str]]:
    """Return `dtype`, `policy` and `kinds` of `plan`, validated."""
    format_ = formats.parse(dtype)
    require("dtype", dtype, format_ is not formats.FP32, "bf16 or fp16")
    require("method", method, method in METHODS, " or ".join(METHODS))
    is_mapping = kinds is None or isinstance(kinds, Mapping)
    require_type("kinds", kinds, is_mapping, "a dictionary of operations")
    for op, kind in (kinds or {}).items():
        is_op = hasattr(torch.ops.aten, str(op).partition(".")[0])
        require("kinds: operation", op, is_op, "a name in torch.ops.aten")
        require(f"kinds: {op}", kind, kind in KINDS, ", ".join(KINDS))
    return format_, Policy.of(policy), kinds or {}


def plan_graph(
    graph_module: fx.GraphModule,
    device: torch.device,
    format_: formats.FloatFormat,
    policy: Policy,
    method: str,
    inputs: Sequence[Any] = (),
    *,
    kinds: Mapping[str, str],
    fp32_ranges: Mapping[str, Range],
    refresh: bool = False,
    fused: bool = False,
    low_weights: Sequence[str] = (),
    batch: Sequence[Any] | None = None,
) -> Plan:
    """Plan a graph of aten operations whose nodes have `meta["val"]`.

    `inputs` are those of the graph, if they include its parameters. `fused`: a compiler
    will run the graph and fuse casts into pointwise operations, so that these casts
    cost nothing. Passes of the whole graph with `batch` are timed to correct the
    operations' times; None: no correction.
    """
    low = format_.dtype
    facts = capture.facts(
        graph_module, device=device.type, policy=policy, low=low, kinds=kinds
    )
    needs_grad = capture.differentiable(graph_module, inputs)
    times = OpTimes(device, low, needs_grad, refresh=refresh)
    operations = {node.name: Operation(DENY) for node in graph_module.graph.nodes}
    for node, fact in facts.items():
        values = [*capture.castable_inputs(node, device.type), node]
        fp32_cost, low_cost = times.operation(node, low=False) or 0, None
        why_fp32 = ranges.why_fp32(values, fp32_ranges)
        if fact.kind != DENY and not why_fp32:
            low_cost = times.operation(node, low=True)
            why_fp32 = f"it has no {format_} kernel" if low_cost is None else ""
        if fact.kind != DENY and why_fp32:
            facts[node] = replace(fact, kind=DENY, reason=why_fp32)
        operations[node.name] = Operation(facts[node].kind, low_cost or 0, fp32_cost)
    problem = weigh(
        graph_module.graph, operations, times, fused=fused, low_weights=low_weights
    )
    slowdown = Slowdown()
    if batch is not None:
        slowdown = measure_slowdown(problem, graph_module, times, batch)
        problem = slowdown.of(problem)
    times.save()
    if method == "min-cut":
        exact = _exact(problem)
        for node, fact in facts.items():
            if node.name in exact:
                facts[node] = replace(fact, kind=DENY, reason=_EXACT)
        denied = {n: replace(problem.operations[n], kind=DENY) for n in exact}
        problem = replace(problem, operations={**problem.operations, **denied})
    chosen_low = (minimum_cut if method == "min-cut" else paint)(problem)
    for node, fact in facts.items():
        facts[node] = replace(fact, reason=_why(fact, low=node.name in chosen_low))
    return assemble(
        graph_module,
        format_.name,
        method,
        facts,
        problem,
        chosen_low,
        times.doubt,
        low_weights,
        slowdown,
    )


def measure_slowdown(
    problem: Problem,
    graph_module: fx.GraphModule,
    times: OpTimes,
    batch: Sequence[Any],
) -> Slowdown:
    """Time a pass of the model in fp32, and a painted one with fp32 weights."""
    problem = replace(problem, low_weights=frozenset())
    low = paint(problem)
    try:
        fp32 = times.time_pass(graph_module, batch) / (problem.cost(()) or 1)
    except torch.OutOfMemoryError:
        times.doubt = "memory did not suffice for a pass of the model in fp32"
        return Slowdown()
    of_casts = sum(cast.cost for cast in problem.casts(low))
    low_alone = of_casts + sum(problem.operations[name].low_cost for name in low)
    if not low_alone:
        return Slowdown(fp32, fp32)
    painted = rewrite_graph(graph_module, low, times.low, times.device.type)
    rest = fp32 * (problem.cost(low) - low_alone)
    in_low = (times.time_pass(painted, batch) - rest) / low_alone
    return Slowdown(fp32, in_low if in_low > 0 else fp32)


def weigh(
    graph: fx.Graph,
    operations: dict[str, Operation],
    times: OpTimes,
    *,
    fused: bool = False,
    low_weights: Collection[str] = (),
) -> Problem:
    """Return the problem of a graph: operations, tensors between them, casts."""
    tied, uses = [], []
    for node in graph.nodes:
        if capture.is_getitem(node) and capture.has_fp32(node):
            # A tuple result and its parts.
            tied.append(frozenset((node.name, node.args[0].name)))
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            continue  # the parts of a tuple are nodes themselves
        consumers = tuple(
            user.name
            for user in node.users
            if node in capture.castable_inputs(user, times.device.type)
        )
        if consumers:
            is_free = fused and torch.Tag.pointwise in getattr(node.target, "tags", ())
            cost = 0 if is_free else times.cast(node)
            uses.append(TensorUse(node.name, consumers, cost))
    low = capture.nodes_of(graph, low_weights)
    return Problem(operations, tuple(uses), tuple(tied), low)


_EXACT = "none of its inputs was computed in 16 bits"


def _exact(problem: Problem) -> set[str]:
    """Return the "infer" and "clear" operations reached only by fp32 values.

    Why: angles of rotary embeddings, or masks, would lose digits before any 16-bit
    matmul does; an operation that is not faster in 16 bits must not be the first to
    round. "clear" operations that only feed 16-bit ones may round before them.
    """
    kinds = {name: operation.kind for name, operation in problem.operations.items()}
    after, _ = problem.neighbours()
    choosable = {name for name, kind in kinds.items() if kind in (INFER, CLEAR)}
    low = {n for n, kind in kinds.items() if kind == ALLOW} | problem.low_weights
    free = low | reachable(low, after, choosable)
    for name in reversed(kinds):
        if kinds[name] == CLEAR and after[name] and after[name] <= free:
            free.add(name)
    return choosable - free


def assemble(
    graph_module: fx.GraphModule,
    dtype: str,
    method: str,
    facts: Mapping[fx.Node, NodeFacts],
    problem: Problem,
    low: Collection[str],
    doubt: str,
    low_weights: Sequence[str],
    slowdown: Slowdown,
) -> Plan:
    """Return the plan in which the nodes in `low` run in 16 bits."""
    nodes = tuple(
        PlannedNode(
            node.name,
            fact.op,
            fact.module,
            fact.source,
            node.name in low,
            fact.kind,
            fact.reason,
            problem.operations[node.name].low_cost / 1e6,
            problem.operations[node.name].fp32_cost / 1e6,
        )
        for node, fact in facts.items()
    )
    by_name = {node.name: node for node in graph_module.graph.nodes}
    casts = tuple(
        PlannedCast(
            cast.producer,
            dtype if cast.to_low else "fp32",
            6 * sum(v.numel() for v in capture.tensors(by_name[cast.producer])),
            cast.cost / 1e6,
        )
        for cast in problem.casts(low)
    )
    return Plan(
        dtype,
        method,
        nodes,
        casts,
        graph_module,
        tuple(low_weights),
        doubt,
        slowdown,
    )


def _why(fact: NodeFacts, *, low: bool) -> str:
    """Return the reason of a decision: of the kind, and of the choice within it."""
    if fact.kind == ALLOW and not low:
        return f"{fact.reason}; here its casts would cost more than it gains"
    if fact.kind in (INFER, CLEAR) and low:
        return f"{fact.reason}; its neighbours run in 16 bits"
    return fact.reason


def device_of(model: nn.Module, example_inputs: Sequence[Any]) -> torch.device:
    """Return the device of a model."""
    tensors = [*model.parameters(), *capture.tensors(list(example_inputs))]
    if not tensors:
        message = "the model has no parameters, and example_inputs hold no tensor."
        raise UserError(message)
    return tensors[0].device

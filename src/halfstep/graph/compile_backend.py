"""`torch.compile(model, backend="halfstep")`: plans each graph that Dynamo traces.

In: a graph of torch functions, and its inputs. Out: a function that runs it with the
plan's casts, eagerly on a CPU, through Inductor on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from halfstep.errors import UserError, warn_caller
from halfstep.graph import capture
from halfstep.graph.planner import check_options, plan_graph
from halfstep.graph.rewrite import rewrite_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.graph.plan import Plan

_OPTIONS = ("dtype", "kinds", "method", "policy", "on_plan")


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Plan and rewrite one graph: the backend "halfstep" of torch.compile.

    Args:
        graph_module: From Dynamo; its parameters are inputs.
        example_inputs: Inputs, possibly fake tensors.
        options: `options` of `torch.compile`: `dtype` ("bf16"), `policy` ("lean"),
            `method` ("min-cut"), `kinds`, as for `plan`; `on_plan`: called with each
            graph's `Plan`. There is no calibration, because traced tensors have no
            values.

    Raises:
        UserError: If an option is unknown or wrong.
    """
    chosen = {"dtype": "bf16", "policy": "lean", "method": "min-cut", **(options or {})}
    unknown = sorted(set(chosen) - set(_OPTIONS))
    if unknown:
        raise UserError(f"options hold {unknown[0]!r}; choose {', '.join(_OPTIONS)}.")
    format_, policy, kinds = check_options(
        chosen["dtype"], chosen["policy"], chosen["method"], chosen.get("kinds")
    )
    if lost := _lost_in(graph_module):
        warn_caller(
            f"a compiled graph holds {lost}, which a plan would lose: it runs as it "
            "is, in the formats it was written in. Call it under halfstep.autocast, or "
            "compile the modules around it."
        )
        _restore_checkpoints(graph_module)
        return graph_module.forward
    with capture.without_autocast():
        aten = _aten_graph(graph_module, example_inputs)
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    if not tensors:
        return graph_module.forward
    device = tensors[0].device
    plan: Plan = plan_graph(
        aten,
        device,
        format_,
        policy,
        chosen["method"],
        example_inputs,
        kinds=kinds,
        fp32_ranges={},
        fused=device.type != "cpu",
    )
    if "on_plan" in chosen:
        chosen["on_plan"](plan)
    rewritten = rewrite_graph(aten, plan.low, format_.dtype, device.type)
    if device.type == "cpu":
        # On a CPU, Inductor's step takes as long, after a minute of compilation:
        # docs/decisions/0022-plans-of-graphs.md
        return rewritten
    inductor = torch._dynamo.lookup_backend("inductor")  # noqa: SLF001
    with capture.without_autocast():
        compiled = inductor(rewritten, list(example_inputs))

    def call(*args: Any) -> Any:  # noqa: ANN401
        with capture.without_autocast():
            return compiled(*args)

    return call


_LOST = {
    "autograd_function_apply": "a custom autograd.Function",
    "tag_activation_checkpoint": "activation checkpointing",
    "_enter_inference_mode": "torch.inference_mode",
    "register_hook": "a hook on a tensor",
    "_get_data_attr": ".data of a tensor",
    "_vmap_increment_nesting": "torch.func.vmap",
    "_grad_increment_nesting": "torch.func.grad",
    "_jvp_increment_nesting": "torch.func.jvp",
}
"""Name of a function in a graph -> what it stands for in the model."""
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast  # noqa: SLF001


def _parts_of(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    return [part for part in graph_module.modules() if isinstance(part, fx.GraphModule)]


def _restore_checkpoints(graph_module: fx.GraphModule) -> None:
    """Make segments recompute with the dropout masks of their forward pass.

    Those of Dynamo do so only where AOTAutograd compiles them.
    """
    for part in _parts_of(graph_module):
        for node in part.graph.nodes:
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                node.target = checkpoint
                node.kwargs = {**node.kwargs, "use_reentrant": False}
        part.recompile()


def _lost_in(graph_module: fx.GraphModule) -> str:
    """Return what a graph of forward operations would lose; "" if nothing."""
    nodes = [node for part in _parts_of(graph_module) for node in part.graph.nodes]
    names = {getattr(node.target, "__name__", "") for node in nodes}
    lost = [what for name, what in _LOST.items() if name in names]
    if any(node.target is _ENTER_AUTOCAST and node.args[2] for node in nodes):
        lost.append("an autocast context of its own")
    return " and ".join(lost)


def _mark_regions(graph: fx.Graph) -> None:
    """Mark nodes in `torch.autocast(enabled=False)`, which tracing to aten drops."""
    regions: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.target is _ENTER_AUTOCAST:
            regions[node] = node.args[2] is False
        elif node.target is torch.amp.autocast_mode._exit_autocast:  # noqa: SLF001
            regions.pop(node.args[0], None)
        elif any(list(regions.values())[-1:]):
            custom = {**(node.meta.get("custom") or {}), capture.NO_AUTOCAST: True}
            node.meta["custom"] = custom


def _aten_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> fx.GraphModule:
    """Return the graph in aten operations, before autograd."""
    _mark_regions(graph_module.graph)

    def run(*inputs: Any) -> Any:  # noqa: ANN401
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(graph_module).run(*inputs)

    trace = make_fx(
        run, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    traced: fx.GraphModule = trace(*example_inputs)
    inputs = traced.graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, example_inputs, strict=True):
        node.meta[capture.PARAMETER] = isinstance(value, nn.Parameter)
    capture.make_functional(traced)
    return traced

"""Inserts a plan's casts into a captured graph, and verifies the result.

In: a graph and the nodes that run in 16 bits. Out: a copy with at most one cast per
tensor and direction. `verify` runs after each rewrite; it shares no code with the
rewriting and recomputes every dtype.
"""

from __future__ import annotations

import copy
import inspect
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from halfstep.casting import active_context
from halfstep.errors import UserError, require_type
from halfstep.graph import capture
from halfstep.graph.plan import Plan
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_CAST = torch.ops.aten.to.dtype


def saturating_cast(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a mask to 16 bits; finite numbers become at most the largest one, not inf.

    Why: bf16 rounds fp32's lowest number, of which masks are made, to -inf, and a
    softmax of only such numbers is NaN. Infinities and NaN stay. A number that is cut
    gets no gradient.
    """
    limit = torch.finfo(dtype).max
    return mask.clamp(-limit, limit).where(mask.isfinite(), mask).to(dtype)


class PlannedModule(fx.GraphModule):
    """A rewritten model, for one mode and inputs of the planned shapes.

    `meta["inputs"]` describes them; without it any are accepted.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the graph with autocast disabled.

        Raises:
            UserError: If an input is not like the planned one.
        """
        if "inputs" in self.meta:
            self._check_inputs(args, kwargs)
        with capture.without_autocast():
            return super().__call__(*args, **kwargs)

    def _check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Accept positional and keyword arguments; bind rejects a wrong number.
        bound = inspect.signature(self.forward).bind(*args, **kwargs)
        inputs = map(_facts, pytree.tree_leaves(list(bound.arguments.values())))
        for number, (given, planned) in enumerate(zip(inputs, self.meta["inputs"])):  # noqa: B905
            if given != planned:
                raise UserError(
                    f"input {number} is {given}, and the graph was planned for "
                    f"{planned}: plan the model for this, too, or leave the "
                    "last, smaller batch out (drop_last=True)."
                )

    def train(self, mode: bool = True) -> PlannedModule:
        """Accept only the planned mode.

        Raises:
            UserError: In the other mode: dropout and batch norms are part of the graph.
        """
        if mode != self.training:
            now, other = ("train", "eval")[:: 1 if self.training else -1]
            raise UserError(
                f"this model was planned in {now}() mode, which its graph keeps: "
                f"plan the original in {other}() mode as well; both share parameters."
            )
        return self


def rewrite(model: nn.Module, plan: Plan) -> PlannedModule:
    """Return a module that runs a model as planned, with the model's parameters.

    It can be trained like the model. It accepts the shapes and constants that were
    planned, in the mode that was planned; others raise `UserError`. Inputs and outputs
    keep their dtypes.

    Args:
        model: The model that was planned.
        plan: The result of `plan`.

    Raises:
        UserError: If the plan is of another model or mode, or the weights are stored in
            other dtypes.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> batch = torch.randn(8, 64)
        >>> rewritten = hs.rewrite(model, hs.plan(model, [batch], method="painting"))
        >>> rewritten(batch).dtype, rewritten.get_parameter("0.weight").dtype
        (torch.float32, torch.float32)
    """
    require_type("plan", plan, isinstance(plan, Plan), "a plan of halfstep.plan")
    planned_modules = plan.graph_module.meta.get("modules", {})
    own_modules = capture.modules_of(model)
    for path in {**planned_modules, **own_modules}:
        planned, present = planned_modules.get(path), own_modules.get(path)
        if planned != present:
            raise UserError(
                f"the plan is of another model: its module {path!r} is "
                f"{_kind_and_mode(planned)}, and here {_kind_and_mode(present)}. Plan "
                "the model anew: halfstep.plan."
            )
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, param in plan.graph_module.named_parameters(remove_duplicate=False):
        _check_same(model, name, own.get(name) is param, "parameter")
        _check_storage(name, param, plan)
    own_buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in plan.graph_module.named_buffers(remove_duplicate=False):
        is_own = own_buffers.get(name, buffer) is buffer  # constants are the graph's
        _check_same(model, name, is_own, "buffer")
    dtype = formats.parse(plan.dtype).dtype
    graph = plan.graph_module.graph
    first = next(chain.from_iterable(map(capture.tensors, graph.nodes)), None)
    device = "cpu" if first is None else first.device.type
    low = plan.low | capture.nodes_of(graph, plan.low_weights)
    rewritten = rewrite_graph(plan.graph_module, low, dtype, device)
    rewritten.training = model.training
    inputs = graph.find_nodes(op="placeholder")
    rewritten.meta["inputs"] = [_facts(node.meta.get("val")) for node in inputs]
    return rewritten


def _check_same(model: nn.Module, name: str, is_same: bool, what: str) -> None:
    if not is_same:
        raise UserError(
            f"the plan is of another model: its {what} {name!r} is not this "
            f"{type(model).__name__}'s, or no longer. Plan the model anew: "
            "halfstep.plan."
        )


def _kind_and_mode(module: tuple[str, bool] | None) -> str:
    if module is None:
        return "missing"
    return f"{module[0]} in {'train' if module[1] else 'eval'}() mode"


def _facts(value: Any) -> str:  # noqa: ANN401
    """Return a string with what the graph depends on in an input."""
    if isinstance(value, Tensor):
        return f"{formats.word(value.dtype)} of shape {tuple(map(int, value.shape))}"
    return repr(value)


def _check_storage(name: str, param: nn.Parameter, plan: Plan) -> None:
    """Reject a parameter that is not stored as planned."""
    stored = formats.word(param.dtype)
    if name in plan.low_weights and stored != plan.dtype:
        raise UserError(
            f"the plan is for {plan.dtype} weights, and {name!r} is {stored}: call "
            f"halfstep.prepare(model, optimizer, 'O2', dtype='{plan.dtype}') first."
        )
    nodes = plan.graph_module.graph.find_nodes(op="get_attr")
    captured = {node.meta["val"].dtype for node in nodes if node.target == name}
    if name not in plan.low_weights and captured - {param.dtype}:
        cure = "plan the model anew: halfstep.plan"
        if formats.is_low(param.dtype):
            cure = "plan with level='O2', before halfstep.prepare"
        message = f"the plan is for fp32 weights, and {name!r} is {stored}: {cure}."
        raise UserError(message)


def rewrite_graph(
    graph_module: fx.GraphModule, low: Collection[str], dtype: torch.dtype, device: str
) -> PlannedModule:
    """Return a copy of a graph with the nodes and parameters in `low` in 16 bits."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    changing = capture.changed_in_place(graph_module.graph)
    masks = {capture.attention_mask(node) for node in graph_module.graph.nodes}
    # Cast inputs first: a cast must not be inside the `no_grad` of its first use.
    nodes = sorted(graph_module.graph.nodes, key=lambda node: not _is_input(node))
    last_input = nodes[max(0, sum(map(_is_input, nodes)) - 1)]

    def in_format(source: fx.Node, to: torch.dtype) -> fx.Node:
        """Return the copied tensor in a format; insert at most one cast for it."""
        value = source.meta.get("val")
        has_fp32 = isinstance(value, Tensor) and value.dtype == torch.float32
        now = dtype if source.name in low else torch.float32
        if not has_fp32 or now == to:
            return copies[source]
        is_mask = source in masks and to == dtype
        cast: Callable[..., Any] = saturating_cast if is_mask else _CAST
        if source in changing:
            return graph.call_function(cast, (copies[source], to))  # memory changes
        if (source, to) not in casts:
            after = last_input if _is_input(source) else source
            with graph.inserting_after(copies[after]):
                casts[source, to] = graph.call_function(cast, (copies[source], to))
        return casts[source, to]

    for node in nodes:
        wanted = dtype if node.name in low else torch.float32
        castable = capture.castable_inputs(node, device)
        arguments = {
            source: in_format(source, wanted if source in castable else torch.float32)
            for source in node.all_input_nodes
        }
        copies[node] = graph.node_copy(node, arguments.__getitem__)
    graph._codegen = copy.copy(graph_module.graph._codegen)  # noqa: SLF001
    rewritten = PlannedModule(graph_module, graph, type(graph_module).__name__)
    planned = {created: node.name in low for node, created in copies.items()}
    shared = {copies[source] for source in nodes if source not in changing}
    verify(rewritten, graph_module, planned, dtype, device, shared)
    active_context.num_planned += 1
    return rewritten


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def verify(
    rewritten: fx.GraphModule,
    original: fx.GraphModule,
    low: Mapping[fx.Node, bool],
    dtype: torch.dtype,
    device: str,
    shared: Collection[fx.Node],
) -> None:
    """Raise AssertionError if a rewritten graph is wrong: a bug in the rewriting.

    fp32 operations get no 16-bit inputs and 16-bit ones no fp32 inputs except where
    required, outputs keep their dtypes, no cast is undone by the next, and no tensor is
    cast twice to one dtype. `low`: node that is no cast -> whether it must be 16-bit.
    `shared`: nodes whose memory does not change, so that one cast serves all uses.
    """
    dtypes = _dtypes(rewritten)
    cast_to = set()
    for node in rewritten.graph.nodes:
        if node not in low:
            source, to = node.args
            _promise(source in low, f"{node} casts what is a cast already")
            is_new = (source, to) not in cast_to or source not in shared
            _promise(is_new, f"{source} is cast twice to {to}")
            cast_to.add((source, to))
            continue
        if node.op == "output":
            before = dict(_leaves(original.graph.output_node().args))
            after = {path: dtypes[each] for path, each in _leaves(node.args)}
            for path, each in before.items():
                expected = [v.dtype for v in capture.tensors(each)]
                _promise(after[path] == expected, f"output {path} is {after[path]}")
        if node.op != "call_function" or getattr(node.target, "_schema", None) is None:
            continue
        wrong = torch.float32 if low[node] else dtype
        for source in capture.castable_inputs(node, device):
            # Models may contain 16-bit tensors of their own.
            own = [] if low[node] else _captured(source)
            wanted = wrong not in dtypes[source] or wrong in own
            _promise(wanted, f"{node} takes {wrong} of {source}")
        own = _captured(node)
        if torch.float32 in own:
            wanted = wrong not in dtypes[node] or (wrong in own and not low[node])
            _promise(wanted, f"{node} computes {wrong}")


def _captured(node: fx.Node) -> list[torch.dtype]:
    """Return the dtypes that a node had before the plan; [] for a cast."""
    return [value.dtype for value in capture.tensors(node)]


def _promise(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(broken)


def _leaves(value: Any) -> list[tuple[str, fx.Node]]:  # noqa: ANN401
    pairs, _ = pytree.tree_flatten_with_path(value)
    return [(pytree.keystr(k), v) for k, v in pairs if isinstance(v, fx.Node)]


def _dtypes(graph_module: fx.GraphModule) -> dict[fx.Node, list[torch.dtype]]:
    """Return node -> dtypes of its tensors, recomputed with fake tensors."""
    # A ShapeEnv gives symbols to data-dependent sizes.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    dtypes: dict[fx.Node, list[torch.dtype]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
            if n.op == "placeholder":
                result: Any = pytree.tree_map_only(
                    Tensor, capture.without_values, n.meta.get("val")
                )
            else:
                result = super().run_node(n)
                if n.op == "get_attr" and isinstance(result, Tensor):
                    result = mode.from_tensor(result, static_shapes=True)
            dtypes[n] = [value.dtype for value in capture.tensors(result)]
            return result

    inputs = [None for _ in graph_module.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad(), capture.without_autocast():
        Recorder(graph_module).run(*inputs, enable_io_processing=False)
    return dtypes

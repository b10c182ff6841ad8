"""Captures a model as a graph of aten operations, and asks the policy about each node.

In: a model and example inputs, or a graph that Dynamo traced. Out: a trainable
`GraphModule` that shares the model's parameters, and for each node its class and reason
(`NodeFacts`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import re
import sys
import threading
import warnings
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep._torch.patches import replaced
from halfstep.errors import UserError, require_type
from halfstep.graph.problem import ALLOW, CLEAR, DENY, INFER
from halfstep.numerics import formats
from halfstep.policy import op_tables
from halfstep.policy.decision import decide

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from halfstep.policy.rules import Policy

_CLEAR_OPS = """
    abs alias amax amin argmax argmin broadcast_to cat chunk clamp clamp_max clamp_min
    clone constant_pad_nd contiguous detach expand expand_as flatten flip gather index
    index_select masked_fill max max_pool1d max_pool2d max_pool3d maximum min minimum
    movedim narrow neg pad permute relu repeat reshape roll select slice split
    split_with_sizes squeeze stack swapaxes t tile transpose unbind unflatten unfold
    unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d view view_as
    where
"""
CLEAR_OPS = frozenset(_CLEAR_OPS.split())
"""Aten operations that pass values on unchanged, select them, or move them."""

_BOUNDED_OPS = {
    *("batch_norm", "native_batch_norm", "instance_norm", "layer_norm", "group_norm"),
    *("linear", "conv1d", "conv2d", "conv3d", "convolution"),
    *("softmax", "_softmax", "_safe_softmax", "cos", "sigmoid", "sin", "tanh"),
    *("native_layer_norm", "rms_norm", "scaled_dot_product_attention"),
}
"""Operations whose results are in the range of 16 bits, whatever mask they take."""
_PRODUCTS = {
    operation.partition(".")[0]
    for rows in op_tables.LEAN.values()
    for operation, row in rows.items()
    if row.category == op_tables.LOW
}
"""Operations that multiply and add: data, and no mask unless a matmul spreads it."""
_ADDENDS = {
    **dict.fromkeys(("addbmm", "addmm", "baddbmm"), (0, "self")),
    "scaled_dot_product_attention": (3, "attn_mask"),
}
"""Operation -> position and name of what it adds to a product."""
_ATTENTION_OPS = {"baddbmm", "scaled_dot_product_attention"}
"""Operations that add masks to scores; `saturating_cast` casts these masks."""

NO_AUTOCAST = "halfstep_no_autocast"
"""Key in `meta["custom"]` of nodes inside `torch.autocast(enabled=False)`."""
PARAMETER = "halfstep_parameter"
"""Key in `meta` of inputs that are parameters."""
_MAX_BREAKS = 3
"""Graph breaks listed in an error message."""
_TORCH_MODULES = "/torch/nn/"
"""Part of the path of torch's modules; a line of the user's code is more useful."""


@dataclass(frozen=True)
class NodeFacts:
    """What a plan needs to know about one operation of a graph."""

    kind: str
    """One of `problem.KINDS`."""
    reason: str
    """Reason of the rule or table entry behind `kind`."""
    op: str
    """aten name, with the overload unless it is the default."""
    module: str
    """Path of the module that ran it; "" is the model itself."""
    source: str
    """File and line of the user's code, or ""."""
    fixed: bool
    """Whether it must run as captured, whatever the policy is."""


def capture(model: nn.Module, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Capture a model as a graph of aten operations that shares the model's parameters.

    Args:
        model: In the mode, training or evaluation, that the graph is for.
        example_inputs: Positional arguments of one batch; the graph gets their shapes.

    Raises:
        UserError: If its weights are in 16 bits, or torch.export cannot capture it; the
            message says where and why.
    """
    require_type("model", model, isinstance(model, nn.Module), "an nn.Module")
    is_sequence = isinstance(example_inputs, list | tuple)
    expected = "a list or tuple of what the model is called with"
    require_type("example_inputs", example_inputs, is_sequence, expected)
    for name, param in model.named_parameters():
        if formats.is_low(param.dtype):
            raise UserError(
                f"{name!r} is {formats.word(param.dtype)}: plan the model while its "
                "weights are fp32, with level='O2' if they will be stored in 16 bits."
            )
    try:
        with (
            without_autocast(),
            _refusing_lost_backwards(),
            _quiet_errors(),
            warnings.catch_warnings(),
        ):
            # Every LSTM triggers it: export rebuilds its list of weights.
            warnings.filterwarnings("ignore", ".*_flat_weights", UserWarning)
            graph_module = torch.export.export(model, tuple(example_inputs)).module()
    except UserError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{type(model).__name__} cannot be captured as one graph by torch.export: "
            f"{first_line.rstrip('.')}.{_advice(model, example_inputs)}"
        ) from error
    assert isinstance(graph_module, fx.GraphModule)  # noqa: S101
    for node in list(graph_module.graph.nodes):
        # A check of the inputs' shapes, which assumes fp32 inputs.
        if node.op == "call_module" and node.target == "_guards_fn":
            graph_module.graph.erase_node(node)
    make_functional(graph_module)
    graph_module.meta["modules"] = modules_of(model)
    return graph_module


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Disable surrounding autocast contexts: capture and measurements run in fp32."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def preserve_state(state: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of parameters and buffers afterwards."""
    copies = {tensor: tensor.detach().clone() for tensor in state}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copied in copies.items():
                tensor.copy_(copied)


def own_copies(inputs: Sequence[Any]) -> list[Any]:
    """Return a model's inputs with copied tensors; the model may write to them."""
    copies: list[Any] = pytree.tree_map_only(
        Tensor,
        lambda value: value.detach().clone().requires_grad_(value.requires_grad),
        list(inputs),
    )
    return copies


def modules_of(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return path -> (class name, training mode) of a model's modules."""
    return {
        path: (type(module).__qualname__, module.training)
        for path, module in model.named_modules()
    }


@contextlib.contextmanager
def _refusing_lost_backwards() -> Iterator[None]:
    """Reject what the captured graph would lose, while a model is captured.

    Why: torch.export traces through a custom `autograd.Function`, a hook on a tensor,
    inference mode and activation checkpointing. The graph would then train with other
    gradients, or need more memory.
    """
    thread = threading.get_ident()
    apply_of_torch = vars(torch.autograd.Function)["apply"]

    def refuse(what: str) -> None:
        if threading.get_ident() == thread and torch.is_grad_enabled():
            raise UserError(
                f"the model uses {what}, which a captured graph would lose: train it "
                "under halfstep.autocast, or plan the modules around it. To plan for "
                "evaluation, call plan under torch.no_grad()."
            )

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # Operators with a registered backward pass stay nodes, which keep it.
        if not cls.__module__.startswith(_OPERATORS):
            is_checkpoint = cls.__module__ == _CHECKPOINT
            name = f"the custom autograd.Function {cls.__name__}"
            refuse("activation checkpointing" if is_checkpoint else name)
        return apply_of_torch.__get__(None, cls)(*args, **kwargs)

    def refused(original: Any, what: str) -> Any:  # noqa: ANN401
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            # torch.export itself makes such calls too.
            caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001
            if caller == _CHECKPOINT or not caller.startswith("torch."):
                refuse(what)
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        function = torch.autograd.Function
        stack.enter_context(replaced(function, "apply", classmethod(apply)))
        for owner, name, what in _LOST_CALLS:
            original = getattr(owner, name, None)
            if original is not None:
                stack.enter_context(replaced(owner, name, refused(original, what)))
        yield


_CHECKPOINT = "torch.utils.checkpoint"
_OPERATORS = ("torch._library.", "torch._higher_order_ops.")
_LOST_CALLS: tuple[tuple[Any, str, str], ...] = (
    # Called by each non-reentrant checkpoint.
    (torch.utils.checkpoint, "_CheckpointFrame", "activation checkpointing"),
    (Tensor, "register_hook", "a hook on a tensor (register_hook)"),
    (torch.inference_mode, "__enter__", "torch.inference_mode"),
)
"""(owner, attribute, description) of calls that a captured graph would lose."""


@contextlib.contextmanager
def _quiet_errors() -> Iterator[None]:
    """Drop what torch logs and prints about an exception; the caller reports it."""
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.WARNING

    names = [name for name in logging.root.manager.loggerDict if name[:5] == "torch"]
    handlers = {each for name in names for each in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(is_other)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _advice(model: nn.Module, example_inputs: Sequence[Any]) -> str:
    """Return where and why Dynamo breaks the graph of a model.

    "" if that fails: then torch.compile cannot run the model either.
    """
    try:
        with _quiet_errors():
            explained = torch._dynamo.explain(copy.deepcopy(model))(*example_inputs)  # noqa: SLF001
    except Exception:  # noqa: BLE001 -- whatever the model raises: torch.export said why
        return ""
    places = []
    for each in explained.break_reasons[:_MAX_BREAKS]:
        frame = each.user_stack[-1] if each.user_stack else None
        where = f" at {Path(frame.filename).name}:{frame.lineno}" if frame else ""
        places.append(f"{where} ({str(each.reason).partition(chr(10))[0]})")
    more = explained.graph_break_count - len(places)
    places += [f" at {more} places more"] if more > 0 else []
    breaks = f", with breaks{','.join(places)}" if places else ""
    return f" torch.compile(model, backend='halfstep') compiles it in parts{breaks}."


def make_functional(graph_module: fx.GraphModule) -> None:
    """Replace `x.add_(y)` by `x.add(y)` unless a view or an input sees the write.

    Why: tensors that are written in place must stay fp32, and `out += x` is common.
    """
    order = {node: number for number, node in enumerate(graph_module.graph.nodes)}
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, root in _alias_roots(graph_module.graph).items():
        groups[root].append(node)
    for root, (_, *others) in groups.items():
        overloads = [_functional_overload(node) for node in others]
        if root.op != "call_function" or None in overloads:
            continue
        for node, overload in zip(others, overloads, strict=True):
            written: Any = node.args[0]
            node.target = overload
            for user in list(written.users):
                if order[user] > order[node]:
                    user.replace_input_with(written, node)
    graph_module.recompile()


def _functional_overload(node: fx.Node) -> Any:  # noqa: ANN401
    """Return the out-of-place overload of an in-place operation, or None."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.endswith("_") or len(schema.returns) != 1:
        return None
    name = schema.name.removeprefix("aten::")[:-1]
    dtypes = {v.dtype for v in tensors([*node.all_input_nodes, node])}
    is_promoted = len({d for d in dtypes if d.is_floating_point or d.is_complex}) > 1
    if name == "copy" or is_promoted:  # copy has no derivative; promotion: other dtype
        return None
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    arguments = [(each.name, str(each.type)) for each in schema.arguments]
    return next(
        (
            overload
            for overload in overloads
            if arguments == [(a.name, str(a.type)) for a in overload._schema.arguments]  # noqa: SLF001
        ),
        None,
    )


def facts(
    graph_module: fx.GraphModule,
    *,
    device: str,
    policy: Policy,
    low: torch.dtype,
    kinds: Mapping[str, str],
) -> dict[fx.Node, NodeFacts]:
    """Return `NodeFacts` for each node that computes fp32 tensors.

    All other nodes run as captured. `kinds` overrides the policy, by operation.
    """
    changing = changed_in_place(graph_module.graph)
    is_bf16 = low == torch.bfloat16  # in fp16, `plan` measures ranges
    large = _may_exceed_bf16(graph_module, changing) if is_bf16 else set()
    node_facts = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or not has_fp32(node):
            continue
        op = op_name(node)
        module, types = _module(node)
        fixed = "its memory is written to in place" if node in changing else ""
        fixed = fixed or _why_fixed(node, low)
        if node in large and not fixed:
            fixed = "it takes numbers that bf16 may not hold"
        kind, reason = DENY, fixed
        if not fixed:
            dtypes = [value.dtype for value in tensors(node.args)]
            answer = decide(
                op, dtypes, device, policy=policy, low=low, module=module, types=types
            )
            kind, reason = _kind(answer.category, op, low), answer.reason
            if answer.dtype == torch.float32 and answer.category == op_tables.LOW:
                kind = DENY
            asked = kinds.get(op, kinds.get(op.partition(".")[0]))
            if asked is not None:
                kind, reason = asked, "the caller chose this kind"
        node_facts[node] = NodeFacts(
            kind, reason, op, module, _source(node), bool(fixed)
        )
    return node_facts


def differentiable(
    graph_module: fx.GraphModule, inputs: Sequence[Any] = ()
) -> set[fx.Node]:
    """Return the nodes whose floating-point results need gradients.

    `inputs` are those of the graph, if they include its parameters.
    """
    nodes: set[fx.Node] = set()
    values = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            if node.op == "placeholder":
                value = next(values, None)
            else:
                value = attrgetter(str(node.target))(graph_module)
            if isinstance(value, Tensor) and value.requires_grad:
                nodes.add(node)
        elif any(each in nodes for each in node.all_input_nodes) and any(
            value.is_floating_point() for value in tensors(node)
        ):
            nodes.add(node)
    return nodes


def _kind(category: str, op: str, low: torch.dtype) -> str:
    if category == op_tables.LOW:
        return ALLOW
    fp32 = {op_tables.FP32, op_tables.FP32_RESULT, op_tables.BANNED}
    if low == torch.float16:
        fp32.add(op_tables.FP32_IN_FP16)
    if category in fp32:
        return DENY
    is_clear = op == "getitem" or op.partition(".")[0] in CLEAR_OPS
    return CLEAR if is_clear else INFER


def _why_fixed(node: fx.Node, low: torch.dtype) -> str:
    """Return why a node must run as captured; "" if the policy decides."""
    if NO_AUTOCAST in (node.meta.get("custom") or {}):
        return "autocast is off there"
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return "" if is_getitem(node) else "it is no operation of aten"
    values = [*tensors(node.args), *tensors(node.kwargs)]
    if not any(value.dtype == torch.float32 for value in values):
        return "it makes new fp32 values"
    other = [v for v in values if v.is_floating_point() and v.dtype != torch.float32]
    if other:
        return f"it also takes {str(other[0].dtype).removeprefix('torch.')}"
    if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
        return "it names a dtype"
    beyond = _number_beyond(node, torch.finfo(low).max)
    return "" if beyond is None else f"{formats.word(low)} does not hold its {beyond:g}"


def _number_beyond(node: fx.Node, limit: float) -> float | None:
    """Return the first finite number among the arguments that exceeds a limit."""
    arguments = [*node.args, *node.kwargs.values()]
    numbers = [a for a in arguments if isinstance(a, float) and math.isfinite(a)]
    return next((number for number in numbers if abs(number) > limit), None)


def _may_exceed_bf16(
    graph_module: fx.GraphModule, changing: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """Return the nodes that stay fp32 for finite numbers beyond bf16's largest.

    Why: masks hold fp32's lowest number, and so do scores to which they are added. In
    bf16 it would be -inf, and a row of it NaN after a softmax. A number or a tensor in
    the code surely is that large, and so is what is computed from it. An input may be,
    or a result of code under `no_grad`: what is computed from it until it is multiplied
    stays fp32 if a softmax, a comparison or the caller reads it.
    """
    same_memory: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node, root in changing.items():
        same_memory[root].add(node)

    def with_aliases(node: fx.Node) -> set[fx.Node]:
        return {node, *same_memory[changing.get(node, node)]}

    large, possible, takers = _follow_large(graph_module, with_aliases)
    exact: set[fx.Node | None] = set()
    for node in reversed(graph_module.graph.nodes):
        op = _base_name(node)
        is_reader = "softmax" in op or op in ("exp", "logsumexp") or not _is_float(node)
        is_fp32 = (
            node in large or node in takers or (node in possible and node in exact)
        )
        if is_reader or is_fp32:
            for each in _read_values(node):
                exact |= with_aliases(each)
        exact.add(attention_mask(node))
    wide = large | (possible & exact)
    return takers | {node for node in wide if _base_name(node) not in _PRODUCTS}


def _follow_large(
    graph_module: fx.GraphModule, with_aliases: Callable[[fx.Node], set[fx.Node]]
) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Return the nodes whose values are large, and may be; and those who take them.

    The latter compute numbers of usual size. `with_aliases` returns a node and those
    that share its memory, if that is written in place.
    """
    large: set[fx.Node] = set()
    possible: set[fx.Node] = set()
    takers: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        op, mask = _base_name(node), attention_mask(node)
        inputs = _read_values(node)
        takes_large = not large.isdisjoint(inputs - {mask})
        takes_large |= mask is None and _addend(node) in possible
        takes_possible = not possible.isdisjoint(inputs)
        if op in _BOUNDED_OPS:
            if takes_large or (takes_possible and "softmax" in op):
                takers.add(node)
        elif op in _PRODUCTS:
            if takes_large:
                takers.add(node)
            if takes_large or mask in large or mask in possible:
                possible.add(node)
        elif _is_float(node):
            is_large, is_possible = _is_source(graph_module, node)
            if is_large or takes_large:
                large |= with_aliases(node)
            elif is_possible or takes_possible:
                possible |= with_aliases(node)
    return large, possible, takers


def _is_source(graph_module: fx.GraphModule, node: fx.Node) -> tuple[bool, bool]:
    """Return whether a node surely makes large numbers, and whether it may."""
    limit = formats.BF16.max / 2**8  # half of fp32's lowest may be doubled later
    if node.op == "placeholder":
        return False, not node.meta.get(PARAMETER)
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(graph_module)
        return isinstance(value, Tensor) and _holds_beyond(value, limit), False
    is_opaque = not (hasattr(node.target, "_schema") or is_getitem(node))  # `no_grad`
    is_large = _number_beyond(node, limit) is not None
    return is_large, is_opaque or _base_name(node) == "nan_to_num"


def _is_float(node: fx.Node) -> bool:
    """Return whether a node computes floating-point tensors."""
    is_output = node.op == "output"
    return not is_output and any(v.is_floating_point() for v in tensors(node))


def _read_values(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of a node of which it reads more than the shape or dtype."""
    op = _base_name(node)
    if op.endswith("_like") or op.startswith("new_"):
        return set()
    return {*(node.all_input_nodes[:1] if op.endswith("_as") else node.all_input_nodes)}


def _holds_beyond(tensor: Tensor, limit: float) -> bool:
    """Return whether a constant or buffer holds finite numbers beyond a limit."""
    is_wide = tensor.dtype in (torch.float32, torch.float64) and not tensor.is_meta
    if isinstance(tensor, nn.Parameter) or not is_wide:
        return False
    sizes = tensor.detach().to_dense().abs()
    return bool(((sizes > limit) & sizes.isfinite()).any())


def attention_mask(node: fx.Node) -> fx.Node | None:
    """Return the mask that attention adds to its scores, in one operation."""
    return _addend(node) if _base_name(node) in _ATTENTION_OPS else None


def _addend(node: fx.Node) -> fx.Node | None:
    """Return what an operation adds to a product."""
    position, name = _ADDENDS.get(_base_name(node), (0, ""))
    value = dict(enumerate(node.args)).get(position) if name else None
    value = node.kwargs.get(name) if value is None else value
    return value if isinstance(value, fx.Node) else None


def _base_name(node: fx.Node) -> str:
    return op_name(node).partition(".")[0]


def changed_in_place(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return node -> the node that owns its memory, where that is written in place."""
    roots = _alias_roots(graph)
    written = {
        roots[value] for node in graph.nodes for value in _aliased(node, written=True)
    }
    return {node: root for node, root in roots.items() if root in written}


def _alias_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return node -> the node that owns its memory, often itself."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        aliased = _aliased(node) or _returned(node)
        roots[node] = next((roots[value] for value in aliased), node)
    return roots


def _returned(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an operation may return although its schema has no alias.

    Examples are dropout in evaluation mode and einsum. Composite operations are run on
    meta tensors to find out.
    """
    can_decompose = getattr(node.target, "_can_decompose", None)
    inputs = [each for each in node.all_input_nodes if [*tensors(each)]]
    if can_decompose is None or not can_decompose() or not inputs:
        return []
    if not has_static_shapes([node, *inputs]):
        return inputs[:1]  # unknown, so assume an alias
    owners: dict[object, fx.Node] = {}

    def without_numbers(value: fx.Node) -> Any:  # noqa: ANN401
        empty = pytree.tree_map_only(
            Tensor, lambda v: without_values(v, "meta"), value.meta.get("val")
        )
        owners.update({_storage(tensor): value for tensor in tensors(empty)})
        return empty

    args, kwargs = fx.map_arg((node.args, node.kwargs), without_numbers)
    target: Any = node.target
    try:
        with torch.no_grad(), without_autocast():
            results = [*tensors(target(*args, **kwargs))]
    except (RuntimeError, NotImplementedError, IndexError):  # a cast has no value
        return inputs[:1]
    return [owners[each] for each in map(_storage, results) if each in owners]


def without_values(value: Tensor, device: torch.device | str = "") -> Tensor:
    """Return an uninitialized tensor like a fake one, whose sizes have hints."""
    sizes, strides = map(int, value.shape), map(int, value.stride())
    return torch.empty_strided(
        [*sizes], [*strides], dtype=value.dtype, device=device or value.device
    )


def _storage(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _aliased(node: fx.Node, *, written: bool = False) -> list[fx.Node]:
    """Return the arguments that the result may alias, or that are written."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [node.args[0]] if is_getitem(node) and not written else []  # type: ignore[list-item]
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if isinstance(value, fx.Node)
        and argument.alias_info is not None
        and (argument.alias_info.is_write or not written)
    ]


def op_name(node: fx.Node) -> str:
    """Return the aten name of a node's operation, with a non-default overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    name = schema.name.removeprefix("aten::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def castable_inputs(node: fx.Node, device: str) -> list[fx.Node]:
    """Return the inputs of a node that are cast to the node's own format."""
    keep = op_tables.fp32_arguments(op_name(node), device)
    fp32_inputs = [node.args[index] for index in keep if index < len(node.args)]
    arguments = [a for i, a in enumerate(node.args) if i not in keep]
    inputs: list[fx.Node] = []
    fx.map_arg((arguments, node.kwargs), inputs.append)
    return [each for each in inputs if each not in fp32_inputs or each in arguments]


def nodes_of(graph: fx.Graph, params: Collection[str]) -> frozenset[str]:
    """Return the names of the nodes that read the given parameters."""
    names = (n.name for n in graph.nodes if n.op == "get_attr" and n.target in params)
    return frozenset(names)


def has_fp32(node: fx.Node) -> bool:
    """Return whether a node computes an fp32 tensor."""
    return any(v.dtype == torch.float32 for v in tensors(node.meta.get("val")))


def has_static_shapes(nodes: Iterable[fx.Node]) -> bool:
    """Return whether no size or stride of the nodes depends on data."""
    sizes = [
        size for n in nodes for v in tensors(n) for size in (*v.shape, *v.stride())
    ]
    return all(
        isinstance(size, int) or not free_unbacked_symbols(size) for size in sizes
    )


def tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield the (fake) tensors of nodes or values in nested lists and tuples."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, fx.Node):
            yield from tensors(leaf.meta.get("val"))
        elif isinstance(leaf, Tensor):
            yield leaf


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node takes an item of a tuple."""
    return getattr(node.target, "__name__", "") == "getitem"


def _module(node: fx.Node) -> tuple[str, Sequence[str]]:
    """Return a node's module path, and its modules' class names, innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    names: list[str] = []
    for module_path, kind in stack.values():
        path = re.sub(r"^L\['\w+'\]\.?", "", module_path)  # Dynamo's notation
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        names.insert(0, name.rpartition(".")[2])
    return path, names


def _source(node: fx.Node) -> str:
    trace: Iterable[str] = (node.meta.get("stack_trace") or "").splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith('File "')]
    if not lines:
        return ""
    own = [line for line in lines if _TORCH_MODULES not in line]
    file, line, *_ = (own or lines)[-1].split(", ")
    name = file.removeprefix('File "').removesuffix('"').rpartition("/")[2]
    return f"{name}:{line.removeprefix('line ')}"

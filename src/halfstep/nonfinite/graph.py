"""Finds in the autograd graph of a loss which operation made the first inf or NaN.

The graph holds most values: a tensor that an operation saved is the result of the node
it points to. The search starts at a non-finite loss and goes back without passing
finite values, which leaves the candidates; a mask of -inf that a softmax has consumed
is not among them. The first candidate in forward order with evidence is named.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from halfstep.nonfinite import domains
from halfstep.nonfinite.domains import (
    FIND,
    MASK,
    RUNNING_STATS,
    UNSCALE,
    counted,
    local_data,
    range_text,
)
from halfstep.nonfinite.optimizer_eps import weight_advice
from halfstep.nonfinite.origin import BadOp, module_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.autograd.graph import Node

    Namer = Callable[[Tensor], str]
    Edge = tuple[Node, int]  # a node, and the index of its output


_WITH_PARAMETERS = re.compile(r"(?P<op>[a-z]\w*) \((?P<names>[^)]*)\)")
"""Text of an operation and the parameters that it takes itself."""
_PHASES = {"data": "input", "weight": "weight"}
"""Phases of causes outside of a pass."""


def _bad_op(
    cause: str, where: str, evidence: str, advice: str, kind: str = "", rule: str = ""
) -> BadOp:
    """Return a cause as the result of a replay that was not made.

    `where` is an operation with the parameters that it takes, or a tensor; `kind` is
    "inf" or "NaN" if a value shows it, and unknown for a derivative.
    """
    match = _WITH_PARAMETERS.fullmatch(where)
    names = match["names"] if match else where if cause == "weight" else ""
    modules = {name.rpartition(".")[0] for name in names.split(", ")}
    if match is None or len(modules) > 1:
        evidence = f"{where}: {evidence}"
    return BadOp(
        phase=_PHASES.get(cause, "forward"),
        module=(modules.pop() or "model") if len(modules) == 1 else "model",
        op=match["op"] if match else "",
        scale=1.0,
        nonfinite_kind=kind,
        cause=cause,
        evidence=evidence,
        advice=advice,
        reproduced=False,
        rule=rule,
    )


@torch.no_grad()
def find_in_graph(loss: Tensor, name_of: Namer, policy: str = "torch") -> BadOp | None:
    """Find the operation that made the first inf or NaN, before the backward pass.

    The graph is not changed. The scale of the result is 1, and nothing was reproduced.

    Synchronizes with the device. Saved tensors behind hooks, as of recomputed blocks,
    are not read, because each read would compute the block again.

    Args:
        loss: Any shape; its graph must not be freed yet.
        name_of: Returns the name of a parameter.
        policy: The policy of the forward pass, to which the advice adds rules.
    """
    if loss.grad_fn is None:
        return None
    # A dispatch mode would get the saved Python numbers as floats, not as tensors.
    with _python_dispatch._disable_current_modes():  # noqa: SLF001
        graph = _Graph(loss, loss.grad_fn, name_of, policy)
        if math.isfinite(_absmax(loss)):
            errors = (graph.domain_error(op, "backward") for op in graph.ops.values())
            bad = next(filter(None, errors), None)
            # A finite loss can hide an overflow; else the derivative is infinite.
            is_slope = bad is not None and bad.cause != "forward range"
            return replace(bad, phase="backward") if bad and is_slope else bad
        checks = (
            *(graph.nonfinite_input, graph.domain_error, graph.masked_softmax),
            *(graph.overflow, graph.unexplained),
        )
        causes = (check(op) for op in graph.candidate_ops() for check in checks)
        return next(filter(None, causes), None)


def loss_scale_of(output: Tensor) -> float:
    """Return the power of two in fp32 that a scaler has multiplied a loss by, or 1.

    Reshaping and summing may follow the multiplication. Synchronizes with the device.
    """
    node = output.grad_fn
    while node is not None:
        for dtype, number in saved_numbers(node, "Mul"):
            if dtype == torch.float32 and math.frexp(number)[0] == 0.5:  # noqa: PLR2004
                return number
        edges = _edges(node)
        node = edges[0][0] if len(edges) == 1 else None
    return 1.0


def is_unscaled(loss: Tensor, scale: float) -> bool:
    """Return whether an operation behind a loss may divide by its scale.

    Division by the scale or its square, perhaps times a weight, is recognized as a
    factor of at least the square root of the scale. Synchronizes with the device.
    """
    nodes = nodes_of(loss.grad_fn)
    multiplied = [n for node in nodes for _, n in saved_numbers(node, "Mul")]
    divided = [n for node in nodes for _, n in saved_numbers(node, "Div")]
    root = math.sqrt(scale)
    divides = any(abs(n) >= root for n in divided)
    return divides or any(0 < abs(n) * root <= 1 for n in multiplied)


def nodes_of(
    root: Node | None, follows: Callable[[Edge], bool] = lambda _: True
) -> set[Node]:
    """Return a node and all nodes upstream along edges that `follows` accepts."""
    nodes = {root} if root else set()
    pending = [*nodes]
    while pending:
        new = {edge[0] for edge in _edges(pending.pop()) if follows(edge)} - nodes
        nodes |= new
        pending += new
    return nodes


def saved_numbers(node: Node | None, kind: str) -> list[tuple[torch.dtype, float]]:
    """Return the saved one-element operands, with dtypes, if a node is of this kind."""
    if node is None or not node.name().startswith(f"{kind}Backward"):
        return []
    numbers = []
    for name in ("other", "self"):
        # RuntimeError: freed. Modes are disabled, or a replay would trace these calls.
        with suppress(RuntimeError), _python_dispatch._disable_current_modes():  # noqa: SLF001
            value = getattr(node, f"_saved_{name}", None)
            if isinstance(value, Tensor) and value.numel() == 1:
                numbers.append((value.dtype, float(value.detach())))
    return numbers


# Operations by the names of their nodes, without "Backward0"

_SHAPE_OPS = re.compile(
    r"(T|Trans\w+|Permute|\w*View|Reshape\w+|Expand|\w*queeze|Clone)$"
)
"""Return their input."""

_BOUNDED_OPS = re.compile(
    r"Relu|Gelu|Silu|Tanh|Sigmoid|.*(Softmax|Norm$|Pool|Dropout)|Mean"
)
"""Do not make inf from finite inputs."""

_ABSORBING_OPS = re.compile(r"Div|Maximum|Minimum|Clamp|Logaddexp|ScaledDot")
"""May return finite values for infinite inputs."""

_ADDING_OPS = {"Add", "Sub", "Rsub", "Baddbmm", "Where", "CopySlices", "IndexPut"}
"""Do not save inputs that need no gradient."""
_FACTORS = {"Addmm": "mat1 mat2", "Mm": "self mat2", "Bmm": "self mat2"}
_FACTORS |= {"Convolution": "input weight", "Mul": "self other"}
_CONVOLUTION = "stride padding dilation transposed output_padding groups"
_OWN_RESULT = re.compile(
    r"result|out|logsumexp|total_weight|saved_|.*(state|philox|seed)"
)
"""Names of saved values that are results of the operation."""
_LOW_OPS = re.compile(r".*([Mm]m|Convolution|Rnn.*)$|ScaledDot|Addmv|Mv|Dot")
"""Autocast casts their inputs to 16 bits."""
_SATURATING_OPS = re.compile(r"Tanh|Sigmoid|.*(Softmax|Norm$)")
"""Their results are small for any finite inputs."""
_FUNCTIONS = {"Mm": "/linear|matmul|mm/", "Bmm": "/matmul|bmm|einsum/"}
"""Functions of torch that make these nodes, as a pattern of a rule."""
_TRANSPOSED = {"Addmm": "addmm", "Mm": "matmul"}
"""Names unless the last factor is transposed, as the weight of a linear layer is."""
_OP_NAMES = {"Bmm": "matmul", "MkldnnRnnLayer": "lstm", "ToCopy": "cast"}
_OP_NAMES |= {"ScaledDotProduct": "attention"}
_PATH = re.compile(r"\w+(\.\w+)+")
"""Name of a submodule's parameter; those of the model itself have no dot."""
_ROLES = {"self": "input", "mat1": "input", "mat2": "operand", "other": "operand"}


class _PythonCalledError(Exception):
    """Reading the saved value would run a hook."""


def _refuse(frame: FrameType, event: str, _argument: object) -> None:
    """Stop the first Python call of a read."""
    if event == "call":
        caller = frame.f_back
        if caller is not None and caller.f_code is _read_without_hooks.__code__:
            raise _PythonCalledError
        sys.setprofile(None)  # an interrupt came before the profiler was restored


def _read_without_hooks(read: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Read a saved value; if torch cannot list hooks, stop before one runs."""
    if _EXPOSES_HOOKS:
        return read()
    profiler = sys.getprofile()
    if profiler is not None and not callable(profiler):
        raise _PythonCalledError  # a C profiler, as cProfile's, cannot be restored
    sys.setprofile(_refuse)
    try:
        return read()
    finally:
        sys.setprofile(profiler)


def _read_saved(node: Node, name: str) -> Any:  # noqa: ANN401
    """Return what a node saved; RuntimeError: it was freed, or modified in place."""
    raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
    parts = raw if isinstance(raw, tuple) else (raw,)
    if any(getattr(part, "unpack_hook", None) for part in parts):
        raise _PythonCalledError
    return _read_without_hooks(partial(getattr, node, name, None))


def saved_value(node: Node, name: str) -> Any:  # noqa: ANN401
    """Return what a node saved; None if it was freed, or a hook would compute it."""
    with suppress(RuntimeError, _PythonCalledError):
        return _read_saved(node, name)
    return None


_EXPOSES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # noqa: SLF001
"""torch 2.9 runs the hooks of saved tensors but does not list them."""


class _Op:
    """One node of the autograd graph, with its saved values."""

    def __init__(self, node: Node) -> None:
        self.node = node
        kind = re.sub(r"Backward\d*$", "", node.name())
        self.kind = kind.replace("_CachedCast", "ToCopy")
        self.leaf: Tensor | None = getattr(node, "variable", None)
        self.edges = _edges(node)
        self.outputs = node._input_metadata  # noqa: SLF001 -- backward takes what it gave
        self.dtype = self.outputs[0].dtype
        self.limit = torch.finfo(self.dtype).max
        # Only casts to float16 are likely to overflow.
        is_cast = self.kind == "ToCopy"
        widens = is_cast and self.dtype != torch.float16
        self.keeps_values = widens or _SHAPE_OPS.match(self.kind) is not None
        self.carries_values = self.keeps_values or is_cast or self.leaf is not None
        has_constants = len(self.edges) < len(node.next_functions)
        self.adds_constants = self.kind in _ADDING_OPS and has_constants
        self.has_unread = False
        self.saved = dict(self._read())

    def _read(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of what the node saved and that can be read."""
        for name in dir(type(self.node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                with suppress(RuntimeError):
                    try:
                        value = _read_saved(self.node, name)
                    except _PythonCalledError:
                        self.has_unread = True
                        continue
                    # torch returns negative saved integers as unsigned.
                    if type(value) is int and value >= 2**63:
                        value -= 2**64
                    yield name.removeprefix("_saved_"), value

    @property
    def name(self) -> str:
        if self.kind == "Convolution":
            across = "_transpose" if self.saved.get("transposed") else ""
            return f"conv{across}{len(self.outputs[0].shape) - 2}d"
        if self.kind in _TRANSPOSED:
            last = self.node.next_functions[-1][0]
            transposed = last is None or last.name() == "TBackward0"
            return "linear" if transposed else _TRANSPOSED[self.kind]
        kind = re.sub(r"^(Native|Cudnn|Miopen|Safe)|(?<=Product).*", "", self.kind)
        return _OP_NAMES.get(kind) or snake_case(kind)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.saved.items():
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, Tensor):
                    yield name, part

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of inputs that need no gradient."""
        for name, value in self.tensors():
            # In training mode, batch norms write running statistics but read none.
            unread = name.startswith("running_") and self.saved.get("training")
            if not value.requires_grad and not _OWN_RESULT.match(name) and not unread:
                yield name, value

    def product(self) -> Tensor | None:
        """Recompute a product in bf16: float16's memory, float32's range."""
        factors = [self.saved.get(name) for name in _FACTORS[self.kind].split()]
        if any(type(factor) not in {Tensor, nn.Parameter} for factor in factors):
            return None
        first, second = (factor.bfloat16() for factor in factors if factor is not None)
        with torch.autocast(first.device.type, enabled=False):
            if self.kind == "Mul":
                return torch.mul(first, second)
            if self.kind == "Convolution":
                how = [self.saved[name] for name in _CONVOLUTION.split()]
                return torch.convolution(first, second, None, *how)
            return torch.matmul(first, second)


def snake_case(kind: str) -> str:
    """Return the name of an operation of which a node has the name, without "0"."""
    words = r"(?<=[a-z0-9D])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]\d)"
    return re.sub(words, "_", kind).lower()


def _with_names(op: str, names: set[str]) -> str:
    # Reverse order puts weight before bias.
    return f"{op} ({', '.join(sorted(names, reverse=True)[:4])})" if names else op


class _Graph:
    """The operations behind a loss in forward order, and their known values."""

    def __init__(self, loss: Tensor, root: Node, name_of: Namer, policy: str) -> None:
        self.root, self.name_of, self.policy = root, name_of, policy
        nodes = nodes_of(root)
        order = sorted(nodes, key=lambda node: node._sequence_nr())  # noqa: SLF001
        self.ops = {node: _Op(node) for node in order}
        self.values: dict[Edge, Tensor] = {(root, loss.output_nr): loss}
        self.in_range: set[Edge] = set()

    def candidate_ops(self) -> list[_Op]:
        """Return the operations through which inf or NaN may have reached the loss."""
        for node, op in self.ops.items():
            if op.leaf is not None:
                self.values[node, 0] = op.leaf
            for _, value in op.tensors():
                if value.grad_fn is not None:
                    self.values.setdefault((value.grad_fn, value.output_nr), value)
        for node, op in reversed(self.ops.items()):
            if op.keeps_values and (node, 0) in self.values:
                self.values.setdefault(op.edges[0], self.values[node, 0])
        for node, op in self.ops.items():
            carries = op.carries_values and op.edges
            operand = self.values.get(op.edges[0]) if carries else None
            # A cast turns values above its limit into inf.
            if operand is not None and not op.limit < _absmax(operand) < math.inf:
                self.values.setdefault((node, 0), operand)
        finite = {edge for edge, v in self.values.items() if math.isfinite(_absmax(v))}
        nodes = nodes_of(self.root, lambda edge: edge not in finite)
        return [op for op in self.ops.values() if op.node in nodes]

    def nonfinite_input(self, op: _Op) -> BadOp | None:
        """Check for non-finite inputs that are not results of operations."""
        for node, _ in op.edges:
            leaf = self.ops[node].leaf
            if leaf is not None and not math.isfinite(_absmax(leaf)):
                if isinstance(leaf, nn.Parameter):
                    return self._nonfinite_weight(leaf)
                where = f"a tensor of shape {tuple(leaf.shape)}, not of any layer"
                kind = _nonfinite_kind(leaf)
                return _bad_op("data", where, _nonfinite_text(leaf), FIND, kind)
        for name, value in op.constants():
            absmax = _absmax(value)
            absorbs = absmax == math.inf and _ABSORBING_OPS.match(op.kind)
            if absmax < math.inf or absorbs:
                continue
            if isinstance(value, nn.Parameter):
                return self._nonfinite_weight(value)
            where = f"the {_ROLES.get(name, name)} of {self._describe_op(op)}"
            evidence, advice = _nonfinite_text(value), FIND
            if name.startswith("running_"):
                advice = RUNNING_STATS
            if value.dtype == torch.float16 and absmax == math.inf:
                evidence += ", where a cast to float16 makes it of all above 65504"
                advice = "Scale this input down, keep it in float32, or train in bf16."
                if value.numel() > 1 and value.isinf().all():
                    advice = "If it is the gradient of a scaled loss, the scale is "
                    advice += f"halved until it fits. {UNSCALE}"
            return _bad_op("data", where, evidence, advice, _nonfinite_kind(value))
        return None

    def _nonfinite_weight(self, parameter: Tensor) -> BadOp:
        name, evidence = self.name_of(parameter), _nonfinite_text(parameter)
        advice, kind = weight_advice(parameter), _nonfinite_kind(parameter)
        return _bad_op("weight", name, evidence, advice, kind)

    def domain_error(self, op: _Op, phase: str = "forward") -> BadOp | None:
        """Check for values at which it, or its derivative, is infinite or undefined."""
        error = domains.find_domain_error(snake_case(op.kind), op.saved, phase)
        if error is None:
            return None
        value = self.values.get((op.node, 0))
        kind = error.result if phase == "forward" else ""
        kind = kind if value is None else _nonfinite_kind(value)
        where = self._describe_op(op)
        return _bad_op(error.cause, where, error.evidence, error.advice, kind)

    def masked_softmax(self, op: _Op) -> BadOp | None:
        """Check for a softmax over a fully masked row, or for a masked target class."""
        result = self.values.get((op.node, 0))
        if op.kind not in {"Softmax", "LogSoftmax"} or result is None:
            return None
        upstream = self._unknown_upstream(op)
        if not any(p.adds_constants or p.kind == "MaskedFill" for p in upstream):
            return None
        what, kind = "a mask covers whole rows", _nonfinite_kind(result)
        if _absmax(result) == math.inf:
            what = "a target names a class that is masked"
        evidence = f"{what}: {_nonfinite_text(result)}"
        return _bad_op("zero", self._describe_op(op), evidence, MASK, kind)

    def overflow(self, op: _Op) -> BadOp | None:
        """Check if a cast or a float16 product overflows; record if it does not."""
        value, what = None, "result"
        if op.kind == "ToCopy" and not op.keeps_values:
            value, what = self.values.get(op.edges[0]), "argument"
        elif op.kind in _FACTORS and op.dtype == torch.float16:
            value = op.product()
        absmax = math.nan if value is None else _absmax(value)
        # Half the limit: the bf16 result is rounded and lacks the bias.
        if absmax <= op.limit / 2:
            self.in_range.add((op.node, 0))
        if not op.limit < absmax < math.inf:
            return None
        evidence = f"its {what} reaches {absmax:.1e}, {range_text(op.dtype)}"
        return self._out_of_range([op], self._describe_op(op), evidence, "inf")

    def unexplained(self, op: _Op) -> BadOp | None:
        """Check for a non-finite result without known cause, here or upstream."""
        outputs = [(op.node, number) for number in range(len(op.outputs))]
        values = [self.values[edge] for edge in outputs if edge in self.values]
        # Masks contain -inf by design.
        if op.kind == "MaskedFill" or all(map(math.isfinite, map(_absmax, values))):
            return None
        chain = self._unknown_upstream(op)
        suspects = [part for part in chain if not _BOUNDED_OPS.match(part.kind)] or [op]
        where = self._describe_op(suspects[0])
        where += f" to {suspects[-1].name}" if suspects[1:] else ""
        edges = [edge for part in chain for edge in part.edges]
        inputs = [self.values[edge] for edge in edges if edge in self.values]
        inputs += [value for part in chain for _, value in part.constants()]
        absmax = max(filter(math.isfinite, map(_absmax, inputs)), default=0.0)
        kind = "inf" if any(local_data(v).isinf().any() for v in values) else "NaN"
        narrow = min(chain, key=lambda part: part.limit)
        may_overflow = narrow.dtype == torch.float16 or absmax**2 > narrow.limit
        reached = f"its inputs reach {absmax:.1e}"
        if any(part.has_unread for part in chain):
            cause = "forward range" if may_overflow else "zero"
            evidence = "tensors there were recomputed or offloaded, and are not read"
            advice = "Switch that off for one step, to see which operation it is."
        elif any(part.adds_constants for part in chain) and (
            kind == "NaN" or not may_overflow
        ):
            cause, evidence, advice = "data", f"{kind} comes in, yet {reached}", FIND
        elif not may_overflow:
            cause, evidence = "zero", f"it makes {kind}, yet {reached}"
            advice = "Print its inputs: it is not defined for one of them."
        else:
            evidence = f"its result holds {kind}, {reached}, {range_text(narrow.dtype)}"
            return self._out_of_range(suspects, where, evidence, kind)
        return _bad_op(cause, where, evidence, advice, kind)

    def _unknown_upstream(self, op: _Op) -> list[_Op]:
        """Return an operation, and upstream of it those with unknown results."""
        examined_edges = self.values.keys() | self.in_range
        nodes = nodes_of(op.node, lambda edge: edge not in examined_edges)
        parts = [part for part in self.ops.values() if part.node in nodes]
        return [part for part in parts if part is op or not part.keeps_values]

    def _describe_op(self, op: _Op) -> str:
        """Name an operation by its parameters, or the last operation that has any."""
        ops = list(self.ops.values())
        for part in reversed(ops[: ops.index(op) + 1]):
            names = self._names(part)
            if names:
                text = _with_names(part.name, names)
                return text if part is op else f"{op.name}, after {text}"
        return op.name

    def _names(self, op: _Op) -> set[str]:
        """Return the names of the parameters that an operation takes itself."""
        nodes = nodes_of(op.node, lambda edge: self.ops[edge[0]].carries_values)
        leaves = [self.ops[node].leaf for node in nodes]
        return {self.name_of(leaf) for leaf in leaves if leaf is not None}

    def _out_of_range(
        self, suspects: list[_Op], where: str, evidence: str, kind: str
    ) -> BadOp:
        """Return the cause for operations that overflow, and the rules that fix it.

        A result that is kept in fp32 overflows again where the next operation casts it
        to float16, so the rules include that operation.
        """
        low = [op for op in suspects if op.dtype == torch.float16]
        modules = {*map(self._module, low)} - {""}
        consumers = self._low_consumers(low)
        consumers = [op for op in consumers if self._module(op) not in modules]
        if consumers:
            what = _with_names(consumers[0].name, self._names(consumers[0]))
            evidence += f"; {what} takes it in float16"
        base, *old = self.policy.split(" + ")
        proposed = self._fp32_rules([*low, *consumers])
        rules = [rule for rule in proposed if rule not in old]
        advice = "Scale down or normalise its inputs."
        if rules:
            policy = " + ".join([base, *rules, *old])  # the first that matches decides
            advice = f"Keep it in float32: policy='{policy}'; or train in bf16."
        rule = " + ".join(rules)
        return _bad_op("forward range", where, evidence, advice, kind, rule)

    def _low_consumers(self, ops: list[_Op]) -> list[_Op]:
        """Return the operations that cast results of `ops` to float16."""
        reached, consumers = {op.node for op in ops}, []
        for node, op in self.ops.items():  # in forward order
            takes = any(maker in reached for maker, _ in op.edges)
            if not takes or node in reached or op.dtype != torch.float16:
                continue
            if _LOW_OPS.match(op.kind):
                consumers.append(op)
            elif not _SATURATING_OPS.match(op.kind):
                reached.add(node)
        return consumers

    def _fp32_rules(self, ops: list[_Op]) -> list[str]:
        """Return rules that keep operations in fp32.

        One for each module whose parameters they take, if all take some. Otherwise one
        for the module that contains them and those whose results they take, if the
        names of parameters show one; its path must not end in a number, because the
        same then happens in other layers. Otherwise one for each function of torch.
        """
        paths = {op: self._module(op) for op in ops}
        if not all(paths.values()):
            inputs = {path for op in ops for path in self._input_modules(op, paths)}
            around = {path.rpartition(".")[0] for path in inputs}
            parent = around.pop() if len(around) == 1 else ""
            if parent and not parent.rpartition(".")[2].isdigit():
                return [module_rule(parent)]
        rules: dict[str, None] = {}
        for op, path in paths.items():
            pattern = _FUNCTIONS.get(op.kind, op.name)
            if path:
                rules[module_rule(path)] = None
            elif op.kind in _FUNCTIONS or hasattr(torch.ops.aten, pattern):
                rules[f"op:{pattern}=fp32"] = None
        return [*rules]

    def _module(self, op: _Op) -> str:
        """Return the module whose parameters an operation takes itself, or ""."""
        names = self._names(op)
        paths = {name.rpartition(".")[0] for name in names}
        is_one = len(paths) == 1 and all(map(_PATH.fullmatch, names))
        return paths.pop() if is_one else ""

    def _input_modules(self, op: _Op, paths: dict[_Op, str]) -> set[str]:
        """Return the module of an operation, or else those of its inputs."""
        nodes = nodes_of(op.node, lambda edge: not self._module(self.ops[edge[0]]))
        edges = [edge for node in nodes for edge in self.ops[node].edges]
        sources = {self._module(self.ops[node]) for node, _ in edges}
        return {paths[op]} if paths[op] else sources - {""}


def _edges(node: Node) -> list[Edge]:
    return [(maker, number) for maker, number in node.next_functions if maker]


def _absmax(value: Tensor) -> float:
    """Return the largest magnitude; NaN if the tensor contains NaN."""
    values = local_data(value)
    values = torch.view_as_real(values) if values.is_complex() else values
    if not (values.is_floating_point() and values.itemsize > 1 and values.numel()):
        return 0.0
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).abs().item()


def _nonfinite_kind(value: Tensor) -> str:
    """Return "NaN" if the tensor contains NaN, else "inf" if it does, else ""."""
    values = local_data(value)
    return "NaN" if values.isnan().any() else "inf" if values.isinf().any() else ""


def _nonfinite_text(value: Tensor) -> str:
    return f"it holds {_nonfinite_kind(value)}{counted(~local_data(value).isfinite())}"

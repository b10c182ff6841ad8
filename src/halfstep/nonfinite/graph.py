"""Which operation made the first inf or NaN of a forward pass, and why.

In: a loss whose backward pass has not run yet. Out: a `GraphCause`, or None if the
forward pass was finite and the backward pass meets no infinite slope.

The autograd graph knows most values: what an operation saved was made by the node it
points to. Going back from a loss that is not finite, and never through a value that is,
leaves the candidates; a mask of -inf that a softmax has used up is not among them. The
first candidate in forward order for which there is evidence is named.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.nonfinite.origin import module_rule
from halfstep.nonfinite.saved_values import (
    DOMAIN_CHECKS,
    EPSILON,
    FIND,
    MASK,
    local_data,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.autograd.graph import Node

    Namer = Callable[[Tensor], str]
    Edge = tuple[Node, int]  # a node, and which of its outputs


@dataclass(frozen=True)
class GraphCause:
    """Who made the first inf or NaN, and why."""

    cause: str
    """"data": a batch, a target or a buffer holds it; "weights": a parameter does;
    "zero": an operation met a value where it, or its slope, is infinite or undefined;
    "range": numbers grew beyond what their format holds."""
    where: str
    """The operation, and the parameters that feed it."""
    evidence: str
    """What was seen there, with numbers."""
    advice: str
    """What to change."""
    nonfinite_kind: str = ""
    """"inf" or "NaN", where a value shows it; of a slope it is not known which."""
    rule: str = ""
    """The rules of a policy in the advice; "" for none."""


@torch.no_grad()
def find_in_graph(loss: Tensor, name_of: Namer) -> GraphCause | None:
    """Look at the graph of a loss before its backward pass, and leave it as it is.

    Waits for the device. Tensors behind hooks, as those of recomputed blocks, are not
    read: that would compute the block again, once for each of them.

    Args:
        loss: Of any shape, its graph not yet freed.
        name_of: Names a parameter.
    """
    if loss.grad_fn is None:
        return None
    graph = _Graph(loss, loss.grad_fn, name_of)
    if math.isfinite(_absmax(loss)):
        findings = (graph.domain_error(op, "backward") for op in graph.ops.values())
    else:
        checks = (
            graph.nonfinite_input,
            graph.domain_error,
            graph.masked_softmax,
            graph.overflow,
            graph.unexplained,
        )
        findings = (charge(op) for op in graph.candidate_ops() for charge in checks)
    return next(filter(None, findings), None)


# Operations, by the names of their nodes without "Backward0"

_SHAPE_OPS = re.compile(
    r"(T|Trans\w+|Permute|\w*View|Reshape\w+|Expand|\w*queeze|Clone)$"
)
"""They give the numbers they take."""

_BOUNDED_OPS = re.compile(
    r"Relu|Gelu|Silu|Tanh|Sigmoid|.*(Softmax|Norm$|Pool|Dropout)|Mean"
)
"""They give no inf where they take none."""

_ABSORBING_OPS = re.compile(r"Div|Maximum|Minimum|Clamp|Logaddexp|ScaledDot")
"""They may give finite numbers though they take infinite ones."""

_ADDING_OPS = {"Add", "Sub", "Rsub", "Baddbmm", "Where", "CopySlices", "IndexPut"}
"""They take in tensors without a gradient that they do not save."""
_FACTORS = {"Addmm": "mat1 mat2", "Mm": "self mat2", "Bmm": "self mat2"}
_FACTORS |= {"Convolution": "input weight"}
_CONVOLUTION = "stride padding dilation transposed output_padding groups"
_OWN_RESULT = re.compile(
    r"result|out|logsumexp|total_weight|saved_|.*(state|philox|seed)"
)
"""How names of saved values begin that the operation made itself."""
_UNTRANSPOSED_NAMES = {"Addmm": "addmm", "Mm": "matmul"}
"""What they are unless their last factor is turned, as a linear layer's weight is."""
_OP_NAMES = {
    "Bmm": "matmul",
    "MkldnnRnnLayer": "lstm",
    "ToCopy": "cast",
    "ScaledDotProduct": "attention",
}
_PATH = re.compile(r"\w+(\.\w+)+")
"""Name of a parameter in a module: one of the model itself has no dot."""
_ROLES = {"self": "input", "mat1": "input", "mat2": "operand", "other": "operand"}


class _PythonCalledError(Exception):
    """What was to be read is computed by a hook."""


def _refuse(_frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        raise _PythonCalledError


def _read_without_hooks(read: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Read a saved value; where torch does not show hooks, stop before one runs.

    Raises:
        _PythonCalledError: If a hook was about to run, or if that cannot be known.
    """
    if _EXPOSES_HOOKS:
        return read()
    profiler = sys.getprofile()
    if profiler is not None and not callable(profiler):
        raise _PythonCalledError  # one in C, as cProfile's, could not be put back
    sys.setprofile(_refuse)
    try:
        return read()
    finally:
        sys.setprofile(profiler)


_EXPOSES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # noqa: SLF001
"""An old torch calls the hooks of saved tensors, and has no word of them."""


class _Op:
    """One node of the graph."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.kind = re.sub(r"Backward\d*$", "", node.name()).replace("_Cast", "ToCopy")
        self.leaf: Tensor | None = getattr(node, "variable", None)
        self.edges = _edges(node)
        self.outputs = node._input_metadata  # noqa: SLF001 -- backward takes what it gave
        self.dtype = self.outputs[0].dtype
        self.limit = torch.finfo(self.dtype).max
        self.range_text = (
            f"{str(self.dtype).removeprefix('torch.')} holds {self.limit:.6g}"
        )
        # Only a cast to float16 is likely to make an inf.
        widens = self.kind == "ToCopy" and self.dtype != torch.float16
        self.keeps_values = widens or _SHAPE_OPS.match(self.kind) is not None
        self.carries_values = (
            self.keeps_values or self.kind == "ToCopy" or self.leaf is not None
        )
        self.adds_constants = self.kind in _ADDING_OPS and len(self.edges) < len(
            node.next_functions
        )
        self.has_unread = False
        self.saved = dict(self._read())

    def _read(self) -> Iterator[tuple[str, Any]]:
        """Yield what it saved, by name, as far as that can be read."""
        for name in dir(type(self.node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                # Freed, or changed in place.
                with suppress(RuntimeError):
                    raw = getattr(self.node, f"_raw_{name.removeprefix('_')}", None)
                    parts = raw if isinstance(raw, tuple) else (raw,)
                    if any(getattr(part, "unpack_hook", None) for part in parts):
                        self.has_unread = True
                        continue
                    try:
                        value = _read_without_hooks(partial(getattr, self.node, name))
                    except _PythonCalledError:
                        self.has_unread = True
                        continue
                    yield name.removeprefix("_saved_"), value

    @property
    def name(self) -> str:
        if self.kind == "Convolution":
            across = "_transpose" if self.saved.get("transposed") else ""
            return f"conv{across}{len(self.outputs[0].shape) - 2}d"
        if self.kind in _UNTRANSPOSED_NAMES:
            last = self.node.next_functions[-1][0]
            is_transposed = last is None or last.name() == "TBackward0"
            return "linear" if is_transposed else _UNTRANSPOSED_NAMES[self.kind]
        kind = re.sub(r"^(Native|Cudnn|Miopen|Safe)|(?<=Product).*", "", self.kind)
        spaced = re.sub(r"(?<=[a-z0-9D])(?=[A-Z][a-z])", "_", kind).lower()
        return _OP_NAMES.get(kind, spaced)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.saved.items():
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, Tensor):
                    yield name, part

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """Yield those that came in without a gradient."""
        for name, value in self.tensors():
            # While it trains, a batch norm writes its running statistics, reads none.
            unread = name.startswith("running_") and self.saved.get("training")
            if not value.requires_grad and not _OWN_RESULT.match(name) and not unread:
                yield name, value

    def product(self) -> Tensor | None:
        """Compute a product again in bf16: float16's memory, float32's range."""
        factors = [self.saved.get(name) for name in _FACTORS[self.kind].split()]
        if any(type(factor) not in {Tensor, nn.Parameter} for factor in factors):
            return None
        first, second = (factor.bfloat16() for factor in factors if factor is not None)
        with torch.autocast(first.device.type, enabled=False):
            if self.kind == "Convolution":
                how = [self.saved[name] for name in _CONVOLUTION.split()]
                return torch.convolution(first, second, None, *how)
            return torch.matmul(first, second)


class _Graph:
    """The operations behind a loss in forward order, and the values known of them."""

    def __init__(self, loss: Tensor, root: Node, name_of: Namer) -> None:
        self.root, self.name_of = root, name_of
        nodes = _upstream(root, lambda _: True)
        order = sorted(nodes, key=lambda node: node._sequence_nr())  # noqa: SLF001
        self.ops = {node: _Op(node) for node in order}
        self.values: dict[Edge, Tensor] = {(root, loss.output_nr): loss}
        self.in_range: set[Edge] = set()

    def candidate_ops(self) -> list[_Op]:
        """Return those through whom something not finite may have come."""
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
            source = (
                self.values.get(op.edges[0]) if op.carries_values and op.edges else None
            )
            # A cast makes inf of what is too large for it.
            if source is not None and not op.limit < _absmax(source) < math.inf:
                self.values.setdefault((node, 0), source)
        finite = {edge for edge, v in self.values.items() if math.isfinite(_absmax(v))}
        reached = _upstream(self.root, lambda edge: edge not in finite)
        return [op for op in self.ops.values() if op.node in reached]

    def nonfinite_input(self, op: _Op) -> GraphCause | None:
        """Say whether it was handed something not finite that no operation made."""
        for node, _ in op.edges:
            leaf = self.ops[node].leaf
            if leaf is not None and not math.isfinite(_absmax(leaf)):
                if isinstance(leaf, nn.Parameter):
                    return self._nonfinite_weight(leaf)
                where = f"a tensor of shape {tuple(leaf.shape)}, not of any layer"
                return GraphCause(
                    "data", where, _nonfinite_text(leaf), FIND, _nonfinite_kind(leaf)
                )
        for name, value in op.constants():
            absmax = _absmax(value)
            if absmax < math.inf or (
                absmax == math.inf and _ABSORBING_OPS.match(op.kind)
            ):
                continue
            if isinstance(value, nn.Parameter):
                return self._nonfinite_weight(value)
            where = f"the {_ROLES.get(name, name)} of {self._describe_op(op)}"
            evidence, advice = _nonfinite_text(value), FIND
            if value.dtype == torch.float16 and absmax == math.inf:
                evidence += ", where a cast to float16 makes it of all above 65504"
                advice = "Scale this input down, keep it in float32, or train in bf16."
            return GraphCause("data", where, evidence, advice, _nonfinite_kind(value))
        return None

    def _nonfinite_weight(self, parameter: Tensor) -> GraphCause:
        advice = "Go back to the last good checkpoint: no loss scale mends a weight."
        if parameter.dtype == torch.float16:
            advice = f"{advice} {EPSILON}"
        name, evidence = self.name_of(parameter), _nonfinite_text(parameter)
        return GraphCause("weights", name, evidence, advice, _nonfinite_kind(parameter))

    def domain_error(self, op: _Op, direction: str = "forward") -> GraphCause | None:
        """Say whether it met a value where it, or its slope, is infinite."""
        for check in DOMAIN_CHECKS:
            if op.kind in check.node_kinds.split() and check.affects in {
                direction,
                "both",
            }:
                mask = check.mask(op.saved)
                if mask.any():
                    where, value = self._describe_op(op), self.values.get((op.node, 0))
                    evidence = f"{check.evidence}{_count_text(mask)}"
                    kind = check.nonfinite_kind if direction == "forward" else ""
                    kind = kind if value is None else _nonfinite_kind(value)
                    return GraphCause(check.cause, where, evidence, check.advice, kind)
        return None

    def masked_softmax(self, op: _Op) -> GraphCause | None:
        """Say whether a mask left a softmax nothing, or took what the loss asks for."""
        result = self.values.get((op.node, 0))
        if op.kind not in {"Softmax", "LogSoftmax"} or result is None:
            return None
        if not any(
            part.adds_constants or part.kind == "MaskedFill"
            for part in self._unknown_upstream(op)
        ):
            return None
        evidence = f"a mask covers whole rows: {_nonfinite_text(result)}"
        if _absmax(result) == math.inf:
            evidence = (
                f"a target names a class that is masked: {_nonfinite_text(result)}"
            )
        return GraphCause(
            "zero", self._describe_op(op), evidence, MASK, _nonfinite_kind(result)
        )

    def overflow(self, op: _Op) -> GraphCause | None:
        """Say whether a cast or a float16 product left its range, or clear it."""
        value, what = None, "result"
        if op.kind == "ToCopy" and not op.keeps_values:
            value, what = self.values.get(op.edges[0]), "argument"
        elif op.kind in _FACTORS and op.dtype == torch.float16:
            value = op.product()
        absmax = math.nan if value is None else _absmax(value)
        # Half of it: what is computed again is rounded, and lacks the bias.
        if absmax <= op.limit / 2:
            self.in_range.add((op.node, 0))
        if not op.limit < absmax < math.inf:
            return None
        evidence = f"its {what} reaches {absmax:.1e}, {op.range_text}"
        advice, rule = self._widening_advice([op])
        return GraphCause("range", self._describe_op(op), evidence, advice, "inf", rule)

    def unexplained(self, op: _Op) -> GraphCause | None:
        """Say that it made it, or something before it whose result is not known."""
        outputs = [(op.node, number) for number in range(len(op.outputs))]
        values = [self.values[edge] for edge in outputs if edge in self.values]
        # What a mask fills in is meant.
        if op.kind == "MaskedFill" or all(map(math.isfinite, map(_absmax, values))):
            return None
        chain = self._unknown_upstream(op)
        unbounded = [part for part in chain if not _BOUNDED_OPS.match(part.kind)] or [
            op
        ]
        where = self._describe_op(unbounded[0]) + (
            f" to {unbounded[-1].name}" if unbounded[1:] else ""
        )
        edges = [edge for part in chain for edge in part.edges]
        inputs = [self.values[edge] for edge in edges if edge in self.values]
        inputs += [value for part in chain for _, value in part.constants()]
        largest = max(filter(math.isfinite, map(_absmax, inputs)), default=0.0)
        input_text, least = (
            f"its inputs reach {largest:.1e}",
            min(chain, key=lambda p: p.limit),
        )
        kind = (
            "inf" if any(local_data(value).isinf().any() for value in values) else "NaN"
        )
        exceeds_range = least.dtype == torch.float16 or largest * largest > least.limit
        cause, evidence = "range", f"{input_text}, {least.range_text}"
        advice, rule = self._widening_advice(unbounded)
        if not exceeds_range:
            cause, evidence, rule = "zero", f"it makes {kind}, yet {input_text}", ""
            advice = "Print its inputs: it is not defined for one of them."
        if any(part.has_unread for part in chain):
            evidence = "tensors there were recomputed or offloaded, and are not read"
            advice = "Switch that off for one step, to see which operation it is."
            rule = ""
        elif any(part.adds_constants for part in chain) and (
            kind == "NaN" or not exceeds_range
        ):
            cause, evidence, advice = "data", f"{kind} comes in, yet {input_text}", FIND
            rule = ""
        return GraphCause(cause, where, evidence, advice, kind, rule)

    def _unknown_upstream(self, op: _Op) -> list[_Op]:
        """Return an operation, and before it those whose results are not known."""
        resolved = self.values.keys() | self.in_range
        reached = _upstream(op.node, lambda edge: edge not in resolved)
        parts = [part for part in self.ops.values() if part.node in reached]
        return [part for part in parts if part is op or not part.keeps_values]

    def _describe_op(self, op: _Op) -> str:
        """Name an operation with its parameters, or after the last one that has any."""
        ops = list(self.ops.values())
        for part in reversed(ops[: ops.index(op) + 1]):
            names = self._param_names(part)
            if names:
                # Backwards in the alphabet, weight comes before bias.
                fed = f"{part.name} ({', '.join(sorted(names, reverse=True)[:4])})"
                return fed if part is op else f"{op.name}, after {fed}"
        return op.name

    def _param_names(self, op: _Op) -> set[str]:
        """Return the names of the parameters that an operation takes itself."""
        nodes = _upstream(op.node, lambda edge: self.ops[edge[0]].carries_values)
        leaves = [self.ops[node].leaf for node in nodes]
        return {self.name_of(leaf) for leaf in leaves if leaf is not None}

    def _widening_advice(self, ops: list[_Op]) -> tuple[str, str]:
        """Return what helps operations whose results do not fit, and the rules in it.

        A rule speaks of the module whose parameters an operation takes; of all such
        operations where none is known.
        """
        rules: dict[str, None] = {}
        for op in ops:
            if op.dtype != torch.float16:
                continue
            names = self._param_names(op)
            paths = {name.rpartition(".")[0] for name in names}
            has_one_module = len(paths) == 1 and all(map(_PATH.fullmatch, names))
            if has_one_module:
                rules[module_rule(paths.pop())] = None
            elif hasattr(torch.ops.aten, op.name):
                rules[f"op:{op.name}=fp32"] = None
        if not rules:
            return "Scale down or normalise what flows in.", ""
        rule = " + ".join(rules)
        return f"Keep it in float32 (policy '{rule}') or train in bf16.", rule


def _edges(node: Node) -> list[Edge]:
    return [(maker, number) for maker, number in node.next_functions if maker]


def _upstream(node: Node, follow: Callable[[Edge], bool]) -> set[Node]:
    """Return a node, and all before it that edges lead to which are to be gone."""
    to_visit, seen = [node], {node}
    while to_visit:
        for edge in _edges(to_visit.pop()):
            if edge[0] not in seen and follow(edge):
                seen.add(edge[0])
                to_visit.append(edge[0])
    return seen


def _absmax(value: Tensor) -> float:
    """Return the largest magnitude, NaN if there is one."""
    data = local_data(value)
    data = torch.view_as_real(data) if data.is_complex() else data
    if not (data.is_floating_point() and data.itemsize > 1 and data.numel()):
        return 0.0
    low, high = torch.aminmax(data)
    return torch.maximum(-low, high).abs().item()


def _nonfinite_kind(value: Tensor) -> str:
    """Return "NaN" if there is one, else "inf" if there is; "" where all is finite."""
    data = local_data(value)
    return "NaN" if data.isnan().any() else "inf" if data.isinf().any() else ""


def _nonfinite_text(value: Tensor) -> str:
    return (
        f"it holds {_nonfinite_kind(value)}{_count_text(~local_data(value).isfinite())}"
    )


def _count_text(mask: Tensor) -> str:
    count = int(mask.sum())
    return f" at {count} of {mask.numel()} places" if mask.numel() > 1 else ""

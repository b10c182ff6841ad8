"""Traces every operation of a replay: which makes inf or NaN, and which passes it on.

Each operation with finite inputs and a non-finite result is recorded as an event, and
each storage maps to the events that its non-finite values result from.

An intended infinity, such as the -inf of a mask, is an event too. It is reported only
if it reaches the loss or a gradient. Making NaN from it is an event of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from halfstep._torch.dispatch_mode import DispatchMode, returns_view
from halfstep.diagnostics.replay import op_names, tensor_facts
from halfstep.diagnostics.replay.op_names import Cast, TorchCalls
from halfstep.diagnostics.replay.tensor_facts import NonFiniteKinds, storage_key
from halfstep.nonfinite import domains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.diagnostics.replay.module_stack import ModuleStack, Place


@dataclass(eq=False)
class NonFiniteEvent:
    """An inf or NaN that an operation made or that was in an input."""

    number: int
    """Index in the order of all events."""
    place: Place
    phase: str
    """"forward" or "backward"."""
    op: str
    """User's name of the op; in backward, of the op whose derivative is computed."""
    aten_name: str
    """aten name of the operation that ran."""
    nonfinite: NonFiniteKinds
    dtype: torch.dtype
    inputs: float | None = None
    """Largest finite magnitude of its inputs."""
    fp32_result: tuple[str, float] = ("not run", 0.0)
    domain_error: domains.DomainError | None = None
    constant: bool = False
    """Whether the program passed a non-finite scalar to the operation."""
    is_intended: bool = False
    """Whether such a scalar only fills elements, like the -inf of a mask."""
    is_selected: bool = False
    """Whether a loss read the value at the position that a label gives."""
    is_executed_op: bool = False
    """In backward of a custom Function: `op` is the operation that ran."""
    count: tuple[int, int] = (0, 0)
    """Non-finite elements, and all; for a sum of gradients, parameters."""
    source_kind: str = ""
    """Origin if no operation made it: "weight", "buffer", "input" (of the model),
    "outside", "exchange" (another process), "sum" (of gradients)."""
    source: str = ""
    """Name of that parameter, buffer or argument, or of the one it is a cast of."""
    raw_input: str = ""
    """Name of a model argument that is an input of the operation; "" for none."""
    parents: frozenset[NonFiniteEvent] = field(default_factory=frozenset)
    """Intended infinities from which it made NaN."""
    casts: bool = False
    """Whether it is a cast to a narrower format."""
    written: Cast | None = None
    """The cast in the program's code that it is, or that made its inputs."""
    consumer: tuple[Place, str] | None = None
    """The first operation that used the result of a cast."""
    receiver: tuple[Place, str] | None = None
    """For a cast in backward: the operation whose result has this gradient."""


_UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_UNSET |= {"empty_permuted", "resize", "resize_as", "set"}
_OVERWRITE = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random"}
_OVERWRITE |= {"exponential", "log_normal", "cauchy", "geometric", "set"}
_FILLS = {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill"}
_FILLS |= {"index_fill", "constant_pad_nd", "where", "clamp", "scatter"}
_EXCHANGES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
"""Namespaces of collectives: results may be incomplete when the operation returns."""
_CASTS = {"_to_copy", "to", "copy"}
_PICKS = {"nll_loss_forward", "nll_loss2d_forward", "gather"}
_SUMS = {"addmm", "mm", "bmm", "baddbmm", "convolution", "add", "sum", "mean"}
"""They return +inf for inputs with -inf only if they overflow themselves."""


@dataclass
class _Call:
    """One operation with copies of its arguments from before it ran."""

    func: torch._ops.OpOverload
    aten_name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    keys: Sequence[int]
    """Storage keys of the inputs."""
    nonfinite: dict[int, NonFiniteKinds]
    """Index of a non-finite input -> its kinds."""
    outs: list[Tensor]
    written: Cast | None


class OpTracer(DispatchMode):  # type: ignore[no-untyped-call]
    """Traces operations inside its `with` block; synchronizes at each.

    `before_write` is called with each tensor that is about to be written.
    """

    def __init__(
        self, modules: ModuleStack, before_write: Callable[[Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self._before_write = before_write
        self.num_ops = 0
        self._num_events = 0
        self.boundary: float | None = None
        """Largest gradient that the loss function passes to the model."""
        self.rejected: set[NonFiniteEvent] = set()
        """Events that the inputs of an operation that raised result from."""
        self.in_backward = False
        """Whether the forward pass has ended and the loss is computed."""
        self.sent: set[NonFiniteEvent] = set()
        """Events that values sent to other processes result from."""
        self.overflow: NonFiniteEvent | None = None
        """The first event of the forward pass that is finite in fp32."""
        self._exchanged = False
        self._origins: dict[int, frozenset[NonFiniteEvent]] = {}
        """Storage key -> events that the non-finite values there result from."""
        # Weak references: the key of a freed storage could otherwise be reused.
        self._refs: dict[int, object] = {}
        self._casts: dict[int, NonFiniteEvent] = {}
        """Storage key of a cast's result that no operation has used yet -> event."""
        self.calls = TorchCalls(self._cast_by_program)
        self._written: dict[int, tuple[Place, Cast]] = {}
        """Storage key -> the cast in the program's code that its dtype is due to."""
        self._stored_tensors = {
            storage_key(part): (kind, name)
            for kind, named in (
                ("buffer", modules.root.named_buffers()),
                ("weight", modules.root.named_parameters()),
            )
            for name, tensor in named
            for part in tensor_facts.floats(tensor)
        }
        self._shapes = {p.shape for p in modules.root.parameters()}

    def run(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run an operation and trace its inputs and outputs."""
        name = op_names.aten_name(func)
        written = _written_tensors(func, args, kwargs)
        self.num_ops += 1
        for tensor in written:
            self._before_write(tensor)
        if func.namespace in _EXCHANGES:
            self._exchanged = True
            self.sent |= self.sources(tensor_facts.floats((args, kwargs)))
            return func(*args, **kwargs)
        if returns_view(func) and not written:
            self.modules.note(name)
            return func(*args, **kwargs)
        _check_indices(name, args, self.modules)
        return self._trace(func, name, args, kwargs, written)

    def _trace(
        self,
        func: torch._ops.OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
    ) -> Any:  # noqa: ANN401
        """Run an operation that writes to `written`, and record its events."""
        old_args, old_kwargs = _pytree.tree_map(
            lambda v: v.detach().clone() if any(v is w for w in written) else v,
            (args, kwargs),
        )
        inputs, keys = [], []
        if name not in _UNSET:
            first = int(name in _OVERWRITE)
            inputs = tensor_facts.floats((old_args, old_kwargs))[first:]
            keys = [*map(storage_key, tensor_facts.floats((args, kwargs)))][first:]
        try:
            output = func(*args, **kwargs)
        except Exception:
            # Some raise for non-finite inputs, such as binary_cross_entropy.
            self.rejected = self.sources(inputs)
            raise
        outs = tensor_facts.floats(output) or tensor_facts.floats(written)
        op = self._user_name(name, outs, args)
        self.modules.note(op)
        all_kinds = enumerate(map(tensor_facts.nonfinite_kinds, inputs))
        call = _Call(
            *(func, name, op, old_args, old_kwargs, inputs, keys),
            {index: kinds for index, kinds in all_kinds if kinds},
            outs,
            self._cast_in_code(name, inputs, keys, outs),
        )
        for key in keys if self._casts else ():
            event = self._casts.pop(key, None)
            if event is not None and event.phase == "forward":
                event.consumer = (self.modules.current(), op)
        for out in outs:
            self._record_output(call, out, is_new=not written)
        if self.boundary is None and self.modules.node() is not None:
            if not self.modules.current().is_loss:
                self.boundary = tensor_facts.absmax(inputs)
            elif any(map(tensor_facts.nonfinite_kinds, outs)):
                self.boundary = math.inf
        return output

    def _record_output(self, call: _Call, out: Tensor, *, is_new: bool) -> None:
        kinds, key = NonFiniteKinds(), storage_key(out)
        if call.aten_name not in _UNSET:
            kinds = tensor_facts.nonfinite_kinds(out)
        if kinds:
            self._origins[key] = self._sources_of(call, kinds, out)
            self._refs[key] = tensor_facts.storage_ref(out)
        # Some split operations return views that their schema does not declare.
        elif is_new and key not in call.keys:
            self._origins.pop(key, None)

    def _user_name(
        self, name: str, outs: Sequence[Tensor], args: Sequence[object]
    ) -> str:
        if op_names.is_matmul(name) and self.calls.op:
            return self.calls.op
        shapes = [t.shape for t in args[:2] if name == "mm" and isinstance(t, Tensor)]
        weighted = any(s in self._shapes or s[::-1] in self._shapes for s in shapes)
        rank = outs[0].dim() if outs else 0
        return op_names.user_name(name, rank, args, weighted=weighted)

    def _set_written(self, out: Tensor, source: tuple[Place, Cast]) -> None:
        self._written[storage_key(out)] = source
        self._refs[storage_key(out)] = tensor_facts.storage_ref(out)

    def _cast_by_program(self, result: object, cast: Cast) -> None:
        for out in filter(_is_low, tensor_facts.floats(result)):
            self._set_written(out, (self.modules.current(), cast))

    def _cast_in_code(
        self,
        name: str,
        inputs: Sequence[Tensor],
        keys: Sequence[int],
        outs: Sequence[Tensor],
    ) -> Cast | None:
        """Return the cast by the program that an operation is, or that made its inputs.

        If all inputs come from such casts, so does the dtype of the result: no op rule
        changes it. A rule for a module does, as it casts what enters the module.
        """
        current = self.modules.current()
        low = list(filter(_is_low, outs))
        sources = [self._written[key] for key in keys if key in self._written]
        origin = next((one for one in sources if one[0].is_inside(current)), None)
        all_cast = len(sources) == sum(t.dim() > 0 for t in inputs)
        if name in _CASTS and low and any(t.itemsize > low[0].itemsize for t in inputs):
            cast = self.calls.cast()
            origin, all_cast = None if cast is None else (current, cast), True
        for key in map(storage_key, outs):
            self._written.pop(key, None)
        source = origin or next(iter(sources), None)
        if all_cast and source is not None:
            for out in low:
                self._set_written(out, source)
        return None if origin is None else origin[1]

    def _sources_of(
        self, call: _Call, kinds: NonFiniteKinds, out: Tensor
    ) -> frozenset[NonFiniteEvent]:
        """Return the events that a non-finite result results from."""
        if not call.nonfinite:
            return frozenset({self._event(call, kinds, out)})
        sources: set[NonFiniteEvent] = set()
        input_kinds = NonFiniteKinds()
        for index, one in call.nonfinite.items():
            tensor, key = call.inputs[index], call.keys[index]
            input_kinds |= one
            if key not in self._origins:
                self._refs[key] = tensor_facts.storage_ref(tensor)
                outside = self._outside_event(call, tensor, key, one)
                self._origins[key] = frozenset({outside})
            sources |= self._origins[key]
        if call.aten_name in _PICKS:
            for event in sources:
                event.is_selected = True
        if all(event.is_intended for event in sources):
            overflowed = kinds.posinf and not input_kinds.posinf
            overflowed = overflowed and call.aten_name in _SUMS
            is_new_nan = kinds.nan and not input_kinds.nan
            if is_new_nan or overflowed or call.aten_name == "logsumexp":
                event = self._event(call, kinds, out, parents=frozenset(sources))
                event.is_intended = not (kinds.nan or kinds.posinf)
                return frozenset({event})
        return frozenset(sources)

    def _new_event(
        self, call: _Call, kinds: NonFiniteKinds, values: Tensor
    ) -> NonFiniteEvent:
        self._num_events += 1
        return NonFiniteEvent(
            number=self._num_events,
            place=self.modules.current(),
            phase="forward" if self.modules.node() is None else "backward",
            op=call.op,
            aten_name=call.aten_name,
            nonfinite=kinds,
            dtype=values.dtype,
            count=(int((~values.detach().isfinite()).sum()), values.numel()),
            inputs=tensor_facts.absmax(call.inputs),
        )

    def _event(
        self,
        call: _Call,
        kinds: NonFiniteKinds,
        out: Tensor,
        parents: frozenset[NonFiniteEvent] = frozenset(),
    ) -> NonFiniteEvent:
        """Return the event of an operation that made inf or NaN."""
        event = self._new_event(call, kinds, out)
        node, name = self.modules.node(), call.aten_name
        forward_op = self.modules.forward_op()
        event.op, event.is_executed_op = forward_op or call.op, not forward_op
        values = domains.arguments(call.func, call.args, call.kwargs, call.outs)
        event.domain_error = domains.find_domain_error(name, values, "forward")
        # After the other uses of these arguments: an in-place operation writes to them.
        event.fp32_result = tensor_facts.run_in_fp32(call.func, call.args, call.kwargs)
        # -inf alone is a mask.
        overflows = (kinds.posinf or kinds.nan) and event.fp32_result[0] == "finite"
        if self.overflow is None and node is None and overflows:
            self.overflow = event
        leaves = _pytree.tree_leaves((call.args, call.kwargs))
        event.constant = any(type(v) is float and not math.isfinite(v) for v in leaves)
        event.is_intended = event.constant and name in _FILLS and not parents
        arguments = self.modules.arguments
        event.raw_input = next((arguments[k] for k in call.keys if k in arguments), "")
        event.parents, event.casts = parents, name in _CASTS
        event.written = call.written if node is None else None
        if event.casts and node is not None:
            event.receiver = self.modules.receiver(node, out.dtype)
        if event.casts and event.written is None:
            if self.calls.op and node is None:
                event.consumer = (event.place, self.calls.op)
            else:
                self._casts[storage_key(call.outs[0])] = event
        return event

    def _outside_event(
        self, call: _Call, tensor: Tensor, key: int, kinds: NonFiniteKinds
    ) -> NonFiniteEvent:
        """Return the event of an inf or NaN that no traced operation made."""
        kind, source = self._stored_tensors.get(key, ("", ""))
        if not kind and key in self.modules.arguments:
            kind, source = "input", self.modules.arguments[key]
        if not kind and self._exchanged and self.in_backward:
            kind = "exchange"
        weight = "" if kind else self._cast_weight(tensor)
        event = self._new_event(call, kinds, tensor)
        # torch wraps a Python scalar of the program into a 0-dim tensor.
        is_number = not tensor.dim() and not self.modules.node()
        event.constant = not kind and not weight and is_number
        event.source_kind = "" if weight or event.constant else kind or "outside"
        event.source = weight or source
        # A mask has -inf only. For `y[:, 0] = inf`, torch before 2.15 fills with a
        # tensor of that scalar, so treat it like the scalar.
        event.is_intended = (event.constant and call.aten_name in _FILLS) or not (
            kinds.nan or kinds.posinf or kind == "weight" or weight
        )
        if weight:
            parameter = self.modules.root.get_parameter(weight)
            event.inputs, event.casts = tensor_facts.absmax([parameter]), True
            event.fp32_result = ("finite", event.inputs)
            event.consumer = (event.place, call.op)
            if tensor_facts.nonfinite_kinds(parameter):
                event.source_kind, event.casts = "weight", False
        if call.aten_name in _CASTS:
            self._casts[storage_key(call.outs[0])] = event
        return event

    def _cast_weight(self, tensor: Tensor) -> str:
        """Return the parameter of which a tensor is a cast made before the replay."""
        if not _is_low(tensor):
            return ""
        for name, parameter in self.modules.root.named_parameters():
            local = tensor_facts.floats(parameter)
            if not local or local[0].dtype == tensor.dtype:
                continue
            for form in (tensor, tensor.t() if tensor.dim() == 2 else tensor):  # noqa: PLR2004
                same = form.shape == local[0].shape
                low = local[0].detach().to(tensor.dtype)
                if same and torch.equal(low.nan_to_num(), form.nan_to_num()):
                    return name
        return ""

    def sources(self, tensors: Iterable[Tensor | None]) -> set[NonFiniteEvent]:
        """Return the events that the non-finite values of some tensors result from."""
        events: set[NonFiniteEvent] = set()
        for part in tensor_facts.floats([*tensors]):
            if tensor_facts.nonfinite_kinds(part):
                events |= self._origins.get(storage_key(part), frozenset())
        return events


def _is_low(tensor: Tensor) -> bool:
    return tensor.itemsize < torch.float32.itemsize


def _written_tensors(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    values = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [t for t in _pytree.tree_leaves(values) if isinstance(t, Tensor)]


_TABLES = {
    "embedding": "embedding",
    "_embedding_bag": "embedding_bag",
    "_embedding_bag_forward_only": "embedding_bag",
}


@dataclass(eq=False)
class OutOfRange(RuntimeError):  # noqa: N818 -- the search catches it
    """A label, token or other index is outside of what an operation accepts."""

    place: Place
    op: str
    is_label: bool
    evidence: str


def _check_indices(name: str, args: Sequence[Any], modules: ModuleStack) -> None:
    """Raise OutOfRange if an index of operation `name` is invalid. Synchronizes."""
    op, is_label = _TABLES.get(name, name), False
    if name in {"nll_loss_forward", "nll_loss2d_forward"}:
        op, is_label = "cross_entropy", True
        logits, indices, ignored = args[0], args[1], args[4]
        size = logits.shape[1 if logits.dim() > 1 else 0]
        right = f"classes are 0 to {size - 1}, and {ignored} is left out"
        invalid = (indices != ignored) & ((indices < 0) | (indices >= size))
    elif name in _TABLES or (name in {"gather", "index_select"} and args[0].dim()):
        if name in _TABLES:
            size, indices = args[0].shape[0], args[1]
            right = f"the table has rows 0 to {size - 1}"
        else:
            size, indices = args[0].shape[args[1]], args[2]
            right = f"there are 0 to {size - 1}"
            # A hand-written loss may gather by its labels.
            is_label = modules.current().is_loss
        invalid = (indices < 0) | (indices >= size)
    elif name == "binary_cross_entropy":
        is_label = True
        invalid = ~((args[1] >= 0) & (args[1] <= 1))
    else:
        return
    if bool(invalid.any()):
        count = f"{int(invalid.sum())} of {invalid.numel()}"
        evidence = f"{count} targets are not inside 0 to 1"
        if name != "binary_cross_entropy":
            index = int(indices[invalid].flatten()[0])
            evidence = f"index {index} at {count} places, yet {right}"
        raise OutOfRange(modules.current(), op, is_label, evidence)

"""Traces every operation of a replay: which makes inf or NaN, and which passes it on.

In: operations as they run. Out: `Event`s, each an operation that took in what is finite
and gave what is not; and, for any tensor, the events behind what it holds.

An infinity that is meant, as a mask of -inf is, is an event like another. It is named
only if it reaches a result; and an operation that makes NaN of it is one of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from halfstep._torch.dispatch_mode import DispatchMode
from halfstep.diagnostics.replay import index_checks, op_names, tensor_facts
from halfstep.diagnostics.replay.tensor_facts import NonFiniteKinds
from halfstep.diagnostics.replay.torch_calls import Calls, Cast
from halfstep.nonfinite.domains import DomainError, find_domain_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.diagnostics.replay.module_stack import ModuleStack, Place


@dataclass(eq=False)
class NonFiniteEvent:
    """An inf or NaN that an operation made, or that came in."""

    number: int
    """Of all events, in order."""
    place: Place
    phase: str
    """"forward" or "backward"."""
    word: str
    """The operation; backwards, the one whose slope is computed."""
    name: str
    """The operation that ran, by aten's name."""
    nonfinite: NonFiniteKinds
    dtype: torch.dtype
    inputs: float | None = None
    """Largest finite magnitude that it took in."""
    fp32_result: tuple[str, float] = ("not run", 0.0)
    domain_error: DomainError | None = None
    constant: bool = False
    """The program itself gave the operation a number that is not finite."""
    is_intended: bool = False
    """Such a number only fills places, as the -inf of a mask does."""
    is_selected: bool = False
    """A label has chosen it: what a loss looks up by its labels came from there."""
    is_executed_op: bool = False
    """Backwards: `word` is the operation that ran, as the slope is not torch's own."""
    count: tuple[int, int] = (0, 0)
    """Places that are not finite, of all; parameters, where gradients were added up."""
    source_kind: str = ""
    """Nothing made it: "weight", "buffer", "input" (of the model), "outside";
    "exchange": another process made it; "sum": gradients were added up."""
    source: str = ""
    """Name of the parameter, buffer or argument that was given, or cast."""
    raw_input: str = ""
    """Argument of the model that it took in as it came; "" for none."""
    parents: frozenset[NonFiniteEvent] = field(default_factory=frozenset)
    """Infinities that were meant, and of which it made NaN."""
    casts: bool = False
    """It is a cast to a narrower format."""
    written: Cast | None = None
    """The program itself made it, or what the operation took in."""
    consumer: tuple[Place, str] | None = None
    """Who took in the result of a cast first."""
    receiver: tuple[Place, str] | None = None
    """Whose gradient a cast in a backward pass makes narrower."""


_UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_UNSET |= {"empty_permuted", "resize", "resize_as", "set"}
_OVERWRITE = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random"}
_OVERWRITE |= {"exponential", "log_normal", "cauchy", "geometric", "set"}
_FILLS = {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill"}
_FILLS |= {"index_fill", "constant_pad_nd", "where", "clamp", "scatter"}
_EXCHANGES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
"""Libraries whose results may still be under way."""
_CASTS = {"_to_copy", "to", "copy"}
_PICKS = {"nll_loss_forward", "nll_loss2d_forward", "gather"}
_SUMS = {"addmm", "mm", "bmm", "baddbmm", "convolution", "add", "sum", "mean"}
"""They give +inf where they take -inf alone only by an overflow of their own."""


class OpTracer(DispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations while it is entered; waits for the device at each.

    Args:
        places: Knows where an operation runs.
        writes: Called with each tensor that is about to be written.
    """

    def __init__(self, places: ModuleStack, writes: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self._writes = writes
        self.watched = 0
        """Operations so far."""
        self.events: list[NonFiniteEvent] = []
        self.boundary: float | None = None
        """Largest magnitude that came back out of the loss, into the model."""
        self.refused: set[NonFiniteEvent] = set()
        """What is behind numbers that an operation refused to take."""
        self.sent: set[NonFiniteEvent] = set()
        """What is behind numbers that went to other processes."""
        self.going_back = False
        """The backward pass has begun."""
        self._exchanged = False
        self._origins: dict[int, frozenset[NonFiniteEvent]] = {}
        # Memory that is freed, and given out again, would pass for what lay there.
        self._refs: dict[int, object] = {}
        self._casts: dict[int, NonFiniteEvent] = {}
        self.calls = Calls(self._cast_by_program)
        self._written: dict[int, tuple[Place, Cast]] = {}
        self._stored_tensors = dict(_stored(places.root))
        self._shapes = {p.shape for p in places.root.parameters()}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation, and look at what it took and gave."""
        del types
        kwargs = kwargs or {}
        name = op_names.base(func)
        returns = func._schema.returns  # noqa: SLF001
        written = _written(func, args, kwargs)
        self.watched += 1
        for tensor in written:
            self._writes(tensor)
        if func.namespace in _EXCHANGES:
            self._exchanged = True
            self.sent |= self.sources(tensor_facts.floats((args, kwargs)))
            return func(*args, **kwargs)
        if not written and any(out.alias_info for out in returns):
            self.places.note(name)
            return func(*args, **kwargs)
        index_checks.check(name, args, self.places)
        before = _pytree.tree_map(
            lambda v: v.detach().clone() if _among(v, written) else v, (args, kwargs)
        )
        taken = [] if name in _UNSET else tensor_facts.floats(before)
        if name in _OVERWRITE and taken:
            taken = taken[1:]
        keys = (
            []
            if name in _UNSET
            else [*map(tensor_facts.storage_key, tensor_facts.floats((args, kwargs)))]
        )
        keys = keys[len(keys) - len(taken) :]
        try:
            output = func(*args, **kwargs)
        except Exception:
            # Some refuse what is not finite, as losses of probabilities do.
            self.refused = self.sources(taken)
            raise
        outs = tensor_facts.floats(output) or tensor_facts.floats(written)
        word = self._word(func, name, outs, args)
        self.places.note(word)
        in_code = self._cast_in_code(name, taken, keys, outs)
        bad = {
            id(t): kinds for t in taken if (kinds := tensor_facts.nonfinite_kinds(t))
        }
        self._note_consumer(keys, word)
        call = _Call(func, name, word, before, taken, outs, in_code)
        for out in outs:
            kinds = (
                NonFiniteKinds()
                if name in _UNSET
                else tensor_facts.nonfinite_kinds(out)
            )
            if not kinds:
                # Some operations that split give views, and do not say so.
                if not written and tensor_facts.storage_key(out) not in keys:
                    self._origins.pop(tensor_facts.storage_key(out), None)
                continue
            key = tensor_facts.storage_key(out)
            self._origins[key] = self._sources_of(call, bad, keys, kinds, out)
            self._refs[key] = tensor_facts.storage_ref(out)
        self._measure_boundary(outs, taken)
        return output

    def _word(
        self,
        func: torch._ops.OpOverload,
        name: str,
        outs: Sequence[Tensor],
        args: Sequence[object],
    ) -> str:
        rank = outs[0].dim() if outs else 0
        weighted = False
        if name == "mm":
            shapes = [tuple(t.shape) for t in args[:2] if isinstance(t, Tensor)]
            weight_shapes = self._shapes
            weighted = any(
                s in weight_shapes or s[::-1] in weight_shapes for s in shapes
            )
        if op_names.is_product(name) and self.calls.op:
            return self.calls.op
        return op_names.word(func, rank, args, weighted=weighted)

    def _cast_by_program(self, result: object, cast: Cast) -> None:
        """Take note of what the program has cast to a narrow format."""
        for out in tensor_facts.floats(result):
            if out.itemsize < torch.float32.itemsize:
                self._written[tensor_facts.storage_key(out)] = (
                    self.places.current(),
                    cast,
                )
                self._refs[tensor_facts.storage_key(out)] = tensor_facts.storage_ref(
                    out
                )

    def _cast_in_code(
        self,
        name: str,
        taken: Sequence[Tensor],
        keys: Sequence[int],
        outs: Sequence[Tensor],
    ) -> Cast | None:
        """Return the cast by the program that an operation is, or that it works on.

        What follows from such casts alone is in that format whatever a rule says; but
        a rule on a module casts what comes into it.
        """
        current = self.places.current()
        low = [out for out in outs if out.itemsize < torch.float32.itemsize]
        sources = [self._written[key] for key in keys if key in self._written]
        origin = next((one for one in sources if one[0].is_inside(current)), None)
        spread = len(sources) == sum(t.dim() > 0 for t in taken)
        if name in _CASTS and low and any(t.itemsize > low[0].itemsize for t in taken):
            cast = self.calls.cast()
            origin, spread = None if cast is None else (current, cast), True
        for key in map(tensor_facts.storage_key, outs):
            self._written.pop(key, None)
        for out in low if spread else ():
            source = origin or next(iter(sources), None)
            if source is not None:
                self._written[tensor_facts.storage_key(out)] = source
                self._refs[tensor_facts.storage_key(out)] = tensor_facts.storage_ref(
                    out
                )
        return None if origin is None else origin[1]

    def _sources_of(
        self,
        call: _Call,
        bad: dict[int, NonFiniteKinds],
        keys: Sequence[int],
        kinds: NonFiniteKinds,
        out: Tensor,
    ) -> frozenset[NonFiniteEvent]:
        """Return the events behind something that is not finite."""
        if not bad:
            return frozenset({self._event(call, kinds, out)})
        sources: set[NonFiniteEvent] = set()
        took = NonFiniteKinds()
        for tensor, key in zip(call.taken, keys, strict=True):
            if id(tensor) in bad:
                took |= bad[id(tensor)]
                if key not in self._origins:
                    self._refs[key] = tensor_facts.storage_ref(tensor)
                    outside_event = self._outside_event(
                        call, tensor, key, bad[id(tensor)]
                    )
                    self._origins[key] = frozenset({outside_event})
                sources |= self._origins[key]
        for event in sources if call.name in _PICKS else ():
            event.is_selected = True
        if all(event.is_intended for event in sources):
            grown = kinds.posinf and not took.posinf and call.name in _SUMS
            emptied = call.name == "logsumexp"
            if (kinds.nan and not took.nan) or grown or emptied:
                new_event = self._event(call, kinds, out, parents=frozenset(sources))
                new_event.is_intended = not (kinds.nan or kinds.posinf)
                return frozenset({new_event})
        return frozenset(sources)

    def _event(
        self,
        call: _Call,
        kinds: NonFiniteKinds,
        out: Tensor,
        parents: frozenset[NonFiniteEvent] = frozenset(),
    ) -> NonFiniteEvent:
        """Record that an operation made an inf or NaN."""
        node = self.places.node()
        args, kwargs = call.before
        own = "" if node is None else self.places.forward_word()
        scalars = [v for v in _pytree.tree_leaves((args, kwargs)) if type(v) is float]
        constant = not all(map(math.isfinite, scalars))
        domain_error = find_domain_error(call.name, args, kwargs, call.outs)
        event = NonFiniteEvent(
            number=len(self.events),
            place=self.places.current(),
            phase="forward" if node is None else "backward",
            word=own or call.word,
            is_executed_op=not own,
            name=call.name,
            nonfinite=kinds,
            dtype=out.dtype,
            count=tensor_facts.count_nonfinite(out),
            inputs=tensor_facts.absmax(call.taken),
            fp32_result=tensor_facts.run_in_fp32(call.func, args, kwargs),
            domain_error=domain_error,
            constant=constant,
            is_intended=constant and call.name in _FILLS and not parents,
            raw_input=self._raw_input(call.taken),
            parents=parents,
            casts=call.name in _CASTS,
            written=call.in_code if node is None else None,
        )
        self.events.append(event)
        if event.casts and node is not None:
            event.receiver = self.places.receiver(node, out.dtype)
        if event.casts and event.written is None:
            if self.calls.op and node is None:
                event.consumer = (event.place, self.calls.op)
            else:
                self._casts[tensor_facts.storage_key(call.outs[0])] = event
        return event

    def _raw_input(self, taken: Iterable[Tensor]) -> str:
        """Name the argument of the model that an operation takes as it came."""
        arguments = self.places.arguments
        return next(
            (
                arguments[k]
                for k in map(tensor_facts.storage_key, taken)
                if k in arguments
            ),
            "",
        )

    def _outside_event(
        self, call: _Call, tensor: Tensor, key: int, kinds: NonFiniteKinds
    ) -> NonFiniteEvent:
        """Record an inf or NaN that no traced operation has made."""
        kind, source = self._stored_tensors.get(key, ("", ""))
        if not kind and key in self.places.arguments:
            kind, source = "input", self.places.arguments[key]
        node = self.places.node()
        if not kind and self._exchanged and self.going_back:
            kind = "exchange"
        cast = "" if kind else self._cast_of(tensor)
        # What a program writes as a number, torch turns into a tensor like this.
        constant = not kind and not cast and not tensor.dim() and not node
        event = NonFiniteEvent(
            number=len(self.events),
            place=self.places.current(),
            phase="forward" if node is None else "backward",
            word=call.word,
            name=call.name,
            nonfinite=kinds,
            dtype=tensor.dtype,
            count=tensor_facts.count_nonfinite(tensor),
            inputs=tensor_facts.absmax(call.taken),
            source_kind="" if cast or constant else kind or "outside",
            constant=constant,
            source=cast or source,
            # A mask holds -inf alone. For `y[:, 0] = inf`, torch before 2.15 fills
            # with a tensor of that number: the same as with the number.
            is_intended=(constant and call.name in _FILLS)
            or not (kinds.nan or kinds.posinf or kind == "weight" or cast),
        )
        if cast:
            weight = self.places.root.get_parameter(cast)
            event.inputs, event.casts = tensor_facts.absmax([weight]), True
            event.fp32_result = ("finite", event.inputs)
            event.consumer = (event.place, call.word)
            if tensor_facts.nonfinite_kinds(weight):
                event.source_kind, event.casts = "weight", False
        self.events.append(event)
        if call.name in _CASTS:
            self._casts[tensor_facts.storage_key(call.outs[0])] = event
        return event

    def _cast_of(self, tensor: Tensor) -> str:
        """Name the parameter that a tensor is a cast of, made before the replay."""
        if tensor.itemsize >= torch.float32.itemsize:
            return ""
        for name, parameter in self.places.root.named_parameters():
            local = tensor_facts.floats(parameter)
            if not local or local[0].dtype == tensor.dtype:
                continue
            for form in (tensor, tensor.t() if tensor.dim() == 2 else tensor):  # noqa: PLR2004
                same = form.shape == local[0].shape
                low = local[0].detach().to(tensor.dtype)
                if same and torch.equal(low.nan_to_num(), form.nan_to_num()):
                    return name
        return ""

    def _note_consumer(self, keys: Iterable[int], word: str) -> None:
        """Take note of who uses the result of a cast first."""
        for key in keys if self._casts else ():
            event = self._casts.pop(key, None)
            if event is not None and event.phase == "forward":
                event.consumer = (self.places.current(), word)

    def _measure_boundary(
        self, outs: Iterable[Tensor], taken: Iterable[Tensor]
    ) -> None:
        """Measure the gradient where it first leaves the loss."""
        if self.boundary is None and self.places.node() is not None:
            if not self.places.current().is_loss:
                self.boundary = tensor_facts.absmax(taken)
            elif any(map(tensor_facts.nonfinite_kinds, outs)):
                self.boundary = math.inf

    def sources(self, tensors: Iterable[Tensor | None]) -> set[NonFiniteEvent]:
        """Return the events behind what is not finite in some tensors."""
        events: set[NonFiniteEvent] = set()
        for tensor in tensors:
            for part in tensor_facts.floats(tensor):
                if tensor_facts.nonfinite_kinds(part):
                    events |= self._origins.get(
                        tensor_facts.storage_key(part), frozenset()
                    )
        return events


@dataclass
class _Call:
    """One operation, with what it took before it ran."""

    func: torch._ops.OpOverload
    name: str
    word: str
    before: tuple[tuple[Any, ...], dict[str, Any]]
    taken: list[Tensor]
    outs: list[Tensor]
    in_code: Cast | None


def _stored(root: torch.nn.Module) -> Iterable[tuple[int, tuple[str, str]]]:
    for kind, named in (
        ("buffer", root.named_buffers()),
        ("weight", root.named_parameters()),
    ):
        for name, tensor in named:
            for part in tensor_facts.floats(tensor):
                yield tensor_facts.storage_key(part), (kind, name)


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operation writes into."""
    values: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            values.append(args[place] if place < len(args) else given)
    return [t for t in _pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _among(value: object, tensors: Iterable[Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)

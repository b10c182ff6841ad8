"""Observes a model while it trains: which tensor is not finite, or what all are like.

In: a model. Out: flags and `TensorStats` by name, of module outputs, of the gradients
of these, and of the gradients of parameters; events for metrics.jsonl. Nothing waits
for the device; on a GPU results arrive some steps later.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist

from halfstep._torch.async_read import DelayedTensors, to_device_async
from halfstep.diagnostics.probe.compiled import UNSEEN
from halfstep.diagnostics.probe.hooks import Hooks
from halfstep.diagnostics.probe.step_records import Key, label
from halfstep.distributed import ddp, process_group
from halfstep.errors import UserError, require
from halfstep.numerics import formats
from halfstep.numerics.tensor_counts import CASTS, Counts
from halfstep.numerics.tensor_stats import TensorStats, all_reduce_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from torch import Tensor, nn

    from halfstep.numerics.formats import FloatFormat

Mode = Literal["flags", "sampled", "full"]
MODES: tuple[Mode, ...] = ("flags", "sampled", "full")
Event = dict[str, Any]

_MAX_HISTORY = 1000  # steps with inf or NaN that are remembered


class Probe:
    """Watches a model from when it is made until `detach`, or as a context manager.

    Names are "<module path>:output", "<module path>:grad" for the gradient of that
    output, and "<parameter name>:grad"; the model itself is "model". A module that
    runs several times in a step, or returns several tensors, has one name: its flag
    says whether one of them held inf or NaN, its statistics are of all their numbers.
    Only what modules return is looked at: an attention mask of -inf that is passed to
    one, or infinities inside of it, are not reported.

    Call `step` once for each step of the optimizer. A gradient is as it is when the
    backward pass ends: multiplied by the loss scale, and not yet clipped.

    Args:
        model: Before torch.compile runs it first; as it is, or inside DDP, or after
            `fully_shard`.
        mode: "flags": whether each tensor is finite, always. "sampled": statistics of
            all, in the first step and each `every` steps from then on; in between
            nothing is looked at. "full": statistics in each step.
        every: Steps, >= 1. 100, because a step with statistics takes a few times as
            long as one without: that hundredth is a few per cent.
        casts: Formats to cast to for the statistics, to see what is lost.
        after: Steps that were made before: a run that is resumed samples the steps that
            it would have sampled without a break. >= 0.
        log: Takes events, which are plain values for `json.dumps`; or a file such as
            metrics.jsonl, to which the first process adds them.
        over_ranks: Flags and statistics are those of all processes. All must have such
            a probe of the same mode, and call `step` together. Flags take one
            collective a step; a step with statistics takes four, and waits for one.
        group: Processes that take part; None: all.

    Raises:
        UserError: If an argument is out of its range, or a log has no folder.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with Probe(model, "full") as probe:
        ...     model(torch.tensor([[1.0, torch.nan]])).sum().backward()
        ...     probe.step()
        >>> probe.non_finite[0]
        '0:output'
        >>> probe.stats["0:output"].nans
        2
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode = "flags",
        *,
        every: int = 100,
        casts: Iterable[FloatFormat | str | torch.dtype] = CASTS,
        after: int = 0,
        log: Callable[[Event], object] | str | Path | None = None,
        over_ranks: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require("mode", mode, mode in MODES, f"one of {', '.join(MODES)}")
        require("every", every, type(every) is int and every >= 1, "1 or more")
        require("after", after, type(after) is int and after >= 0, "0 or more")
        self.mode = mode
        self.every = every
        self.steps = after
        """Number of the last step that has ended."""
        self.non_finite: tuple[str, ...] = ()
        """What was not finite in step `arrived`, in the order observed."""
        self.arrived = 0
        """The last step that is known of; 0 before the first."""
        self.history: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_MAX_HISTORY)
        """The last 1,000 steps in which something was not finite: number and names."""
        self.stats: dict[str, TensorStats] = {}
        """By name, of the last step with statistics. Reading a property may wait."""
        self._casts = tuple(
            word if isinstance(word, formats.FloatFormat) else formats.parse(word)
            for word in casts
        )
        self._ended = after
        self._blind: str | None = None
        """What should have been seen, and was not."""
        self._log = _writer(log)
        self._over_ranks, self._group = over_ranks, group
        self._flags_coming: DelayedTensors[tuple[int, list[int], list[int]]] = (
            DelayedTensors()
        )
        self._stats_coming: DelayedTensors[tuple[Event, list[str], list[str]]] = (
            DelayedTensors()
        )
        self._hooks = Hooks(ddp.unwrap(model), self._casts, full=mode != "flags")
        self._begin()

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be seen, parts of a module before the module."""
        return self._hooks.names

    def step(self, number: int | None = None, *, scale: float | None = None) -> None:
        """End a step: tell what is known, and begin the next. Waits for nothing.

        After the backward pass. Before or after the optimizer's step is the same, but
        for a model that torch.compile runs: there, before gradients are cleared.

        Args:
            number: Of the step, as events tell it; None counts on.
            scale: What its loss was multiplied by, > 0, as events of statistics tell
                it: without it, `halfstep doctor` takes that of the step's own record.

        Raises:
            RuntimeError: After `detach`.
            UserError: If `scale` is out of its range.
        """
        good = scale is None or (math.isfinite(scale) and scale > 0)
        require("scale", scale, good, "a finite number above 0, or None")
        hooks = self._hooks
        if not hooks.attached:
            message = "the probe was detached; make another one."
            raise RuntimeError(message)
        hooks.finish()
        self._ended += 1
        self.steps = self.steps + 1 if number is None else number
        if hooks.looking and self.mode == "flags":
            self._send_flags()
        elif hooks.looking:
            self._send_stats({} if scale is None else {"scale": scale})
        self._begin()
        if self._blind is not None:
            message = (
                f"the probe saw nothing of {self._blind}. If torch.compile ran it "
                "before the probe was attached, attach first, or call "
                "torch.compiler.reset()."
            )
            self._blind = None
            warnings.warn(message, stacklevel=2)

    def _begin(self) -> None:
        looking = self.mode != "sampled" or self._ended % self.every == 0
        self._hooks.begin(looking=looking)

    def flush(self) -> None:
        """Take in all that is still under way. Waits for the device."""
        for (step, order, came), tensors in self._flags_coming.flush():
            self._flags_arrived(step, order, came, tensors)
        for (which, names, dtypes), tensors in self._stats_coming.flush():
            self._stats_arrived(which, names, dtypes, tensors)

    def detach(self) -> None:
        """Leave the model as it was before; what was seen can still be read. Waits."""
        self._hooks.detach()
        self.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing inside, such as passes that evaluate the model.

        Graphs of torch.compile that run inside are compiled without the probe.
        """
        before, self._hooks.on = self._hooks.on, False
        try:
            yield
        finally:
            self._hooks.on = before and self._hooks.attached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # Flags

    def _send_flags(self) -> None:
        hooks = self._hooks
        records = hooks.records
        if not (records.peaks or hooks.traced or self._over_ranks):  # all on the host
            bad = {number for number, flag in records.nonfinite.items() if flag}
            self._arrive(self.steps, records.nonfinite, self._named(records.order, bad))
            return
        order, rows = records.flags()
        came = list(records.order)
        rows = [to_device_async(row, hooks.device).float() for row in rows]
        if hooks.traced:
            count = len(hooks.modules)
            # Gradients of parameters come last.
            traced = [*range(count), *reversed(range(count, 2 * count))]
            order, came = [*traced, *order], [*traced, *came]
            rows = [hooks.flags[0].clone(), hooks.flags[1].flip(0), *rows]
        if self._over_ranks:
            order, rows = self._reduced_over_ranks(order, rows)
        if not rows:
            rows = [torch.empty(0)]
        note = self.steps, order, came
        for (step, numbers, first), tensors in self._flags_coming.submit(note, rows):
            self._flags_arrived(step, numbers, first, tensors)

    def _reduced_over_ranks(
        self, order: list[int], rows: list[Tensor]
    ) -> tuple[list[int], list[Tensor]]:
        """Return the flags of all names in all processes."""
        hooks = self._hooks
        every = torch.full((len(hooks.names),), UNSEEN, device=hooks.device)
        if order:
            indices = torch.tensor(order).to(hooks.device, non_blocking=True)
            every.scatter_reduce_(0, indices, torch.cat(rows), "amax")
        return list(range(len(every))), [
            process_group.all_reduce_max(every, self._group)
        ]

    def _flags_arrived(
        self, step: int, order: list[int], came: list[int], tensors: list[Tensor]
    ) -> None:
        flags = list(zip(order, torch.cat(tensors).tolist(), strict=True))
        seen = {number for number, flag in flags if flag != UNSEEN}
        bad = {number for number, flag in flags if flag > 0}
        self._arrive(step, seen, self._named(came, bad))

    def _named(self, came: Iterable[int], bad: set[int]) -> list[str]:
        """Return the names of numbers, in the order observed."""
        if not bad:
            return []
        # What only other processes observed comes last.
        ordered = dict.fromkeys([*came, *sorted(bad)])
        return [self.names[number] for number in ordered if number in bad]

    # Statistics

    def _send_stats(self, extra: Event) -> None:
        """Send statistics, with what their event tells besides."""
        rows = self._hooks.records.rows
        if self._over_ranks:
            rows = self._stats_over_ranks(rows)
        if not rows:
            self._arrive(self.steps, (), [])
            return
        first: dict[int, str] = {}
        names = [
            label(self.names[number], dtype, first.setdefault(number, dtype))
            for number, dtype in rows
        ]
        dtypes = [dtype for _, dtype in rows]
        self.stats = {
            name: TensorStats(dtype, self._casts, row)
            for name, dtype, row in zip(names, dtypes, rows.values(), strict=True)
        }
        stacked = Counts.stacked(list(rows.values()))
        for (which, labels, kinds), tensors in self._stats_coming.submit(
            ({"step": self.steps, **extra}, names, dtypes), list(vars(stacked).values())
        ):
            self._stats_arrived(which, labels, kinds, tensors)

    def _stats_over_ranks(self, rows: dict[Key, Counts]) -> dict[Key, Counts]:
        """Return the statistics of all processes. Waits for what each has seen."""
        if not (dist.is_available() and dist.is_initialized()):
            return rows
        keys_per_rank: list[list[Key]] = [[]] * dist.get_world_size(self._group)
        dist.all_gather_object(keys_per_rank, list(rows), group=self._group)
        # Every process must send them in one order: that of the first.
        keys = list(dict.fromkeys(key for keys in keys_per_rank for key in keys))
        none = Counts.zeros(len(self._casts), self._hooks.device)
        own = [rows.get(key, none) for key in keys]
        return (
            dict(
                zip(
                    keys,
                    all_reduce_counts(Counts.stacked(own), self._group).rows(),
                    strict=True,
                )
            )
            if own
            else {}
        )

    def _stats_arrived(
        self, which: Event, names: list[str], dtypes: list[str], tensors: list[Tensor]
    ) -> None:
        counts = Counts(*tensors)
        flags = counts.has_nonfinite().tolist()
        bad = [name for name, flag in zip(names, flags, strict=True) if flag]
        if self._log is not None:
            stats = {
                name: TensorStats(dtype, self._casts, row).data()
                for name, dtype, row in zip(names, dtypes, counts.rows(), strict=True)
            }
            self._log({**which, "event": "stats", "tensors": stats})
        numbers = {name: number for number, name in enumerate(self.names)}
        seen = {numbers[name] for name in names if name in numbers}
        self._arrive(which["step"], seen, bad)

    # Both

    def _arrive(self, step: int, seen: Container[int], bad: list[str]) -> None:
        """Take in what was found in a step."""
        if not self.arrived:
            self._blind = self._hooks.blind(seen)
        self.arrived = step
        self.non_finite = tuple(bad)
        if bad:
            self.history.append((step, self.non_finite))
            if self._log is not None:
                self._log({"step": step, "event": "non_finite", "where": bad})


def _writer(
    log: Callable[[Event], object] | str | Path | None,
) -> Callable[[Event], object] | None:
    """Return what takes an event: the callable, or one that adds lines to a file."""
    if log is None or callable(log):
        return log
    path = Path(log)
    if not path.parent.is_dir():
        message = f"log={log}: there is no folder {path.parent}; make it first."
        raise UserError(message)

    def add(event: Event) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")

    return add

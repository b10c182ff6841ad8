"""Defines `Probe`, which records non-finite tensors or statistics during training.

It observes module outputs, their gradients, and the gradients of parameters, without
host-device synchronization; on a GPU results arrive some steps later.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist

from halfstep._torch.async_read import DelayedTensors, to_device_async
from halfstep.diagnostics.probe.hooks import Hooks
from halfstep.distributed import ddp
from halfstep.errors import UserError, require
from halfstep.numerics import formats
from halfstep.numerics.tensor_counts import CASTS, Counts
from halfstep.numerics.tensor_stats import TensorStats

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from torch import Tensor, nn

    from halfstep.numerics.formats import FloatFormat

Mode = Literal["flags", "sampled", "full"]
MODES: tuple[Mode, ...] = ("flags", "sampled", "full")
Event = dict[str, Any]

_MAX_HISTORY = 1000  # steps with inf or NaN that are remembered


class Probe:
    """Records non-finite tensors of a model, or statistics of all, while it trains.

    It observes until `detach`, or as a context manager. Names are "<module
    path>:output", "<module path>:grad" for the gradient of that output, and "<parameter
    name>:grad"; the model itself is "model". A module that runs several times in a
    step, or returns several tensors, has one name for all of them. Only outputs of
    modules are observed, so masks that contain -inf are not.

    Call `step` once for each step of the optimizer. A gradient is as it is when the
    backward pass ends: multiplied by the loss scale, and not yet clipped.

    Args:
        model: The model, also inside DDP or after `fully_shard`; before the first call
            of a compiled one, whose modules are then compiled one by one.
        mode: "flags": whether each tensor is finite, always. "sampled": statistics of
            all, in the first step and each `every` steps from then on; in between
            nothing is observed. "full": statistics in each step.
        every: Steps from one sample to the next, >= 1. A step with statistics takes a
            few times as long as one without: at 100, sampling adds a few percent.
        casts: Formats whose rounding, underflow and overflow the statistics measure.
        after: Steps before this run, >= 0: a resumed run samples the steps that an
            uninterrupted one would.
        log: Called with each event, plain values for `json.dumps`; or a file such as
            metrics.jsonl, to which the first process appends them.

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
    ) -> None:
        require("mode", mode, mode in MODES, f"one of {', '.join(MODES)}")
        require("every", every, type(every) is int and every >= 1, "1 or more")
        require("after", after, type(after) is int and after >= 0, "0 or more")
        self.mode = mode
        self.every = every
        self.steps = after
        """Number of the last step that has ended."""
        self.non_finite: tuple[str, ...] = ()
        """Names of the non-finite tensors of step `arrived`, in the order observed."""
        self.arrived = 0
        """The last step whose results have arrived; 0 before the first."""
        self.history: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_MAX_HISTORY)
        """The last 1,000 steps with non-finite tensors: number and names."""
        self.stats: dict[str, TensorStats] = {}
        """Name -> statistics of the last step with statistics. Reading a property may
        synchronize."""
        self._casts = tuple(
            word if isinstance(word, formats.FloatFormat) else formats.parse(word)
            for word in casts
        )
        self._ended = after
        self._unobserved: str | None = None
        """Path of a module that was not observed although it may have run."""
        self._log = _writer(log)
        self._pending: DelayedTensors[Callable[[list[Tensor]], None]] = DelayedTensors()
        self._hooks = Hooks(ddp.unwrap(model), self._casts, full=mode != "flags")
        self._begin()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are observed, parts of a module before the module."""
        return self._hooks.names

    def step(self, number: int | None = None, *, scale: float | None = None) -> None:
        """End a step: report what has arrived, and begin the next.

        Call it after the backward pass, before or after the optimizer's step. Nothing
        synchronizes.

        Args:
            number: Of the step, for events; None: one more than the last.
            scale: Loss scale, > 0, for events of statistics: without it,
                `halfstep doctor` takes the one in the step's own record.

        Raises:
            RuntimeError: After `detach`.
            UserError: If `scale` is out of its range.
        """
        valid = scale is None or (math.isfinite(scale) and scale > 0)
        require("scale", scale, valid, "a finite number above 0, or None")
        hooks = self._hooks
        if not hooks.attached:
            raise RuntimeError("the probe was detached; make another one.")
        self._ended += 1
        self.steps = self.steps + 1 if number is None else number
        if hooks.sampling and self.mode == "flags":
            self._send_flags()
        elif hooks.sampling:
            self._send_stats({} if scale is None else {"scale": scale})
        self._begin()
        if self._unobserved is not None:
            path, self._unobserved = self._unobserved, None
            warnings.warn(
                f"the probe observed nothing of {path}. If torch.compile ran it before "
                "the probe was attached, attach first, or call torch.compiler.reset().",
                stacklevel=2,
            )

    def _begin(self) -> None:
        is_due = self.mode != "sampled" or self._ended % self.every == 0
        self._hooks.begin(sampling=is_due)

    def flush(self) -> None:
        """Report all steps whose results have not arrived yet. Synchronizes."""
        for arrived, tensors in self._pending.flush():
            arrived(tensors)

    def detach(self) -> None:
        """Remove all hooks; results can still be read. Synchronizes."""
        self._hooks.detach()
        self.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing inside, such as passes that evaluate the model.

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
        records = self._hooks.records
        if not records.peaks:  # all on the host
            bad = {number for number, flag in records.nonfinite.items() if flag}
            self._arrive(self.steps, records.nonfinite, self._named(records.order, bad))
            return
        order, rows = records.flags()
        rows = [to_device_async(row, self._hooks.device) for row in rows]
        first_seen = list(records.order)
        self._submit(partial(self._flags_arrived, self.steps, order, first_seen), rows)

    def _flags_arrived(
        self, step: int, order: list[int], first_seen: list[int], tensors: list[Tensor]
    ) -> None:
        flags = zip(order, torch.cat(tensors).tolist(), strict=True)
        bad = {number for number, flag in flags if flag}
        self._arrive(step, set(order), self._named(first_seen, bad))

    def _named(self, first_seen: Iterable[int], bad: set[int]) -> list[str]:
        """Return the names of the indices `bad`, in the order observed."""
        if not bad:
            return []
        return [self.names[n] for n in dict.fromkeys(first_seen) if n in bad]

    # Statistics

    def _send_stats(self, extra: Event) -> None:
        """Send statistics to the host; `extra` are further fields of their event."""
        rows = self._hooks.records.stats
        if not rows:
            self._arrive(self.steps, (), [])
            return
        first: dict[int, str] = {}
        names = []
        for number, dtype in rows:
            word = formats.word(getattr(torch, dtype))
            is_first = dtype == first.setdefault(number, dtype)
            names.append(self.names[number] + ("" if is_first else f" ({word})"))
        dtypes = [dtype for _, dtype in rows]
        self.stats = {
            name: TensorStats(dtype, self._casts, row)
            for name, dtype, row in zip(names, dtypes, rows.values(), strict=True)
        }
        stacked = Counts.stacked(list(rows.values()))
        event = {"step": self.steps, **extra}
        arrived = partial(self._stats_arrived, event, names, dtypes)
        self._submit(arrived, [*vars(stacked).values()])

    def _stats_arrived(
        self, event: Event, names: list[str], dtypes: list[str], tensors: list[Tensor]
    ) -> None:
        counts = Counts(*tensors)
        flags = counts.has_nonfinite().tolist()
        bad = [name for name, flag in zip(names, flags, strict=True) if flag]
        if self._log is not None:
            stats = {
                name: TensorStats(dtype, self._casts, row).data()
                for name, dtype, row in zip(names, dtypes, counts.rows(), strict=True)
            }
            self._log({**event, "event": "stats", "tensors": stats})
        numbers = {name: number for number, name in enumerate(self.names)}
        observed = {numbers[name] for name in names if name in numbers}
        self._arrive(event["step"], observed, bad)

    # Both

    def _submit(
        self, arrived: Callable[[list[Tensor]], None], tensors: list[Tensor]
    ) -> None:
        """Start copying tensors to the host; report the steps that have arrived."""
        for report, values in self._pending.submit(arrived, tensors):
            report(values)

    def _arrive(self, step: int, observed: Container[int], bad: list[str]) -> None:
        """Update results, history and log with those of a step."""
        if not self.arrived:
            self._unobserved = self._hooks.unobserved(observed)
        self.arrived = step
        self.non_finite = tuple(bad)
        if bad:
            self.history.append((step, self.non_finite))
            if self._log is not None:
                self._log({"step": step, "event": "non_finite", "where": bad})


def _writer(
    log: Callable[[Event], object] | str | Path | None,
) -> Callable[[Event], object] | None:
    """Return a callable for events: `log`, or one that appends lines to a file."""
    if log is None or callable(log):
        return log
    path = Path(log)
    if not path.parent.is_dir():
        raise UserError(f"log={log}: there is no folder {path.parent}; make it first.")

    def add(event: Event) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")

    return add

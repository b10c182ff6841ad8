"""Trains one level with one seed, in the same way as fp32."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import random
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from halfstep.diagnostics.preflight.model_copy import SavedBytes
from halfstep.errors import UserError
from halfstep.machine import gemm
from halfstep.numerics.formats import FloatFormat, tensors_in
from halfstep.parity.candidate import PERTURBED
from halfstep.policy.levels import LEVELS
from halfstep.reporting import json_fields
from halfstep.scaling import LossScaleCollapse
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.parity.candidate import Candidate
    from halfstep.session.session import Session

    LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
    TrainingParts: TypeAlias = (
        tuple[nn.Module, Optimizer, LossFn]
        | tuple[nn.Module, Optimizer, LossFn, Mapping[str, Any]]
    )
    Batches: TypeAlias = Sequence[Any] | Callable[[int], Iterable[Any]]

_NONFINITE_STEPS = 20
"""Consecutive non-finite losses that end a run: a loss scale of 65536 needs 16 steps
to reach 1."""


@dataclass(frozen=True)
class Workload:
    """What all runs of a comparison train."""

    make: Callable[[int], TrainingParts]
    batches: Batches
    steps: int
    metric: Callable[[nn.Module], float] | None
    """None: the mean loss of the last tenth of the steps."""
    metric_name: str
    lower_is_better: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that the runs of a comparison share."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One finished run."""

    level: str
    """Name of its candidate."""
    seed: int
    losses: tuple[float, ...]
    """Training loss of each step, before its update."""
    metric: float
    """NaN if the run diverged."""
    diverged: str
    """Why it counts as diverged; "" if it does not."""
    skipped: int
    """Steps without an update, for inf or NaN in a gradient."""
    seconds: tuple[float, ...]
    """Duration of each step."""
    peak_bytes: int
    """On a GPU the peak of torch's allocator; on a CPU the bytes of weights, gradients,
    master weights, moments and activations saved for the backward pass."""
    weights_crc: int
    """Checksum of the initial weights, before a perturbation."""
    first_batches_crc: int
    """Checksum of all tensors of the first step's micro-batches."""
    batches_crc: int
    """Checksum of all tensors of all batches."""

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        plain: dict[str, Any] = json_fields.plain(asdict(self))
        return plain

    @classmethod
    def from_data(cls, data: Mapping[str, Any], steps: int) -> Run:
        """Return the run of so many steps whose `data` these are.

        Raises:
            ArithmeticError, LookupError, TypeError, ValueError: If they are damaged.
        """
        # What is not finite was stored as text.
        floats = {name: tuple(map(float, data[name])) for name in ("losses", "seconds")}
        run = cls(**{**data, **floats, "metric": float(data["metric"])})
        kinds = [type(value).__name__ for value in vars(run).values()]
        num_steps = len(run.losses) if run.diverged else steps
        if not (
            kinds == [str(each.type).partition("[")[0] for each in fields(cls)]
            and len(run.losses) == len(run.seconds) == num_steps
            and math.isfinite(run.metric) != bool(run.diverged)
        ):
            raise ValueError(data)
        return run


def train(workload: Workload, candidate: Candidate, seed: int) -> Run:
    """Train a candidate with a seed.

    The random numbers of a step depend on seed and step only: on a CPU dropout masks
    are then the same at all levels.
    """
    model, optimizer, loss_fn, arguments = make(workload, seed)
    weights_crc, first_crc, batches_crc = checksum(model.state_dict()), 0, 0
    if candidate == PERTURBED:
        _perturb(model, seed)
    device = _device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    session = _prepare(candidate, model, optimizer, arguments)
    losses, seconds = list[float](), list[float]()
    peak_bytes, nonfinite, diverged = 0, 0, ""
    for step, micro_batches in _iterate_steps(workload, seed, session.accumulate):
        batches_crc = checksum(micro_batches, batches_crc)
        first_crc = batches_crc if step == 1 else first_crc
        _seed_all((seed << 32) + step, device)
        is_last = step == workload.steps
        try:
            with _errors_of(candidate):
                result = _train_step(session, loss_fn, micro_batches, is_last)
                loss, duration, peak_bytes = result
        except LossScaleCollapse as error:
            diverged = f"step {step}: {_first_line(error)}"
            break
        losses.append(loss)
        seconds.append(duration)
        nonfinite = 0 if math.isfinite(loss) else nonfinite + 1
        if nonfinite == _NONFINITE_STEPS:
            diverged = f"the loss is {loss} since step {step - nonfinite + 1}"
            break
    metric = math.nan
    if not diverged:
        with _errors_of(candidate):
            metric = _metric(workload, session, losses, seed)
        if not math.isfinite(metric):
            diverged = f"{workload.metric_name} is {metric} after step {len(losses)}"
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    curves = tuple(losses), metric, diverged, session.steps_skipped, tuple(seconds)
    checksums = weights_crc, first_crc, batches_crc
    return Run(candidate.name, seed, *curves, peak_bytes, *checksums)


def _train_step(
    session: Session, loss_fn: LossFn, micro_batches: list[Any], counts_bytes: bool
) -> tuple[float, float, int]:
    """Train one step; return mean loss, seconds, and bytes in use if counted."""
    device, saved = _device(session.model), SavedBytes(session.model)
    counts_bytes &= device.type == "cpu"
    total, used = torch.zeros((), device=device), 0
    gemm.synchronize(device.type)
    began = time.perf_counter()
    for batch in micro_batches:
        counting = saved.counting() if counts_bytes else contextlib.nullcontext()
        with session.autocast(), counting:
            loss = loss_fn(session.model, batch)
        session.backward(loss)
        if counts_bytes:  # while gradients exist
            used = sum(session.memory().values()) + saved.bytes
        session.step()
        total += loss.detach()
    gemm.synchronize(device.type)
    seconds = time.perf_counter() - began
    return total.item() / len(micro_batches), seconds, used


def make(
    workload: Workload, seed: int
) -> tuple[nn.Module, Optimizer, LossFn, Mapping[str, Any]]:
    """Call the workload's `make` with all generators seeded, and check its result."""
    _seed_all(seed, None)
    result: Any = workload.make(seed)
    types = (nn.Module, torch.optim.Optimizer, object, Mapping)
    parts = (*result, {})[:4] if isinstance(result, tuple | list) else ()
    are_valid = len(parts) == len(types) and all(map(isinstance, parts, types))
    if not (are_valid and callable(parts[2])):
        kinds = ", ".join(type(each).__name__ for each in parts[: len(result)] if parts)
        returned = f"({kinds})" if parts else f"a {type(result).__name__}"
        raise UserError(
            f"make({seed}) returned {returned}; it must return (model, optimizer, "
            "loss_fn), and perhaps a dict of arguments of prepare."
        )
    return parts[0], parts[1], parts[2], parts[3]


def check_repeatable(workload: Workload, seed: int) -> dict[str, str]:
    """Raise unless two calls of `make` with one seed give the same initial weights.

    Returns the settings of the optimizer and `prepare`, which all runs share.
    """
    pair = [make(workload, seed) for _ in range(2)]
    states = [model.state_dict() for model, *_ in pair]
    names = dict.fromkeys(name for state in states for name in state)
    for name in names:
        first, second = (checksum(state.get(name)) for state in states)
        if first != second:
            raise UserError(
                f"make({seed}) gave other initial weights in a second call, first in "
                f"{name!r}: draw all random numbers from the seed, and build the model "
                "anew in each call."
            )
    _, optimizer, _, arguments = pair[0]
    objects = {"optimizer": optimizer, **arguments}
    return {name: _text(value) for name, value in objects.items()}


def _text(value: object) -> str:
    """Return plain values and states as text, and the type of any other."""
    if hasattr(value, "state_dict"):
        return f"{type(value).__name__}: {_text(value.state_dict())}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    is_plain = isinstance(value, str | Real | torch.dtype | FloatFormat | None)
    return str(value) if is_plain else type(value).__name__


def first_checksums(workload: Workload, seed: int) -> tuple[int, int]:
    """Return the `weights_crc` and `first_batches_crc` of a run of this seed."""
    model, _, _, arguments = make(workload, seed)
    _, batches = next(_iterate_steps(workload, seed, arguments.get("accumulate", 1)))
    return checksum(model.state_dict()), checksum(batches)


def check_paired(run: Run, reference: Run) -> None:
    """Raise unless two runs of a seed had the same initial weights and batches."""
    is_complete = not (run.diverged or reference.diverged)
    for what, is_equal in (
        ("initial weights", run.weights_crc == reference.weights_crc),
        ("batches", run.batches_crc == reference.batches_crc or not is_complete),
    ):
        if not is_equal:
            raise UserError(
                f"{what} of {reference.level} and {run.level} differ for seed "
                f"{run.seed}: make and batches must give all runs of a seed the same."
            )


def _prepare(
    candidate: Candidate,
    model: nn.Module,
    optimizer: Optimizer,
    arguments: Mapping[str, Any],
) -> Session:
    with _errors_of(candidate):
        every = {**arguments, **candidate.arguments}
        if not LEVELS[candidate.level].low:
            every.pop("dtype", None)  # it would warn that fp32 has no use for it
        return prepare(model, optimizer, candidate.level, **every)


@contextlib.contextmanager
def _errors_of(candidate: Candidate) -> Iterator[None]:
    """Name the level in an error; an error in fp32 is the caller's own."""
    try:
        yield
    except LossScaleCollapse:
        raise
    except Exception as error:
        if not LEVELS[candidate.level].low:
            raise
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(
            f"{candidate.name} cannot run: {kind}{_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _iterate_steps(
    workload: Workload, seed: int, accumulate: int
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each step, from 1, and its micro-batches."""
    source: Any = workload.batches
    stream = iter(source(seed)) if callable(source) else itertools.cycle(source)
    for step in range(1, workload.steps + 1):
        micro_batches = list(itertools.islice(stream, accumulate))
        if len(micro_batches) < accumulate:
            raise UserError(
                f"batches(seed) ended before step {step} of {workload.steps}: return "
                "an iterable that is long enough and begins anew in each call, or "
                "lower steps."
            )
        yield step, micro_batches


def _metric(
    workload: Workload, session: Session, losses: Sequence[float], seed: int
) -> float:
    if workload.metric is None:
        last = losses[-max(1, len(losses) // 10) :]
        return math.fsum(last) / len(last)
    _seed_all(seed, None)
    session.model.eval()
    with torch.no_grad(), session.autocast():
        value: Any = workload.metric(session.model)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise UserError(
            f"metric(model) returned a {kind}; it must return a number."
        ) from error


# Random numbers and checksums


def _seed_all(seed: int, device: torch.device | None) -> None:
    """Seed the generators of torch, Python and numpy."""
    if device is None or device.type != "cpu":
        torch.manual_seed(seed)
    else:  # 30 microseconds faster, as `torch.manual_seed` also visits other devices
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # takes 32 bits
        sys.modules["numpy"].random.seed(zlib.crc32(str(seed).encode()))


@torch.no_grad()
def _perturb(model: nn.Module, seed: int) -> None:
    """Move each trained fp32 weight by one ulp, up or down at random."""
    draw = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad and param.dtype == torch.float32:
            up = torch.rand(param.shape, generator=draw) < 0.5  # noqa: PLR2004
            target = torch.where(up, math.inf, -math.inf).to(param)
            param.copy_(torch.nextafter(param, target))


def checksum(value: object, start: int = 0) -> int:
    """Return a CRC-32 of the bytes of all tensors in a nested value, without numpy."""
    crc = start
    for tensor in tensors_in(value):
        dense = tensor.detach().cpu()
        dense = dense.to_dense() if dense.layout != torch.strided else dense
        dense = dense.resolve_conj().resolve_neg().contiguous()
        if dense.nbytes:
            view = (ctypes.c_uint8 * dense.nbytes).from_address(dense.data_ptr())
            crc = zlib.crc32(view, crc)
    return crc

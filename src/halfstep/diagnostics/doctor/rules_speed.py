"""Doctor rules on speed: why 16-bit formats do not make a step faster.

The weight of a finding is the share of the step time that it concerns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules, percent
from halfstep.diagnostics.profiling import Profile
from halfstep.diagnostics.profiling.profile_result import GEMM, LOW, is_fp32_only
from halfstep.machine import hardware
from halfstep.policy import levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.diagnostics.doctor.run_record import RunFacts
    from halfstep.diagnostics.profiling import Row

_SMALL = {"cpu": 2.0 * 128**3, "cuda": 2.0 * 512**3}
"""FLOPs of one GEMM below which launch and memory traffic dominate."""


def _profile(facts: RunFacts) -> Profile:
    return facts.profile or Profile(0.0)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _of_step(facts: RunFacts, seconds: float) -> str:
    wall = _profile(facts).wall_s
    return f"{_ms(seconds)} of a step of {_ms(wall)}, {percent(seconds / wall)}"


def _share_of_step(
    facts: RunFacts, where: str, seconds: float, advice: str, more: str = ""
) -> Iterator[Observation]:
    """Yield an observation of a share of the step; `more` ends what was measured."""
    share = _profile(facts).share(seconds)
    yield Observation(where, _of_step(facts, seconds) + more, advice, share, share)


def _on(facts: RunFacts, device: str) -> bool:
    return facts.device in {None, device}


def _low(facts: RunFacts) -> bool:
    return facts.dtype != "fp32"


def _is_small(facts: RunFacts) -> bool:
    """Return whether all matmuls of a step take an eighth of the least large one.

    Such a program is a toy, or checks something else than speed: in any format it takes
    the time that Python takes.
    """
    rows = [row for row in _profile(facts).rows if GEMM.fullmatch(row.name)]
    sizes = [(row.calls, _size(row)) for row in rows]
    measured = [(calls, size) for calls, size in sizes if size is not None]
    flops = sum(calls * size.flops for calls, size in measured)
    return 0 < len(measured) == len(sizes) and flops < _least_flops(facts) / 8


def _least_flops(facts: RunFacts) -> float:
    return _SMALL.get(facts.device or "cpu", _SMALL["cuda"])


def _low_and_large(facts: RunFacts) -> bool:
    return _low(facts) and not _is_small(facts)


_AMX = (16, 32, 16)
"""M, K, N of one bf16 matmul of AMX tiles (Intel's manual, chapter on AMX)."""
_TENSOR_CORES = 8
"""16-bit values in 16 bytes, the alignment of each size that tensor cores need."""


class _Size(NamedTuple):
    """Sizes of a batch of matmuls of (rows x summed) and (summed x columns)."""

    batch: int
    rows: int
    summed: int
    columns: int

    @property
    def flops(self) -> float:
        """FLOPs of the batch; a multiplication and an addition count as two."""
        return 2.0 * math.prod(self)

    @property
    def padding(self) -> float:
        """Share of the AMX computation that is padding, 0 to 1."""
        padded = [math.ceil(n / t) * t for n, t in zip(self[1:], _AMX, strict=True)]
        return 1 - math.prod(self[1:]) / math.prod(padded)

    def __str__(self) -> str:
        """Return the sizes, such as "8 x (16 x 32) (32 x 64)"."""
        many = f"{self.batch} x " if self.batch > 1 else ""
        return f"{many}({self.rows} x {self.summed}) ({self.summed} x {self.columns})"


_LEFT = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1}
"""Matmul -> index of the input that is the left factor; the right one follows."""
_LINEAR = {"linear", "mkldnn_linear", "_linear_pointwise"}
"""Operations whose left factor has any number of dimensions, and whose right factor is
transposed."""


def _size(row: Row) -> _Size | None:
    """Return the sizes of a matmul; None of other operations."""
    first = 0 if row.name in _LINEAR else _LEFT.get(row.name, len(row.shapes))
    factors = row.shapes[first : first + 2]
    if len(factors) < 2:  # noqa: PLR2004
        return None
    left, right = factors
    if row.name in _LINEAR:
        left, right = (math.prod(left[:-1]), *left[-1:]), right[::-1]
    if len(left) < 2 or len(right) != len(left) or left[-1] != right[-2]:  # noqa: PLR2004
        return None
    return _Size(math.prod(left[:-2]), left[-2], left[-1], right[-1])


def _misfits(
    facts: RunFacts, lost: Callable[[_Size], float], says: str, advice: str
) -> Iterator[Observation]:
    """Yield one observation for all 16-bit GEMMs of unfit sizes, if there are any.

    `lost` returns the share of a GEMM's time that its sizes concern, 0 to 1. Operands
    of unknown dtype count as 16 bits.
    """
    misfits = [
        (lost(size) * row.self_s, row, size)
        for row in _profile(facts).rows
        if (size := _size(row)) and size.flops and lost(size)
        if not row.dtypes or LOW & set(row.dtypes)
    ]
    if misfits:
        _, row, size = max(misfits, key=lambda each: each[0])
        total_seconds = sum(seconds for seconds, _, _ in misfits)
        measured = f"{size} {says}; all such take " + _of_step(facts, total_seconds)
        share = _profile(facts).share(total_seconds)
        yield Observation(row.name, measured, advice, share, share)


RULES: Rules[RunFacts] = Rules()


@RULES.add(
    "machine.SLOWER; formats equally fast differ by a few per cent",
    needs=("dtype", "machine"),
    limit=Limit(hardware.SLOWER, below=True),
    concerns=_low,
)
def emulated(facts: RunFacts) -> Iterator[Observation]:
    """Measured rate of 16-bit matmuls over fp32's."""
    rates = facts.machine.rates if facts.machine else {}
    dtype = facts.dtype or "fp32"
    if dtype not in rates or not rates.get("fp32"):
        return
    gain = rates[dtype] / rates["fp32"]
    chip = facts.machine.chip if facts.machine else ""
    measured = f"{dtype} products run at {rates[dtype]:.3g} TFLOP/s, fp32 at "
    measured += f"{rates['fp32']:.3g}: {gain:.2f} of its rate"
    profile = _profile(facts)
    weight = profile.share(profile.gemm_s) if profile.wall_s else 1.0
    where = chip or "this machine"
    advice = "Train in fp32 here: --level O0."
    if rates.get("bf16", 0.0) >= hardware.WORTH_IT * rates["fp32"]:
        advice = "Train in bf16, which is fast here: --dtype bf16."
    yield Observation(where, measured, advice, gain, weight)


@RULES.add(
    "Campo: casts took more than 21 % of the time where AMP lost",
    needs=("profile",),
    limit=Limit(0.2, "{:.0%} of the step"),
    concerns=_low_and_large,
)
def casts(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in casts from one format to another."""
    profile, more = _profile(facts), ""
    rates = facts.machine.rates if facts.machine else {}
    dtype = facts.dtype
    if dtype is not None and rates.get("fp32") and rates.get(dtype):
        gain = rates[dtype] / rates["fp32"]
        more = f"; matrix products take {_ms(profile.gemm_s)}, and large ones run "
        more += f"{gain:.2g} times as fast in {dtype} as in fp32 here"
    advice = "Store the weights low (--level O2), so that they are not cast each step;"
    level = levels.LEVELS.get(facts.config.level or profile.level or "")
    if level is not None and level.low_weights:
        advice = "Put fewer operations into fp32 (--policy lean);"
    advice += " larger batches cast less for each product, --compile fuses casts."
    return _share_of_step(facts, "a step", profile.casts_s, advice, more)


@RULES.add(
    OURS,
    needs=("profile",),
    limit=Limit(0.25, "{:.0%} of the step"),
    concerns=_low_and_large,
)
def fp32_operations(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in operations that run in fp32."""
    profile = _profile(facts)
    rows = [r for r in profile.rows if is_fp32_only(r.name, r.dtypes)]
    most = max(rows, key=lambda row: row.self_s, default=None)
    where = "operations in fp32" if most is None else most.name
    more = "" if most is None else f"; most of it in {most.name}"
    advice = "Policy lean leaves norms and softmax in 16 bits where the kernel sums in "
    advice += "fp32 (--policy lean); let the rest be compiled into few (--compile)."
    return _share_of_step(facts, where, profile.fp32_only_s, advice, more)


@RULES.add(
    OURS + ": 16 bits, 1.5 times as fast, then save 5 % of the step",
    needs=("dtype", "profile"),
    limit=Limit(0.15, "{:.0%} of the step"),
    concerns=_low,
)
def fp32_matmuls(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in fp32 matmuls.

    At `machine.WORTH_IT`, the least gain for which 16 bits are recommended, matmuls of
    15 % of the step take 10 % in 16 bits: a speed-up of 1.05, from which a change is
    worth it (`preflight.rules.WORTH_TIME`). Most machines gain more.
    """
    products = [row for row in _profile(facts).rows if GEMM.fullmatch(row.name)]
    wide = [row for row in products if row.dtypes and not LOW & set(row.dtypes)]
    if wide:
        most = max(wide, key=lambda row: row.self_s)
        spent = sum(row.self_s for row in wide)
        more = f", in fp32 matmuls, in a run in {facts.dtype}"
        advice = "Compute forward pass and loss inside the autocast context, opened "
        advice += "for their device and in their thread (a decorated generator leaves "
        advice += "it at once); session.explain() tells which rule keeps one in fp32."
        yield from _share_of_step(facts, most.name, spent, advice, more)


@RULES.add(
    OURS + ": below 2 x 128^3 operations on a CPU, 2 x 512^3 on a GPU",
    needs=("profile",),
    limit=Limit(0.2, "{:.0%} of the step"),
    concerns=_low_and_large,
)
def small_products(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in matmuls too small for 16 bits."""
    most = _least_flops(facts)
    says = f"is {most / 1e6:.0f} million operations or less a call"
    advice = "Larger batches, or several small products as one; --level O0 if neither "
    advice += "is possible."
    return _misfits(facts, lambda size: size.flops < most, says, advice)


@RULES.add(
    "Intel: tiles of 16 rows by 64 bytes; the share is our choice",
    name="sizes and AMX tiles",
    needs=("dtype", "machine", "profile"),
    limit=Limit(0.1, "{:.0%} of the step"),
    concerns=lambda facts: facts.dtype in {None, "bf16"} and _on(facts, "cpu"),
)
def _tiles(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step that rounding sizes up to AMX tiles costs."""
    machine = facts.machine
    if machine is not None and "AMX-BF16" in machine.instruction_sets:
        says = "does not fill tiles of 16 x 32 x 16"
        advice = "Make hidden sizes multiples of 32, and batch x length one of 16."
        yield from _misfits(facts, lambda size: size.padding, says, advice)


@RULES.add(
    "NVIDIA's guide: sizes of 16 bytes; the share is our choice",
    needs=("profile",),
    limit=Limit(0.1, "{:.0%} of the step"),
    concerns=lambda facts: _low(facts) and _on(facts, "cuda"),
)
def sizes_and_tensor_cores(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in matmuls whose sizes are no multiples of 8."""

    def unaligned(size: _Size) -> bool:
        return any(n % _TENSOR_CORES for n in size[1:])

    advice = "Pad hidden sizes, vocabulary and batch to multiples of 8, better 64."
    says = "has sizes that are no multiple of 8"
    return _misfits(facts, unaligned, says, advice)


_CAN_FUSE = {"Adam", "AdamW"}
"""Optimizers of torch with many operations, for which it also has one kernel."""
_UNFUSED = {"addcdiv_", "_foreach_addcdiv_"}
"""Of those operations: neither torch's kernel nor a compiled update has one."""


@RULES.add(
    OURS + ": one pass over the memory in place of eight then saves 10 % of the step",
    needs=("profile",),
    limit=Limit(0.15, "{:.0%} of the step"),
    concerns=lambda f: f.profile is None or f.profile.optimizer in _CAN_FUSE,
)
def unfused_update(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step in the update of an Adam or AdamW without `fused=True`."""
    profile = _profile(facts)
    if _UNFUSED & {row.name for row in profile.rows}:
        more = "; 16 bits do not make it faster"
        where = f"torch.optim.{profile.optimizer}"
        advice = (
            f"{where}(..., fused=True), without foreach: one kernel for all, which "
        )
        advice += "on a GPU also skips a step without a wait."
        yield from _share_of_step(facts, where, profile.update_s, advice, more)


@RULES.add(
    OURS,
    needs=("profile",),
    limit=Limit(0.3, "{:.0%} of the step"),
    concerns=lambda facts: not _is_small(facts),
)
def overhead(facts: RunFacts) -> Iterator[Observation]:
    """Share of a step between operations: Python, launches."""
    profile = _profile(facts)
    calls = sum(row.calls for row in profile.rows)
    more = f", between {calls:,.0f} operations"
    advice = "Larger batches; fewer and larger operations (--compile); on a GPU CUDA "
    advice += "graphs (torch.compile(mode='reduce-overhead'))."
    where = "Python and launches"
    return _share_of_step(facts, where, profile.python_s, advice, more)


@RULES.add(
    OURS + ": one, for a loss that is shown",
    needs=("profile",),
    limit=Limit(1, "{:g} a step"),
    concerns=lambda facts: _on(facts, "cuda"),
)
def waits(facts: RunFacts) -> Iterator[Observation]:
    """Host-device synchronizations in a step."""
    profile = _profile(facts)
    share = profile.share(profile.wait_s)
    measured = f"{profile.waits:g} host-device synchronizations in a step, "
    measured += _of_step(facts, profile.wait_s)
    advice = "Look for .item(), .cpu(), print and `if tensor` in the loop; read the "
    advice += "loss every so many steps."
    yield Observation("a step", measured, advice, profile.waits, share)


@RULES.add(OURS, needs=("input time",), limit=Limit(0.1, "{:.0%} of the time"))
def data_loading(facts: RunFacts) -> Iterator[Observation]:
    """Share of the time spent waiting for batches."""
    timed = [s for s in facts.steps if s.input_s is not None and s.total_s]
    advice = "Give more --workers; prepare what can be prepared before training."
    if not timed:
        spent, more = _profile(facts).input_s, ", went into waiting for batches"
        yield from _share_of_step(facts, "batches", spent, advice, more)
        return
    total_seconds = sum(step.total_s or 0.0 for step in timed)
    share = sum(step.input_s or 0.0 for step in timed) / total_seconds
    measured = f"{percent(share)} of the time in training steps went into waiting for "
    yield Observation("batches", measured + "batches", advice, share, share)

"""Doctor rules on weights, updates and gradient sums in 16-bit formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.diagnostics.doctor.rule import OURS, Limit, Observation, Rules, percent
from halfstep.errors import UserError
from halfstep.policy.levels import Level, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.diagnostics.doctor.run_record import RunFacts

_LOW = ("bf16", "fp16")
_NAMED = 3  # parameters


def _level(facts: RunFacts) -> Level | None:
    """Return the run's level; None if it is unknown or not one of O0 to O3."""
    try:
        return parse(facts.config.level or "")
    except UserError:
        return None


def _masters_advice(facts: RunFacts) -> str:
    if facts.dtype == "fp16":
        return "Keep fp32 master weights: --level O2 --master fp32."
    return (
        "Keep master weights: --level O2 with --master split (exact, 16 bits a weight),"
        " kahan (as lean, bf16 moments too) or stochastic (nothing kept, right on "
        "average)."
    )


def _low_and_alone(facts: RunFacts) -> bool:
    """Return whether weights are (or may be) 16-bit without master weights."""
    level = _level(facts)
    if facts.dtype == "fp32" or level is None:
        return facts.dtype != "fp32"
    return level.low_weights and (not level.masters or facts.config.master == "none")


RULES: Rules[RunFacts] = Rules()


@RULES.add(
    "our choice; bf16 loses updates below 2^-9 to 2^-8 of the weight",
    needs=("dtype", "lost updates"),
    limit=Limit(0.05, "{:.0%}", severe=0.5),
    concerns=lambda facts: bool(facts.lost) or _low_and_alone(facts),
)
def swamped_updates(facts: RunFacts) -> Iterator[Observation]:
    """Share of a parameter group's updates lost to rounding."""
    groups: dict[int, list[float]] = {}
    for lost in facts.lost:
        groups.setdefault(lost.group, []).append(lost.share)
    for group, shares in groups.items():
        share = sum(shares) / len(shares)
        measured = f"{percent(share)} of its updates were rounded away, over "
        measured += "one count" if len(shares) == 1 else f"{len(shares)} counts"
        where = f"parameter group {group}"
        yield Observation(where, measured, _masters_advice(facts), share, share)


@RULES.add(
    "at lr 2e-5 and weights of 0.04, bf16 loses 85 % of the updates",
    needs=("level", "dtype"),
    severity="note",
    concerns=_low_and_alone,
)
def no_masters(facts: RunFacts) -> Iterator[Observation]:
    """16-bit weights without master weights; lost updates were not counted."""
    if not facts.lost:
        measured = f"{facts.dtype} weights without master weights, and updates lost to "
        measured += "rounding were not counted"
        advice = _masters_advice(facts)
        advice += " session.count_rounding_loss(every=100) counts."
        yield Observation("weights", measured, advice)


@RULES.add(
    "the level's promise: fp32 weights",
    needs=("level", "weights"),
    severity="error",
    limit=Limit(0, "{:g} parameters"),
    concerns=lambda facts: (level := _level(facts)) is None or not level.low_weights,
)
def weights_already_low(facts: RunFacts) -> Iterator[Observation]:
    """Parameters in 16 bits before a level that keeps fp32 weights."""
    low = [name for name, word in facts.weights.items() if word in _LOW]
    level = _level(facts)
    if low and level is not None and not level.low_weights:
        names = ", ".join(low[:_NAMED])
        more = f" and {len(low) - _NAMED} more" if len(low) > _NAMED else ""
        word = facts.weights[low[0]]
        measured = f"{len(low)} of {len(facts.weights)} parameters came in {word}, "
        measured += f"which level {level} updates without master weights: {names}{more}"
        advice = "Call model.float() before prepare; or store them low on purpose, "
        advice += "with master weights: --level O2."
        share = len(low) / len(facts.weights)
        yield Observation("weights", measured, advice, len(low), share)


@RULES.add(
    "torch: allow_fp16_accumulation; sums beyond 2,048 lose ones",
    needs=("dtype", "machine"),
    concerns=lambda facts: facts.dtype in {None, "fp16"} and facts.device != "cpu",
)
def fp16_sums(facts: RunFacts) -> Iterator[Observation]:
    """Matmuls that accumulate in fp16."""
    machine = facts.machine
    if machine is not None and machine.fp16_accumulation and facts.dtype == "fp16":
        measured = "torch may add up products of fp16 numbers in fp16"
        advice = "Set torch.backends.cuda.matmul.allow_fp16_accumulation = False."
        yield Observation("matrix products", measured, advice, weight=1.0)


@RULES.add(
    OURS + "; each addition rounds at 2^-8 in bf16, at 2^-11 in fp16",
    needs=("level", "dtype"),
    limit=Limit(3),
    concerns=_low_and_alone,
)
def gradients_summed_low(facts: RunFacts) -> Iterator[Observation]:
    """Micro-batches whose gradients are summed in 16 bits."""
    count = facts.config.accumulate or 1
    measured = f"{count} micro-batches are added up in {facts.dtype}"
    advice = "Keep master weights, which add them up in fp32: --level O2."
    yield Observation("gradients", measured, advice, count)

"""`halfstep bench traces`: the rules by hand and against torch's kernel; the tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bench_runs import tables
from hypothesis import example, given
from hypothesis import strategies as st

from halfstep.bench import traces
from halfstep.bench.traces import LibraryRule, Trace
from halfstep.scaling import ScaleRule, ScaleState, advance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAN = math.nan
LIBRARIES = traces.LIBRARIES


def walk(name: str, first: float, steps: str) -> list[float]:
    """Return the scales of and after steps spelled "x" (overflow) and "." (clean)."""
    return play(name, [NAN if step == "x" else 0.0 for step in steps], first)


def play(name: str, peaks: Sequence[float], first: float) -> list[float]:
    """Return a candidate's scales."""
    return list(traces.CANDIDATES[name][1](peaks, first))


# What fits


@pytest.mark.parametrize(
    ("peak", "scale", "expected"),
    [
        (65504.0, 1.0, False),
        (65519.9, 1.0, False),  # rounds down
        (65520.0, 1.0, True),  # a tie, and the even neighbour is inf
        (3.0, 2.0**14, False),
        (3.0, 2.0**15, True),
        (NAN, 1.0, True),
        (math.inf, 0.0, True),
        (3.0, 0.0, False),  # a scale of 0 hides everything
    ],
)
def test_overflow_by_hand(peak: float, scale: float, expected: bool) -> None:
    """Law: a step is lost where fp16 cannot hold its largest scaled gradient."""
    assert traces.overflows(peak, scale) is expected


@given(st.floats(2.0**-40, 2.0**40), st.integers(-40, 40))
def test_overflow_is_fp16s(peak: float, exponent: int) -> None:
    """Law: torch's cast to fp16 is the judge."""
    scaled = torch.tensor(peak * 2.0**exponent, dtype=torch.float64).half()
    assert traces.overflows(peak, 2.0**exponent) == (not scaled.isfinite())


@given(st.floats(2.0**-60, 2.0**60))
def test_largest_safe_scale(peak: float) -> None:
    """Law: it is a power of two that fits, and its double does not."""
    scale = traces.largest_safe_scale(peak)
    assert math.frexp(scale)[0] == 0.5
    assert not traces.overflows(peak, scale)
    assert traces.overflows(peak, 2 * scale)


# Rules of others


@given(
    st.integers(-149, 127),
    st.integers(1, 3),
    st.lists(st.booleans(), max_size=6),
)
@example(127, 1, [False])
@example(-149, 1, [True])
def test_torchs_rule(exponent: int, interval: int, flags: list[bool]) -> None:
    """Law: torch's rule moves as torch's own kernel does, down to 0 and up to the top.

    The interval is shorter than torch's default of 2,000 steps.
    """
    scale = torch.tensor(2.0**exponent)
    tracker = torch.tensor(0, dtype=torch.int32)
    expected = [scale.item()]
    for bad in flags:
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(bad)), 2.0, 0.5, interval
        )
        expected.append(scale.item())
    rule = replace(LIBRARIES["torch.amp"], interval=interval)
    peaks = [NAN if bad else 0.0 for bad in flags]
    assert list(rule.replay(peaks, 2.0**exponent)) == expected


def test_torchs_defaults() -> None:
    """Law: the numbers are those of torch's scaler."""
    scaler = torch.amp.GradScaler("cpu")
    assert LIBRARIES["torch.amp"] == LibraryRule(
        scaler._init_scale, scaler.get_growth_interval()
    )
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)


def test_megatrons_rule() -> None:
    """Law: one overflow is borne; once spent, only growth brings patience back.

    By hand: 8 bears the first, then halves at each, clean steps between or not, and
    stays at 1. The 1,000th clean step doubles, and the next overflow is borne again.
    """
    scales = walk("Megatron", 8.0, "x.xx.xxx")
    assert scales == [8, 8, 8, 4, 2, 2, 1, 1, 1]
    scales = walk("Megatron", 8.0, "xx" + "." * 1000 + "xx")
    assert scales[2] == scales[1001] == 4
    assert scales[1002:] == [8, 8, 4]


@pytest.mark.parametrize("name", ["DeepSpeed", "DeepSpeed, consecutive"])
def test_deepspeeds_rule(name: str) -> None:
    """Law: DeepSpeed bears one overflow, halves down to 1, and then raises."""
    assert walk(name, 4.0, "xxxx") == [4, 4, 2, 1]
    assert walk(name, 1.0, "xx") == [1, 1]
    scales = walk(name, 4.0, "xx" + "." * 1000 + "xx")
    assert scales[2] == scales[1001] == 2
    assert scales[1002:] == [4, 4, 2]


def test_deepspeeds_refills() -> None:
    """Law: with consecutive hysteresis a clean step brings patience back."""
    assert walk("DeepSpeed", 8.0, "x.x.xx") == [8, 8, 8, 4, 4, 2, 1]
    scales = walk("DeepSpeed, consecutive", 8.0, "x.x.xx")
    assert scales == [8, 8, 8, 8, 8, 8, 4]


# Ours


RULES = {
    "halfstep": ScaleRule(),
    "halfstep, hysteresis 2": ScaleRule(hysteresis=2),
    "halfstep, hysteresis 2, clean": ScaleRule(hysteresis=2, refill="clean"),
}


@pytest.mark.parametrize("name", RULES)
@given(
    peaks=st.lists(st.sampled_from([2.0**-9, 0.5, 3.0, NAN]), max_size=9),
    exponent=st.integers(9, 18),
)
def test_ours_is_advance(name: str, peaks: list[float], exponent: int) -> None:
    """Law: ours walks as `advance` does, its overflows are those of the trace."""
    rule = RULES[name]
    first = 2.0**exponent
    state = replace(ScaleState.first(rule), scale=torch.tensor(first))
    expected = [first]
    for peak in peaks:
        bad = traces.overflows(peak, state.scale.item())
        state = advance(state, torch.tensor(float(bad)), rule)
        expected.append(state.scale.item())
    assert play(name, peaks, first) == expected


def test_refills_of_ours() -> None:
    """Law: each name has its own refill: by hand, as for DeepSpeed."""
    peaks = [NAN, 3.0, NAN]
    assert play("halfstep", peaks, 8.0) == [8, 4, 4, 2]
    assert play("halfstep, hysteresis 2", peaks, 8.0) == [8, 8, 8, 4]
    assert play("halfstep, hysteresis 2, clean", peaks, 8.0) == [8, 8, 8, 8]


def replay_all(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return the cells of each rule."""
    rules = traces.CANDIDATES.items()
    return {name: {**traces.replay(trace, *each)} for name, each in rules}


def test_cold_start() -> None:
    """Law: the way down from 2**32 to 2**14 takes 18 steps, from 2**16 two.

    Hysteresis costs one more. Measured knows before the first step, and is a factor of
    two below the largest safe scale: its margin.
    """
    for first, halvings in (2.0**32, 18), (2.0**16, 2):
        trace = Trace("", [3.0] * 150, [3.0] * 150, first)
        found = replay_all(trace)
        lost = {name: cells["steps lost"] for name, cells in found.items()}
        assert lost["torch.amp"] == lost["halfstep"] == halvings
        assert lost["Megatron"] == lost["DeepSpeed"] == halvings + 1
        assert lost["DeepSpeed, consecutive"] == halvings + 1
        assert lost["halfstep, hysteresis 2"] == halvings + 1
        assert lost["halfstep, measured"] == 0
        assert found["torch.amp"]["last scale"] == "2**14"
        assert found["halfstep, measured"]["last scale"] == "2**13"
        assert found["halfstep, measured"]["steps to recover"] == 0


def test_endings() -> None:
    """Law: NaN for ever ends at 0.0, at the floor, or with an error: by hand.

    From 2**4: torch halves 4 + 149 times to fp32's smallest number, and once more.
    DeepSpeed bears one, halves 4 times, and raises. Ours raises after 10 skips in a
    row, for its scale is at the floor after 4.
    """
    trace = Trace("", [NAN] * 300, [3.0] * 300, 2.0**4)
    found = replay_all(trace)
    ends = {n: (each["steps lost"], each["last scale"]) for n, each in found.items()}
    assert ends["torch.amp"] == (300, "0.0")
    assert ends["Megatron"] == (300, "stuck at 1")
    assert ends["DeepSpeed"] == (6, "raises")
    assert ends["halfstep"] == (10, "raises")
    assert play("torch.amp", [NAN] * 153, 2.0**4)[-1] == 2.0**-149
    assert play("torch.amp", [NAN] * 154, 2.0**4)[-1] == 0.0
    assert {cells["steps to recover"] for cells in found.values()} == {None}


# What is told of a trace


def outcome(scales: list[float], peaks: list[float], level: float) -> tuple[Any, ...]:
    """Return the cells of scales that are as given."""

    def given_scales(_peaks: Sequence[float], first: float) -> Iterator[float]:
        assert first == 7.0
        return iter(scales)

    trace = Trace("", peaks, [level] * len(peaks), None)
    cells = traces.replay(trace, 7.0, given_scales)
    return (*cells.values(),)


def test_outcome() -> None:
    """Law: lost, off and unused are counted by step: by hand, at a safe scale of 2**14.

    Two steps too high and lost, two right, three too low (2, 2 and 3 binades), one
    right: the longest stretch is 3, and 0 + 1 + 2 + 2 + 3 + 0 binades over 6 steps.
    """
    powers = [16, 15, 14, 13, 12, 12, 11, 14, 14]
    found = outcome([2.0**power for power in powers], [3.0] * 8, 3.0)
    assert found == (2, 3, "2**14", pytest.approx(8 / 6))
    early = outcome([2.0**14, 2.0**14], [3.0] * 4, 3.0)
    assert early == (0, None, "raises", 0.0)
    low = outcome([2.0**14, 2.0**12, 2.0**12], [3.0] * 2, 3.0)
    assert low == (0, None, "2**12", 1.0)
    dead = outcome([0.0, 0.0], [3.0], 3.0)
    assert dead == (0, None, "0.0", math.inf)


# Traces


def test_written_down() -> None:
    """Law: the shapes are what their names say."""
    by_name = {trace.name: trace for trace in traces.synthetic_traces(1000)}
    assert all(len(t.peaks) == len(t.level) == 1000 for t in by_name.values())
    bad = {name: sum(map(math.isnan, t.peaks)) for name, t in by_name.items()}
    assert bad.pop("one bad batch") == 1
    assert bad.pop("three bad batches") == 3
    assert bad.pop("NaN for ever") == 900
    assert set(bad.values()) == {0}
    spikes = by_name["8 times as large every 51 steps"].peaks
    assert [spikes.count(3.0), spikes.count(24.0)] == [
        981,
        19,
    ]  # the 51st, 102nd, ..., 969th
    assert by_name["gradients double every 500 steps"].peaks[500] == 6.0
    assert by_name["gradients halve every 500 steps"].peaks[500] == 1.5
    firsts = {name: trace.first for name, trace in by_name.items()}
    assert firsts.pop("cold start from 2**32") == 2.0**32
    assert firsts.pop("cold start from 2**16") == 2.0**16
    assert set(firsts.values()) == {traces.largest_safe_scale(3.0)}


def test_recorded() -> None:
    """Law: a recorded trace is the same each time, finite, and of real gradients.

    Before the first update a summed loss over 32 examples has 32 times the gradients of
    a mean one, as far as fp16 tells: its smallest are subnormal, its largest are not.
    """
    mean, again = (
        traces.record_trace(4, "mean"),
        traces.record_trace(4, "mean"),
    )
    summed = traces.record_trace(4, "sum")
    assert mean == again
    assert mean.first is None
    assert all(0 < peak < math.inf for peak in (*mean.peaks, *summed.peaks))
    assert summed.peaks[0] == pytest.approx(32 * mean.peaks[0], rel=2**-8)
    assert mean.level == [max(mean.peaks)] * 4


# The command


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a table a trace, a row a rule, notes once, and the same each time."""
    found = tables("traces", "--steps 20")
    assert [table.title for table in found] == [
        "cold start from 2**32",
        "cold start from 2**16",
        "one bad batch",
        "three bad batches",
        "gradients double every 500 steps",
        "gradients halve every 500 steps",
        "8 times as large every 51 steps",
        "NaN for ever",
        "recorded, loss: mean of 32",
        "recorded, loss: sum of 32",
    ]
    assert all(
        tuple(row[0] for row in table.rows) == tuple(traces.CANDIDATES)
        for table in found
    )
    assert not any(table.notes for table in found[:-1])
    assert found[-1].notes[-1] == "halfstep bench traces --steps 20"
    assert len(capsys.readouterr().err.splitlines()) == 10
    assert [t.text() for t in tables("traces", "--steps 20")] == [
        t.text() for t in found
    ]

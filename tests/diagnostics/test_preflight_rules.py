"""The verdict of a check, from planted facts; gradients compared, batches halved."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.diagnostics.preflight import CheckReport, rules
from halfstep.diagnostics.preflight.measurements import (
    Cost,
    Facts,
    GradientSimilarity,
    ScalePoint,
    compare_gradients,
)
from halfstep.diagnostics.preflight.model_check import rounds
from halfstep.diagnostics.preflight.rules import (
    DYNAMIC,
    findings,
    speed_up_interval,
    verdict,
)
from halfstep.diagnostics.preflight.scale_search import halves
from halfstep.nonfinite.origin import BadOp
from halfstep.numerics.formats import tensors_in
from halfstep.scaling import ScaleRule


def likeness(
    cosine: float, where: str = "all", norm: float = 1.0
) -> GradientSimilarity:
    """Return a likeness of which only the cosine and the norm matter."""
    return GradientSimilarity(where, 10, cosine, 40.0, 0.0, norm)


GOOD = Facts(
    level="O2",
    dtype="fp16",
    reason="asked for",
    device="cpu",
    policy="lean",
    loss_fp32=1.0,
    finite_fp32=True,
    loss=1.0,
    default_scale=2.0**16,
    safe_scale=2.0**17,
    scale=2.0**16,
    curve=(ScalePoint(2.0**16, 0.0, 0.0, 2.0),),
    gradients=likeness(0.9999),
    layers=(likeness(0.9999, "a"),),
    noise=likeness(0.5),
    noise_layers=(likeness(0.5, "a"),),
)


def overflow(phase: str = "forward", **changed: Any) -> BadOp:
    """Return an overflow, of a forward pass if nothing else is said."""
    fields = {
        "module": "a.b",
        "op": "linear",
        "scale": 2.0**16,
        "nonfinite_kind": "inf",
        "cause": f"{phase} range",
        "evidence": "inputs reach 1e+05",
        "advice": "Keep it.",
        "reproduced": True,
    }
    return BadOp(phase=phase, **fields | changed)


FAULT = overflow()


def timed(speed_up: float, size: int = 100, size_fp32: int = 100) -> dict[str, Any]:
    """Return what a level takes, and fp32, in rounds that are all alike."""
    return {
        "cost_fp32": Cost(1.0, {"weights": size_fp32}),
        "cost": Cost(1.0 / speed_up, {"weights": size}),
        "ratios": (speed_up,) * 11,
    }


SLOW = timed(0.5)

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "good"),
    ({"dtype": "bf16", "curve": (), "safe_scale": None}, "good"),
    ({"scale": 2.0**10, "safe_scale": 2.0**10}, "good with a loss scale of 1024"),
    ({"scale": 2.0**40, "safe_scale": 2.0**40}, "good with a loss scale of 2**40"),
    (
        {
            "fault": FAULT,
            "rules": ("module:a.b=fp32", "module:c=fp32"),
            "scale": 2.0**10,
            "safe_scale": 2.0**10,
        },
        (
            "keep these modules in float32: module:a.b=fp32, module:c=fp32; with a "
            "loss scale of 1024"
        ),
    ),
    (
        {"fault": FAULT, "gradients": None},
        "fails: a.b (linear): inf at loss scale 65536: inputs reach 1e+05",
    ),
    (
        {"finite_fp32": False},
        "fails: loss: loss 1 of , or its gradients, are not finite in fp32",
    ),
    (
        {"learns": False},
        (
            "fails: gradients: no parameter gets a gradient other than zero, not even "
            "in fp32"
        ),
    ),
    (
        {"level": "O0", "dtype": "fp32"},
        "nothing to compare: O0 is fp32 itself, and finite (asked for)",
    ),
    (
        {"weight_nan_warning": "eps is 0: NaN. Use 1.", "optimizer": "AdamW"},
        "fails: AdamW: eps is 0: NaN",
    ),
    ({"lost": 0.5}, "good"),
    (
        {"lost": 0.51, "optimizer": "SGD"},
        "fails: SGD: 51% of its updates were rounded away, over one count",
    ),
    ({"failed": "no kernel"}, "fails: O2 fp16: raises no kernel"),
    (
        {"weights_finite": False},
        "fails: O2 fp16: weights of the copy are inf or NaN after the timed steps",
    ),
    (
        {"gradients": likeness(0.94)},
        "fails: gradients: cosine of all gradients to fp32's 0.94000",
    ),
    ({"gradients": likeness(0.96)}, "good"),  # a tenth of the noise is 0.05
    ({"gradients": likeness(0.991), "noise": None}, "good"),
    (
        {"gradients": likeness(0.98), "noise": None},
        "fails: gradients: cosine of all gradients to fp32's 0.98000",
    ),
    (timed(1, 95), "not worth it: 1.00 times the speed of fp32, 5% less memory"),
    (
        timed(1, 1001, 1000),
        "not worth it: 1.00 times the speed of fp32, as much memory",
    ),
    (timed(0.833, 80), "good"),
    (timed(0.5, 50), "not worth it: 0.50 times the speed of fp32, 50% less memory"),
    # Numbers before costs: an overflow is never hidden behind them.
    (
        SLOW | {"fault": FAULT, "rules": ("module:a.b=fp32",)},
        (
            "keep these modules in float32: module:a.b=fp32; not worth it: 0.50 times "
            "the speed of fp32, as much memory"
        ),
    ),
    (
        SLOW | {"default_finite": False, "scale": 2.0**10, "safe_scale": 2.0**10},
        (
            "overflows: use a loss scale of 1024; not worth it: 0.50 times the speed "
            "of fp32, as much memory"
        ),
    ),
    (
        {"fault": FAULT, "gradients": likeness(0.1), "noise": None},
        "fails: a.b (linear): inf at loss scale 65536: inputs reach 1e+05",
    ),
    # Of 11 rounds the slowest and the fastest are the spread; of fewer, half as much.
    (SLOW | {"ratios": (1.06,) * 11}, "good"),
    (
        SLOW | {"ratios": (1.04,) + (1.5,) * 10},
        (
            "good; cannot tell whether it is worth it: 1.04 to 1.50 times the speed of "
            "fp32 in 11 rounds, as much memory"
        ),
    ),
    (
        SLOW | {"ratios": (1.5,) * 5},
        (
            "good; cannot tell whether it is worth it: 1.00 to 2.25 times the speed of "
            "fp32 in 5 rounds, as much memory"
        ),
    ),
    (
        SLOW | {"ratios": (0.6,) * 5},
        "not worth it: 0.60 times the speed of fp32, as much memory",
    ),
]


@pytest.mark.parametrize(("changed", "words"), CASES)
def test_verdict(changed: dict[str, Any], words: str) -> None:
    """Law: each reason has its words, and a limit on both of its sides.

    None is good beside a finding that is an error, or if it is not worth it.
    """
    facts = replace(GOOD, **changed)
    all_findings = findings(facts)
    report = CheckReport(verdict(facts, all_findings), all_findings, facts)
    assert report.verdict == words
    bad = "error" in {one.severity for one in all_findings} or "not worth" in words
    assert not (report.good and bad)


def test_the_spread_of_rounds() -> None:
    """Law: as many rounds are cut off as leave the median inside in 999 of 1,000."""
    assert speed_up_interval([1.0, 2.0, 4.0]) == (1.0 / 1.5, 4.0 * 1.5)
    assert speed_up_interval([*range(1, 12)]) == (1, 11)  # 2 / 2^11 is 0.098 %
    assert speed_up_interval([*range(1, 15)]) == (1, 14)  # 2 (1 + 14) / 2^14 is 0.18 %
    assert speed_up_interval([*range(1, 16)]) == (2, 14)  # 2 (1 + 15) / 2^15 is 0.098 %


def verdicts(true: float, load: float) -> set[str]:
    """Return what is said of a level that is so much faster, in 200 loaded machines.

    Args:
        true: Its speed-up.
        load: By how much a step may take longer: the logarithm's standard deviation.
    """
    said = set()
    for seed in range(200):
        draw = random.Random(seed)  # noqa: S311 -- no secret

        def step(seconds: float, draw: random.Random = draw) -> float:
            return seconds * math.exp(draw.gauss(0.0, load))

        times = rounds(lambda step=step: (step(true), step(1.0)), 5)
        ratios = tuple(plain / low for plain, low in times)
        assert len(ratios) <= 20
        said.add(rules.cost(replace(GOOD, **timed(true) | {"ratios": ratios}))[0])
    return said


@pytest.mark.parametrize("load", [0.02, 0.2, 0.5])
def test_load_does_not_flip_the_verdict(load: float) -> None:
    """Law: on a busy machine it is not known, but never the opposite."""
    assert verdicts(2.0, load) <= {"worth", "cannot tell"}
    assert verdicts(0.5, load) <= {"not worth", "cannot tell"}
    if load < 0.1:
        assert verdicts(2.0, load) == {"worth"}
        assert verdicts(0.5, load) == {"not worth"}


def found(**changed: Any) -> dict[str, str]:
    return {one.rule: str(one) for one in findings(replace(GOOD, **changed))}


def test_words_of_findings() -> None:
    """Law: a finding names place, number, limit and advice; good facts have none."""
    assert found() == {}
    kept = ("module:a.b=fp32",)
    policy = "lean + module:a.b=fp32"
    told = found(fault=FAULT, rules=kept, policy=policy)
    assert told["overflow"] == (
        "a.b (linear): inf at loss scale 65536: inputs reach 1e+05 (fp16 holds 65504). "
        "Keep in float32: module:a.b=fp32 (policy='lean + module:a.b=fp32'); or train "
        "in bf16."
    )
    fault = overflow("backward", normal=True)
    told = found(fault=fault, default_finite=False, safe_scale=2.0**12, scale=2.0**12)
    assert told == {
        "loss scale": "a.b (linear): gradients overflow at the default loss scale "
        "65536; 4096 is safe (fp16 holds 65504). Begin at 4096, by "
        "loss_scale=ScaleRule(init_scale=...). A dynamic scale skips about 4 steps on "
        "its way there."
    }
    low = found(default_finite=False, safe_scale=0.25, scale=0.25)["loss scale"]
    assert low.endswith("Use loss_scale=2**-2, or bf16.")
    fault = overflow("backward", module="loss", op="", scale=1.0)
    told = found(fault=fault, default_finite=False, safe_scale=0.25, scale=0.25)
    assert told["overflow"] == (
        "loss: inf in its backward pass at loss scale 1: inputs reach 1e+05 (fp16 "
        "holds 65504). Only a loss scale below 1 fixes it, such as 2**-2; or train in "
        "bf16."
    )
    lost = (ScalePoint(2.0**16, 0.4, 0, 9), ScalePoint(2.0**24, 0.001, 0, 1))
    told = found(curve=lost, safe_scale=2.0**24, scale=2.0**24)
    assert told["underflow"] == (
        "gradients: 40.0% of fp32's gradients other than zero become zero in fp16 at "
        "loss scale 65536 (at most 1%). Begin at 2**24, by "
        "loss_scale=ScaleRule(init_scale=...). There 0.1% are lost."
    )
    assert found(loss=1.02)["loss"].startswith(
        "loss: 1.02, in fp32 1: +2.00% (at most 1%)."
    )
    assert "loss" not in found(loss=1.005)


def test_bounds_of_scales() -> None:
    """Law: what is said of scales that move is what their rule says."""
    assert (ScaleRule().min_scale, ScaleRule().max_scale) == DYNAMIC


def test_layers_that_do_not_matter() -> None:
    """Law: a layer is spoken of if it strays, more than noise, and has some weight."""
    bad = likeness(0.5, "b", norm=0.1)
    assert "gradient" in found(layers=(bad,))
    assert found(layers=(bad,))["gradient"].startswith(
        "b: cosine to fp32's gradient 0.50000, SQNR 40.0 dB, 0.0% flushed "
        "(at least cosine 0.99)"
    )
    assert "gradient" not in found(layers=(likeness(0.5, "b", norm=1e-4),))
    noisy = (likeness(-1.0, "b"),)
    close = likeness(0.95, "b", norm=0.1)
    assert "gradient" not in found(layers=(close,), noise_layers=noisy)
    assert "gradient" in found(layers=(close,), noise_layers=(likeness(0.9, "b"),))


# Gradients beside gradients, at the edges; test_preflight has numpy beside them.


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def only(x: list[float] | None, q: list[float] | None) -> GradientSimilarity:
    """Compare one gradient with another, either of which may be missing."""

    def named(values: list[float] | None) -> dict[str, Tensor]:
        return {} if values is None else {"a.w": torch.tensor(values)}

    whole, layers = compare_gradients(named(x), named(q), owner)
    assert (layers[0].cosine, layers[0].sqnr) == pytest.approx(
        (whole.cosine, whole.sqnr), nan_ok=True
    )
    return whole


def test_edges() -> None:
    """Law: zeros equal zeros; what is missing is zero; inf and NaN make NaN."""
    assert (only([0.0], [0.0]).cosine, only([0.0], [0.0]).sqnr) == (1.0, math.inf)
    assert (only([2.0], [0.0]).cosine, only([2.0], [0.0]).sqnr) == (0.0, 0.0)
    assert (only([0.0], [2.0]).cosine, only([0.0], [2.0]).sqnr) == (0.0, -math.inf)
    assert only([2.0, 0.0], None).flushed == 1.0
    assert only(None, [2.0]).cosine == 0.0
    assert math.isnan(only([1.0], [math.inf]).cosine)
    assert math.isnan(only([1.0, 1.0], [math.nan, 1.0]).sqnr)
    assert compare_gradients({}, {}, owner)[0].cosine == 1.0


# Halves of a batch, for the noise of gradients


X, Y = torch.arange(10.0).view(5, 2), torch.arange(5)


def test_halves() -> None:
    """Law: both halves have as many examples, and the batch stays whole.

    Tensors of another length, and numbers, go into both.
    """
    table, scale = torch.ones(3, 2), torch.tensor(2.0)
    batch = [X, {"y": Y}, table, scale, 7]
    cut = halves(batch)
    assert cut is not None
    for part, rows in zip(cut, (slice(0, 2), slice(2, 4)), strict=True):
        x, y, *others = tensors_in(part)
        assert torch.equal(x, X[rows])
        assert torch.equal(y, Y[rows])
        assert others[0] is table
        assert others[1] is scale
        assert part[4] == 7
    assert batch[0] is X


@pytest.mark.parametrize("batch", [7, (), torch.tensor(1.0), torch.ones(1, 4)])
def test_nothing_to_halve(batch: Any) -> None:
    """Law: without two examples there are no halves."""
    assert halves(batch) is None

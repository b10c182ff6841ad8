"""The doctor's rules: each is silent up to its limit, and speaks beyond it."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sick_run import counted, environment, profile, step, tally

from halfstep.diagnostics.doctor import RULES, examination, examine, worst_first
from halfstep.diagnostics.doctor.rule import NEEDS, percent
from halfstep.diagnostics.doctor.run_record import (
    Config,
    LostUpdates,
    MachineFacts,
    NonFinite,
    RunFacts,
    Step,
)
from halfstep.diagnostics.profiling import Profile
from halfstep.nonfinite.origin import BadOp
from halfstep.numerics import formats
from halfstep.numerics.tensor_stats import measure
from halfstep.numerics.tensor_summary import (
    Sample,
    TensorSummary,
    flushed_share,
    max_exponent,
    underflow_exponent,
)
from halfstep.reporting.finding import Finding
from halfstep.train.config import SETTINGS

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
FP16 = Config(level="O2", dtype="fp16", master_weights="fp32", loss_scale="dynamic")
BF16 = Config(level="O2", dtype="bf16", master_weights="fp32", loss_scale="none")
ON_GPU = replace(FP16, device="cuda")
ON_CPU = replace(BF16, device="cpu")


def steps(records: Iterable[dict[str, Any]]) -> tuple[Step, ...]:
    return tuple(map(Step.from_data, records))


def held(name: str, told: Any, at: int = 1, scale: float = 1.0) -> RunFacts:
    """Return a run in fp16 of whose tensor `name` there is one sample."""
    sample = Sample(at, TensorSummary.from_data(told), scale)
    records = steps([step(1, scale=scale)])
    return RunFacts(config=FP16, stats={name: (sample,)}, steps=records)


def skipped(*numbers: int, of: int = 400) -> RunFacts:
    """Return a run that skipped these steps, and whose rate waits for applied ones."""
    records, applied = [], 0
    for number in range(1, of + 1):
        lost = number in numbers
        records.append(step(number, skipped=lost, lr=1e-3 / (1 + applied)))
        applied += not lost
    return RunFacts(config=FP16, steps=steps(records))


def scales(*values: float) -> RunFacts:
    records = [step(i, scale=value) for i, value in enumerate(values, 1)]
    return RunFacts(config=FP16, steps=steps(records))


def profiled(config: Config, **more: Any) -> RunFacts:
    facts = profile(device=config.device, dtype=config.dtype, level="O2", **more)
    machine = MachineFacts.from_data(environment()["machine"])
    told = Profile.from_data(facts)
    return RunFacts(config=config, profile=told, machine=machine)


ADDCDIV = [
    {"op": "_foreach_addcdiv_", "shapes": [], "dtypes": [], "calls": 1, "self_s": 0.01}
]
"""The row of an update that is not fused."""


def product(*shapes: list[int], self_s: float = 0.05) -> dict[str, Any]:
    """Return a row of a profile: one product of 16-bit numbers."""
    row = {"op": "mm", "shapes": list(shapes), "dtypes": ["bf16"] * len(shapes)}
    return row | {"calls": 12, "self_s": self_s}


def wide(self_s: float) -> dict[str, Any]:
    """Return a row of a profile: one product of fp32 numbers."""
    row = product([512, 512], [512, 512], self_s=self_s)
    return row | {"dtypes": ["fp32", "fp32"]}


def rates(bf16: float, dtype: str = "bf16") -> RunFacts:
    """Return a run on a machine with this rate of bf16; that of fp16 is a tenth."""
    machine = MachineFacts(rates={"fp32": 1.0, "bf16": bf16, "fp16": 0.1})
    return RunFacts(config=replace(ON_CPU, dtype=dtype), machine=machine)


def weights(*words: str) -> RunFacts:
    named = {f"layer.{number}": word for number, word in enumerate(words)}
    return RunFacts(config=replace(BF16, level="O1"), weights=named)


def lost(share: float) -> RunFacts:
    """Return a run in which rounding swallowed a share of the updates."""
    bare = replace(BF16, master_weights="none")
    return RunFacts(config=bare, lost=(LostUpdates(100, 0, share),))


def bad(**more: Any) -> BadOp:
    told = {
        "step": 12,
        "scale": 1024.0,
        "phase": "forward",
        "module": "decoder.wo",
        "op": "linear",
        "cause": "forward range",
        "evidence": "inputs reach 8.3e+04, float16 holds 65504",
        "advice": "Train in bfloat16.",
        "reproduced": True,
    }
    return BadOp(**told | more)


def not_finite(*names: str, config: Config = FP16) -> RunFacts:
    """Return a run in which some tensors were not finite once."""
    return RunFacts(config=config, non_finite=(NonFinite(7, names),))


CALM = held("a:output", tally(0))
ROUNDS = [1024.0, 512.0] * 3


def tiny(lowest: int) -> RunFacts:
    """Return a run with so many of 10,000 gradients next to 0, and 500 zeros."""
    return held("a:grad", counted({-24: lowest, -20: 10000 - lowest}, zeros=500))


def near_overflow(scale: str, amax: float) -> RunFacts:
    facts = held("a:grad", tally(0, amax=amax))
    return replace(facts, config=replace(FP16, loss_scale=scale))


def cast_of(signal: float) -> Any:
    return tally(0, casts={"fp16": {"signal": signal, "noise": 1.0}})


def in_fp16(loss_scale: str) -> RunFacts:
    return RunFacts(config=replace(FP16, loss_scale=loss_scale))


def in_bf16(**settings: Any) -> RunFacts:
    return RunFacts(config=replace(BF16, **settings))


def on_gpu(**machine: Any) -> RunFacts:
    return RunFacts(config=ON_GPU, machine=MachineFacts(**machine))


def multiplied(config: Config, *rows: dict[str, Any]) -> RunFacts:
    return profiled(config, rows=list(rows))


SQUARE = product([512, 512], [512, 512])

LIMITS: list[tuple[str, Callable[[Any], RunFacts], Any, Any, str]] = [
    # rule, run with a figure, the figure of a healthy and of a sick run, what is said
    (
        *("underflow", tiny, 198, 204),
        "about 1.0% of its gradients become 0 in fp16 at loss scale 1 (at most 1%).",
    ),
    (
        *("output near overflow", lambda x: held("a.b:output", tally(0, amax=x))),
        *(32752.0, 32800.0),
        (
            "2^1.0 below overflow (at least a factor of 2^1). Keep it in fp32: "
            "--policy 'lean + module:a.b=fp32'"
        ),
    ),
    (
        *("gradient near overflow", lambda x: near_overflow("1024", x)),
        *(32752.0, 32800.0),
        "Use --loss-scale 0.5: the largest",
    ),
    (
        *("coarse", lambda x: held("a:output", cast_of(x)), 4e6, 3e6),
        "65 dB are left of it in fp16, of 74",
    ),
    (
        *("skipped steps", lambda n: skipped(100, 200, 300, *n, 390), (), (350,)),
        "5 of 400 steps were skipped for inf or NaN, 1.2%; the last is step 390",
    ),
    (
        "scale unsettled",
        lambda n: scales(*[1024.0] * 2 * n, *ROUNDS, *[1024.0] * n),
        *(3000, 500),
        "it fell 3 and rose 3 times in the last",
    ),
    (
        "scale falling",
        lambda last: scales(*[1024.0] * 40, *[512.0] * 10, *[256.0] * 10, *[last] * 10),
        *(256.0, 128.0),
        "fell 3 times in the last 35 steps, to 128, and never rose",
    ),
    (*("no loss scale", in_fp16, "2", "none"), "fp16 without a loss scale"),
    (
        *("needless loss scale", lambda scale: in_bf16(loss_scale=scale)),
        *("none", "dynamic", "bf16 with loss scale dynamic"),
    ),
    ("swamped updates", lost, 0.05, 0.06, "6.0% of its updates were rounded"),
    (
        *("no masters", lambda given: in_bf16(**given), {}),
        *({"level": "O3", "master_weights": None}, "master split"),
    ),
    (
        *("weights already low", lambda last: weights("fp32", last), "fp32", "bf16"),
        "1 of 2 parameters came in bf16, which level O1 updates without master weights",
    ),
    (
        *("fp16 sums", lambda on: on_gpu(fp16_accumulation=on), False, True),
        "allow_fp16_accumulation = False",
    ),
    (
        *("gradients summed low", lambda n: in_bf16(level="O3", accumulate=n), 3, 4),
        "4 micro-batches are added up in bf16",
    ),
    ("emulated", rates, 0.9, 0.89, "0.89 of its rate"),
    (
        *("casts", lambda s: profiled(ON_CPU, casts_s=s), 0.02, 0.021),
        "21%; matrix products take 60 ms, and large ones run 8 times",
    ),
    (
        *("fp32 operations", lambda s: profiled(ON_CPU, fp32_only_s=s), 0.025, 0.026),
        "26 ms of a step of 100 ms",
    ),
    (
        *("fp32 matmuls", lambda s: multiplied(ON_CPU, wide(s), SQUARE), 0.015, 0.016),
        "16 ms of a step of 100 ms, 16%, in fp32 matmuls, in a run in bf16",
    ),
    (
        "small products",
        lambda n: multiplied(ON_CPU, product([128, 128], [128, n])),
        *(128, 127, "(128 x 128) (128 x 127) is 4 million operations"),
    ),
    (
        "sizes and AMX tiles",
        lambda sizes: multiplied(ON_CPU, product(*sizes)),
        *(([512, 768], [768, 768]), ([500, 100], [100, 770])),
        "(500 x 100) (100 x 770) does not fill tiles",
    ),
    (
        "sizes and tensor cores",
        lambda n: multiplied(ON_GPU, product([4096, 1024], [1024, n])),
        *(1024, 1025),
        "(4096 x 1024) (1024 x 1025) has sizes that are no multiple of 8",
    ),
    (
        "unfused update",
        lambda s: profiled(ON_CPU, rows=ADDCDIV, update_s=s, optimizer="Adam"),
        *(0.015, 0.016, "16 ms of a step of 100 ms, 16%; 16 bits do not make it"),
    ),
    (
        *("overhead", lambda s: profiled(ON_CPU, python_s=s), 0.03, 0.031),
        "31 ms of a step of 100 ms, 31%, between 24 operations",
    ),
    (
        *("waits", lambda n: profiled(ON_GPU, waits=n, wait_s=0.05), 1, 2),
        "2 host-device synchronizations in a step",
    ),
    (
        *("data loading", lambda s: profiled(ON_CPU, input_s=s), 0.01, 0.011),
        "11 ms of a step of 100 ms",
    ),
]
CASES: list[tuple[str, RunFacts, RunFacts, str]] = [
    *((name, run(low), run(high), said) for name, run, low, high, said in LIMITS),
    # rule, just healthy, just sick, words of what is said
    (
        "bad op",
        RunFacts(config=FP16, stats=CALM.stats),
        RunFacts(config=FP16, bad_ops=(bad(), bad(step=14))),
        "float16 holds 65504 (step 12, 2 times)",
    ),
    (
        "not finite forward",
        not_finite("a.b:grad"),
        not_finite("a.b:output", "model:output"),
        "was non-finite once, first at step 7 (none)",
    ),
    (
        *("not finite backward", not_finite("a.b:grad")),
        *(not_finite("a.b:grad", config=BF16), "Not a matter of the loss scale"),
    ),
    (
        "loss not finite",
        RunFacts(steps=steps([step(1), step(2, loss=None, skipped=True)])),
        RunFacts(steps=steps([step(1), step(2, loss=None)])),
        "it was not finite in 1 step with an update, first in step 2",
    ),
    (
        *("schedule on skipped steps", skipped(100, 200)),
        RunFacts(
            steps=steps(
                step(n, skipped=n in {20, 30}, lr=1.0 / n) for n in range(1, 40)
            )
        ),
        "the rate moved on after 2 of 2 skipped steps",
    ),
]


@pytest.mark.parametrize(
    ("name", "sound", "sick", "said"), CASES, ids=[case[0] for case in CASES]
)
def test_each_rule_has_its_limit(
    name: str, sound: RunFacts, sick: RunFacts, said: str
) -> None:
    """Law: a rule speaks beyond its limit and not up to it, and says what to do.

    And so each time: rules are pure; what they find survives JSON, and is sorted.
    """
    assert [found for found in examine(sound) if found.rule == name] == []
    assert name not in not_evaluated(sound) or name == "bad op"
    found = [found for found in examine(sick) if found.rule == name]
    assert found
    for each in found:
        assert each.where
        assert each.measured
        assert each.source
        assert each.advice.endswith(".")
        assert 0 <= each.weight <= 1
    assert said in str(found[0])
    found = examine(sick)
    assert examine(sick) == found
    assert [Finding(**json.loads(json.dumps(f.data()))) for f in found] == found
    assert [f.rank for f in found] == sorted(f.rank for f in found)


def test_flags_that_are_advised_exist() -> None:
    """Law: whatever flag an advice names, `halfstep train` takes it."""
    advice = " ".join(f.advice for *_, sick, _ in CASES for f in examine(sick))
    named = set(re.findall(r"--[a-z][a-z-]*", advice))
    flags = {setting.flag for setting in SETTINGS.values()}
    assert {"--lr", "--loss-scale", "--policy"} <= named <= flags


@pytest.mark.parametrize("config", [FP16, BF16, replace(FP16, loss_scale="65536")])
def test_skips_that_go_on_are_told_what_ends_them(config: Config) -> None:
    """Law: find_nonfinite, an fp32 rule, and bf16 if not in use are named."""
    facts = replace(skipped(*range(20, 60), of=100), config=config)
    told = {each.rule: each.advice for each in examine(facts)}["skipped steps"]
    assert "halfstep.find_nonfinite(model, step)" in told
    assert "--policy 'lean + module:NAME=fp32'" in told
    assert ("--dtype bf16" in told) == (config.dtype == "fp16")
    assert ("never falls" in told) == (config.loss_scale == "65536")
    ruled = replace(facts, bad_ops=(bad(rule="module:decoder.wo=fp32"),))
    told = {each.rule: each.advice for each in examine(ruled)}["skipped steps"]
    assert "--policy 'lean + module:decoder.wo=fp32'" in told


@pytest.mark.parametrize(
    ("op", "optimizer"), [("_fused_adamw_", "AdamW"), ("addcdiv_", "RMSprop")]
)
def test_an_update_that_is_one_kernel_or_cannot_be(op: str, optimizer: str) -> None:
    """Law: `fused=True` is advised only where it is missing and torch has it."""
    rows = [{**ADDCDIV[0], "op": op}]
    facts = profiled(ON_CPU, rows=rows, update_s=0.05, optimizer=optimizer)
    assert "unfused update" not in [each.rule for each in examine(facts)]


BACKWARD = bad(cause="backward range", phase="backward", advice="It is halved.")


def still(config: Config) -> RunFacts:
    """Return a run whose scale stands at 1e9 while steps are skipped."""
    records = steps(step(n, scale=1e9, skipped=n > 5) for n in range(1, 9))
    return RunFacts(config=config, steps=records, bad_ops=(BACKWARD,))


def masked(*names: str, known: bool) -> RunFacts:
    """Return a run with a mask of inf in each step, of which the third was skipped.

    The third has more that is not finite; `known`: steps have records.
    """
    every = [NonFinite(n, ("mask:output", *names * (n == 3))) for n in range(1, 6)]
    records = steps(step(n, skipped=n == 3, loss=1.0) for n in range(1, 6))
    return RunFacts(
        config=FP16, steps=records if known else (), non_finite=tuple(every)
    )


def lost_tenth(top: int) -> RunFacts:
    """Return a run that lost a tenth of its gradients, with this largest exponent.

    7 doublings leave less than a thousandth of all. Below half of overflow are numbers
    of 2^13 and less, at 2^14 over the largest.
    """
    return held("a:grad", counted({-24: 2000, top: 7000}, zeros=5000))


def half_off(form: formats.FloatFormat) -> RunFacts:
    """Return a run with an output of equal numbers, each half a unit off."""
    worst = torch.full((100,), 1 + 2.0 ** -(form.mantissa_bits + 1))
    facts = held("a:output", measure(worst).data())
    return replace(facts, config=replace(FP16, dtype=form.name))


INFS = held("scores:output", tally(0, infs=3))
BELOW = held("a:grad", counted({-24: 10, 0: 10}, zeros=10))
FLOOR = (*[64.0] * 20, *[8.0] * 6, *[2.0] * 6, *[1.0] * 6)
TWO = steps([step(1, scale=1.0), step(2, scale=1.0)])
UNKNOWN = {"step": 2, "loss": None}
SAID: dict[str, tuple[RunFacts, str, str, str]] = {
    "an overflow is normal where the scale falls": (
        *(still(FP16), "bad op", "note", "halved"),
    ),
    "not at a fixed scale": (
        *(still(replace(FP16, loss_scale="1e9")), "bad op", "error", "never falls"),
    ),
    "nor where the records show that it stands still": (
        *(still(replace(FP16, loss_scale=None)), "bad op", "error", "never falls"),
    ),
    "nor where it falls, and steps go on to be skipped": (
        replace(skipped(*range(20, 60), of=100), bad_ops=(BACKWARD,)),
        *("bad op", "warning", "--dtype bf16"),
    ),
    "an overflow that needs a rule is an error": (
        RunFacts(config=FP16, bad_ops=(replace(BACKWARD, rule="module:a=fp32"),)),
        *("bad op", "error", "decoder.wo"),
    ),
    "one that did not recur is none": (
        RunFacts(config=FP16, bad_ops=(bad(phase="none", cause="hardware"),)),
        *("bad op", "warning", "hardware: "),
    ),
    "the scale advised keeps the largest gradient below half": (
        *(lost_tenth(0), "underflow", "error", "Use --loss-scale 16384"),
    ),
    "and so of larger ones": (
        *(lost_tenth(7), "underflow", "error", "Use --loss-scale 128"),
    ),
    "bf16 where no scale keeps both": (
        *(lost_tenth(8), "underflow", "error"),
        "Train in bf16 (--dtype bf16): fp16 would take a loss scale of 128",
    ),
    "gradients in fp32 are not held against fp16's borders": (
        held("n.weight:grad", counted({-40: 100}, dtype="float32", zeros=100)),
        *("underflow", "", ""),
    ),
    "what an overflow left behind is no statistic": (
        replace(BELOW, steps=steps([step(1, scale=1.0, skipped=True)])),
        *("underflow", "", ""),
    ),
    "a loss that is not scaled is not told to lower its scale": (
        near_overflow("none", 60000.0),
        *("gradient near overflow", "warning", "as the loss; or train in bf16"),
    ),
    "an output beyond fp16 was never there": (
        *(held("a:output", tally(0, amax=1e308)), "output near overflow", "", ""),
    ),
    "rounding alone is not coarse in fp16": (half_off(formats.FP16), "coarse", "", ""),
    "nor in bf16": (half_off(formats.BF16), "coarse", "", ""),
    "inf in a sample of a step that went well is a note": (
        *(INFS, "not finite forward", "note", "stayed finite"),
    ),
    "in one that was skipped, an error": (
        replace(INFS, steps=steps([step(1, skipped=True, loss=None)])),
        *("not finite forward", "error", "scores:output"),
    ),
    "a mask is not why a step was skipped": (
        *(masked(known=True), "not finite forward", "note", "mask:output: "),
    ),
    "nor where no records tell of steps": (
        *(masked(known=False), "not finite forward", "note", "mask:output: "),
    ),
    "what else was not finite then is": (
        masked("fc:output", "model:output", known=True),
        *("not finite forward", "error", "fc:output: it, or what follows it, was non-"),
    ),
    "and so without records": (
        masked("fc:output", "model:output", known=False),
        *("not finite forward", "error", "once, first at step 3"),
    ),
    "skips before the scale has settled do not count": (
        *(skipped(1, 2, 3, 5, 6, 8, 12, of=60), "skipped steps", "", ""),
    ),
    "a scale that never settles is an error": (
        *(skipped(*range(1, 61), of=60), "skipped steps", "error", "60 of 60"),
    ),
    "fallen to 1, a scale protects nothing": (
        *(scales(*FLOOR), "scale falling", "error", "to 1, and never rose"),
    ),
    "a step may have been skipped": (
        RunFacts(steps=steps([step(1), UNKNOWN])),
        *("loss not finite", "warning", "nothing tells whether there was an update"),
    ),
    "an update is told where records tell of one": (
        RunFacts(steps=steps([step(1), UNKNOWN, step(3, loss=None)])),
        *("loss not finite", "error", "in 1 step with an update, first in step 3"),
    ),
    "records tell of a scale where no setting does": (
        RunFacts(config=Config(dtype="fp16"), steps=TWO),
        *("no loss scale", "error", "fp16 without a loss scale"),
    ),
    "and of one that is needless": (
        RunFacts(config=Config(dtype="bf16"), steps=steps([step(1)])),
        *("needless loss scale", "warning", "bf16 with loss scale 1024"),
    ),
    "numbers read out of tensors on a CPU are no fault": (
        *(profiled(ON_CPU, waits=110, wait_s=0.001), "waits", "", ""),
    ),
    "bf16 is advised where that is fast": (
        *(rates(1.5, "fp16"), "emulated", "warning", "--dtype bf16"),
    ),
    "Python's share of a toy is no fault": (
        *(profiled(ON_CPU, python_s=0.09, rows=[product([32, 8], [8, 8])]), "overhead"),
        *("", ""),
    ),
    "it is of larger matmuls": (
        profiled(ON_CPU, python_s=0.09, rows=[product([32, 64], [64, 64])]),
        *("overhead", "warning", "Larger batches"),
    ),
    "fp32 where it is not": (
        *(rates(1.4, "fp16"), "emulated", "warning", "--level O0"),
    ),
}


@pytest.mark.parametrize("law", SAID)
def test_what_is_said(law: str) -> None:
    """Law: that of the name: there is one finding, or none, and it says so."""
    facts, rule, severity, words = SAID[law]
    found = [each for each in examine(facts) if each.rule == rule]
    assert [each.severity for each in found] == [severity] * bool(severity)
    assert all(words in str(each) for each in found)


def test_numbers_come_before_speed() -> None:
    """Law: of one severity, however large the share of the time; errors come first."""

    def finding(rule: str, severity: Any, weight: float) -> Finding:
        return Finding(severity, rule, "", "", "", "", "", weight)

    error, warning = finding("bad op", "error", 0.1), finding("underflow", "warning", 0)
    slow, note = finding("overhead", "warning", 1.0), finding("bad op", "note", 1.0)
    assert worst_first([note, slow, warning, error]) == (error, warning, slow, note)


def test_every_rule_has_a_case() -> None:
    """Law: a new rule comes with a sound and a sick run; names are told apart."""
    assert sorted(case[0] for case in CASES) == sorted(rule.name for rule in RULES)
    assert {name for rule in RULES for name in rule.needs} == NEEDS.keys()


def test_nothing_known_is_not_health() -> None:
    """Law: without facts there are no findings, and every rule says it was blind."""
    blind = examination(RunFacts())
    assert blind.findings == ()
    assert blind.num_evaluated == 0
    assert not_evaluated(RunFacts()).keys() == {rule.name for rule in RULES}


def test_what_does_not_concern_a_run_is_not_missed() -> None:
    """Law: a run in fp32 is not asked for a loss scale; with masters none is lost."""
    told = not_evaluated(
        RunFacts(config=Config("O0", "fp32", loss_scale="none"))
    ).keys()
    assert not told & {"underflow", "no loss scale", "casts", "swamped updates"}
    assert told >= {"overhead", "data loading", "skipped steps"}
    for master in ("fp32", "none"):
        blind = not_evaluated(RunFacts(config=replace(BF16, master_weights=master)))
        assert ("swamped updates" in blind) == (master == "none")
    # A reader learns the setting and the call that make statistics.
    assert "--probe sampled" in blind["coarse"]
    assert 'halfstep.Probe(model, "sampled", log=...)' in blind["coarse"]


@pytest.mark.parametrize(
    ("sigma", "near"), [(2.0**-24, 0.3), (2.0**-22, 0.1), (2.0**-20, 0.1)]
)
def test_what_was_flushed_is_estimated(sigma: float, near: float) -> None:
    """Law: of a bell curve the estimate is the true share, to a tenth of it.

    Its density is all but even where it is wide beside the border; where it is not,
    the estimate is low.
    """
    draw = torch.Generator().manual_seed(0)
    wide = sigma * torch.randn(1 << 18, dtype=torch.float64, generator=draw)
    low = wide.half()
    true = ((low == 0) & (wide != 0)).double().mean().item()
    powers = torch.frexp(low[low != 0].double())[1] - 1
    bins, counts = powers.unique(return_counts=True)
    told = counted(
        dict(zip(bins.tolist(), counts.tolist(), strict=True)),
        zeros=int((low == 0).sum()),
    )
    share = flushed_share([Sample(1, TensorSummary.from_data(told))], formats.FP16)
    assert share == pytest.approx(true, rel=near)


def test_zeros_that_were_zeros_are_not_lost() -> None:
    """Law: padding and dropout make zeros; with nothing next to 0 none were lost."""
    for lowest, zeros, share in ((-20, 10**6, 0.0), (-24, 3, 3 / 203)):
        told = TensorSummary.from_data(counted({lowest: 100, 0: 100}, zeros=zeros))
        assert flushed_share([Sample(1, told)], formats.FP16) == share


def test_an_unknown_scale_gives_no_advice_on_scales() -> None:
    """Law: gradients of a loop that told no loss scale are not taken for unscaled."""
    facts = replace(BELOW, steps=())
    assert "underflow" not in {each.rule for each in examine(facts)}
    assert "loss scale" in not_evaluated(facts)["underflow"]
    none = replace(facts, config=replace(FP16, loss_scale="none"))
    assert "underflow" in {each.rule for each in examine(none)}


def every(interval: int, of: int = 400) -> tuple[Step, ...]:
    """Return the steps of a sound run whose scale grows, and falls, so often."""
    records, scale, clean = [], 1024.0, 0
    for number in range(1, of + 1):
        lost = scale > 1024.0
        records.append(step(number, scale=scale, skipped=lost))
        clean = 0 if lost else clean + 1
        scale = 1024.0 if lost or clean < interval else 2048.0
    return steps(records)


def test_growth_that_is_often_tried() -> None:
    """Law: skips that growth costs, however often it is tried, are no fault of steps.

    That it is tried often is told, with what mends it.
    """
    found = examine(RunFacts(config=FP16, steps=every(20)))
    assert [each.rule for each in found] == ["scale unsettled"]
    assert "growth_interval=2000" in found[0].advice
    assert examine(RunFacts(config=FP16, steps=every(2000, of=8000))) == []


def test_many_places_are_counted() -> None:
    """Law: of one rule the three worst places are named, the rest is counted."""
    (sample,) = BELOW.stats["a:grad"]
    facts = replace(BELOW, stats={f"layer.{i}:grad": (sample,) for i in range(9)})
    found = [each for each in examine(facts) if each.rule == "underflow"]
    assert len(found) == 3
    assert found[-1].measured.endswith("; and so in 6 more places")
    assert "more" not in found[0].measured


@pytest.mark.parametrize("format_", [formats.FP16, formats.BF16])
def test_borders_of_formats(format_: formats.FloatFormat) -> None:
    """Law: the borders are the format's own: 2**lowest rounds to zero, and so on."""

    def made(power: float) -> float:
        wide = torch.tensor(power, dtype=torch.float64)
        return wide.to(format_.dtype).double().item()

    assert made(2.0 ** underflow_exponent(format_)) == 0.0
    assert made(1.01 * 2.0 ** underflow_exponent(format_)) > 0.0
    assert made(2.0 ** max_exponent(format_)) < float("inf")
    assert made(2.0 ** (max_exponent(format_) + 1)) == float("inf")


words = st.text(max_size=8)
numbers = st.floats(min_value=0, allow_infinity=False, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "loss": st.none() | st.floats(),
                "lr": st.none() | st.floats(),
                "scale": st.none() | st.floats(),
                "skipped": st.none() | st.booleans(),
                "seconds": st.dictionaries(words, numbers, max_size=3),
            },
        ),
        max_size=12,
    ),
    st.dictionaries(st.integers(-140, 120), st.integers(1, 99), max_size=6),
    st.sampled_from(["fp16", "bf16", "fp32", None]),
)
def test_any_facts_can_be_judged(
    records: list[dict[str, Any]], powers: dict[int, int], dtype: str | None
) -> None:
    """Law: whatever the figures are, rules answer, and never with an exception."""
    seen = steps({"step": i, **each} for i, each in enumerate(records))
    stats: dict[str, tuple[Sample, ...]] = {}
    if powers:
        told = TensorSummary.from_data(counted(powers))
        stats = {"a:grad": (Sample(0, told),), "a:output": (Sample(0, told),)}
    facts = RunFacts(config=Config("O3", dtype), steps=seen, stats=stats)
    for found in examine(facts):
        assert found.advice
        assert 0 <= found.weight <= 1


def test_shares_in_words() -> None:
    """Law: small shares keep a digit."""
    words = [percent(x) for x in (0.0, 0.012, 0.26, 1.0)]
    assert words == ["0%", "1.2%", "26%", "100%"]


def test_docs_show_the_rules() -> None:
    """Law: the table in the docs is made of the rules themselves."""
    lines = ["| rule | worst | looks at | limit | source |", "|---|---|---|---|---|"]
    for rule in RULES:
        worst: str = rule.severity
        limit = "-" if rule.limit is None else str(rule.limit)
        if rule.limit is not None and rule.limit.severe is not None:
            worst = "error"
            limit += f"; error: {rule.limit.unit.format(rule.limit.severe)}"
        cells = (rule.name, worst, rule.about, limit, rule.source)
        lines.append("| " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    assert table in DOCS.read_text(encoding="utf-8"), f"paste this:\n{table}"


def not_evaluated(facts: RunFacts) -> dict[str, str]:
    """Return the rules that lack a fact, and why."""
    missing = examination(facts).not_evaluated
    return {rule: why for why, rules in missing.items() for rule in rules}

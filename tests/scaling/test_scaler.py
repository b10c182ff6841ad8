"""Loss scaling against twins: an if/else host rule, torch's kernel, float64 numpy."""

import itertools
import math
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.errors import UserError
from halfstep.scaling import LossScaler, ScaleRule, ScaleState, advance, unscale_
from halfstep.scaling.collapse import is_collapsed

RULE = ScaleRule(
    init_scale=64.0,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=7,
    min_scale=2.0,
    max_scale=2.0**20,
    hysteresis=3,
    refill="clean",
    max_consecutive_skips=9,
)
"""Every field away from its default."""


def fp32(number: float) -> float:
    return float(np.float32(number))


class Twin:
    """The rule as one would write it on the host, rounded to fp32 once a step."""

    def __init__(self, rule: ScaleRule, scale: float, clean: int) -> None:
        self.rule, self.scale, self.clean = rule, scale, clean
        self.left, self.skips = rule.hysteresis, 0

    def numbers(self) -> list[float]:
        return [self.scale, self.clean, self.left, self.skips]

    def step(self, bad: bool) -> None:
        rule = self.rule
        if bad:
            self.clean = 0
            self.skips += 1
            if self.left > 1:
                self.left -= 1
            else:
                lower = self.scale * rule.backoff_factor
                self.scale = min(self.scale, fp32(max(lower, rule.min_scale)))
        else:
            self.clean += 1
            self.skips = 0
            if rule.refill == "clean":
                self.left = rule.hysteresis
            if self.clean >= rule.growth_interval:
                higher = self.scale * rule.growth_factor
                self.scale = max(self.scale, fp32(min(higher, rule.max_scale)))
                self.clean = 0
                self.left = rule.hysteresis


@st.composite
def rules(draw: st.DrawFn) -> ScaleRule:
    low = draw(st.sampled_from([2.0**-20, 0.1, 1.0, 3.0]))
    high = low * draw(st.sampled_from([1.0, 1.5, 16.0, 2.0**20]))
    return ScaleRule(
        init_scale=draw(st.sampled_from([low, high, (low * high) ** 0.5])),
        growth_factor=draw(st.sampled_from([1.0, 1.3, 2.0, 4.0])),
        backoff_factor=draw(st.sampled_from([0.1, 0.5, 0.7, 1.0])),
        growth_interval=draw(st.sampled_from([1, 2, 3, 4, 2**31 + 5])),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 3)),
        refill=draw(st.sampled_from(["growth", "clean"])),
    )


flags = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.0]), max_size=40)


def numbers_of(state: ScaleState) -> list[float]:
    return [getattr(state, field.name).item() for field in fields(state)]


def begun(rule: ScaleRule, beyond: float, clean: int) -> ScaleState:
    """Return a state as it may be loaded: within bounds or not, after clean steps."""
    first = ScaleState.first(rule)
    counted = first.clean_steps + clean
    return replace(first, scale=first.scale * beyond, clean_steps=counted)


@given(rules(), flags, st.sampled_from([0.25, 1.0, 4.0]), st.integers(0, 5))
def test_advance_is_the_obvious_rule(
    rule: ScaleRule, trace: list[float], beyond: float, clean: int
) -> None:
    """Law: the selections on the device equal if/else on the host, counters too.

    A loaded scale may lie beyond the bounds: even there no overflow raises it, and no
    clean step lowers it. A window made shorter than the clean steps so far still ends,
    where torch's never does; one longer than 32 bits count does not. And `advance`
    leaves its argument alone.
    """
    state = begun(rule, beyond, clean)
    twin = Twin(rule, state.scale.item(), clean)
    for flag in trace:
        after = advance(state, torch.tensor(flag), rule)
        assert numbers_of(state) == twin.numbers()
        twin.step(flag > 0)
        state = after
        assert numbers_of(state) == twin.numbers()
    dtypes = [getattr(state, field.name).dtype for field in fields(state)]
    assert dtypes == [torch.float32, torch.int32, torch.int32, torch.float32]


KINDS = ["fp32", "fp64", "bf16", "fp16", "complex", "conjugate", "sparse"]
DTYPES = {
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "complex": torch.complex64,
    "conjugate": torch.complex64,
}


def gradient(kind: str, seed: int, plant: tuple[int, float] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES.get(kind, torch.float32)
    values = torch.randn(24, dtype=dtype, generator=generator)
    if plant:
        values[plant[0]] = plant[1]
    if kind == "conjugate":
        return values.conj()
    if kind == "sparse":
        places = torch.arange(24)[None] * 2
        return torch.sparse_coo_tensor(places, values, (50,), check_invariants=True)
    return values.reshape(4, 6)


def numbers(tensor: Tensor) -> np.ndarray:
    plain = tensor.to_dense().resolve_conj()
    wide = torch.complex128 if plain.is_complex() else torch.float64
    return plain.to(wide).numpy().copy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [0, -3, -16, 4])
def test_unscale_equals_float64(kind: str, exponent: int) -> None:
    """Law: a power of two is multiplied in exactly, with one rounding at most.

    Once, too, where torch's kernel refuses a list for a sparse gradient in it.
    """
    kinds = (kind, "fp32", "sparse", kind)
    grads = [gradient(each, seed) for seed, each in enumerate(kinds)]
    expected = [numbers(grad) * 2.0**exponent for grad in grads]
    found = unscale_(grads, torch.tensor(2.0**exponent))
    assert (found.item(), found.dtype, found.shape) == (0.0, torch.float32, ())
    for grad, wide in zip(grads, expected, strict=True):
        rounded = torch.from_numpy(wide).to(grad.dtype)
        assert torch.equal(grad.to_dense().resolve_conj(), rounded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_unscale_finds_what_is_planted(kind: str, value: float) -> None:
    """Law: one bad number anywhere in any tensor of any kind raises the flag to 1."""
    for place, position in itertools.product((0, 11, 23), range(3)):
        grads = [gradient(other, 5) for other in KINDS]
        plants = [(place, value) if i == position else None for i in range(3)]
        grads += [gradient(kind, i, plant) for i, plant in enumerate(plants)]
        assert unscale_(grads, torch.tensor(0.5)).item() == 1.0
    several = [gradient(kind, seed, (0, value)) for seed in range(3)]
    assert unscale_(several, torch.tensor(1.0)).item() == 1.0
    assert unscale_([], torch.tensor(1.0)).item() == 0.0


def test_scale_widens_first() -> None:
    """Law: fp16 outputs times 2**17 are finite, for the product is fp32."""
    scaler = LossScaler(ScaleRule(init_scale=2.0**17))
    for shape in ((), (3,)):
        scaled = scaler.scale(torch.ones(shape, dtype=torch.float16))
        assert scaled.dtype == torch.float32
        assert torch.equal(scaled, torch.full_like(scaled, 2.0**17))
    assert scaler.scale(torch.ones((), dtype=torch.float64)).dtype == torch.float64


BETWEEN = "between min_scale and"


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("growth_factor", 0.5, "finite and at least 1"),
        ("growth_factor", float("inf"), "finite and at least 1"),
        ("backoff_factor", 0.0, "in (0, 1]"),
        ("backoff_factor", 1.5, "in (0, 1]"),
        ("backoff_factor", math.nan, "in (0, 1]"),
        ("growth_interval", 0, "at least 1"),
        ("min_scale", 0.0, "at least 1.17549e-38"),
        ("min_scale", 1e-46, "at least 1.17549e-38"),
        ("max_scale", 0.5, f"{BETWEEN} 3.40282e+38"),
        ("max_scale", math.inf, f"{BETWEEN} 3.40282e+38"),
        ("init_scale", 0.5, f"{BETWEEN} max_scale"),
        ("init_scale", math.nan, f"{BETWEEN} max_scale"),
        ("hysteresis", 0, "at least 1"),
        ("max_consecutive_skips", 0, "at least 1"),
    ],
)
def test_rule_messages(field: str, value: float, right: str) -> None:
    """Law: a number out of range is named with its value and the range."""
    with pytest.raises(UserError) as caught:
        ScaleRule(**{field: value})
    assert str(caught.value) == f"{field}={value} must be {right}."


@pytest.mark.parametrize("word", ["fast", "", 0, -2.0, "nan", "inf", 1e39, 1e-40])
def test_parse_message(word: str | float) -> None:
    """Law: a word that is no scale is named, with what would be one."""
    with pytest.raises(UserError) as caught:
        ScaleRule.parse(word)
    assert str(caught.value) == (
        f"loss_scale={word!r} is not a scale; choose auto, dynamic, "
        "none or a positive number such as 1024."
    )


def test_parse() -> None:
    """Law: "dynamic" moves; a number and "none" stay for ever, both ways."""
    assert ScaleRule.parse("dynamic") == ScaleRule()
    for word, scale in (("none", 1.0), ("1024", 1024.0), (0.25, 0.25)):
        rule = ScaleRule.parse(word)
        state = ScaleState.first(rule)
        for flag in [0.0] * 2001 + [1.0] * 40:
            state = advance(state, torch.tensor(flag), rule)
        assert state.scale.item() == scale


def test_state_round_trip() -> None:
    """Law: a saved state holds rule and state, and loading restores each counter."""
    assert all(getattr(RULE, f.name) != f.default for f in fields(ScaleRule))
    scaler = LossScaler(RULE)
    for flag in (1, 1, 0, 0, 1, 1):
        scaler.update(torch.tensor(float(flag)))
    scaler.state = replace(scaler.state, clean_steps=torch.tensor(5, dtype=torch.int32))
    state = scaler.state_dict()
    # Two clean steps gave back what two overflows took; the next two left one.
    own = {"scale": 64.0, "clean_steps": 5, "hysteresis_left": 1, "skips_in_a_row": 2}
    watch = {"applied": 2, "begun": True, "history": [64.0, 64.0]}
    assert state == asdict(RULE) | own | {"watch": watch}
    limitless = LossScaler(replace(RULE, max_consecutive_skips=None)).state_dict()
    assert limitless.keys() == state.keys() - {"max_consecutive_skips"}
    fresh = LossScaler(RULE)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    for field in fields(ScaleState):
        loaded, saved = (getattr(s.state, field.name) for s in (fresh, scaler))
        assert loaded.dtype == saved.dtype
    for saved, hysteresis, left in ((3, 1, 1), (-2, 3, 1), (2, 3, 2)):
        fresh = LossScaler(replace(RULE, hysteresis=hysteresis))
        fresh.load_state_dict(state | {"hysteresis_left": saved})
        assert fresh.state.hysteresis_left.item() == left


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0, "8", None])
def test_what_is_no_scale(scale: Any) -> None:
    """Law: a state whose scale is no positive fp32 number is refused by value."""
    scaler = LossScaler(RULE)
    before = scaler.state_dict()
    with pytest.raises(UserError, match=r"^scale=.* must be a number from 1\.17"):
        scaler.load_state_dict(before | {"scale": scale})
    assert scaler.state_dict() == before


@pytest.mark.gpu
def test_a_copy_of_pending_reads() -> None:
    """Law: a scaler whose reads of the device are pending is pickled with them."""
    scaler = LossScaler(RULE, "cuda")
    scaler.observe_loss(torch.ones((), device="cuda", requires_grad=True))
    scaler.update(torch.zeros((), device="cuda"), lambda: ())
    again = pickle.loads(pickle.dumps(scaler))  # noqa: S301 -- our own
    assert again.state_dict() == scaler.state_dict()


def test_is_collapsed() -> None:
    """Law: ten skips with a moving scale at its floor, or the limit at any scale."""
    free = replace(RULE, max_consecutive_skips=None)
    assert is_collapsed(2.0, 10, free)
    assert not is_collapsed(2.0, 9, free)
    assert not is_collapsed(4.0, 99, free)
    assert not is_collapsed(2.0, 99, replace(free, backoff_factor=1.0))
    for factor in (0.5, 1.0):
        rule = replace(RULE, max_consecutive_skips=5, backoff_factor=factor)
        assert is_collapsed(8.0, 5, rule)
        assert not is_collapsed(8.0, 4, rule)


@pytest.mark.parametrize("floor", [0.1, 1e-3, 1 / 3, 0.7, 2.0**-10])
def test_a_floor_that_fp32_rounds_is_a_floor(floor: float) -> None:
    """Law: a floor that fp32 can only hold rounded up is recognised all the same."""
    rule = ScaleRule(init_scale=1.0, min_scale=floor, max_consecutive_skips=None)
    state = ScaleState.first(rule)
    for _ in range(20):
        state = advance(state, torch.tensor(1.0), rule)
    assert is_collapsed(state.scale.item(), int(state.skips_in_a_row), rule)
    assert not is_collapsed(2 * state.scale.item(), int(state.skips_in_a_row), rule)

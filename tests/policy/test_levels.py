"""The levels as data, and what happens to misspelt ones."""

import pytest

from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.policy.levels import DEFAULT_LOSS_SCALE, LEVELS, Level

# By hand, from apex's description of its levels.
PROMISED = {
    #      low weights, fp32 norms, autocast, masters, low inputs, low
    "O0": (False, False, False, False, False, False),
    "O1": (False, False, True, False, False, True),
    "O2": (True, True, True, True, False, True),
    "O3": (True, False, False, False, True, True),
}


def test_fields() -> None:
    """Law: each level promises what apex's level of that name does."""
    assert {
        name: (
            level.low_weights,
            level.fp32_norms,
            level.autocast,
            level.masters,
            level.low_inputs,
            level.low,
        )
        for name, level in LEVELS.items()
    } == PROMISED


@pytest.mark.parametrize("level", LEVELS.values(), ids=str)
def test_parse_undoes_str(level: Level) -> None:
    """Law: `parse` and `str` are inverses, and every level has a summary."""
    assert levels.parse(str(level)) is level
    assert level.summary


@pytest.mark.parametrize("word", ["o2", "02", " O3 ", "O4", "", "2", "O", "fp16"])
def test_unknown_level(word: str) -> None:
    """Law: any other word is rejected with the choice, also a small o or a digit 0."""
    with pytest.raises(UserError, match="choose auto, O0, O1, O2, O3") as caught:
        levels.parse(word)
    assert repr(word) in str(caught.value)


def test_every_format_has_a_default_loss_scale() -> None:
    """Law: just fp16 needs a scale, for just its range is shorter than fp32's."""
    assert DEFAULT_LOSS_SCALE.keys() == formats.FORMATS.keys()
    short = {
        name
        for name, format_ in formats.FORMATS.items()
        if format_.exponent_bits < formats.FP32.exponent_bits
    }
    scaled = {name for name, word in DEFAULT_LOSS_SCALE.items() if word == "dynamic"}
    assert scaled == short == {"fp16"}
    assert set(DEFAULT_LOSS_SCALE.values()) == {"dynamic", "none"}

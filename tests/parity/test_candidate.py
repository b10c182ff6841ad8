"""Words of `levels`, and what is said of those that are none."""

from typing import Any

import pytest

from halfstep import UserError
from halfstep.parity.candidate import parse, parse_all


@pytest.mark.parametrize(
    ("word", "level", "arguments"),
    [
        ("O0", "O0", {}),
        ("O2:split", "O2", {"master": "split"}),
        ("O1:fp16", "O1", {"dtype": "fp16"}),
        ("O2:none:bf16", "O2", {"dtype": "bf16", "master": "none"}),
        ("O1:fp16:loss_scale=none", "O1", {"dtype": "fp16", "loss_scale": "none"}),
    ],
)
def test_words(word: str, level: str, arguments: dict[str, str]) -> None:
    """Law: a word names a level, and arguments of `prepare` in any order."""
    candidate = parse(word)
    assert (candidate.name, candidate.level) == (word, level)
    assert candidate.arguments == arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["O22"], "levels holds 'O22': 'O22' is unknown; choose O0, O1, O2, O3; "),
        (["o2"], "nearest: O2."),
        (["O2:splt"], "levels holds 'O2:splt': 'splt' is unknown; choose bf16, fp16, "),
        (["O2:splt"], "; nearest: split."),
        (["O0:bf16"], "levels holds 'O0:bf16': 'bf16' is unknown; fp32 has no "),
        (["O1:bf16:fp16"], "levels holds 'O1:bf16:fp16', which sets dtype twice; "),
        (["O1", "O1"], "levels holds 'O1' and 'O1', which are equal; keep one."),
        (["O2:bf16:split", "O2:split:bf16"], "and 'O2:split:bf16', which are equal;"),
        ("O1", "levels is of type str; it must be a list of words such as 'O2:fp16'."),
        ([1], "levels is of type int; it must be a list of words such as 'O2:fp16'."),
    ],
)
def test_unknown_words(words: Any, message: str) -> None:
    """Law: an unknown part is named, with the known ones and the nearest of them."""
    with pytest.raises(UserError) as caught:
        parse_all(words)
    assert message in str(caught.value)


def test_fp32_always_runs() -> None:
    """Law: fp32 is the reference, listed or not."""
    assert [each.name for each in parse_all(["O0", "O1"])] == ["O1"]

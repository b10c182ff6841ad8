"""Parses the words of `levels`: a level, its dtype, master weights and loss scale."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError, format_value, require_type
from halfstep.masters.encoding import ENCODINGS, NONE
from halfstep.policy.levels import LEVELS, O0

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOSS_SCALE = "loss_scale="
_SETTINGS = {"bf16": "dtype", "fp16": "dtype"}
_SETTINGS |= dict.fromkeys((*ENCODINGS, NONE), "master")
_TYPE = "a list of words such as 'O2:fp16'"


@dataclass(frozen=True)
class Candidate:
    """A level with settings, which is trained and compared with fp32."""

    name: str
    """As written in `levels`: "O2:split"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `prepare`, besides the level, that the name sets."""

    @property
    def level(self) -> str:
        """The name of the level."""
        return self.name.partition(":")[0]


REFERENCE = Candidate(O0.name)
PERTURBED = Candidate(f"{O0.name}:ulp")
"""fp32 from initial weights that differ by one ulp: a difference without a meaning."""


def parse(word: str) -> Candidate:
    """Return the candidate of a word.

    A word is a level; then, each after a colon and in any order, a dtype, an encoding
    of the master weights, `loss_scale=` with a value of `prepare`.

    Raises:
        UserError: If a part is unknown or set twice; with the nearest known word.

    Example:
        >>> parse("O2:bf16:split").arguments
        {'dtype': 'bf16', 'master': 'split'}
    """
    require_type("levels", word, isinstance(word, str), _TYPE)
    level, *parts = word.split(":")
    if level not in LEVELS:
        raise _unknown(word, level, LEVELS)
    arguments: dict[str, Any] = {}
    for part in parts:
        key, value = _SETTINGS.get(part, ""), part
        if part.startswith(_LOSS_SCALE):
            key, value = "loss_scale", part.removeprefix(_LOSS_SCALE)
        choices = (*_SETTINGS, _LOSS_SCALE) if LEVELS[level].low else ()
        if not key or not choices:
            raise _unknown(word, part, choices)
        if key in arguments:
            raise UserError(f"levels holds {word!r}, which sets {key} twice; keep one.")
        arguments[key] = value
    return Candidate(word, arguments)


def parse_all(words: Sequence[str]) -> tuple[Candidate, ...]:
    """Return the candidates of `levels` without fp32, which always runs."""
    is_list = not isinstance(words, str) and hasattr(words, "__iter__")
    require_type("levels", words, is_list, _TYPE)
    candidates = [parse(word) for word in words]
    for one, other in itertools.combinations(candidates, 2):
        if (one.level, one.arguments) == (other.level, other.arguments):
            names = f"{one.name!r} and {other.name!r}"
            raise UserError(f"levels holds {names}, which are equal; keep one.")
    return tuple(each for each in candidates if each != REFERENCE)


def _unknown(
    word: str, part: str, choices: Mapping[str, Any] | Sequence[str]
) -> UserError:
    near = difflib.get_close_matches(part, choices, 1, cutoff=0.4)
    advice = f"choose {', '.join(choices)}" if choices else "fp32 has no settings"
    nearest = f"; nearest: {near[0]}" if near else ""
    message = (
        f"levels holds {format_value(word)}: {part!r} is unknown; {advice}{nearest}."
    )
    return UserError(message)

"""Defines the levels O0 to O3: which values are stored and computed in which format.

This module does not import torch. Code outside it reads the fields of a `Level` and
does not compare level names.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.errors import UserError, format_value
from halfstep.reporting.table import Table


@dataclass(frozen=True)
class Level:
    """How much of the training runs in a 16-bit format."""

    name: str
    """"O0" to "O3", with the letter O, as in apex."""
    summary: str
    """Description in one line."""
    low_weights: bool
    """Parameters are stored in the 16-bit format; buffers too without autocast."""
    fp32_norms: bool
    """Parameters of normalisation layers stay fp32 when `low_weights` is true."""
    autocast: bool
    """Each operation is cast as the policy says."""
    masters: bool
    """The optimizer updates fp32 master weights."""
    low_inputs: bool
    """Floating inputs of the model are cast to the 16-bit format on entry."""
    fp32_outputs: bool
    """16-bit outputs of the model are cast to fp32 on exit."""

    @property
    def low(self) -> bool:
        """Whether anything runs in a 16-bit format."""
        return self.autocast or self.low_weights

    def __str__(self) -> str:
        """Return the name, which `parse` accepts."""
        return self.name


def _level(name: str, summary: str, on: str = "") -> Level:
    """Return the level in which the fields named in `on` are true."""
    storage = ("low_weights", "fp32_norms", "autocast", "masters")
    fields = (*storage, "low_inputs", "fp32_outputs")
    return Level(name, summary, **{field: field in on.split() for field in fields})


O0 = _level("O0", "fp32 throughout: the baseline")
O1 = _level("O1", "fp32 weights, each operation cast as the policy says", "autocast")
O2 = _level(
    "O2",
    "16-bit weights, fp32 normalisation, fp32 master weights",
    "low_weights fp32_norms autocast masters fp32_outputs",
)
O3 = _level(
    "O3", "16-bit throughout: the speed limit", "low_weights low_inputs fp32_outputs"
)

LEVELS = {level.name: level for level in (O0, O1, O2, O3)}
"""Name -> `Level`, from "O0" to "O3"."""

DEFAULT_LOSS_SCALE = {"fp32": "none", "bf16": "none", "fp16": "dynamic"}
"""Format -> what `loss_scale="auto"` means. fp16 flushes gradients below 2**-25 to
zero, so it needs a scale; bf16 has fp32's exponent range and needs none."""


def parse(word: str | Level) -> Level:
    """Return the level of a name; a `Level` is returned as it is.

    Args:
        word: "O0", "O1", "O2" or "O3", with the capital letter O.

    Raises:
        UserError: If no level has this name.

    Example:
        >>> parse("O2").low_weights
        True
    """
    if isinstance(word, Level):
        return word
    level = LEVELS.get(word) if isinstance(word, str) else None
    if level is None:
        raise UserError(
            f"level={format_value(word)} is not a level; "
            f"choose auto, {', '.join(LEVELS)}."
        )
    return level


def table() -> Table:
    """Return the levels as a table, one line each.

    Example:
        >>> [row[0] for row in table().rows]
        ['O0', 'O1', 'O2', 'O3']
    """
    rows = tuple(
        (
            level.name,
            "16 bits" if level.low_weights else "fp32",
            "fp32" if level.fp32_norms or not level.low_weights else "16 bits",
            level.autocast,
            level.masters,
            level.summary,
        )
        for level in LEVELS.values()
    )
    columns = ("level", "weights", "norms", "autocast", "master weights", "in words")
    scales = ", ".join(f"{name} {kind}" for name, kind in DEFAULT_LOSS_SCALE.items())
    notes = (
        "16 bits: --dtype bf16 or fp16",
        f"loss scale unless set: {scales}; steps with inf or NaN are always skipped",
    )
    return Table("Levels", columns, rows, notes)

"""Defines apex's levels as `Properties`, and checks overrides of them.

Code outside this module reads the fields and does not compare level names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.compat.apex.state import AmpError, Properties
from halfstep.numerics.formats import AUTOCAST_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

_FP32, _FP16 = torch.float32, torch.float16
OFF = Properties(False, None, None, False, None, None, 1.0)  # noqa: FBT003
_ROWS: dict[str, tuple[Any, ...]] = {
    "O0": (_FP32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (_FP16, False, True, True, "dynamic"),
    "O3": (_FP16, False, False, False, 1.0),
}
LEVELS = {name: Properties(True, name, *row) for name, row in _ROWS.items()}  # noqa: FBT003

_CONTRADICT_O1 = {
    "cast_model_type": "O1 casts arguments of functions, not weights: use O2 or O3",
    "keep_batchnorm_fp32": "weights are fp32, batch norm runs in its input's dtype",
    "master_weights": "the model's own weights are fp32",
}
"""Override -> why it makes no sense at O1."""


def choose(opt_level: str, **overrides: Any) -> Properties:
    """Return a level's properties with overrides; None leaves the level's own."""
    if opt_level not in LEVELS:
        raise AmpError(
            f"opt_level={opt_level!r} is not a level; choose one of "
            f"{', '.join(LEVELS)}, with the letter O."
        )
    level = LEVELS[opt_level]
    explicit = {name: value for name, value in overrides.items() if value is not None}
    for name, check in _CHECKS.items():
        if name in explicit:
            explicit[name] = check(explicit[name])
    _check_contradictions(level, explicit)
    return replace(level, **explicit)


def _flag(value: object) -> bool:
    words: dict[object, bool] = {"True": True, "False": False}
    flag = words.get(value, value)
    if not isinstance(flag, bool):
        raise AmpError(
            f"keep_batchnorm_fp32={value!r} must be a bool, the string 'True' or "
            "'False', or None."
        )
    return flag


def _scale(value: object) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise AmpError(
            f"loss_scale={value!r} must be 'dynamic' or a positive number, as 128.0."
        )
    return scale


def _type(value: object) -> object:
    is_format = isinstance(value, torch.dtype) and value in AUTOCAST_DTYPES
    if value is not False and not is_format:
        raise AmpError(
            f"cast_model_type={value!r} must be torch.float16, torch.bfloat16, "
            "torch.float32, or False to cast nothing."
        )
    return value


_CHECKS: dict[str, Callable[[object], object]] = {
    "keep_batchnorm_fp32": _flag,
    "loss_scale": _scale,
    "cast_model_type": _type,
}


def _check_contradictions(level: Properties, explicit: dict[str, Any]) -> None:
    """Reject overrides that contradict a level."""
    if not level.patch_torch_functions:
        if explicit.get("patch_torch_functions"):
            raise AmpError(
                f"patch_torch_functions=True with opt_level={level.opt_level!r}: only "
                "opt_level='O1' casts in functions; choose that."
            )
        return
    for name, why in _CONTRADICT_O1.items():
        value = explicit.get(name)
        is_default = name == "cast_model_type" and value in {False, torch.float32}
        if value is not None and not is_default:
            raise AmpError(
                f"{name}={value} with opt_level={level.opt_level!r}: {why}; leave it "
                "out."
            )

"""Defines apex's levels as `Properties`, and checks overrides of them.

Code outside this module reads the fields and does not compare level names.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from halfstep.compat.apex.state import AmpError, Properties, reject
from halfstep.numerics.formats import AUTOCAST_DTYPES

_FP32, _FP16 = torch.float32, torch.float16
OFF = Properties(False, None, None, False, None, None, 1.0)  # noqa: FBT003
_ROWS: dict[str, tuple[Any, ...]] = {
    "O0": (_FP32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (_FP16, False, True, True, "dynamic"),
    "O3": (_FP16, False, False, False, 1.0),
}
LEVELS = {name: Properties(True, name, *row) for name, row in _ROWS.items()}  # noqa: FBT003


_DESCRIPTIONS = {
    "O0": "Pure FP32 training.",
    "O1": "Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "Pure FP16 training.",
}
"""Texts of apex, which programs search for in logs."""


def choose(opt_level: str, **overrides: Any) -> Properties:
    """Return a level's properties with overrides; None leaves the level's own."""
    level = LEVELS.get(opt_level)
    if level is None:
        raise AmpError(_no_level(opt_level))
    explicit = {name: value for name, value in overrides.items() if value is not None}
    if "keep_batchnorm_fp32" in explicit:
        explicit["keep_batchnorm_fp32"] = _flag(explicit["keep_batchnorm_fp32"])
    if "loss_scale" in explicit:
        explicit["loss_scale"] = _scale(explicit["loss_scale"])
    if "cast_model_type" in explicit:
        _check_type(explicit["cast_model_type"])
    _check_mix(level, explicit)
    return replace(level, **explicit)


def lines(properties: Properties) -> list[str]:
    """Return the lines that apex prints about a level and its overrides."""
    name = str(properties.opt_level)
    return [
        f"Selected optimization level {name}:  {_DESCRIPTIONS[name]}",
        "Defaults for this optimization level are:",
        *_options(LEVELS[name]),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *_options(properties),
    ]


def _options(properties: Properties) -> list[str]:
    return [f"{name:<22} : {value}" for name, value in asdict(properties).items()]


def _no_level(word: object) -> str:
    text = str(word).strip().upper()
    level = "O" + text[1:]
    if text[:1] in {"0", "O"} and level in LEVELS:
        return (
            f"opt_level={word!r} is spelt {level!r}: the prefix O is the letter O, not "
            "the digit zero."
        )
    return f"opt_level={word!r} is not a level; choose one of {', '.join(LEVELS)}."


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


def _check_type(value: object) -> None:
    is_format = isinstance(value, torch.dtype) and value in AUTOCAST_DTYPES
    if value is not False and not is_format:
        raise AmpError(
            f"cast_model_type={value!r} must be torch.float16, torch.bfloat16, "
            "torch.float32, or False to cast nothing."
        )


def _check_mix(level: Properties, explicit: dict[str, Any]) -> None:
    """Reject overrides that contradict a level."""
    name = level.opt_level
    if not level.patch_torch_functions:
        if explicit.get("patch_torch_functions"):
            reject(
                f"patch_torch_functions=True with opt_level={name!r}: functions are "
                "only patched by opt_level='O1'; choose that."
            )
        return
    if explicit.get("cast_model_type") not in {None, False, torch.float32}:
        reject(
            f"cast_model_type={explicit['cast_model_type']} with opt_level={name!r}, "
            "which inserts casts around torch functions rather than model weights: "
            "use opt_level='O2' or 'O3'."
        )
    if "keep_batchnorm_fp32" in explicit:
        reject(
            f"keep_batchnorm_fp32={explicit['keep_batchnorm_fp32']} with "
            f"opt_level={name!r}, where batch norm runs in the dtype of its input with "
            "fp32 weights: it should be None."
        )
    if "master_weights" in explicit:
        reject(
            f"master_weights={explicit['master_weights']} makes no sense with "
            f"opt_level={name!r}: the model's own weights are fp32. Leave it out."
        )

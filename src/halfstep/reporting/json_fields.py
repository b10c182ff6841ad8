"""Prepares values for JSON, which lacks inf and NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def plain(value: Any, spell: Callable[[float], object] = str) -> Any:  # noqa: ANN401 -- JSON
    """Return a nested value with non-finite numbers replaced, by their text or else."""
    if isinstance(value, float) and not math.isfinite(value):
        return spell(value)
    if isinstance(value, dict):
        return {key: plain(item, spell) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, spell) for item in value]
    return value

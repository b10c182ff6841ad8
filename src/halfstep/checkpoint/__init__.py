"""Directories of weights and state: whole or absent, checked, safe to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.checkpoint.single import (
        Checkpoint,
        CheckpointError,
        load,
        read_manifest,
        save,
    )

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load",
    "read_manifest",
    "save",
]

if not TYPE_CHECKING:  # a type checker must still see a misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name on first use: submodules are used without torch."""
        if name in __all__:
            from halfstep.checkpoint import single

            return getattr(single, name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)

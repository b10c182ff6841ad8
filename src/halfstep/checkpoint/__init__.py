"""Checkpoint directories that are complete or absent, verified, and safe to load."""

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

__all__ = ["Checkpoint", "CheckpointError", "load", "read_manifest", "save"]

if not TYPE_CHECKING:  # type checkers must still report misspelled names

    def __getattr__(name: str) -> object:
        """Import a public name on first use; some submodules are used without torch."""
        if name in __all__:
            from halfstep.checkpoint import single

            return getattr(single, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checkpoint directories that are complete or absent, verified, and safe to load."""

from halfstep.checkpoint.single import (
    Checkpoint,
    CheckpointError,
    load,
    read_manifest,
    save,
)

__all__ = ["Checkpoint", "CheckpointError", "load", "read_manifest", "save"]

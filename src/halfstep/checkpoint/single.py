"""Checkpoints of one process: complete or absent, verified, and safe to load.

In: weights as a flat dict of tensors, the rest as plain containers of tensors and
numbers. Out: a directory, written under a temporary name and renamed once it is on
disk.

    DIR/weights.safetensors    weights, readable by other libraries
    DIR/state.pt               optimizer, scaler, random states, position
    DIR/manifest.json          schema, size and SHA-256 of both files, notes, seal
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.checkpoint import atomic_directory
from halfstep.checkpoint.atomic_directory import MANIFEST, CheckpointError, os_reason
from halfstep.errors import UserError
from halfstep.reporting.table import Report, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WEIGHTS, STATE = "weights.safetensors", "state.pt"

__all__ = ["Checkpoint", "CheckpointError", "load", "read_manifest", "save"]


@dataclass(frozen=True, repr=False)
class Checkpoint(Report):
    """The contents of a checkpoint; `load` returns it."""

    weights: dict[str, Tensor]
    """Name -> tensor, on the CPU."""
    state: dict[str, Any]
    """Optimizer, scaler, random states: the `state` of `save`."""
    notes: dict[str, Any]
    """Small facts such as step, level and metrics, readable in manifest.json."""

    def __str__(self) -> str:
        """Return the number of weights and the notes."""
        return f"{format_count(len(self.weights), 'tensor')} of weights, {self.notes}"


def save(
    directory: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    notes: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Write a checkpoint directory that is complete or absent, even after a crash.

    Files are written and flushed to disk under a temporary name beside the target, and
    one rename makes them the checkpoint. Temporary files that killed processes have
    left for this name are removed.

    Args:
        directory: Must not exist yet; its parent is created if necessary.
        weights: Name -> tensor. Tied tensors are stored once.
        state: Nested dicts, lists and tuples of tensors, numbers and strings.
        notes: Values for `json.dumps`.
        replace: `directory` may exist; it is removed once the new one is on disk.

    Raises:
        CheckpointError: If `directory` exists, `state` holds anything else, or the disk
            is full, read-only or gone. No files are left.
        UserError: If safetensors is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> model = torch.nn.Linear(2, 1)
        >>> directory = Path(tempfile.mkdtemp()) / "step-10"
        >>> save(directory, model.state_dict(), {}, {"step": 10})
        >>> load(directory).notes
        {'step': 10}
    """

    def fill(part: Path) -> dict[str, Any]:
        unique, aliases = _untie(weights)
        _safetensors().save_file(unique, part / WEIGHTS)
        # Pass an open file: with a path, torch hides the reason of a failed write.
        with (part / STATE).open("wb") as file:
            torch.save(dict(state), file)
        try:
            # With mmap only the structure is read, not the tensors.
            torch.load(part / STATE, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                "the state to save holds more than tensors and plain values, and could "
                "not be loaded again; keep to dicts, lists, tuples, tensors, numbers, "
                "strings."
            ) from error
        return {"aliases": aliases, "notes": dict(notes)}

    atomic_directory.write(directory, atomic_directory.PLAIN, fill, replace=replace)


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint, after comparing every file with its SHA-256.

    Nothing in it is executed: weights are safetensors, the rest is loaded with
    `weights_only=True`. `save` has an example.

    Args:
        directory: What `save` wrote.

    Raises:
        CheckpointError: If it is missing, not a checkpoint, truncated, altered or of
            another schema; the message names the file.
        UserError: If safetensors is not installed.
    """
    manifest = read_manifest(directory)
    atomic_directory.verify(directory, manifest)
    try:
        weights = _safetensors().load_file(directory / WEIGHTS)
        for alias, name in manifest["aliases"].items():
            weights[alias] = weights[name]
        state = torch.load(directory / STATE, map_location="cpu", weights_only=True)
        return Checkpoint(weights, state, manifest["notes"])
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint file {directory / STATE} holds more than tensors and plain "
            "values; it was not written by halfstep and is not loaded."
        ) from error
    except UserError:
        raise
    except Exception as error:
        # The hashes match, so another program wrote these files.
        reason = os_reason(error) or type(error).__name__
        raise CheckpointError(
            f"checkpoint {directory} was not written by halfstep, and cannot be read: "
            f"{reason}."
        ) from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest.json, without reading the weights.

    Args:
        directory: What `save` wrote.

    Returns:
        "format", "schema", "files" (size and SHA-256 of each), "notes" and "aliases".

    Raises:
        CheckpointError: If there is none, or it is of another schema.
    """
    manifest = atomic_directory.read(directory, atomic_directory.PLAIN)
    if manifest["files"].keys() != {WEIGHTS, STATE}:
        message = f"{directory} is not a halfstep checkpoint: {MANIFEST} names others."
        raise CheckpointError(message)
    return manifest


def _untie(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors stored once, and tied name -> name of the stored tensor."""
    first: dict[tuple[object, ...], str] = {}
    unique, aliases = {}, {}
    for name, tensor in weights.items():
        # Lazily conjugated or negated tensors share memory but not values.
        view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        place = (tensor.data_ptr(), tensor.dtype, *view)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            plain = tensor.detach().resolve_conj().resolve_neg()
            unique[name] = plain.cpu().contiguous()
    return unique, aliases


def _safetensors() -> Any:  # noqa: ANN401 -- a module
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError(
            "checkpoints need safetensors: pip install 'halfstep[train]', or pip "
            "install safetensors."
        ) from error
    return safetensors.torch

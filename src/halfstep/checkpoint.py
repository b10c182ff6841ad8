"""Checkpoints that are whole or absent, checked on reading, and safe to load.

In: weights as a flat dict of tensors, the rest as plain containers of tensors and
numbers. Out: a directory, written under a temporary name and renamed when it is on
disk; reading refuses what is foreign, truncated or altered.

    DIR/weights.safetensors    weights, for everybody
    DIR/state.pt               optimizer, scaler, random numbers, position
    DIR/manifest.json          schema, size and SHA-256 of both files, notes, its seal
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 1
WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"


class CheckpointError(UserError):
    """A checkpoint that cannot be used, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    notes: dict[str, Any]
    """Small facts for readers of the manifest: step, level, metrics."""


def save(
    directory: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> None:
    """Write a checkpoint; it appears under its name whole, or not at all.

    Why: a process may die at any byte. Files are written and flushed to disk under a
    temporary name beside the target, and one rename makes them the checkpoint.

    Args:
        directory: Must not exist yet; its parent is made if need be.
        weights: Name -> tensor. Tied tensors are stored once.
        state: Nested dicts, lists, tuples of tensors, numbers, strings.
        notes: Json-able.

    Raises:
        CheckpointError: If `directory` exists, or `state` holds anything else.
    """
    if directory.exists():
        message = f"{directory} exists; a checkpoint is never written over another."
        raise CheckpointError(message)
    part = directory.with_name(f".{directory.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        unique, aliases = _untie(weights)
        _safetensors().save_file(unique, part / WEIGHTS)
        torch.save(dict(state), part / STATE)
        _check_loadable(part / STATE)
        manifest: dict[str, Any] = {
            "format": "halfstep checkpoint",
            "schema": SCHEMA,
            "files": {name: _digest(part / name) for name in (WEIGHTS, STATE)},
            "aliases": aliases,
            "notes": dict(notes),
        }
        manifest["seal"] = _seal(manifest)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for name in (WEIGHTS, STATE, MANIFEST):
            _flush(part / name)
        _flush(part)
        part.rename(directory)
        _flush(directory.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint after checking every byte of it.

    Nothing in it is executed: weights are safetensors, the rest is loaded with
    `weights_only=True`.

    Raises:
        CheckpointError: If it is missing, foreign, truncated, altered or of another
            schema; the text names the file.
    """
    manifest = read_manifest(directory)
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            message = f"checkpoint {directory} has no {name}; it is not whole."
            raise CheckpointError(message)
        found = _digest(path)
        if found["bytes"] != expected["bytes"]:
            message = (
                f"checkpoint file {path} is truncated or altered: {found['bytes']} "
                f"bytes, its manifest says {expected['bytes']}."
            )
            raise CheckpointError(message)
        if found["sha256"] != expected["sha256"]:
            message = (
                f"checkpoint file {path} is damaged: its SHA-256 is not the one in "
                f"{MANIFEST}. Resume from another checkpoint."
            )
            raise CheckpointError(message)
    weights = _safetensors().load_file(directory / WEIGHTS)
    for alias, name in manifest["aliases"].items():
        weights[alias] = weights[name]
    try:
        state = torch.load(directory / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        message = (
            f"checkpoint file {directory / STATE} holds more than tensors and plain "
            "values; it was not written by halfstep and is not loaded."
        )
        raise CheckpointError(message) from error
    return Checkpoint(weights, state, manifest["notes"])


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, its shape checked.

    Raises:
        CheckpointError: If there is none, or it is not one of this schema.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{directory} is not a halfstep checkpoint: it has no {MANIFEST}."
        raise CheckpointError(message) from error
    except ValueError as error:
        message = f"checkpoint file {path} is damaged: it is not valid JSON."
        raise CheckpointError(message) from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        message = f"{path} has schema {schema!r}; this halfstep reads schema {SCHEMA}."
        raise CheckpointError(message)
    if manifest.get("seal") != _seal(manifest):
        message = (
            f"checkpoint file {path} is damaged: its seal is not that of what it says. "
            "Resume from another checkpoint."
        )
        raise CheckpointError(message)
    return manifest


def point(pointer: Path, directory: Path) -> None:
    """Let a small file name a checkpoint beside it; replaced in one piece."""
    part = pointer.with_name(f".{pointer.name}.part-{os.getpid()}")
    try:
        part.write_text(json.dumps({"checkpoint": directory.name}), encoding="utf-8")
        _flush(part)
        part.replace(pointer)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _flush(pointer.parent)


def follow(pointer: Path) -> Path:
    """Return the checkpoint that a pointer names.

    Raises:
        CheckpointError: If there is no pointer, or it is damaged.
    """
    try:
        name = json.loads(pointer.read_text(encoding="utf-8"))["checkpoint"]
    except FileNotFoundError as error:
        message = f"there is no checkpoint here: {pointer} does not exist."
        raise CheckpointError(message) from error
    except (ValueError, KeyError, TypeError) as error:
        message = f"{pointer} is damaged: it does not name a checkpoint."
        raise CheckpointError(message) from error
    return pointer.parent / str(name)


def _untie(
    weights: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors stored once, and the other names of tied ones."""
    first: dict[tuple[object, ...], str] = {}
    unique, aliases = {}, {}
    for name, tensor in weights.items():
        # A lazily conjugated or negated tensor shares memory, but not numbers.
        view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        place = (tensor.data_ptr(), tensor.dtype, *view)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            plain = tensor.detach().resolve_conj().resolve_neg()
            unique[name] = plain.cpu().contiguous()
    return unique, aliases


def _check_loadable(path: Path) -> None:
    """Refuse a state that `load` would refuse, while the run that holds it lives."""
    try:
        # Mapped, so that only the structure is read, not the tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        message = (
            "the state to save holds more than tensors and plain values, and could not "
            "be loaded again; keep to dicts, lists, tuples, tensors, numbers, strings."
        )
        raise CheckpointError(message) from error


def _seal(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that a manifest says besides."""
    facts = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory; its rename is durable by itself.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:  # noqa: ANN401 -- a module
    try:
        import safetensors.torch
    except ImportError as error:
        message = (
            "checkpoints need safetensors: pip install 'halfstep[train]', or pip "
            "install safetensors."
        )
        raise UserError(message) from error
    return safetensors.torch

"""Damaged, foreign and hostile checkpoints are refused, with the file's name."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

from halfstep.checkpoint import Checkpoint, CheckpointError, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = ("weights.safetensors", "state.pt", "manifest.json")
NOTES = {"step": 7, "level": "O2 bf16", "loss": 0.125, "tags": ["a", None], "s": "\xe9"}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a checkpoint with a tie."""
    tied = torch.randn(3, 3)
    weights = {"0.weight": tied, "1.weight": tied, "0.bias": torch.randn(3).bfloat16()}
    state = {
        "step": 3,
        "momentum": [torch.randn(3), torch.ones(2)],
        "rng": torch.get_rng_state(),
    }
    save(tmp_path / "kept", weights, state, NOTES)
    return tmp_path / "kept"


def refusal(directory: Path) -> str:
    """Return why a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return str(caught.value)


# Refused on loading


def harmless(directory: Path, original: Checkpoint) -> bool:
    """Say whether a checkpoint still says what it said; False where it is refused."""
    try:
        found = load(directory)
    except CheckpointError:
        return False
    assert found.notes == original.notes
    torch.testing.assert_close(found.weights, original.weights, rtol=0, atol=0)
    torch.testing.assert_close(found.state, original.state, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("name", FILES)
def test_flipped_byte(name: str, kept: Path) -> None:
    """Law: one altered byte is refused, and never loaded as something else.

    In the manifest every byte is tried: only blanks between words may change freely.
    """
    original, path = load(kept), kept / name
    content = path.read_bytes()
    step = 1 if name == "manifest.json" else len(content) // 40
    for position in range(0, len(content), step):
        for flip in (0x01, 0x20, 0x80):
            altered = bytearray(content)
            altered[position] ^= flip
            path.write_bytes(altered)
            if harmless(kept, original):
                assert name == "manifest.json"
                assert json.loads(altered) == json.loads(content)
    path.write_bytes(content)
    assert harmless(kept, original)


@pytest.mark.parametrize("name", FILES)
def test_truncated_or_longer(name: str, kept: Path) -> None:
    """Law: a file that ends early, or late, is refused."""
    path = kept / name
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert refusal(kept) == (
            f"checkpoint file {path} is damaged: it is not valid JSON."
            if name == "manifest.json"
            else f"checkpoint file {path} is truncated or altered: {length} bytes, its "
            f"manifest says {len(content)}. Resume from another checkpoint."
        )
    path.write_bytes(content + b"0")
    assert str(path) in refusal(kept)


def test_damage_is_named(kept: Path) -> None:
    """Law: each kind of damage is told apart, with the file and what to do."""
    state, manifest = kept / "state.pt", kept / "manifest.json"
    content, said = bytearray(state.read_bytes()), manifest.read_text(encoding="utf-8")
    content[100] ^= 1
    state.write_bytes(content)
    assert refusal(kept) == (
        f"checkpoint file {state} is damaged: its SHA-256 is not the one in "
        "manifest.json. Resume from another checkpoint."
    )
    manifest.write_text(said.replace("1.weight", "9.weight"), encoding="utf-8")
    assert refusal(kept) == (
        f"checkpoint file {manifest} is damaged: its seal is not that of what it says. "
        "Resume from another checkpoint."
    )
    state.unlink()
    manifest.write_text(said, encoding="utf-8")
    assert refusal(kept) == (
        f"checkpoint {kept} has no state.pt; it is not whole. Resume from another "
        "checkpoint."
    )
    manifest.write_text(said.replace('"schema": 1', '"schema": 2'), encoding="utf-8")
    assert refusal(kept) == f"{manifest} has schema 2; this halfstep reads schema 1."
    for foreign in ("[]", "{}", "null"):
        manifest.write_text(foreign, encoding="utf-8")
        assert refusal(kept) == (
            f"{manifest} has schema None; this halfstep reads schema 1."
        )


@pytest.mark.parametrize("kind", ["absent", "empty", "foreign", "file"])
def test_no_checkpoint(kind: str, tmp_path: Path) -> None:
    """Law: what never was a checkpoint is called that."""
    directory = tmp_path / "c"
    if kind == "file":
        directory.touch()
    elif kind != "absent":
        directory.mkdir()
    if kind == "foreign":
        safetensors.torch.save_file({"w": torch.ones(1)}, directory / FILES[0])
    assert refusal(directory) == (
        f"{directory} is not a halfstep checkpoint: it has no manifest.json."
    )


class Trap:
    """A value whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [False, True], ids=["torch", "pickle"])
def test_code_is_not_run(plain: bool, kept: Path, tmp_path: Path) -> None:
    """Law: code in a state.pt whose manifest fits it is refused, and not run."""
    state, manifest, trap = kept / "state.pt", kept / "manifest.json", tmp_path / "trap"
    if plain:
        state.write_bytes(pickle.dumps({"a": Trap(trap)}, protocol=2))
    else:
        torch.save({"a": Trap(trap)}, state)
    said = json.loads(manifest.read_text(encoding="utf-8"))
    content = state.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    said["files"]["state.pt"] = {"bytes": len(content), "sha256": digest}
    del said["seal"]
    said["seal"] = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    manifest.write_text(json.dumps(said), encoding="utf-8")
    assert refusal(kept) == (
        f"checkpoint file {state} holds more than tensors and plain values; it was not "
        "written by halfstep and is not loaded."
    )
    assert not trap.exists()
    # Twin: the trap works, and everything but the code was right.
    if plain:
        pickle.loads(content)  # noqa: S301
    else:
        torch.load(state, weights_only=False)
    assert trap.is_dir()

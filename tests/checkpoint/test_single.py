"""Checkpoints: whole or absent, exact to the bit, and refused when anything changed."""

import json
import os
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from data_files import Trap
from hypothesis import given
from hypothesis import strategies as st
from sharded_files import reseal
from torch import Tensor, nn

from halfstep.checkpoint import (
    Checkpoint,
    CheckpointError,
    atomic_directory,
    load,
    save,
)
from halfstep.numerics.formats import map_tensors

FILES = ("weights.safetensors", "state.pt", "manifest.json")
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
)
NOTES = {"step": 7, "level": "O2 bf16", "loss": 0.125, "tags": ["a", None], "s": "\xe9"}


def number(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


SHAPES = st.sampled_from([(), (0,), (3,), (2, 0), (2, 3)])
TENSORS = st.builds(number, st.integers(0, 99), st.sampled_from(DTYPES), SHAPES)
NAMES = st.text("abc.", min_size=1, max_size=6)
STATES = st.recursive(
    st.one_of(TENSORS, st.none(), st.booleans(), st.integers(), st.text(max_size=4))
    | st.floats(allow_nan=False),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(NAMES | st.integers(), inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    """Return whether nested values are alike to the bit, in their types too."""

    def shown(tensor: Tensor) -> Any:
        flat = tensor.contiguous().reshape(-1)
        return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()

    return repr(map_tensors(left, shown)) == repr(map_tensors(right, shown))


def trained() -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    return dict(model.state_dict()), state


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    weights, state = trained()
    save(tmp_path / "kept", weights, state, NOTES)
    return tmp_path / "kept"


# Round trip


@given(weights=st.dictionaries(NAMES, TENSORS, max_size=4), state=STATES)
def test_round_trip(
    weights: dict[str, Tensor], state: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Law: weights, nested state and notes come back with type, shape and every bit."""
    directory = tmp_path_factory.mktemp("round") / "deep" / "name"
    save(directory, weights, {"state": state}, NOTES)
    found = load(directory)
    assert same(dict(sorted(found.weights.items())), dict(sorted(weights.items())))
    assert same(found.state, {"state": state})
    assert found.notes == NOTES
    assert {file.name for file in directory.iterdir()} == set(FILES)
    assert [file.name for file in directory.parent.iterdir()] == ["name"]


def test_tied_tensors(tmp_path: Path) -> None:
    """Law: tied tensors are stored once and come back tied; equal ones stay apart."""
    tied, apart = torch.ones(1000), torch.ones(1000)
    save(tmp_path / "c", {"a": tied, "b": tied, "c": apart, "d": tied}, {}, {})
    stored = safetensors.torch.load_file(tmp_path / "c" / FILES[0])
    assert stored.keys() == {"a", "c"}
    found = load(tmp_path / "c").weights
    assert found["a"] is found["b"] is found["d"]
    assert found["c"] is not found["a"]
    assert torch.equal(found["c"], apart)


def test_memory_shared_but_not_tied(tmp_path: Path) -> None:
    """Law: tensors that read one memory differently are no aliases of each other.

    What needs gradients is saved as a tensor, and stays as it was.
    """
    base = torch.arange(6.0).reshape(2, 3)
    spin = torch.ones(2) * 1j
    weights = {
        "t": base.t(),
        "base": base,
        "none": torch.empty(0),
        "nothing": torch.empty(0),
        "spin": spin,
        "back": spin.conj(),
        "minus": torch._neg_view(base),
        "wide": torch.ones(1).expand(4),
        "learned": nn.Parameter(torch.ones(2)),
    }
    save(tmp_path / "c", weights, {}, {})
    plain = {n: t.detach().resolve_conj().resolve_neg() for n, t in weights.items()}
    assert weights["learned"].requires_grad
    found = load(tmp_path / "c").weights
    assert same(dict(sorted(found.items())), dict(sorted(plain.items())))
    assert found["none"] is not found["nothing"]


# Refused on saving


def test_existing_directory_is_refused(kept: Path) -> None:
    """Law: nothing is written over, be it a checkpoint, empty, or a file."""
    before = {name: (kept / name).read_bytes() for name in FILES}
    (kept.parent / "empty").mkdir()
    (kept.parent / "file").touch()
    for name in ("kept", "empty", "file"):
        target = kept.parent / name
        with pytest.raises(CheckpointError, match=f"^{target} exists; "):
            save(target, {}, {}, {})
    assert {name: (kept / name).read_bytes() for name in FILES} == before
    assert sorted(p.name for p in kept.parent.iterdir()) == ["empty", "file", "kept"]


@pytest.mark.parametrize(
    "culprit", [np.float64(1), np.arange(2), pathlib.PurePath(), print], ids=repr
)
def test_what_could_not_be_loaded_is_not_saved(culprit: object, tmp_path: Path) -> None:
    """Law: a state that `load` would refuse is refused while the run still lives."""
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        save(tmp_path / "c", {}, {"a": [culprit]}, {})
    assert not list(tmp_path.iterdir())


class Crash(BaseException):
    """What ends a process."""


def crash_at(
    call: int, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    real, calls = getattr(where, name), [0]

    def crashing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, crashing)


WRITING = [
    (torch, "save", 1),
    (safetensors.torch, "save_file", 1),
    (atomic_directory, "digest", 2),
    *((os, "fsync", call) for call in (1, 2, 3, 4, 5)),
]


@pytest.mark.parametrize(
    ("where", "name", "call"), WRITING, ids=[f"{n}-{c}" for _, n, c in WRITING]
)
def test_failure_while_writing(
    where: object, name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: whatever fails before the rename, no directory and no temporary is left.

    Once it has its name it is whole, even if the last flush fails.
    """
    crash_at(call, monkeypatch, where, name)
    with pytest.raises(Crash):
        save(tmp_path / "c", {"w": torch.ones(2)}, {"s": 1}, NOTES)
    renamed = call == 5
    assert [path.name for path in tmp_path.iterdir()] == ["c"] * renamed
    assert not renamed or load(tmp_path / "c").state == {"s": 1}


def test_notes_that_are_no_json(tmp_path: Path) -> None:
    """Law: notes that cannot be written leave nothing behind."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path / "c", {}, {}, {"tensor": torch.ones(1)})
    assert not list(tmp_path.iterdir())


# Replaced


def test_replaced(kept: Path) -> None:
    """Law: what is replaced stays until the new one is whole, be it anything."""
    (kept.parent / "file").touch()
    (kept.parent / "link").symlink_to("nowhere")
    for name in ("kept", "file", "link", "new"):
        save(kept.parent / name, {}, {"name": name}, {}, replace=True)
        assert load(kept.parent / name).state == {"name": name}
    names = sorted(path.name for path in kept.parent.iterdir())
    assert names == ["file", "kept", "link", "new"]


# Refused on loading


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return str(caught.value)


def harmless(directory: Path, original: Checkpoint) -> bool:
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
    """Law: a file that ends early, or late, is refused by name."""
    path = kept / name
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert f"checkpoint file {path} is " in refusal(kept)
    path.write_bytes(content + b"0")
    assert str(path) in refusal(kept)


def test_damage_is_named(kept: Path) -> None:
    """Law: each kind of damage is told apart, with the file and what to do."""
    state, manifest = kept / "state.pt", kept / "manifest.json"
    content, said = bytearray(state.read_bytes()), manifest.read_text(encoding="utf-8")
    remedy = "Resume from another checkpoint."
    content[100] ^= 1
    state.write_bytes(content)
    sums = f"{state} is damaged: its SHA-256 is not the one in manifest.json. {remedy}"
    assert refusal(kept) == f"checkpoint file {sums}"
    state.write_bytes(content[:9])
    bytes_ = f"9 bytes, its manifest says {len(content)}. {remedy}"
    assert refusal(kept).endswith(f"{state} is truncated or altered: {bytes_}")
    state.unlink()
    missing = f"checkpoint {kept} has no state.pt; it is incomplete. {remedy}"
    assert refusal(kept) == missing
    seal = "is damaged: its seal does not match its content."
    schema = "has schema {}; this halfstep reads schema 1."
    for text, words in (
        (said.replace("1.weight", "9.weight"), seal),
        (said[:9], "is damaged: it is not valid JSON."),
        (said.replace('"schema": 1', '"schema": 2'), schema.format(2)),
        *((foreign, schema.format(None)) for foreign in ("[]", "{}", "null")),
    ):
        manifest.write_text(text, encoding="utf-8")
        assert f"{manifest} {words}" in refusal(kept)


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


@pytest.mark.parametrize("plain", [False, True], ids=["torch", "pickle"])
def test_code_is_not_run(plain: bool, kept: Path, tmp_path: Path) -> None:
    """Law: code in a state.pt whose manifest fits it is refused, and not run."""
    state, trap = kept / "state.pt", tmp_path / "trap"
    if plain:
        state.write_bytes(pickle.dumps({"a": Trap(trap)}, protocol=2))
    else:
        torch.save({"a": Trap(trap)}, state)
    reseal(kept)
    assert f"{state} holds more than tensors and plain values; " in refusal(kept)
    assert not trap.exists()
    # Twin: the trap works, and everything but the code was right.
    if plain:
        pickle.loads(state.read_bytes())  # noqa: S301
    else:
        torch.load(state, weights_only=False)
    assert trap.is_dir()

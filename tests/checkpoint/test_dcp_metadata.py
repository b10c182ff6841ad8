"""Indices of a sharded checkpoint that were changed, and sealed by whoever did it."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharded_files import INDEX, PART, refusal, reseal, trained
from small_training import one_thread, same
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from halfstep.checkpoint import dcp_metadata
from halfstep.checkpoint import sharded as checkpoint_sharded
from halfstep.session import fsdp_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


FOREIGN = (
    "{} holds more than tensors and plain values, or none; it was not written by "
    "halfstep and is not loaded."
)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sound directory."""
    path = tmp_path_factory.mktemp("original") / "c"
    with one_thread():
        fsdp_checkpoint.save(trained(), path, {"step": 1})
    return path


@pytest.fixture
def kept(original: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may spoil."""
    return shutil.copytree(original, tmp_path / "c")


def edited(kept: Path, change: Callable[[Any], None]) -> None:
    """Change a sound index, and seal it."""
    found = FileSystemReader(kept).read_metadata()
    change(found)
    (kept / INDEX).write_bytes(pickle.dumps(found))
    reseal(kept)


def _first(found: Any, **change: Any) -> None:
    place = next(iter(found.storage_data.values()))
    for name, value in change.items():
        setattr(place, name, value)


def _size(found: Any, size: Any) -> None:
    next(iter(found.state_dict_metadata.values())).size = size


NAME = "weights/0.weight"
"""A tensor of 16 times 6 numbers."""


def _parts(found: Any, *parts: tuple[Any, Any], size: Any = (16, 6)) -> None:
    """Let a tensor be made of parts, each of an offset and sizes, all in one place."""
    entry = found.state_dict_metadata[NAME]
    place = found.storage_data.pop(MetadataIndex(NAME, (0, 0)))
    entry.size = torch.Size(size)
    entry.chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in parts
    ]
    for offsets, _ in parts:
        found.storage_data[MetadataIndex(NAME, offsets)] = place


NOT_MADE_UP = f"it is no index (the parts of {NAME} do not make it up)."
NOT_INSIDE = f"it is no index (a part of {NAME} is not inside of it)."
NOT_THERE = f"it is no index (a part of {NAME} is in no file, or cut)."
EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no parts": (_parts, NOT_MADE_UP),
    "a part missing": (
        lambda found: _parts(found, ((0, 0), (8, 6)), ((8, 0), (8, 5))),
        NOT_MADE_UP,
    ),
    "parts that overlap": (
        lambda found: _parts(found, ((0, 0), (8, 6)), ((4, 0), (8, 6))),
        NOT_MADE_UP,
    ),
    "a part twice": (
        lambda found: _parts(found, ((0, 0), (8, 6)), ((0, 0), (8, 6))),
        NOT_MADE_UP,
    ),
    "empty parts": (lambda found: _parts(found, *[((0, 0), (0, 6))] * 3), NOT_MADE_UP),
    "a part outside": (lambda found: _parts(found, ((1, 0), (16, 6))), NOT_INSIDE),
    "a flat part": (lambda found: _parts(found, ((0,), (96,))), NOT_INSIDE),
    "an uneven part": (lambda found: _parts(found, ((0, 0), (96,))), NOT_INSIDE),
    "no place": (
        lambda found: found.storage_data.pop(MetadataIndex(NAME, (0, 0))),
        NOT_THERE,
    ),
    "too short a place": (
        lambda found: _first(found, length=16 * 6 * 4 - 1),
        NOT_THERE,
    ),
    "too large a part": (
        lambda found: _parts(found, ((0, 0), (10**9, 10**6)), size=(10**9, 10**6)),
        NOT_THERE,
    ),
    "too large a number": (
        lambda found: _first(found, length=2**63),
        "it is no index (int in place of a count).",
    ),
    "outside": (
        lambda found: _first(found, relative_path="../other/x"),
        "it is no index (it points to ../other/x).",
    ),
    "compressed": (
        lambda found: _first(found, transform_descriptors=["zip"]),
        f"it is no index ({PART} is compressed).",
    ),
    "before the start": (
        lambda found: _first(found, offset=-1),
        "it is no index (int in place of a count).",
    ),
    "no number": (
        lambda found: _first(found, length="9"),
        "it is no index (str in place of a count).",
    ),
    "no size": (
        lambda found: _size(found, [2]),
        "it is no index (list in place of a size).",
    ),
    "no entry": (
        lambda found: found.state_dict_metadata.update(a=3),
        "it is no index (int in place of TensorStorageMetadata).",
    ),
    "no places": (
        lambda found: setattr(found, "storage_data", None),
        "it is no index ('NoneType' object is not iterable).",
    ),
}


@pytest.mark.parametrize("word", EDITS)
def test_index_of_something_else(word: str, kept: Path) -> None:
    """Law: an index whose names or numbers are none is refused, and not followed."""
    change, fault = EDITS[word]
    edited(kept, change)
    line = refusal(kept)
    assert line == f"checkpoint file {kept / INDEX} is damaged: {fault}"


def test_edits_are_what_is_refused(kept: Path) -> None:
    """Law: an index written anew, with nothing changed, is taken."""
    edited(kept, repr)
    session = trained(1)
    fsdp_checkpoint.load(session, kept)
    assert same(session.state_dict(), trained().state_dict())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_protocols(kept: Path, protocol: int) -> None:
    """Law: however objects are numbered, a sound index is taken.

    Properties that loading does not use, as strides, are left out.
    """
    found = FileSystemReader(kept).read_metadata()
    (kept / INDEX).write_bytes(pickle.dumps(found, protocol))
    read = dcp_metadata.read(kept / INDEX, [PART])
    for entry in found.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = TensorProperties(entry.properties.dtype)
    assert read.state_dict_metadata == found.state_dict_metadata


PUTS = {
    "LONG_BINPUT": b"r" + struct.pack("<I", 2**32 - 1),
    "BINPUT": b"q\x03",
    "PUT": b"p4294967295\n",
    "negative": b"p-1\n",
}


@pytest.mark.parametrize("word", PUTS)
def test_too_high_a_number_of_an_object(kept: Path, word: str) -> None:
    """Law: a few bytes cannot take memory for objects that are not there."""
    (kept / INDEX).write_bytes(b"\x80\x04N" + PUTS[word] + b".")
    reseal(kept)
    line = refusal(kept)
    assert line.startswith(f"checkpoint file {kept / INDEX} is damaged: it is no index")
    assert line.endswith(" in place of 2 or less).") or word == "negative"


def test_overlap() -> None:
    """Law: parts overlap exactly where some number is in two of them."""
    draw = random.Random(0)  # noqa: S311 -- boxes are no secret
    seen = {True: 0, False: 0}
    for _ in range(2000):
        dims, parts = draw.randint(1, 3), []
        count = torch.zeros((4,) * dims)
        for _ in range(draw.randint(0, 4)):
            offsets = [draw.randint(0, 3) for _ in range(dims)]
            sizes = [draw.randint(0, min(3, 4 - start)) for start in offsets]
            parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            count[tuple(map(_slice, offsets, sizes))] += 1
        right = bool((count > 1).any())
        assert dcp_metadata.parts_overlap(parts) is right, parts
        seen[right] += 1
    assert min(seen.values()) > 200


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)


class Trap:
    """A value whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# Sound indices of what halfstep does not write


@pytest.mark.parametrize("name", ["rest", NAME])
def test_bytes_are_not_unpickled(kept: Path, tmp_path: Path, name: str) -> None:
    """Law: an entry that torch would unpickle is refused by its kind."""
    (kept / PART).write_bytes(pickle.dumps(Trap(tmp_path / "trap")))

    def change(found: Any) -> None:
        found.state_dict_metadata[name] = BytesStorageMetadata()
        place = next(iter(found.storage_data.values()))
        place.length = (kept / PART).stat().st_size
        found.storage_data[MetadataIndex(name)] = place
        for key in [*found.state_dict_metadata]:
            if key not in {name, "rest"}:
                del found.state_dict_metadata[key]

    edited(kept, change)
    assert refusal(kept) == FOREIGN.format(kept)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("name", ["rest", NAME])
def test_absurd_sizes(kept: Path, name: str) -> None:
    """Law: a tensor for which no machine has memory is refused by name and size."""

    def change(found: Any) -> None:
        entry = found.state_dict_metadata[name]
        entry.size = torch.Size([10**15, *entry.size[1:]])
        entry.chunks[0].sizes = entry.size
        offsets = (0,) * len(entry.size)
        found.storage_data[MetadataIndex(name, offsets)].length = 2**60

    edited(kept, change)
    line = refusal(kept)
    assert line.startswith(f"the checkpoint holds {name}, a tensor of torch.")
    assert line.endswith("], for which there is no memory here.")
    assert str(10**15) in line
    assert len(line.split()) <= 35


RESTS: dict[str, Any] = {
    "nothing": {},
    "a list": [1],
    "a number": 3,
    "no groups": {"parameters": ["a"], "small": {}, "masters": {}},
    "no masters": {"parameters": [], "groups": [], "small": {}},
    "groups that are none": {"parameters": ["a"], "groups": [3], "small": {}},
    "too few names": {
        "parameters": [],
        "groups": [{"params": [0]}],
        "small": {},
        "masters": {},
    },
    "moments of another": {
        "parameters": [],
        "groups": [],
        "small": {"a": {}},
        "masters": {},
    },
}


@pytest.mark.parametrize("word", RESTS)
def test_plain_values_of_something_else(tmp_path: Path, word: str) -> None:
    """Law: what does not hold what a session needs is refused in one line."""
    file = io.BytesIO()
    torch.save(RESTS[word], file)
    rest = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    checkpoint_sharded.write({"rest": rest}, tmp_path / "c", {})
    assert refusal(tmp_path / "c") == FOREIGN.format(tmp_path / "c")

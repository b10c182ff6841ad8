"""The index of a sharded checkpoint is read as data: nothing in it can run."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_files import INDEX, refusal, reseal, trained
from small_training import one_thread
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from halfstep.checkpoint import atomic_directory
from halfstep.checkpoint import dcp_metadata as checkpoint_dcp_metadata
from halfstep.checkpoint.atomic_directory import MANIFEST, CheckpointError, digest
from halfstep.session import fsdp_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


def test_index_is_torchs(original: Path) -> None:
    """Law: what is read as data is what torch reads by running it."""
    found = checkpoint_dcp_metadata.read(original / INDEX)
    right = FileSystemReader(original).read_metadata()
    for entry in right.state_dict_metadata.values():
        properties = getattr(entry, "properties", None)
        if hasattr(properties, "strides"):  # of the tensor saved: no reader asks
            properties.strides = None
    assert found.state_dict_metadata == right.state_dict_metadata
    assert found.storage_data.keys() == right.storage_data.keys()
    for key, place in right.storage_data.items():
        mine = found.storage_data[key]
        assert mine.relative_path == place.relative_path
        assert (mine.offset, mine.length) == (place.offset, place.length)
        assert getattr(place, "transform_descriptors", None) is None
    offsets = [(key.fqn, key.offset, key.index) for key in found.storage_data]
    assert offsets == [(key.fqn, key.offset, key.index) for key in right.storage_data]


# Code


class Trap:
    """A value whose unpickling calls something."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self.reduced = function, given

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


_META = "torch.distributed.checkpoint.metadata"


def attribute_of_a_class(path: Path) -> bytes:
    """Return a pickle that plants a function in a class of torch, then calls it.

    BUILD with (None, {name: value}) sets attributes of whatever it is given.
    """
    planted = _text("__setstate__") + _name("torch.serialization", "_get_layout")
    cls = _name(_META, "StorageMeta")
    change = cls + b"N}" + planted + b"s\x86b"
    use = cls + b")\x81" + _text(str(path)) + b"b"
    return b"\x80\x04" + change + b"0" + use + b"."


def dotted(path: Path) -> bytes:
    """Return a pickle that walks from an allowed class to a function beside it."""
    del path
    walk = (
        _name(_META, "os.mkdir") + b"0" + _name(_META, "Metadata.__init__.__globals__")
    )
    return b"\x80\x04" + walk + b"."


def old_names(path: Path) -> bytes:
    """Return a pickle of protocol 0, whose builtins have other names."""
    return f"c__builtin__\neval\n(S'open({str(path)!r}, \"w\")'\ntR.".encode()


def member_of_another(path: Path) -> bytes:
    """Return a pickle that takes an attribute of something that is no enumeration."""
    del path
    call = _name("builtins", "getattr") + _name(_META, "Metadata") + _text("__init__")
    return b"\x80\x04" + call + b"\x86R."


def _plain(*given: Any) -> Callable[[Path], bytes]:
    return lambda path: pickle.dumps(Trap(*given, str(path)), protocol=4)


def within(path: Path) -> bytes:
    """Return a sound index with a trap deep inside."""
    found = dcp_metadata.Metadata(
        {}, {"planner": [{"a": (Trap(os.mkdir, str(path)),)}]}
    )
    found.storage_data = {}
    return pickle.dumps(found)


TRAPS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "mkdir": (_plain(os.mkdir), f"{os.mkdir.__module__}.mkdir"),
    "open": (
        lambda path: pickle.dumps(Trap(open, str(path), "w")),
        f"{open.__module__}.open",
    ),
    "eval": (_plain(eval), "builtins.eval"),
    "system": (_plain(os.system), f"{os.system.__module__}.system"),
    "a path's method": (_plain(Path.touch), f"{Path.__module__}.Path.touch"),
    "torch.load": (_plain(torch.load), "torch.serialization.load"),
    "within": (within, f"{os.mkdir.__module__}.mkdir"),
    "protocol 0": (old_names, "__builtin__.eval"),
    "by a dot": (dotted, f"{_META}.os.mkdir"),
    "by getattr": (member_of_another, "builtins.getattr"),
}


@pytest.mark.parametrize("sound_seal", [True, False], ids=["sealed", "not sealed"])
@pytest.mark.parametrize("word", TRAPS)
def test_code_is_not_run(
    word: str, sound_seal: bool, kept: Path, tmp_path: Path
) -> None:
    """Law: an index that would run code is refused, unrun; no seal helps it."""
    make, name = TRAPS[word]
    trap = tmp_path / "trap"
    (kept / INDEX).write_bytes(make(trap))
    if sound_seal:
        reseal(kept)
    else:
        (kept / MANIFEST).unlink()
    assert refusal(kept) == (
        f"checkpoint file {kept / INDEX} holds more than an index ({name}); it was not "
        "written by halfstep and is not loaded."
    )
    assert not trap.exists()


@pytest.mark.parametrize("word", ["mkdir", "within"])
def test_the_traps_work(word: str, tmp_path: Path) -> None:
    """Law: what the others refuse would have run."""
    pickle.loads(TRAPS[word][0](tmp_path / "trap"))  # noqa: S301 -- our own
    assert (tmp_path / "trap").exists()


def test_classes_are_not_changed(kept: Path, tmp_path: Path) -> None:
    """Law: by no allowed name can a class of torch be changed."""
    data = attribute_of_a_class(tmp_path)
    (kept / INDEX).write_bytes(data)
    reseal(kept)
    assert "is damaged: it is no index" in refusal(kept)
    assert not hasattr(dcp_metadata.StorageMeta, "__setstate__")
    # Twin: read as any pickle, these very bytes change it.
    try:
        with pytest.raises(TypeError, match="_get_layout"):
            pickle.loads(data)  # noqa: S301 -- our own
        assert hasattr(dcp_metadata.StorageMeta, "__setstate__")
    finally:
        del dcp_metadata.StorageMeta.__setstate__


def test_enumeration_by_name(tmp_path: Path) -> None:
    """Law: a member that Python pickles by its name is read, and looked up nowhere."""
    data = tmp_path / INDEX
    call = _name("builtins", "getattr") + _name(_META, "_MEM_FORMAT_ENCODING")
    found = b"\x80\x04" + call + _text("TORCH_CONTIGUOUS_FORMAT") + b"\x86R."
    data.write_bytes(found)
    with pytest.raises(CheckpointError, match="getattr in place of Metadata"):
        checkpoint_dcp_metadata.read(data)
    assert pickle.loads(found).value == 0  # noqa: S301 -- our own


def test_code_in_a_tensor(kept: Path, tmp_path: Path) -> None:
    """Law: code in the tensor of all that is small, or in a part, is not run."""
    file = io.BytesIO()
    torch.save({"a": [Trap(os.mkdir, str(tmp_path / "trap"))]}, file)
    rest = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    shutil.rmtree(kept)
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save({"rest": rest}, checkpoint_id=kept)
    files = {path.name: digest(path) for path in kept.iterdir()}
    atomic_directory.commit(
        kept,
        shutil.copytree(kept, tmp_path / "part"),
        {
            "format": atomic_directory.SHARDED,
            "files": files,
            "notes": {},
        },
    )
    assert refusal(kept) == (
        f"{kept} holds more than tensors and plain values, or none; it was not written "
        "by halfstep and is not loaded."
    )
    (part,) = kept.glob("*.distcp")
    torch.save({"a": Trap(os.mkdir, str(tmp_path / "trap"))}, part)
    reseal(kept)
    assert str(kept) in refusal(kept)
    assert not (tmp_path / "trap").exists()

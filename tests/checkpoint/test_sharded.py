"""Sharded checkpoints that were changed, and sealed by whoever did it."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import Trap
from sharded_files import (  # noqa: F401 -- fixtures among them
    INDEX,
    PART,
    kept_checkpoint,
    original_checkpoint,
    refusal,
    reseal,
    trained,
)
from small_training import same
from torch.distributed.checkpoint.filesystem import FileSystemReader

from halfstep.checkpoint import sharded
from halfstep.session import fsdp_checkpoint

FOREIGN = (
    "{} holds more than tensors and plain values, or none; it was not written by "
    "halfstep and is not loaded."
)
NAME = "weights/0.weight"
"""A tensor of 16 times 6 numbers."""


def edited(kept: Path, change: Callable[[Any], object]) -> None:
    index = json.loads((kept / INDEX).read_text(encoding="utf-8"))
    change(index)
    (kept / INDEX).write_text(json.dumps(index), encoding="utf-8")
    reseal(kept)


def test_index_is_torchs(original: Path) -> None:
    """Law: the index of plain values says what torch's own says."""
    index = sharded.verify(original, "rest")
    expected = FileSystemReader(original).read_metadata()
    assert index.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in expected.state_dict_metadata.items():
        own: Any = index.state_dict_metadata[name]
        assert (own.size, own.chunks) == (entry.size, entry.chunks)
        assert own.properties.dtype == entry.properties.dtype
    assert index.storage_data.keys() == expected.storage_data.keys()
    for key, place in expected.storage_data.items():
        assert index.storage_data[key][:3] == (
            *(place.relative_path, place.offset, place.length),
        )


def _parts(*boxes: tuple[Any, Any], size: Any = (16, 6)) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        place = index[NAME]["parts"][0][2:]
        index[NAME]["size"] = size
        index[NAME]["parts"] = [[*box, *place] for box in boxes]

    return change


def _place(file: Any = PART, start: Any = 0, length: Any = 10**6) -> Any:
    def change(index: Any) -> None:
        index[NAME]["parts"][0][2:] = [file, start, length]

    return change


VAST = (10**9, 10**6)
NOT_MADE_UP = f"the parts of {NAME} do not make it up"
NOT_INSIDE = f"a part of {NAME} is not inside of it"
NOT_THERE = f"a part of {NAME} is in no file, or cut"
EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no parts": (_parts(), NOT_MADE_UP),
    "a part missing": (_parts(((0, 0), (8, 6)), ((8, 0), (8, 5))), NOT_MADE_UP),
    "a part twice": (_parts(((0, 0), (8, 6)), ((0, 0), (8, 6))), NOT_MADE_UP),
    "empty parts": (_parts(*[((0, 0), (0, 6))] * 3), NOT_MADE_UP),
    "a part outside": (_parts(((1, 0), (16, 6))), NOT_INSIDE),
    "a flat part": (_parts(((0,), (16,))), "zip() argument"),
    "too large a part": (_parts(((0, 0), VAST), size=VAST), NOT_THERE),
    "too short a place": (_place(length=16 * 6 * 4 - 1), NOT_THERE),
    "outside": (_place("../other/x"), NOT_THERE),
    "too large a number": (_place(length=2**63), "in place of a count"),
    "before the start": (_place(start=-1), "-1 in place of a count"),
    "no number": (_place(length="9"), "'9' in place of a count"),
    "no place": (lambda index: index[NAME]["parts"][0].pop(), ""),
    "no dtype": (lambda index: index[NAME].update(dtype="eval"), "'eval'"),
    "no size": (lambda index: index[NAME].pop("size"), "'size'"),
    "no entry": (lambda index: index.update(a=3), "'int' object"),
}


@pytest.mark.parametrize("word", EDITS)
def test_index_of_something_else(word: str, kept: Path) -> None:
    """Law: an index whose names or numbers are none is refused, and not followed."""
    change, fault = EDITS[word]
    edited(kept, change)
    line = refusal(kept)
    start = f"checkpoint file {kept / INDEX} is damaged: it is no index ("
    assert line.startswith(start)
    assert fault in line


def test_no_index(kept: Path) -> None:
    """Law: whatever stands in place of an index is refused in one line."""
    for text in ("[1, 2]", "{", "[" * 100_000, "3"):
        (kept / INDEX).write_text(text, encoding="utf-8")
        reseal(kept)
        assert "is damaged: it is no index (" in refusal(kept)


def test_edits_are_what_is_refused(kept: Path) -> None:
    """Law: an index written anew, with nothing changed, is taken."""
    edited(kept, repr)
    session = trained(1)
    fsdp_checkpoint.load(session, kept)
    assert same(session.state_dict(), trained().state_dict())


@pytest.mark.parametrize("name", ["rest", NAME])
def test_absurd_sizes(kept: Path, name: str) -> None:
    """Law: a tensor for which no machine has memory is refused by name and size."""

    def change(index: Any) -> None:
        size = [10**15, *index[name]["size"][1:]]
        index[name] |= {"size": size, "parts": [[[0] * len(size), size, PART, 0, 1]]}
        index[name]["parts"][0][-1] = 2**60

    edited(kept, change)
    line = refusal(kept)
    assert line.startswith(f"the checkpoint holds {name}, a tensor of torch.")
    assert line.endswith("], for which there is no memory here.")
    assert str(10**15) in line
    assert len(line.split()) <= 35


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "not sealed"])
def test_torchs_index_is_not_run(kept: Path, tmp_path: Path, is_sealed: bool) -> None:
    """Law: code in torch's own index is never run; torch itself would run it."""
    trap = tmp_path / "trap"
    (kept / sharded.TORCH_INDEX).write_bytes(pickle.dumps(Trap(trap)))
    if is_sealed:
        reseal(kept)
        fsdp_checkpoint.load(trained(1), kept)
    else:
        assert f"{sharded.TORCH_INDEX} is truncated or altered" in refusal(kept)
    assert not trap.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(kept).read_metadata()
    assert trap.exists()


def test_code_in_a_tensor(kept: Path, tmp_path: Path) -> None:
    """Law: code in the tensor of all that is small, or in a part, is not run."""
    file, trap = io.BytesIO(), tmp_path / "trap"
    torch.save({"a": [Trap(trap)]}, file)
    rest = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    sharded.write({"rest": rest}, kept, {}, replace=True)
    assert refusal(kept) == FOREIGN.format(kept)
    torch.save({"a": Trap(trap)}, kept / PART)
    reseal(kept)
    assert str(kept) in refusal(kept)
    assert not trap.exists()


WHOLE: dict[str, Any] = {"parameters": [], "groups": [], "small": {}, "masters": {}}
RESTS: dict[str, Any] = {
    "nothing": {},
    "a list": [1],
    "a number": 3,
    "no groups": {"parameters": ["a"], "small": {}, "masters": {}},
    "no masters": {"parameters": [], "groups": [], "small": {}},
    "groups that are none": {"parameters": ["a"], "groups": [3], "small": {}},
    "too few names": WHOLE | {"groups": [{"params": [0]}]},
    "moments of another": WHOLE | {"small": {"a": {}}},
}


@pytest.mark.parametrize("word", RESTS)
def test_plain_values_of_something_else(tmp_path: Path, word: str) -> None:
    """Law: what does not hold what a session needs is refused in one line."""
    file = io.BytesIO()
    torch.save(RESTS[word], file)
    rest = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    sharded.write({"rest": rest}, tmp_path / "c", {})
    assert refusal(tmp_path / "c") == FOREIGN.format(tmp_path / "c")

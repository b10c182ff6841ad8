"""The index of a sharded checkpoint, read as data: no code in it can run.

In: the bytes of `.metadata`, which torch.distributed.checkpoint writes as a pickle.
Out: its `Metadata`, made anew from the names and numbers in there.

Unpickling calls whatever the pickle names. Here every name that such an index holds
leads to an empty record, made for this reading; any other name is refused before it is
looked up. So nothing that exists can be called, changed or reached by a chain of
attributes, and what the records hold is checked before torch sees it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from halfstep.checkpoint.atomic_directory import CheckpointError, os_reason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_ENUM = "_MEM_FORMAT_ENCODING"
_FILES = "torch.distributed.checkpoint.filesystem"
_ALLOWED_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "TensorProperties")),
    (_METADATA, _ENUM),
    ("builtins", "getattr"),  # of that enumeration; see _Member
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # Where it was written; of no use here.
    *(
        (f"pathlib{inner}", f"{system}Path")
        for inner in ("", "._local")
        for system in ("Posix", "Windows")
    ),
}
_MEMO_OPCODES = {"PUT", "BINPUT", "LONG_BINPUT"}
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


class Place(NamedTuple):
    """Where a part of a tensor is, by the names that torch asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """What stands for an object of a pickle: what it was made from, and no more."""

    __slots__ = ("given", "state")

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 -- anything
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        """Take what the object would have been filled with."""
        self.state = state


class _Member(_Record):
    """A member of an enumeration, as some versions of Python write it: by its name."""

    __slots__ = ()

    def __init__(self, kind: Any = None, name: Any = None) -> None:  # noqa: ANN401
        super().__init__(kind, name)
        if getattr(kind, "__name__", "") != _ENUM or type(name) is not str:
            message = "builtins.getattr"
            raise pickle.UnpicklingError(message)


class _Unpickler(pickle.Unpickler):
    """Reads a pickle into records."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str, /) -> Any:  # noqa: ANN401
        """Return a record's class, or a dtype, for a name that an index may hold.

        Raises:
            UnpicklingError: If it may not.
        """
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if (module, name) not in _ALLOWED_NAMES:
            message = f"{module}.{name}"
            raise pickle.UnpicklingError(message)
        # A class of this reading alone, as a pickle may set attributes of classes.
        if name not in self.kinds:
            base = _Member if name == "getattr" else _Record
            self.kinds[name] = type(name, (base,), {"__slots__": ()})
        return self.kinds[name]


def read(path: Path, files: Collection[str] | None = None) -> Metadata:
    """Read an index.

    Args:
        path: Of `.metadata`.
        files: Names of the files beside it, the only ones that it may point to, and
            that must hold all of every tensor; None: it is not used to read them.

    Raises:
        CheckpointError: If it cannot be read, names anything that an index does not
            hold, or is damaged. Nothing in it was run.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        data = path.read_bytes()
        _check_memo(data)
        record = _Unpickler(data).load()
        fields = _fields(record, "Metadata")
        tensors = fields["state_dict_metadata"]
        places = fields["storage_data"]
        metadata = Metadata({_text(name): _entry(tensors[name]) for name in tensors})
        metadata.storage_data = {
            _index(key): _place(places[key], files) for key in places
        }
        if files is not None:
            _check_complete(metadata)
    except OSError as error:
        message = f"checkpoint file {path} cannot be read: {os_reason(error)}."
        raise CheckpointError(message) from error
    except pickle.UnpicklingError as error:
        message = (
            f"checkpoint file {path} holds more than an index ({error}); it was not "
            "written by halfstep and is not loaded."
        )
        raise CheckpointError(message) from error
    except Exception as error:
        # Nothing but records and numbers was at work: it is they that do not fit.
        message = f"checkpoint file {path} is damaged: it is no index ({error})."
        raise CheckpointError(message) from error
    return metadata


def _check_memo(data: bytes) -> None:
    """Refuse a pickle that numbers its objects beyond how many there can be.

    Why: the unpickler makes a table as long as the highest number, before it knows.
    """
    for count, (opcode, number, _) in enumerate(pickletools.genops(data)):
        if opcode.name in _MEMO_OPCODES and not 0 <= int(number or 0) <= count:
            _damaged(f"object {number} in place of {count} or less")


def _check_complete(metadata: Metadata) -> None:
    """Refuse tensors of which a number is in no file, or in two.

    Why: torch reads the parts of an index into memory as it finds it. What no part
    covers would be taken for what was saved.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            volume = sum(_part_volume(name, entry, p, metadata) for p in entry.chunks)
            if volume != math.prod(entry.size) or parts_overlap(entry.chunks):
                _damaged(f"the parts of {name} do not make it up")


def _part_volume(
    name: str,
    entry: TensorStorageMetadata,
    part: ChunkStorageMetadata,
    metadata: Metadata,
) -> int:
    """Return how many numbers a part has, once it is found to be in a file."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    sides = (part.offsets, part.sizes, entry.size)
    inside = {len(part.offsets), len(part.sizes)} == {len(entry.size)} and all(
        start + length <= end for start, length, end in zip(*sides, strict=True)
    )
    if not inside:
        _damaged(f"a part of {name} is not inside of it")
    numbers = math.prod(part.sizes)
    place = metadata.storage_data.get(MetadataIndex(name, part.offsets))
    if place is None or place.length < numbers * entry.properties.dtype.itemsize:
        _damaged(f"a part of {name} is in no file, or cut")
    return numbers


def parts_overlap(parts: Sequence[ChunkStorageMetadata]) -> bool:
    """Say whether two parts of a tensor share a number."""
    nonempty = [part for part in parts if 0 not in part.sizes]
    if len(nonempty) < 2:  # noqa: PLR2004 -- it takes two
        return False
    # Along the dimension in which most start apart, few reach over the start of one.
    dims = range(len(nonempty[0].sizes))
    along = max(dims, key=lambda dim: len({part.offsets[dim] for part in nonempty}))
    reaching: list[ChunkStorageMetadata] = []
    for part in sorted(nonempty, key=lambda part: part.offsets[along]):
        start = part.offsets[along]
        reaching = [o for o in reaching if o.offsets[along] + o.sizes[along] > start]
        if any(_share(part, other) for other in reaching):
            return True
        reaching.append(part)
    return False


def _share(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + other_side and b < a + side
        for a, side, b, other_side in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _damaged(message: str) -> NoReturn:
    raise ValueError(message)


def _expect(value: object, valid: bool, noun: str) -> None:
    """Refuse a value of another kind.

    Raises:
        TypeError: With the kind that it is, and the noun for what it should be.
    """
    if not valid:
        message = f"{type(value).__name__} in place of {noun}"
        raise TypeError(message)


def _fields(record: Any, kind: str) -> dict[str, Any]:  # noqa: ANN401
    """Return what a dataclass of a kind would have been filled with."""
    is_record = isinstance(record, _Record) and type(record).__name__ == kind
    _expect(record, is_record, kind)
    fields: dict[str, Any] = record.state
    _expect(fields, isinstance(fields, dict), f"the fields of {kind}")
    return fields


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:  # noqa: ANN401
    from torch.distributed.checkpoint import metadata

    if type(record).__name__ == "BytesStorageMetadata":
        return metadata.BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    kind = "TensorProperties"
    _expect(properties, type(properties).__name__ == kind, kind)
    dtype = properties.state[0]
    _expect(dtype, isinstance(dtype, torch.dtype), "a dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype),
        _size(fields["size"]),
        [
            metadata.ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"]))
            for c in chunks
        ],
    )


def _index(record: Any) -> MetadataIndex:  # noqa: ANN401
    from torch.distributed.checkpoint.metadata import MetadataIndex

    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _place(record: Any, files: Collection[str] | None) -> Place:  # noqa: ANN401
    fields = _fields(record, "_StorageInfo")
    name = _text(fields["relative_path"])
    if files is not None and name not in files:
        _damaged(f"it points to {name}")
    if fields.get("transform_descriptors"):
        _damaged(f"{name} is compressed")
    return Place(name, _count(fields["offset"]), _count(fields["length"]))


def _size(record: Any) -> torch.Size:  # noqa: ANN401
    is_size = isinstance(record, _Record) and type(record).__name__ == "Size"
    _expect(record, is_size, "a size")
    (numbers,) = record.given or ((),)
    return torch.Size([_count(number) for number in numbers])


def _text(value: Any) -> str:  # noqa: ANN401
    _expect(value, type(value) is str, "a name")
    return str(value)


def _count(value: Any) -> int:  # noqa: ANN401
    _expect(value, type(value) is int and 0 <= value < 2**63, "a count")
    return int(value)

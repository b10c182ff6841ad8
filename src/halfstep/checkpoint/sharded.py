"""Checkpoint directories that ranks write and read together, complete or absent.

In: tensors by name, of which each rank holds parts. Out: a sealed directory of
torch.distributed.checkpoint in which each rank has written its own parts. Reading
verifies every byte, once among all ranks. If one rank fails, all raise at once.

torch's own index, `.metadata`, is a pickle, which can run code when it is read. It is
written for torch's tools; halfstep writes and reads the same facts as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from halfstep.checkpoint import atomic_directory
from halfstep.checkpoint.atomic_directory import CheckpointError
from halfstep.distributed import process_group

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.storage import WriteResult

INDEX, TORCH_INDEX = "index.json", ".metadata"
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_MAX_COUNT = 1 << 63


def write(
    tensors: dict[str, Tensor],
    directory: Path,
    notes: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Write each rank's parts; the directory appears once all are on disk, or never.

    All ranks share its file system and have tensors of the same names; the notes of
    rank 0 are stored.
    """
    rank = process_group.rank()
    unwritten = partial(atomic_directory.write_error, directory)
    temporary = atomic_directory.temporary_path(directory)
    temporary = process_group.broadcast_object(temporary)
    try:
        with _raise_on_all_ranks(unwritten):
            if rank == 0:
                atomic_directory.make_temporary(directory, temporary, replace=replace)
        with _raise_on_all_ranks(unwritten):
            _write(tensors, temporary)
            indexes = [temporary / INDEX, temporary / TORCH_INDEX]
            own_files = indexes if rank == 0 else []
            own_files += temporary.glob(f"__{rank}_*")
            files = {p.name: atomic_directory.digest(p) for p in sorted(own_files)}
        files_by_rank = process_group.all_gather_object(files)
        with _raise_on_all_ranks(unwritten):
            if rank == 0:
                files = {name: f for part in files_by_rank for name, f in part.items()}
                _check_shared(temporary, files)
                format_ = atomic_directory.SHARDED
                facts = {"format": format_, "files": files, "notes": dict(notes)}
                atomic_directory.commit(directory, temporary, facts, replace=replace)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(tensors: dict[str, Tensor], temporary: Path) -> None:
    """Write this rank's parts with torch and, on rank 0, both indexes."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        """Reports errors as text, since causes are not sent between ranks."""

        def write_data(self, *args: Any) -> Any:  # noqa: ANN401 -- torch's own
            try:
                return super().write_data(*args)
            except Exception as error:
                reason = atomic_directory.os_reason(error) or repr(error)
                raise OSError(reason) from error

        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            super().finish(metadata, results)
            text = json.dumps(_index_data(metadata, results))
            (temporary / INDEX).write_text(text, encoding="utf-8")

    with _without_torch_warnings():
        state_dict_saver.save(tensors, storage_writer=Writer(temporary))


def _index_data(
    metadata: Metadata, results: list[list[WriteResult]]
) -> dict[str, dict[str, Any]]:
    """Return each tensor's parts, with file and position of each."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    places = {result.index: result.storage_data for part in results for result in part}
    index = {}
    entries: dict[str, Any] = metadata.state_dict_metadata
    for name, entry in entries.items():
        parts = []
        for chunk in entry.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            file = [place.relative_path, place.offset, place.length]
            parts.append([[*chunk.offsets], [*chunk.sizes], *file])
        dtype = str(entry.properties.dtype)
        index[name] = {"dtype": dtype, "size": [*entry.size], "parts": parts}
    return index


class _Place(NamedTuple):
    """File and position of a tensor's part, with the attributes that torch reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def _read_index(path: Path, files: Collection[str]) -> Metadata:
    """Read what `_index_data` returned; it may refer only to `files`."""
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    try:
        metadata, places = Metadata({}), {}
        for name, data in json.loads(path.read_bytes()).items():
            entry = _read_entry(name, data)
            metadata.state_dict_metadata[name] = entry
            parts = zip(data["parts"], entry.chunks, strict=True)
            for (*_, file, start, length), chunk in parts:
                place = _Place(file, *_size([start, length]))
                num_bytes = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
                if file not in files or length < num_bytes:
                    _damaged(f"a part of {name} is in no file, or cut")
                places[MetadataIndex(name, chunk.offsets)] = place
        metadata.storage_data = places
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        message = f"checkpoint file {path} is damaged: it is no index ({error})."
        raise CheckpointError(message) from error
    return metadata


def _read_entry(name: str, data: dict[str, Any]) -> TensorStorageMetadata:
    """Return a tensor's index entry after checking that its parts cover the tensor.

    Why: torch reads only the parts that exist; the rest would be uninitialized memory.
    """
    from torch.distributed.checkpoint import metadata

    size = _size(data["size"])
    chunks = [
        metadata.ChunkStorageMetadata(_size(offsets), _size(sizes))
        for offsets, sizes, *_ in data["parts"]
    ]
    for chunk in chunks:
        ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(start + length > end for start, length, end in ends):
            _damaged(f"a part of {name} is not inside of it")
    num_distinct = len({chunk.offsets for chunk in chunks if 0 not in chunk.sizes})
    num_nonempty = sum(0 not in chunk.sizes for chunk in chunks)
    numel = sum(math.prod(chunk.sizes) for chunk in chunks)
    if numel != math.prod(size) or num_distinct != num_nonempty:
        _damaged(f"the parts of {name} do not make it up")
    properties = metadata.TensorProperties(_DTYPES[data["dtype"]])
    return metadata.TensorStorageMetadata(properties, size, chunks)


def _size(numbers: list[int]) -> torch.Size:
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MAX_COUNT:
            _damaged(f"{number!r} in place of a count")
    return torch.Size(numbers)


def _damaged(message: str) -> NoReturn:
    raise ValueError(message)


def _check_shared(temporary: Path, files: Mapping[str, object]) -> None:
    """Reject a directory in which rank 0 does not see the files of other ranks."""
    missing = files.keys() - {path.name for path in temporary.iterdir()}
    if missing:
        raise CheckpointError(
            f"{temporary.parent} is not one directory for all ranks: the first does "
            f"not see {min(missing)}, which another has written. Save to a shared disk."
        )


def verify(directory: Path, needed: str) -> Metadata:
    """Return a directory's index, after verifying every byte.

    Each rank reads the manifest, the index and its share of the other files. `needed`
    is the name of a tensor that every checkpoint of halfstep contains.
    """
    with _raise_on_all_ranks(partial(atomic_directory.read_error, directory)):
        if not (directory / atomic_directory.MANIFEST).is_file():
            _refuse_foreign(directory, f"file {atomic_directory.MANIFEST}")
        manifest = atomic_directory.read(directory, atomic_directory.SHARDED)
        if INDEX not in manifest["files"]:
            _refuse_foreign(directory, f"file {INDEX}")
        names = sorted(manifest["files"].keys() - {INDEX})
        mine = names[process_group.rank() :: process_group.world_size()]
        atomic_directory.verify(directory, manifest, [INDEX, *mine])
        metadata = _read_index(directory / INDEX, names)
        if needed not in metadata.state_dict_metadata:
            _refuse_foreign(directory, f"entry {needed!r}")
    return metadata


def read(tensors: dict[str, Tensor], directory: Path, metadata: Metadata) -> None:
    """Fill tensors, or this rank's parts of them, with the stored values."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        """Storage reader with halfstep's index; torch's is a pickle."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401
            return metadata

    unread = partial(atomic_directory.read_error, directory)
    with _raise_on_all_ranks(unread), _without_torch_warnings():
        state_dict_loader.load(tensors, storage_reader=Reader(directory))


def _refuse_foreign(directory: Path, what: str) -> NoReturn:
    raise CheckpointError(
        f"{directory} was not written by halfstep.fsdp.save, or only in part: it "
        f"has no {what}."
    )


@contextlib.contextmanager
def _raise_on_all_ranks(make_error: Callable[[str], CheckpointError]) -> Iterator[None]:
    """Raise on all ranks if the body fails on one; the body must not use collectives.

    Why: the other ranks would wait forever. Each rank raises its own error, or else
    that of the first rank that failed; `make_error` makes one from an OS error.
    """
    fault: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        fault = error
    except Exception as error:  # noqa: BLE001 -- raised below, when all know
        fault, reason = error, atomic_directory.os_reason(error)
        if reason is not None:
            fault = make_error(reason)
            fault.__cause__ = error
    own_fault = None if fault is None else (str(fault), getattr(fault, "reason", ""))
    faults = process_group.all_gather_object(own_fault)
    if fault is not None:
        raise fault
    for rank, other in enumerate(faults):
        if other is not None:
            text, reason = other
            # Rank 0 acts for all ranks, so its number is left out.
            place = f"rank {rank}: " if rank else ""
            if reason:
                raise make_error(place + reason)
            raise CheckpointError(place + text)


@contextlib.contextmanager
def _without_torch_warnings() -> Iterator[None]:
    """Run torch with or without torch.distributed; raise failures as CheckpointError.

    Why: torch raises an exception on every rank that is not an `Exception`, and whose
    text contains all ranks' tracebacks.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # allowed here
        warnings.filterwarnings("ignore", "TypedStorage is")  # from torch 2.9 itself
        try:
            yield
        except CheckpointException as error:
            faults = {rank: each for rank, (each, _) in error.failures.items()}
            own = process_group.rank()
            rank = own if own in faults else min(faults)
            place = f"rank {rank}: " if rank not in {0, own} else ""
            reason = atomic_directory.os_reason(faults[rank]) or repr(faults[rank])
            raise OSError(place + reason) from faults[rank]

"""Saves and loads sessions in the format of torch.distributed.checkpoint.

Any number of processes can load such a directory, sharded or not.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.checkpoint import sharded
from halfstep.checkpoint.single import CheckpointError
from halfstep.distributed import ddp, process_group
from halfstep.errors import UserError
from halfstep.numerics.local_tensor import is_quantized
from halfstep.session import fsdp, state_dict
from halfstep.session.fsdp import fsdp_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from halfstep.session.session import Session

__all__ = ["Stateful", "fsdp_policy", "full_tensors", "load", "save"]

_REST = "rest"
_WEIGHT, _OUTSIDE, _LOW, _MOMENT = "weights/", "outside/", "low/", "optimizer/"


class Stateful:
    """A session as a Stateful object for torch.distributed.checkpoint.

    Use it to save a session with other objects. For a session by itself, `save` and
    `load` of this module are safer: they check every byte and write all or nothing,
    while `dcp.load` unpickles its index and may fail with half of the weights read.

    Args:
        session: A session between two optimizer steps; to load, it may be new.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> session = hs.prepare(model, optimizer, "O2", dtype="bf16")
        >>> state = {"train": hs.fsdp.Stateful(session)}  # for dcp.save, dcp.load
        >>> [*state["train"].state_dict()][:3]
        ['weights/weight', 'weights/bias', 'rest']
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name, and everything else as bytes.

        Before the first step it includes the moments that the optimizer will have,
        since torch.distributed.checkpoint reads only entries that exist.

        Raises:
            RuntimeError: Between the micro-batches of a step.
        """
        state: dict[str, Any] = _flat(self._session.state_dict())
        state[_REST] = state[_REST].numpy().tobytes()
        if not self._session.optimizer.state:
            moments = self._session.first_moments()
            state |= {_MOMENT + name: value for name, value in moments.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the session.

        Raises:
            UserError: If it does not fit the session.
        """
        tensors = {key: value for key, value in state.items() if key != _REST}
        rest = torch.load(io.BytesIO(state[_REST]), weights_only=True)
        self._session.load_state_dict(_nested(tensors, rest))


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors: return the full tensors, on every rank.

    `full_tensors(session.weights())` is for export. All ranks must call it.

    Args:
        tensors: Name -> tensor; a tensor that is not sharded is returned as it is.
    """
    parts: dict[str, Any] = dict(tensors)
    return {
        name: tensor.full_tensor() if fsdp.is_dtensor(tensor) else tensor
        for name, tensor in parts.items()
    }


def save(
    session: Session,
    directory: Path,
    notes: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
) -> None:
    """Write a session's state in the format of torch.distributed.checkpoint.

    All ranks must call it; each writes its own shards. Weights and moments are stored
    under the names of the parameters, in fp32 as in `session.state_dict()`. The
    directory is renamed into place once all files are on disk, with a SHA-256 for each.

    Args:
        session: The session to save.
        directory: On a disk that all ranks share. Must not exist yet.
        notes: Values for `json.dumps`; those of rank 0 go into the manifest.
        replace: `directory` may exist; it is removed once the new one is on disk.

    Raises:
        CheckpointError: If `directory` exists, or one rank cannot write. All ranks
            raise, and no files are left.
        UserError: If the optimizer quantizes its moments, which this format cannot
            index.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import halfstep as hs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session = hs.prepare(model, optimizer, "O2", dtype="bf16")
        >>> directory = Path(tempfile.mkdtemp()) / "step-10"
        >>> hs.fsdp.save(session, directory, {"step": 10})
        >>> hs.fsdp.load(session, directory)
    """
    tensors = _flat(session.state_dict())
    quantized = next((name for name in tensors if is_quantized(tensors[name])), None)
    if quantized is not None:
        raise UserError(
            f"{quantized} is a {type(tensors[quantized]).__name__}, which fsdp.save "
            "does not write: save halfstep.fsdp.Stateful(session) by "
            "torch.distributed.checkpoint, or session.state_dict() by torch.save."
        )
    sharded.write(tensors, directory, dict(notes or {}), replace=replace)


def load(session: Session, directory: Path) -> None:
    """Load what `save` wrote, with any number of processes.

    All ranks must call it. The session may have another level, another `master`,
    another sharding or none. Every file is first compared with its SHA-256, then this
    rank's shards are read into new memory; an error leaves the session unchanged. The
    pickled index of torch.distributed.checkpoint is not read, so no code in it runs.

    Args:
        session: The session to load into.
        directory: What `save` wrote.

    Raises:
        CheckpointError: If it was not written by `save`, is incomplete or damaged, or
            memory is too short.
        UserError: If the state does not fit the session.
    """
    index = sharded.verify(directory, _REST)
    saved: dict[str, Any] = index.state_dict_metadata
    rest_buffer = {_REST: _empty(_REST, saved[_REST], None)}
    sharded.read(rest_buffer, directory, index)
    with _own_format(directory):
        file = io.BytesIO(bytes(rest_buffer[_REST].tolist()))
        rest = torch.load(file, weights_only=True)
    tensors = _template(session, saved)
    # Outside: a process that is lost while reading is no fault of the files.
    sharded.read(tensors, directory, index)
    with _own_format(directory):
        state = _nested(tensors, rest)
    session.load_state_dict(state)


@contextlib.contextmanager
def _own_format(directory: Path) -> Iterator[None]:
    """Report files that match their manifest, but not our format."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{directory} holds more than tensors and plain values, or none; it was "
            "not written by halfstep and is not loaded."
        ) from error


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a state as name -> tensor; all small values are in one, as bytes."""
    names = [*state["parameters"]]
    groups = state["optimizer"]["param_groups"]
    numbers = dict.fromkeys(number for group in groups for number in group["params"])
    tensors = {_WEIGHT + name: tensor for name, tensor in state["weights"].items()}
    tensors |= {_OUTSIDE + name: tensor for name, tensor in state["outside"].items()}
    small: dict[str, Any] = {}
    for number, name in zip(numbers, names, strict=True):
        for key, value in state["optimizer"]["state"].get(number, {}).items():
            is_separate = torch.is_tensor(value) and value.dim() > 0
            if is_separate:
                tensors[f"{_MOMENT}{name}/{key}"] = value
            # Keep their order: stochastic rounding numbers them by it.
            small.setdefault(name, {})[key] = None if is_separate else value
    masters = dict(state["masters"])
    tensors |= {_LOW + name: tensor for name, tensor in masters.pop("low").items()}
    in_tensors = {"weights", "outside", "optimizer"}
    rest = {key: state[key] for key in state if key not in in_tensors}
    rest |= {"masters": masters, "groups": groups, "small": small}
    file = io.BytesIO()
    torch.save(rest, file)
    # Ranks have equal values, but their pickles may differ in bytes.
    rest_bytes = process_group.broadcast_object(file.getvalue())
    return tensors | {_REST: torch.frombuffer(bytearray(rest_bytes), dtype=torch.uint8)}


def _nested(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `_flat` was called with."""
    names = [*rest["parameters"]]
    groups, small = rest.pop("groups"), rest.pop("small")
    numbers = dict.fromkeys(number for group in groups for number in group["params"])
    number_of = dict(zip(names, numbers, strict=True))
    state = {
        number_of[name]: {
            key: tensors.get(f"{_MOMENT}{name}/{key}", value)
            for key, value in values.items()
        }
        for name, values in small.items()
    }
    weights, outside, low = (
        {p.removeprefix(kind): t for p, t in tensors.items() if p.startswith(kind)}
        for kind in (_WEIGHT, _OUTSIDE, _LOW)
    )
    return rest | {
        "weights": weights,
        "outside": outside,
        "optimizer": {"state": state, "param_groups": groups},
        "masters": rest["masters"] | {"low": low},
    }


def _template(
    session: Session, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Return empty tensors for all that was saved, sharded like this session's."""
    own_tensors = state_dict.stored_tensors(ddp.unwrap(session.model))
    tensors = {}
    for path in (path for path in saved if path != _REST):
        name = path.partition("/")[2]
        name = name.rpartition("/")[0] if path.startswith(_MOMENT) else name
        tensors[path] = _empty(path, saved[path], own_tensors.get(name))
    return tensors


def _empty(path: str, saved: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """Return an empty tensor for one saved, sharded like `like` if shapes agree."""
    dtype = saved.properties.dtype
    try:
        if like is None or like.shape != saved.size:
            return torch.empty(saved.size, dtype=dtype)
        return torch.empty_like(like.detach(), dtype=dtype)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint holds {path}, a tensor of {dtype} and {list(saved.size)}, "
            "for which there is no memory here."
        ) from error

"""Saves, validates and loads the checkpoints of a run.

With DDP, the first rank writes the whole checkpoint. With FSDP2, each rank writes its
shard; any number of ranks can load it.
"""

from __future__ import annotations

from dataclasses import asdict
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.checkpoint import atomic_directory, single
from halfstep.checkpoint.single import CheckpointError
from halfstep.distributed import process_group
from halfstep.errors import UserError
from halfstep.session import fsdp_checkpoint
from halfstep.train.parallelize import FSDP2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from halfstep.distributed.process_group import World
    from halfstep.session.session import Session
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.plan import TrainJob, TrainState

T = TypeVar("T")

_NOTES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "best_step", "waited", "processes"), (int,)),
    **dict.fromkeys(("level", "dtype", "reason", "fingerprint"), (str,)),
    "best_score": (int, float, NoneType),
}


def save(
    session: Session, train_state: TrainState, job: TrainJob, folder: RunFolder
) -> None:
    """Write a checkpoint and prune old ones; a collective call."""
    choice, world = session.choice, job.steps.world
    notes = asdict(train_state) | {
        "level": choice.level.name,
        "dtype": choice.format.name,
        "reason": choice.reason,
        "labels": list(job.corpus.labels),
        "fingerprint": job.corpus.fingerprint,
        "processes": world.size,
    }
    path, keep = folder.checkpoint_path(train_state.step), job.plan.config.keep
    if job.plan.config.parallel == FSDP2:
        with folder.writing(path):
            fsdp_checkpoint.save(session, path, notes, replace=True)
        run_on_first_rank(world, lambda: folder.prune(keep))
        return
    state = session.state_dict()
    weights = state.pop("weights")

    def write() -> None:
        with folder.writing(path):
            single.save(path, weights, state, notes, replace=True)
        folder.prune(keep)

    run_on_first_rank(world, write)


def load(session: Session, path: Path) -> None:
    """Load a checkpoint, sharded or not, into the session."""
    if atomic_directory.read(path)["format"] == atomic_directory.PLAIN:
        checkpoint = single.load(path)
        session.load_state_dict(checkpoint.state | {"weights": checkpoint.weights})
    else:
        fsdp_checkpoint.load(session, path)


def run_on_first_rank(world: World, call: Callable[[], T]) -> T | None:
    """Call a function on the first rank and return its result there, None elsewhere.

    If it raises `UserError`, all ranks do; otherwise they would wait for a rank that is
    gone. If it raises `OSError`, the others raise `UserError`.
    """
    result: T | None = None
    fault: UserError | OSError | None = None
    try:
        result = call() if world.is_first else None
    except (UserError, OSError) as error:
        fault = error
    message = process_group.broadcast_object(None if fault is None else str(fault))
    if message is not None:
        raise fault or UserError(message)
    return result


def find_resume_checkpoint(
    folder: RunFolder, world: World
) -> tuple[dict[str, Any], list[str]] | None:
    """Return the notes of the newest intact checkpoint, and lines on damaged ones.

    The same on every rank; None without checkpoints; UserError if none is intact.
    """

    def find() -> tuple[dict[str, Any], list[str]] | None:
        newest = folder.newest(checked_notes)
        notes, faults = newest or ({"best_step": 0}, [])
        best = notes["best_step"]
        try:
            if best not in {0, notes.get("step")}:
                checked_notes(folder.checkpoint_path(best))
        except CheckpointError as error:
            fault = f"the checkpoint of step {best}, the best, is not used: {error}"
            return notes | {"best_step": 0, "best_score": None}, [*faults, fault]
        return newest

    return process_group.broadcast_object(run_on_first_rank(world, find))


def checked_notes(path: Path) -> dict[str, Any]:
    """Verify a checkpoint's checksums and the types of its notes; return the notes."""
    manifest = atomic_directory.read(path)
    atomic_directory.verify(path, manifest)
    notes: dict[str, Any] = manifest["notes"]
    for name, types in _NOTES.items():
        if type(notes.get(name, ...)) not in types:
            raise CheckpointError(
                f"checkpoint file {path / atomic_directory.MANIFEST} was not written "
                f"by a run: {name!r} of its notes is missing, or not what a run notes."
            )
    return notes

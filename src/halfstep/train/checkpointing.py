"""Checkpoints of a run: what is in them, who writes them, which is gone on from.

In: a session, how far the run has come, the run's folder. Out: checkpoints, and a
session that stands where one of them stood.

With DDP each process holds everything, and the first writes it. With FSDP2 each writes
its own parts; any number of processes can read them.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.checkpoint import atomic_directory, single
from halfstep.checkpoint.single import CheckpointError
from halfstep.distributed import process_group
from halfstep.errors import UserError
from halfstep.session import fsdp_checkpoint
from halfstep.train.parallelize import FSDP2
from halfstep.train.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from halfstep.distributed.process_group import World
    from halfstep.session.session import Session
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.train_state import TrainJob

T = TypeVar("T")

_NOTES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("step", "best_step", "waited", "processes"), (int,)),
    **dict.fromkeys(("level", "dtype", "reason", "fingerprint"), (str,)),
    "best_score": (int, float, NoneType),
}


def save(
    session: Session,
    train_state: TrainState,
    job: TrainJob,
    folder: RunFolder,
    world: World,
) -> None:
    """Write a checkpoint, and delete those not needed any more; all must call it."""
    notes = _notes(session, train_state, job, world)
    if job.plan.config.parallel == FSDP2:
        path = folder.checkpoint_path(train_state.step)
        with folder.writing(path):
            fsdp_checkpoint.save(session, path, notes, replace=True)
        run_on_first_rank(world, lambda: folder.prune(job.plan.config.keep))
        return
    state = session.state_dict()
    weights = state.pop("weights")

    def write() -> None:
        folder.save(train_state.step, weights, state, notes)
        folder.prune(job.plan.config.keep)

    run_on_first_rank(world, write)


def load(session: Session, path: Path) -> None:
    """Put a checkpoint into the session, in parts or whole, whoever wrote it."""
    if atomic_directory.read(path)["format"] == atomic_directory.PLAIN:
        checkpoint = single.load(path)
        session.load_state_dict(checkpoint.state | {"weights": checkpoint.weights})
    else:
        fsdp_checkpoint.load(session, path)


def _notes(
    session: Session, train_state: TrainState, job: TrainJob, world: World
) -> dict[str, Any]:
    """Return what a checkpoint says of itself, for the run and for readers."""
    choice = session.choice
    return {
        **asdict(train_state),
        "level": choice.level.name,
        "dtype": choice.format.name,
        "reason": choice.reason,
        "labels": list(job.corpus.labels),
        "fingerprint": job.corpus.fingerprint,
        "processes": world.size,
    }


def run_on_first_rank(world: World, call: Callable[[], T]) -> T | None:
    """Let the first process act while the others wait; where it fails, all fail.

    Why: to those that wait, one that leaves is lost, and they may not learn why.

    Returns:
        What it returned, on the first; None on the others.

    Raises:
        UserError: On all, if it raises that or, on the others, an `OSError`.
        OSError: On the first, if it raises that.
    """
    result: T | None = None
    local_error: UserError | OSError | None = None
    if world.is_first:
        try:
            result = call()
        except (UserError, OSError) as error:
            local_error = error
    fault = process_group.broadcast_object(
        None if local_error is None else str(local_error)
    )
    if fault is not None:
        raise local_error or UserError(fault)
    return result


def find_resume_checkpoint(
    folder: RunFolder, world: World
) -> tuple[dict[str, Any], list[str]] | None:
    """Find the newest checkpoint that is whole; the same on every process.

    Returns:
        Its notes, and a line for each newer one that is damaged or not a run's. None
        if there is none yet.

    Raises:
        UserError: If there are checkpoints, and none is whole.
    """

    def find() -> tuple[dict[str, Any], list[str]] | None:
        newest = folder.newest(checked_notes)
        return None if newest is None else _check_best(folder, *newest)

    return process_group.broadcast_object(run_on_first_rank(world, find))


def _check_best(
    folder: RunFolder, notes: dict[str, Any], faults: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the same; where the best checkpoint is damaged, without it."""
    best = notes["best_step"]
    if best in {0, notes["step"]}:
        return notes, faults
    try:
        checked_notes(folder.checkpoint_path(best))
    except CheckpointError as error:
        fault = f"the checkpoint of step {best}, the best, is not used: {error}"
        return notes | {"best_step": 0, "best_score": None}, [*faults, fault]
    return notes, faults


def checked_notes(path: Path) -> dict[str, Any]:
    """Return a checkpoint's notes, their shape and every byte of it checked."""
    manifest = atomic_directory.read(path)
    atomic_directory.verify(path, manifest)
    notes: dict[str, Any] = manifest["notes"]
    fits = {name: type(notes.get(name, ...)) in types for name, types in _NOTES.items()}
    if not all(fits.values()):
        invalid = next(name for name, fit in fits.items() if not fit)
        message = (
            f"checkpoint file {path / atomic_directory.MANIFEST} was not written by a "
            f"run: {invalid!r} of its notes is missing, or not what a run notes there."
        )
        raise CheckpointError(message)
    return notes


def check_fingerprint(notes: Mapping[str, Any], fingerprint: str) -> None:
    """Refuse to go on from a checkpoint of other data."""
    if notes.get("fingerprint") != fingerprint:
        message = (
            "--resume: the checkpoint was made from other data; resume with the data "
            "it was trained on."
        )
        raise UserError(message)


def train_state_from_notes(notes: Mapping[str, Any]) -> TrainState:
    """Return how far a run had come."""
    names = [field.name for field in fields(TrainState)]
    return TrainState(**{name: notes[name] for name in names})

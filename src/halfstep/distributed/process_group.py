"""Joins torchrun's processes, runs collectives, and shares the reasons of failures.

With one process every collective is the identity.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]


T = TypeVar("T")
_FAILURE_KEY = "halfstep/fault"
_MAX_REASON_CHARS = 400
_REASON_TIMEOUT_S = 2.0  # in which a failing process may send its reason
_POLL_S = 0.005
_LONGEST_CALL = timedelta(days=7)  # torch's own limit, 10 to 30 minutes, is for hangs
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo error",
    "[gloo",
    "/gloo/",
)


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0


class PeerLost(RuntimeError):  # noqa: N818 -- an outcome, printed in one line
    """Another process of the run has ended; the message has the reason it sent."""


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Join the processes that torchrun started; leave the group at the end, together.

    A process that fails sends its reason to the others, whose next collective then
    raises `PeerLost` with it. `device` is "cpu" (gloo) or "cuda" (nccl; each process
    uses the GPU of its local rank).
    """
    torch_device = _device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(0, 1, torch_device)
        return
    store, rank, size = _init_process_group(torch_device)
    try:
        with _share_failure(store, rank):
            yield World(rank, size, torch_device)
            dist.barrier()  # not after an error: the others may never arrive
    finally:
        # A gloo thread that still holds the last collective's tensors needs the GIL to
        # free them. That aborts the process if the interpreter is exiting, and
        # deadlocks if DDP is being freed. A short sleep releases the GIL.
        time.sleep(0.05)
        _machine_group.cache_clear()
        dist.destroy_process_group()


def _device(word: str) -> torch.device:
    """Return this process's device; make a GPU the current device."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    # str.isdigit also accepts characters that int() rejects.
    if not (local_rank.isascii() and local_rank.isdigit()):
        raise UserError(
            f"LOCAL_RANK={local_rank!r} is not the number of a process: let torchrun "
            "set it, or unset it to train in one process."
        )
    if word != "cuda":
        return torch.device(word)
    local, count = int(local_rank), torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"LOCAL_RANK={local}: each process needs a GPU of its own, and torch sees "
            f"{count} here; start no more than that on this machine "
            "(--nproc-per-node)."
        )
    gpu = torch.device("cuda", local)
    torch.cuda.set_device(gpu)
    return gpu


def _init_process_group(device: torch.device) -> tuple[Store, int, int]:
    """Initialize the group; return its store, this rank, and the number of ranks."""
    try:
        shared, rank, size = next(rendezvous("env://"))
        store = _fresh_store(shared, rank, size)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )
    except ValueError as error:
        message = f"RANK is set, but the environment is not torchrun's: {error}."
        raise UserError(message) from error
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = _shortened(str(error).strip().partition("\n")[0])  # then a stack trace
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes did not meet at {place} "
            f"({why}); start them all, with MASTER_ADDR and "
            "MASTER_PORT of the first."
        ) from error
    return store, rank, size


def _shortened(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON_CHARS].rstrip(".")


def _fresh_store(store: Store, rank: int, size: int) -> Store:
    """Return an unused part of the store; all processes must call it.

    Why: torchrun keeps its store when it restarts failed processes, and torch would
    wait for the dead ones in it; restart counts differ between machines. So rank 0
    offers a random token, and only live processes answer.
    """
    token_of_this = secrets.token_hex(8)
    if rank == 0:
        for other in range(1, size):
            while not _answers(store, other, token_of_this):
                pass
        store.set(f"halfstep/go/{token_of_this}", "")
        return PrefixStore(token_of_this, store)
    store.set(f"halfstep/here/{rank}", token_of_this)
    token = bytes(store.get(f"halfstep/ask/{token_of_this}")).decode()
    store.set(f"halfstep/yes/{token_of_this}/{token}", "")
    store.get(f"halfstep/go/{token}")
    return PrefixStore(token, store)


def _answers(store: Store, rank: int, token: str) -> bool:
    """Offer a token to the process that last registered for a rank.

    Returns False if another process registers for the rank: the previous one is dead.
    """
    place = f"halfstep/here/{rank}"
    name = bytes(store.get(place)).decode()
    store.set(f"halfstep/ask/{name}", token)
    # A dead process may have answered others, but not this token.
    while not store.check([f"halfstep/yes/{name}/{token}"]):
        if bytes(store.get(place)).decode() != name:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def _share_failure(store: Store, rank: int) -> Iterator[None]:
    """Send the reason if this process fails; raise another process's reason."""
    try:
        yield
    except BaseException as error:  # of KeyboardInterrupt, too, the others must know
        if not _is_lost_peer(error):
            # The store's process may have ended. The first reason is kept.
            with contextlib.suppress(RuntimeError):
                words = _shortened(str(error))
                if not isinstance(error, UserError):
                    words = f"{type(error).__name__}: {words}".removesuffix(": ")
                store.compare_set(_FAILURE_KEY, "", f"process {rank}: {words}")
            raise
        reason = _reason_of_peer(store)
        raise PeerLost(f"stopped, because another process did: {reason}.") from error


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process has ended."""
    if isinstance(error, dist.DistError):  # from nccl, or a timeout of the store
        return True
    # gloo raises RuntimeError itself.
    is_gloo = any(text in str(error).lower() for text in _LOST_PEER_TEXTS)
    return isinstance(error, RuntimeError) and is_gloo


def _reason_of_peer(store: Store) -> str:
    """Return the first reason that another process sent, or a default."""
    deadline = time.monotonic() + _REASON_TIMEOUT_S
    with contextlib.suppress(RuntimeError):  # the store may have ended too
        while time.monotonic() < deadline:
            if store.check([_FAILURE_KEY]):
                return bytes(store.get(_FAILURE_KEY)).decode()
            time.sleep(_REASON_TIMEOUT_S / 20)
    return "it gave no reason, so it was killed or its machine was lost"


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the elementwise sum over all ranks, the same on each."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank."""
    values: list[T] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_object(value: T) -> list[T]:
    """Return the values of all ranks, in order, on every rank."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def first_not_none(value: T | None) -> T | None:
    """Return the value of the first rank that has one, on every rank, or None."""
    return next((v for v in all_gather_object(value) if v is not None), None)


@functools.cache
def _machine_group() -> tuple[dist.ProcessGroup, int]:
    """Return the group of this machine's processes, and this one's rank in it.

    By host names, since launchers other than torchrun set no LOCAL_WORLD_SIZE, and by
    torchrun's number of the machine, since containers may share a name. It is made
    once: torch names a group by its ranks, and takes a name once.
    """
    own = socket.gethostname(), os.environ.get("GROUP_RANK")
    hosts = all_gather_object(own)
    ranks = [rank for rank, host in enumerate(hosts) if host == own]
    group = dist.new_group(
        ranks, timeout=_LONGEST_CALL, backend="gloo", use_local_synchronization=True
    )
    return group, ranks.index(dist.get_rank())


def once_per_machine(call: Callable[[], T]) -> T:
    """Return what the first process of this machine returns, on each of its processes.

    The others wait, however long it takes. The result is pickled.

    Raises:
        UserError: That of the first process, on each.
    """
    if not dist.is_initialized():
        return call()
    group, rank = _machine_group()
    outcome: list[T | UserError | None] = [None]
    if rank == 0:
        try:
            outcome = [call()]
        except UserError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    result: Any = outcome[0]
    if isinstance(result, UserError):
        raise result
    return cast("T", result)


def barrier() -> None:
    """Wait until every rank has called this."""
    if dist.is_initialized():
        dist.barrier()

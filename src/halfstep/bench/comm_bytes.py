"""`halfstep bench wire`: bytes that data-parallel processes send per step.

Two processes train the recipe network over loopback with gloo, at each level and with
torch.amp. Counts the bytes sent by the process's sockets, as reported by the kernel,
and the size of the tensors passed to collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import contenders, loops, measure
from halfstep.bench.worker_process import PASSIVE_WAIT, WorkerProcess
from halfstep.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from halfstep.bench.loops import Batches, PlainLoop, SessionLoop
    from halfstep.reporting.table import Cell, Table

BASELINE = "O0"
RANKS = 2
_WARM_UP = 2
"""Steps not counted: DDP rebuilds its buckets after the first."""
_TIMEOUT = timedelta(seconds=60)
_LR = 1e-3
_SENT = 200
"""Offset of `tcpi_bytes_sent` in Linux's `tcp_info`, since 4.19; followed by
`tcpi_bytes_retrans`, both 64 bits."""


@dataclass(frozen=True)
class RankResult:
    """What one rank sent with one contender, per step."""

    sent: float | None
    """Bytes sent by its sockets; None if the system does not report them."""
    payload: float
    """Bytes of the tensors passed to collectives."""
    calls: float
    """Number of collectives."""
    digest: str
    """Hash of weights, masters and optimizer state at the end."""


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train with each contender in two processes; return what the first one sent."""
    results: dict[tuple[str, int], list[RankResult]] = {}
    refusals: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(start(rank, Path(folder) / "store"))
            for rank in range(RANKS)
        ]
        for micro_batches in arguments.accumulate:
            work = measure.from_flags(
                loops.Workload, arguments, accumulate=micro_batches
            )
            for name in arguments.contenders:
                task = {"name": name, "steps": arguments.steps, "work": asdict(work)}
                answers = request_all(processes, task)
                if "refused" in answers[0]:
                    refusals[name] = answers[0]["refused"]
                results[name, micro_batches] = [
                    RankResult(**a["result"]) for a in answers if "result" in a
                ]
                measure.progress(f"{name}, {micro_batches} micro-batches: done")
    rows = [
        table_row(name, micro_batches, ranks, results.get((BASELINE, micro_batches)))
        for (name, micro_batches), ranks in results.items()
    ]
    notes = (
        f"bytes and calls of one rank of {RANKS} in a step, mean of {arguments.steps}",
        "sent: TCP_INFO of its own sockets (bytes sent, but not again), less a barrier",
        "in collectives: size of the tensors that all-reduce was called with",
        "ranks equal: weights, master weights and optimizer state, bit for bit",
        "torch.amp: DDP, and no_sync() but for the last micro-batch",
        "O: halfstep under DDP",
        f"hook: torch's {arguments.dtype}_compress_hook",
        *(f"{name} rejected: {text}" for name, text in refusals.items()),
        *measure.conditions("wire", "cpu", arguments),
    )
    return [measure.table("Bytes on the wire", rows, notes, digits=4)]


def start(rank: int, store: Path) -> WorkerProcess:
    """Start the process of a rank."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if "lo0" in names else "lo"}
    task = {"rank": rank, "store": str(store)}
    return WorkerProcess(f"rank {rank}", __name__, task, PASSIVE_WAIT | loopback)


def request_all(
    processes: Sequence[WorkerProcess], task: dict[str, Any]
) -> list[dict[str, Any]]:
    """Send a task to all ranks concurrently, as each waits for the others."""
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(lambda process: process.request(task), processes))


def table_row(
    name: str,
    micro_batches: int,
    ranks: Sequence[RankResult],
    baseline: Sequence[RankResult] | None,
) -> dict[str, Cell]:
    """Return a row; its cells are empty if the contender was rejected."""
    own, base = ranks[0] if ranks else None, baseline[0] if baseline else None

    def over(figure: Callable[[RankResult], float | None]) -> float | None:
        mine, its = figure(own) if own else None, figure(base) if base else None
        return None if mine is None or its is None else mine / its

    return {
        "contender": name,
        "micro-batches": micro_batches,
        "bytes sent": None if own is None or own.sent is None else round(own.sent),
        f"sent x {BASELINE}": over(lambda rank: rank.sent),
        "in collectives": round(own.payload) if own else None,
        f"collectives x {BASELINE}": over(lambda rank: rank.payload),
        "calls": round(own.calls) if own else None,
        "ranks equal": len({rank.digest for rank in ranks}) == 1 if own else None,
    }


# In a rank's process


def worker(rank: int, store: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Join the process group; return the function that answers requests."""
    place = f"file://{store}"
    dist.init_process_group(
        "gloo", init_method=place, rank=rank, world_size=RANKS, timeout=_TIMEOUT
    )
    atexit.register(_leave)
    return partial(_answer, rank)


def _leave() -> None:
    # No barrier: the other rank may still be waiting for a request. The sleep is for a
    # gloo thread that may need the GIL once more.
    time.sleep(0.05)
    dist.destroy_process_group()


def _answer(rank: int, task: dict[str, Any]) -> dict[str, Any]:
    """Train with one contender, on batches that differ between ranks.

    If the contender does not support the work, the answer is the reason in "refused".
    """
    work = loops.Workload(**task["work"])
    batches = [(inputs + rank, targets) for inputs, targets in loops.draw_batches(work)]
    try:
        loop = make_loop(contenders.WIRE[task["name"]], work, rank)
    except UserError as error:
        return {"refused": str(error)}
    return {"result": asdict(count_communication(loop, batches, task["steps"]))}


_HOOKS: dict[str, Callable[..., object]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def make_loop(
    settings: dict[str, Any], work: loops.Workload, rank: int
) -> PlainLoop | SessionLoop:
    """Build a contender; each rank starts from different weights."""
    model = loops.make_network(work, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), _LR)
    if "level" in settings:
        loop = loops.session(model, optimizer, work, **settings)
        loop.model = loop.session.model = DistributedDataParallel(loop.model)
        return loop
    wrapper = DistributedDataParallel(model)
    if settings.get("hook"):
        # In a lambda, as DDP rejects torch's own hook function on a CPU.
        hook = _HOOKS[work.dtype]
        wrapper.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
    return loops.plain(wrapper, optimizer, work)


def count_communication(
    loop: PlainLoop | SessionLoop, batches: Batches, steps: int
) -> RankResult:
    """Count what steps send; a collective call."""
    marks = []
    # Barriers flush buffers; the bytes they send themselves are subtracted.
    for due in (_WARM_UP, 0, steps):
        for _ in range(due):
            loop.step(batches)
        dist.barrier()
        marks.append(bytes_sent())
    counters = [mark for mark in marks if mark is not None]
    sent = None
    if len(counters) == len(marks):
        sent = (counters[2] - 2 * counters[1] + counters[0]) / steps
    with Collectives() as collectives:
        for _ in range(steps):
            loop.step(batches)
    payload, calls = collectives.payload / steps, collectives.calls / steps
    return RankResult(sent, payload, calls, digest(_replicated_tensors(loop)))


def _replicated_tensors(loop: PlainLoop | SessionLoop) -> Iterator[Tensor]:
    """Yield all tensors that must be equal on every rank."""
    yield from loop.model.parameters()
    if isinstance(loop, loops.SessionLoop):
        yield from loop.session.weights().values()
        optimizer = loop.session.optimizer
    else:
        optimizer = loop.optimizer
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def bytes_sent() -> int | None:
    """Return the bytes sent by this process's TCP sockets, without retransmissions.

    None on systems other than Linux, which do not report them.
    """
    folder = Path("/proc/self/fd")
    if not (folder.exists() and hasattr(socket, "TCP_INFO")):
        return None
    total = 0
    for entry in sorted(folder.iterdir()):
        with contextlib.suppress(OSError), duplicate_socket(int(entry.name)) as one:
            if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < _SENT + 16:
                return None
            total_sent, retransmitted = struct.unpack_from("=QQ", info, _SENT)
            total += total_sent - retransmitted
    return total


def duplicate_socket(number: int) -> socket.socket:
    """Return a socket object for a file descriptor's connection.

    Raises:
        OSError: If it is not a socket, or was closed in the meantime.
    """
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives and their bytes, including DDP's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.payload = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Count collectives, then dispatch."""
        if func.namespace == "c10d":
            tensors = [args[0]] if torch.is_tensor(args[0]) else args[0]
            self.calls += 1
            self.payload += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of all bits."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).contiguous()
        sha256.update(flat.view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()

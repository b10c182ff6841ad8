"""`halfstep bench wire`: bytes that data-parallel processes send in a step.

In: flags. Out: a table. Two processes train the recipe's network over loopback, by
gloo, at each level and with torch.amp, and count what they send.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.bench import measure, worker_process
from halfstep.bench.comm_worker import RANKS, RankResult
from halfstep.reporting.table import Cell, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

BASELINE = "O0"

_COLUMNS = (
    "contender",
    "micro-batches",
    "bytes sent",
    f"sent x {BASELINE}",
    "in collectives",
    f"collectives x {BASELINE}",
    "calls",
    "ranks equal",
)


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Let two processes train with each contender; return what the first one sent.

    Raises:
        UserError: If one of them fails.
    """
    results: dict[tuple[str, int], list[RankResult]] = {}
    refusals: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(start(rank, Path(folder) / "store"))
            for rank in range(RANKS)
        ]
        for micros in arguments.accumulate:
            for name in arguments.contenders:
                task = {
                    key: getattr(arguments, key)
                    for key in ("device", "dtype", "layers", "width", "batch", "steps")
                }
                task |= {"contender": name, "accumulate": micros}
                answers = request_all(processes, task)
                results[name, micros] = [
                    RankResult(**answer["found"])
                    for answer in answers
                    if "found" in answer
                ]
                for answer in answers:
                    if "refused" in answer:
                        refusals[name] = answer["refused"]
                measure.progress(f"{name}, {micros} micro-batches: done")
    rows = tuple(
        cells(name, micros, ranks, results.get((BASELINE, micros)))
        for (name, micros), ranks in results.items()
    )
    notes = (
        f"bytes and calls of one rank of {RANKS} in a step, mean of {arguments.steps}",
        "sent: TCP_INFO of its own sockets (bytes sent, but not again), less a barrier",
        "in collectives: size of the tensors that all-reduce was called with",
        "ranks equal: weights, masters and optimizer state, to the bit",
        "torch.amp: DDP, and no_sync() but for the last micro-batch",
        "O: halfstep under DDP",
        f"hook: torch's {arguments.dtype}_compress_hook",
        *(f"{name} refused: {text}" for name, text in refusals.items()),
        *measure.conditions("wire", "cpu", arguments),
    )
    return [Table("Bytes on the wire", _COLUMNS, rows, notes, digits=4)]


def start(rank: int, store: Path) -> worker_process.WorkerProcess:
    """Start one of the processes that train together."""
    task = {"rank": rank, "store": str(store)}
    environment = {"GLOO_SOCKET_IFNAME": loopback()}
    return worker_process.WorkerProcess(
        f"rank {rank}", "halfstep.bench.comm_worker", task, environment
    )


def loopback() -> str:
    """Return the name of the interface that leads back to this machine."""
    names = {name for _, name in socket.if_nameindex()}
    return "lo0" if "lo0" in names else "lo"


def request_all(
    processes: Sequence[worker_process.WorkerProcess], question: dict[str, Any]
) -> list[dict[str, Any]]:
    """Put a question to all at once, for each waits for the others; in their order."""
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(lambda process: process.request(question), processes))


def cells(
    name: str,
    micros: int,
    ranks: Sequence[RankResult],
    baseline: Sequence[RankResult] | None,
) -> tuple[Cell, ...]:
    """Return a row; only a name, if the ranks refused."""
    if not ranks:
        return (name, micros, *[None] * (len(_COLUMNS) - 2))
    own, base = ranks[0], baseline[0] if baseline else None
    return (
        name,
        micros,
        None if own.sent is None else round(own.sent),
        _over(own.sent, base.sent if base else None),
        round(own.payload),
        _over(own.payload, base.payload if base else None),
        round(own.calls),
        len({rank.digest for rank in ranks}) == 1,
    )


def _over(own: float | None, base: float | None) -> float | None:
    return None if own is None or base is None else own / base

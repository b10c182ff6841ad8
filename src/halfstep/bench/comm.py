"""`halfstep bench comm`: bytes that data-parallel processes exchange per step.

Two processes train the recipe network over loopback with gloo, at each level and with
torch.amp. Counts the size of the tensors passed to collectives, DDP's own included.
"""

from __future__ import annotations

import atexit
import socket
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import commands, journal, loops, measure, recipe, results
from halfstep.bench.worker_process import PASSIVE_WAIT, WorkerProcess
from halfstep.errors import UserError
from halfstep.parity.training_run import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.reporting.table import Cell, Table

BASELINE = "O0"
CANDIDATES: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0", "dtype": "fp32"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2-split": {"level": "O2", "master": "split"},
    "torch.amp": {},
    "torch.amp-hook": {"hook": True},
}
"""Settings of `prepare`, or of torch.amp under DDP."""
RANKS = 2
_WARM_UP = 2
"""Steps not counted: DDP rebuilds its buckets after the first."""
_TIMEOUT = timedelta(seconds=60)


def tables(arguments: Namespace) -> list[Table]:
    """Train with each candidate in two processes; return what the first one sent."""
    answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = [
            stack.enter_context(start(rank, Path(folder) / "store"))
            for rank in range(RANKS)
        ]
        for count, name in product(arguments.accumulate, arguments.candidates):
            work = results.settings(arguments) | {"accumulate": count, "device": "cpu"}
            got = request_all(processes, {"name": name, "work": work})
            answers[name, count] = got
            journal.record(f"{name}, {count} micro-batches", **got[0])
            measure.progress(f"{name}, {count} micro-batches: done")
    rows = [
        table_row(*key, got, answers.get((BASELINE, key[1])))
        for key, got in answers.items()
    ]
    firsts = {name: got[0] for (name, _), got in answers.items()}
    notes = (
        f"bytes and calls of one rank of {RANKS} in a step, mean of {arguments.steps}",
        "bytes: size of the tensors that all-reduce was called with",
        "ranks equal: weights, master weights and optimizer state, bit for bit",
        "torch.amp: DDP, and no_sync() but for the last micro-batch",
        "O: halfstep under DDP",
        f"hook: torch's {arguments.dtype}_compress_hook",
        *(
            f"{name} rejected: {first['rejected']}"
            for name, first in firsts.items()
            if "rejected" in first
        ),
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
    ranks: Sequence[dict[str, Any]],
    baseline: Sequence[dict[str, Any]] | None,
) -> dict[str, Cell]:
    """Return a row; its cells are empty if the candidate was rejected."""
    own, base = ranks[0], baseline[0] if baseline else {}
    ran = "bytes" in own
    checksums = {rank.get("checksum") for rank in ranks}
    return {
        "candidate": name,
        "micro-batches": micro_batches,
        "bytes": round(own["bytes"]) if ran else None,
        f"x {BASELINE}": own["bytes"] / base["bytes"] if ran and base else None,
        "calls": round(own["calls"]) if ran else None,
        "ranks equal": len(checksums) == 1 if ran else None,
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
    """Train with one candidate, on batches that differ between ranks.

    If the candidate does not support the work, the answer is the reason in "rejected".
    """
    work = Namespace(**task["work"])
    batches = [(x + rank, y) for x, y in next(recipe.draw_batches(work, 0))]
    try:
        loop = make_loop(CANDIDATES[task["name"]], work, rank)
    except UserError as error:
        return {"rejected": str(error)}
    for _ in range(_WARM_UP):
        loop.step(batches)
    with Collectives() as collectives:
        for _ in range(work.steps):
            loop.step(batches)
    weights = loop.session.weights() if loop.session else None
    state = loop.optimizer.state_dict()["state"]
    replicated = [loop.model.state_dict(), weights, state]  # equal on every rank
    return {
        "bytes": collectives.bytes / work.steps,
        "calls": collectives.calls / work.steps,
        "checksum": checksum(replicated),
    }


def make_loop(settings: dict[str, Any], work: Namespace, rank: int) -> loops.Loop:
    """Build a candidate; each rank starts from different weights."""
    torch.manual_seed(rank)
    model = recipe.make_network(work)
    optimizer = torch.optim.AdamW(model.parameters())
    if "level" in settings:
        task = loops.Task(model, optimizer, recipe.loss_of, work)
        loop = loops.session(task, **settings)
        assert loop.session is not None  # noqa: S101
        loop.session.model = DistributedDataParallel(loop.model)
        return loop
    wrapper = DistributedDataParallel(model)
    if settings.get("hook"):
        # In a lambda, as DDP rejects torch's own hook function on a CPU.
        hook = getattr(default_hooks, f"{work.dtype}_compress_hook")
        wrapper.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
    return loops.plain(loops.Task(wrapper, optimizer, recipe.loss_of, work))


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives and their bytes, including DDP's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.bytes = 0

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
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


BENCHES = {
    "comm": commands.Bench(
        tables,
        "Train a few linear layers in two processes over loopback, at each level and "
        "with torch.amp; print the bytes of the tensors they all-reduced.",
        {
            **commands.network(1024, 32),
            "accumulate": commands.flag(
                commands.ACCUMULATE, [1, 4], commands.positive_ints, "N,N"
            ),
            "steps": commands.flag("steps counted", 5),
            "candidates": commands.names(CANDIDATES),
            "dtype": commands.DTYPE,
            "device": commands.choice("gloo runs on a CPU", "cpu"),
        },
    )
}

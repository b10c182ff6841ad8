"""One of the processes of `halfstep bench wire`: it trains, and counts what it sends.

In: a rank, where ranks meet, and contenders to train. Out: for each, bytes of a step:
in the kernel's figures of the process's own sockets, and as the size of the tensors
that collectives are called with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.bench import accumulate, worker_process
from halfstep.bench.loops import PlainLoop, SessionLoop
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from halfstep.bench.accumulate import Batches
    from halfstep.session.session import Session

RANKS = 2
_WARM_UP = 2
"""Steps that are not counted: DDP regroups gradients after its first."""
_TIMEOUT = timedelta(seconds=60)
_LR = 1e-3
_SENT = 200
"""Where Linux keeps `tcpi_bytes_sent` in its `tcp_info`, from 4.19 on; what was sent
again comes next, and both are 64 bits."""


@dataclass(frozen=True)
class RankResult:
    """What one rank sent with one contender, per step."""

    sent: float | None
    """Bytes that left its sockets; None where the system does not tell."""
    payload: float
    """Bytes of the tensors in its collectives."""
    calls: float
    """Collectives."""
    digest: str
    """Of weights, masters and optimizer state at the end."""


class Loop(Protocol):
    """A model that learns, together with others."""

    def step(self, batches: Batches) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Yield all that must be the same on every rank."""


class AmpLoop(PlainLoop):
    """torch.amp under DDP, which is told to wait for the last micro-batch."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, optimizer, accumulate.loss_of, "cpu", dtype)
        self._wrapper = model

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self._wrapper.no_sync():
                loss = self.forward(batch)
                scaled = self._scaler.scale(loss / len(batches))
                scaled.backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return loss.detach()

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Yield all that must be the same on every rank."""
        yield from self.model.parameters()
        yield from _states(self._optimizer)


class DdpSessionLoop(SessionLoop):
    """A session under DDP."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, accumulate.loss_of)

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Yield all that must be the same on every rank."""
        yield from self.model.parameters()
        yield from self._session.weights().values()
        yield from _states(self._session.optimizer)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _session(level: str, **settings: Any) -> Callable[..., Loop]:  # noqa: ANN401
    def make(
        model: nn.Module, optimizer: torch.optim.Optimizer, work: accumulate.Workload
    ) -> Loop:
        session = prepare(
            model,
            optimizer,
            level,
            dtype="fp32" if level == "O0" else work.dtype,
            accumulate=work.accumulate,
            **settings,
        )
        session.model = DistributedDataParallel(session.model)
        return DdpSessionLoop(session)

    return make


def _plain(*, hook: bool) -> Callable[..., Loop]:
    def make(
        model: nn.Module, optimizer: torch.optim.Optimizer, work: accumulate.Workload
    ) -> Loop:
        wrapper = DistributedDataParallel(model)
        if hook:
            wrapper.register_comm_hook(None, _hook(work.dtype))
        return AmpLoop(wrapper, optimizer, formats.parse(work.dtype).dtype)

    return make


_HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def _hook(dtype: str) -> Callable[..., object]:
    """Return torch's hook under another name: by its own, DDP refuses it on a CPU."""
    return lambda state, bucket: _HOOKS[dtype](state, bucket)  # noqa: PLW0108


CONTENDERS = {
    "O0": _session("O0"),
    "O1": _session("O1"),
    "O2": _session("O2"),
    "O2-split": _session("O2", master="split"),
    "torch.amp": _plain(hook=False),
    "torch.amp-hook": _plain(hook=True),
}
"""Word for the flag -> what trains."""


def make_loop(name: str, work: accumulate.Workload, rank: int) -> Loop:
    """Return a contender; every rank begins with weights of its own."""
    torch.manual_seed(rank)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), _LR)
    return CONTENDERS[name](model, optimizer, work)


def bytes_sent() -> int | None:
    """Return the bytes that this process's TCP sockets have sent, but not again.

    None where the system does not tell: it is Linux that does.
    """
    folder = Path("/proc/self/fd")
    if not (folder.exists() and hasattr(socket, "TCP_INFO")):
        return None
    total = 0
    for entry in sorted(folder.iterdir()):
        with contextlib.suppress(OSError), _socket(int(entry.name)) as one:
            if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < _SENT + 16:
                return None
            total_sent, retransmitted = struct.unpack_from("=QQ", info, _SENT)
            total += total_sent - retransmitted
    return total


def _socket(number: int) -> socket.socket:
    """Return a socket that shares a file's connection.

    Raises:
        OSError: If it is no socket, or was closed meanwhile.
    """
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


class Collectives(TorchDispatchMode):
    """Counts what collectives are called with, DDP's own among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.payload = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- an operation of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Count, and go on."""
        del types
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


def count_communication(loop: Loop, batches: Batches, steps: int) -> RankResult:
    """Count what steps send; the ranks do this together."""
    marks = []
    # After a barrier nothing is left in a buffer; what it sends itself is taken off.
    for due in (_WARM_UP, 0, steps):
        for _ in range(due):
            loop.step(batches)
        dist.barrier()
        marks.append(bytes_sent())
    counters = [mark for mark in marks if mark is not None]
    bytes_per_step = None
    if len(counters) == len(marks):
        bytes_per_step = (counters[2] - 2 * counters[1] + counters[0]) / steps
    with Collectives() as collectives:
        for _ in range(steps):
            loop.step(batches)
    return RankResult(
        bytes_per_step,
        collectives.payload / steps,
        collectives.calls / steps,
        digest(loop.replicated_tensors()),
    )


def answer(rank: int, task: dict[str, Any]) -> dict[str, Any]:
    """Train with one contender, on batches of this rank's own.

    One that cannot do the work says so instead, in "refused", on every rank.
    """
    name, steps = task.pop("contender"), task.pop("steps")
    work = accumulate.Workload(**task)
    batches = [
        (inputs + rank, targets) for inputs, targets in accumulate.draw_batches(work)
    ]
    try:
        loop = make_loop(name, work, rank)
    except UserError as error:
        return {"refused": str(error)}
    return {"found": asdict(count_communication(loop, batches, steps))}


def main(words: Sequence[str]) -> None:
    """Be one rank: one argument, its number and where ranks meet, as JSON."""
    task = json.loads(words[0])
    rank = task["rank"]
    place = f"file://{task['store']}"
    join = partial(dist.init_process_group, "gloo", init_method=place, rank=rank)
    worker_process.serve(
        lambda question: answer(rank, question),
        # An old torch prints of it.
        partial(join, world_size=RANKS, timeout=_TIMEOUT),
    )
    # No barrier: the other rank may still be waiting for a question. But a thread of
    # gloo's may want the GIL once more.
    time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

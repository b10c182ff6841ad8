"""Threads in all mixtures of torch's contexts and halfstep's: does any hang?

    python tests/support/thread_soak.py SECONDS [THREADS]

Exit status 0 and a line with the steps that each kind of thread has made, or 1 with the
stacks of all threads where none has made a step for `PATIENCE` seconds.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- its usual name
from torch.utils.checkpoint import checkpoint

import halfstep as hs

PATIENCE = 60
"""Seconds without a step of one thread that count as a hang; a step takes some ms."""


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)
    )


SHARED = net()
X, Y = torch.randn(16, 32), torch.randint(8, (16,))


def loss_of(model: nn.Module, *, again: bool = False) -> torch.Tensor:
    out = checkpoint(model, X, use_reentrant=False) if again else model(X)
    return F.cross_entropy(out, Y)


def torch_train(model: nn.Module) -> None:
    with torch.autocast("cpu"):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def torch_evaluate(model: nn.Module) -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        loss_of(model)
        torch.clear_autocast_cache()


def drop_in(model: nn.Module) -> None:
    with hs.autocast("cpu"):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def policy(model: nn.Module) -> None:
    with hs.autocast("cpu", policy="lean + op:linear=fp32"):
        loss = loss_of(model, again=True)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def recorded(model: nn.Module) -> None:
    with torch.no_grad(), hs.autocast("cpu", record=True):
        loss_of(model)


def session_step() -> Callable[[nn.Module], None]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")

    def step(_: nn.Module) -> None:
        with session.autocast():
            loss = loss_of(model)
        session.backward(loss)
        session.step()

    return step


KINDS = (torch_train, torch_evaluate, drop_in, policy, recorded)


class Soak:
    """Threads that make steps until they are told to stop, or one of them fails."""

    def __init__(self, threads: int) -> None:
        self.works = [*KINDS, session_step()]
        self.names = [*(work.__name__ for work in KINDS), "session"]
        self.steps = [0] * threads
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self.run, args=(index,), daemon=True)
            for index in range(threads)
        ]

    def name(self, index: int) -> str:
        """Return which kind of thread one is."""
        return self.names[index % len(self.works)]

    def run(self, index: int) -> None:
        work = self.works[index % len(self.works)]
        # One alone trains the shared model: two would collide over its gradients.
        evaluates = work in {torch_evaluate, recorded}
        model = SHARED if evaluates or index == 0 else net()
        try:
            while not self.stop.is_set():
                work(model)
                self.steps[index] += 1
        except BaseException as error:  # noqa: BLE001 -- raised by `soak`
            self.errors.append(error)
            self.stop.set()

    def watch(self, seconds: float) -> None:
        """Wait; end the process if a thread makes no step for too long."""
        end = time.monotonic() + seconds
        seen, since = list(self.steps), [time.monotonic()] * len(self.steps)
        while time.monotonic() < end and not self.stop.is_set():
            time.sleep(0.05)
            for index, count in enumerate(self.steps):
                if count != seen[index]:
                    seen[index], since[index] = count, time.monotonic()
                elif time.monotonic() - since[index] > PATIENCE:
                    _hang(self.name(index))


def soak(seconds: float, threads: int) -> dict[str, int]:
    """Run the kinds in turn, at least one thread each; return their steps.

    The process ends with status 1 if one of them stops.
    """
    work = Soak(threads)
    for thread in work.threads:
        thread.start()
    work.watch(seconds)
    work.stop.set()
    for index, thread in enumerate(work.threads):
        thread.join(PATIENCE)
        if thread.is_alive():
            _hang(work.name(index))
    if work.errors:
        raise work.errors[0]
    totals = dict.fromkeys(work.names, 0)
    for index, count in enumerate(work.steps):
        totals[work.name(index)] += count
    return totals


def _hang(name: str) -> None:
    sys.stderr.write(f"{name}: no step in {PATIENCE} s\n")
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    sys.stdout.write(f"{soak(float(sys.argv[1]), count)}\n")

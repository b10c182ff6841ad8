"""The training loops that benches compare: plain torch.amp, by hand, halfstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.fast_dropout import use_fast_dropout
from halfstep.numerics import formats
from halfstep.numerics.local_tensor import inner_tensors
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from argparse import Namespace

    from torch.optim import Optimizer

    from halfstep.session.session import Session

LossOf: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss of the batch."""


@dataclass(frozen=True)
class Task:
    """What a candidate trains."""

    model: nn.Module
    """On its device, in fp32."""
    optimizer: Optimizer
    loss_of: LossOf
    work: Namespace
    """Has `device`, "cpu" or "cuda"; `dtype`, "bf16" or "fp16"; and `accumulate`, the
    micro-batches of a step."""


@dataclass
class Loop:
    """A training step."""

    model: nn.Module
    optimizer: Optimizer
    passes: Callable[[Sequence[Any]], Tensor]
    """Runs forward and backward of all micro-batches; returns the last loss."""
    update: Callable[[], object] = lambda: None
    """Steps the optimizer and clears the gradients, unless `passes` does so."""
    forward: Callable[[Any], Tensor] | None = None
    """Returns the loss of a micro-batch with its graph; None: casts and saved bytes are
    not counted."""
    session: Session | None = None

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""
        loss = self.passes(batches)
        self.update()
        return loss.detach()

    def state_bytes(self) -> int:
        """Return the bytes of weights, master weights and optimizer state."""
        if self.session:
            memory: dict[str, int] = self.session.memory()
            return memory["weights"] + memory["masters"] + memory["moments"]
        return state_bytes(self.model, self.optimizer)


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of a model's weights, and of what an optimizer holds."""
    groups, states = optimizer.param_groups, optimizer.state.values()
    tensors = [p for group in groups for p in group["params"]]
    tensors += [v for state in states for v in state.values() if torch.is_tensor(v)]
    every = (*model.parameters(), *tensors)
    storages = (t.untyped_storage() for each in every for t in inner_tensors(each))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def plain(task: Task, *, low: bool = True) -> Loop:
    """Return a loop as in tutorials: torch.autocast, and its GradScaler for fp16.

    Without `low` it trains in fp32.
    """
    model, device = task.model, task.work.device
    dtype = formats.parse(task.work.dtype).dtype if low else None

    def forward(batch: Any) -> Tensor:  # noqa: ANN401 -- whatever the model takes
        with torch.autocast(device, dtype, enabled=low):
            return task.loss_of(model, batch)

    return _scaled(task, forward, scales=dtype == torch.float16)


def _scaled(task: Task, forward: Callable[[Any], Tensor], *, scales: bool) -> Loop:
    """Return a loop with torch's GradScaler, which does nothing unless it `scales`."""
    scaler = torch.amp.GradScaler(task.work.device, enabled=scales)

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            loss = forward(batch)
            scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        return loss

    def update() -> None:
        scaler.step(task.optimizer)
        scaler.update()
        task.optimizer.zero_grad()

    return Loop(task.model, task.optimizer, passes, update, forward)


def manual(task: Task, *, masters: bool) -> Loop:
    """Return a loop with 16-bit weights and optional fp32 master weights, by hand.

    With masters: copy gradients to fp32, step, copy the masters to the weights.
    Without: step on the weights, without a loss scale.
    """
    dtype = formats.parse(task.work.dtype).dtype
    pairs: list[tuple[Tensor, Tensor]] = []
    if masters:
        (group,) = task.optimizer.param_groups
        originals = [p.detach().clone() for p in group["params"]]
        pairs = list(zip(group["params"], originals, strict=True))
        group["params"] = originals
    task.model.to(dtype)

    def forward(batch: Any) -> Tensor:  # noqa: ANN401
        return task.loss_of(task.model, formats.cast_floating(batch, dtype))

    loop = _scaled(task, forward, scales=masters and dtype == torch.float16)
    inner = loop.update

    def update() -> None:
        for weight, master in pairs:
            if weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None
        inner()
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)

    loop.update = update
    return loop


def session(task: Task, **settings: Any) -> Loop:  # noqa: ANN401
    """Return a loop over a Session; `settings` are arguments of `prepare`."""
    common = {"dtype": task.work.dtype, "accumulate": task.work.accumulate}
    own = prepare(task.model, task.optimizer, **common | settings)

    def forward(batch: Any) -> Tensor:  # noqa: ANN401
        with own.autocast():
            return task.loss_of(own.model, batch)

    def passes(batches: Sequence[Any]) -> Tensor:
        for number, batch in enumerate(batches, start=1):
            loss = forward(batch)
            own.backward(loss)
            if number < len(batches):
                own.step()
        return loss

    return Loop(own.model, own.optimizer, passes, own.step, forward, own)


def fast_dropout(task: Task) -> Task:
    """Return the task with the model after `use_fast_dropout`."""
    use_fast_dropout(task.model)
    return task


def fused(task: Task) -> Task:
    """Return the task with torch's one kernel for the optimizer's update."""
    groups = [{**group, "fused": True} for group in task.optimizer.param_groups]
    make: Any = type(task.optimizer)
    return replace(task, optimizer=make(groups, fused=True))


@dataclass(frozen=True)
class Candidate:
    """One way to train the model of a workload."""

    description: str
    make: Callable[..., Loop]
    """(task, **settings) -> loop."""
    settings: dict[str, Any] = field(default_factory=dict)
    keeps_memory: bool = False
    """Whether its C allocator returns no memory to the system."""
    change: Callable[[Task], Task] = lambda task: task
    """Changes the model or the optimizer before."""

    def loop(self, task: Task) -> Loop:
        """Return its loop for a task."""
        return self.make(self.change(task), **self.settings)


def _session(description: str, **settings: Any) -> Candidate:  # noqa: ANN401
    return Candidate(f"halfstep: {description}", session, settings)


_KEEPS_MEMORY = "the same; the C library's allocator keeps all memory"
CANDIDATES = {
    "fp32": Candidate("all in fp32", plain, {"low": False}),
    "torch.amp": Candidate("torch.autocast, and torch's GradScaler with fp16", plain),
    "torch.amp-kept": Candidate(_KEEPS_MEMORY, plain, keeps_memory=True),
    "torch.amp-fused": Candidate(
        "torch.amp, and the optimizer with fused=True", plain, change=fused
    ),
    "torch.amp-fused-kept": Candidate(
        _KEEPS_MEMORY, plain, keeps_memory=True, change=fused
    ),
    "torch.amp-fast": Candidate(
        "torch.amp after hs.use_fast_dropout", plain, change=fast_dropout
    ),
    "naive-O2": Candidate("fp32 masters by hand", manual, {"masters": True}),
    "pure": Candidate("all in 16 bits, by hand", manual, {"masters": False}),
    "O1": _session("fp32 weights, operations cast one by one", level="O1"),
    "O1-fused": replace(
        _session("O1, and the optimizer with fused=True", level="O1"), change=fused
    ),
    "O2": _session("16-bit weights, fp32 master weights", level="O2"),
    "O2-kept": Candidate(_KEEPS_MEMORY, session, {"level": "O2"}, keeps_memory=True),
    "O2-fast": replace(
        _session("O2 after hs.use_fast_dropout", level="O2"), change=fast_dropout
    ),
    **{
        f"O2-{master}": _session(description, level="O2", master=master)
        for master, description in (
            ("split", "bf16 weights and the low 16 bits of fp32"),
            ("kahan", "bf16 weights and a compensation term"),
            ("stochastic", "stochastically rounded updates"),
        )
    },
    "O3": _session("16-bit weights without master weights", level="O3"),
    "O1 torch": _session("O1 with torch's op table", level="O1", policy="torch"),
    "O1 lean": _session("O1 with the lean op table", level="O1", policy="lean"),
}
"""Name -> candidate."""


def pick(*names: str) -> dict[str, Candidate]:
    """Return some of the candidates."""
    return {name: CANDIDATES[name] for name in names}

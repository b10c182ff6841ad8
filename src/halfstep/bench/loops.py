"""The training loops that benches compare: plain torch.amp, other libraries, halfstep.

A library is used as its documentation shows it, without further tuning.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.casting.autocast_mode import autocast
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
    scaled_dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    """For which `plain` uses a GradScaler; bf16 needs none, but many programs do."""


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
    """Returns the loss of a micro-batch with its graph; None in other libraries."""
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
        groups, states = self.optimizer.param_groups, self.optimizer.state.values()
        tensors = [p for group in groups for p in group["params"]]
        tensors += [v for state in states for v in state.values() if torch.is_tensor(v)]
        every = (*self.model.parameters(), *tensors)
        storages = (t.untyped_storage() for each in every for t in inner_tensors(each))
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def plain(task: Task, *, low: bool = True, policy: str | None = None) -> Loop:
    """Return a loop as in tutorials: torch.autocast, and its GradScaler for fp16.

    Without `low` it trains in fp32; with a policy, under halfstep.autocast.
    """
    model, device = task.model, task.work.device
    dtype = formats.parse(task.work.dtype).dtype if low else None
    open_context: Any = partial(torch.autocast, device, dtype, enabled=low)
    if policy is not None:
        open_context = partial(autocast, device, dtype, policy=policy)

    def forward(batch: Any) -> Tensor:  # noqa: ANN401 -- whatever the model takes
        with open_context():
            return task.loss_of(model, batch)

    return _scaled(task, forward, scales=dtype in task.scaled_dtypes)


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


def accelerate(task: Task) -> Loop:
    """Return a loop over Hugging Face Accelerate."""
    accelerator: Any = import_module("accelerate").Accelerator(
        mixed_precision=task.work.dtype,
        cpu=task.work.device == "cpu",
        gradient_accumulation_steps=task.work.accumulate,
    )
    model, optimizer = accelerator.prepare(task.model, task.optimizer)

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = task.loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    return Loop(model, optimizer, passes)


def fabric(task: Task, *, kind: str) -> Loop:
    """Return a loop over Lightning Fabric: "mixed" is autocast, "true" all 16 bits."""
    number = {"bf16": "bf16", "fp16": "16"}[task.work.dtype]
    library: Any = import_module("lightning_fabric").Fabric(
        accelerator=task.work.device, devices=1, precision=f"{number}-{kind}"
    )
    model, optimizer = library.setup(task.model, task.optimizer)

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            loss = task.loss_of(model, batch)
            library.backward(loss / len(batches))
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, optimizer, passes, update)


def trainer(task: Task) -> Loop:
    """Return a loop over transformers' Trainer, without logging, clipping, schedule.

    `Trainer.train` runs in a thread of its own, and waits for the batches of each step.
    """
    batches_in: queue.Queue[Any] = queue.Queue()
    losses: queue.Queue[Tensor | Exception] = queue.Queue()
    folder = tempfile.TemporaryDirectory()
    transformers: Any = import_module("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> object:
            return iter(batches_in.get, None)  # without end

        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:  # noqa: ANN401
            self.loss = task.loss_of(model, inputs)
            return self.loss

    class Report(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            losses.put(worker.loss)

    settings = transformers.TrainingArguments(
        output_dir=folder.name,
        use_cpu=task.work.device == "cpu",
        **{task.work.dtype: True},
        max_steps=2**31 - 1,
        gradient_accumulation_steps=task.work.accumulate,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    worker = Trainer(
        task.model,
        settings,
        optimizers=(task.optimizer, None),
        callbacks=[Report()],
    )
    worker.model_accepts_loss_kwargs = False  # so that it divides by `accumulate`

    def train() -> None:
        try:
            with folder:
                worker.train()
        except Exception as error:  # noqa: BLE001 -- raised by `passes`
            losses.put(error)

    threading.Thread(target=train, daemon=True).start()

    def passes(batches: Sequence[Any]) -> Tensor:
        for batch in batches:
            batches_in.put(batch)
        loss = losses.get()
        if isinstance(loss, Exception):
            raise loss
        return loss

    return Loop(task.model, task.optimizer, passes)


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
    package: str | None = None
    """Package that it needs besides torch."""
    optimizer: str | None = None
    """Class of `torchao.optim`, in place of AdamW."""
    keeps_memory: bool = False
    """Whether its C allocator returns no memory to the system."""
    change: Callable[[Task], Task] = lambda task: task
    """Changes the model or the optimizer before."""

    def loop(self, task: Task) -> Loop:
        """Return its loop for a task."""
        if self.optimizer:
            make = getattr(import_module("torchao.optim"), self.optimizer)
            lr = task.optimizer.param_groups[0]["lr"]
            task = replace(task, optimizer=make(task.model.parameters(), lr=lr))
        return self.make(self.change(task), **self.settings)


def _session(description: str, **settings: Any) -> Candidate:  # noqa: ANN401
    return Candidate(f"halfstep: {description}", session, settings)


def _other(text: str, make: Any, package: str, **settings: Any) -> Candidate:  # noqa: ANN401
    return Candidate(text, make, settings, package)


def _torchao(kind: str, text: str, make: Any, **settings: Any) -> Candidate:  # noqa: ANN401
    return Candidate(f"{text} with torchao's {kind}", make, settings, "torchao", kind)


_FABRIC = "lightning_fabric"
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
    "accelerate": _other("Hugging Face Accelerate", accelerate, "accelerate"),
    "fabric-mixed": _other("Lightning Fabric, mixed", fabric, _FABRIC, kind="mixed"),
    "fabric-true": _other("Lightning Fabric, true", fabric, _FABRIC, kind="true"),
    "trainer": _other("transformers' Trainer", trainer, "transformers"),
    "torchao-8bit": _torchao("AdamW8bit", "torch.amp", plain),
    "torchao-4bit": _torchao("AdamW4bit", "torch.amp", plain),
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
    "O2-8bit": _torchao("AdamW8bit", "halfstep: O2", session, level="O2"),
    "O3": _session("16-bit weights without master weights", level="O3"),
    "O1 torch": _session("O1 with torch's op table", level="O1", policy="torch"),
    "O1 lean": _session("O1 with the lean op table", level="O1", policy="lean"),
}
"""Name -> candidate."""


def pick(*names: str) -> dict[str, Candidate]:
    """Return some of the candidates."""
    return {name: CANDIDATES[name] for name in names}

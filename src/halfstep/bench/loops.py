"""The training loops that benches compare: plain torch.amp, other libraries, halfstep.

A library is used as its documentation shows it, without further tuning.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from halfstep.session.session import Session

LossOf: TypeAlias = "Callable[[nn.Module, Any], Tensor]"
"""(model, batch) -> mean loss of the batch."""
Batches: TypeAlias = "list[tuple[Tensor, Tensor]]"


class Loop(Protocol):
    """A model and its training step."""

    model: nn.Module

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401 -- whatever the model takes
        """Return the loss of a batch, with its graph."""

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""


class PlainLoop:
    """A loop as in tutorials: torch.autocast, and torch.amp.GradScaler for fp16.

    Args:
        model: On its device, in fp32; under DDP it synchronizes the last micro-batch.
        optimizer: Optimizer of its parameters.
        loss_of: Computes the loss from model and batch.
        device: "cpu" or "cuda".
        dtype: The 16-bit dtype; None trains in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_of: LossOf,
        device: str,
        dtype: torch.dtype | None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss_of, self._device, self._dtype = loss_of, device, dtype
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        enabled = self._dtype is not None
        with torch.autocast(self._device, self._dtype, enabled=enabled):
            return self._loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""
        no_sync = getattr(self.model, "no_sync", contextlib.nullcontext)
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with contextlib.nullcontext() if is_last else no_sync():
                loss = self.forward(batch)
                self.scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.detach()

    def update(self) -> None:
        """Step the optimizer; clear the gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class ManualLoop(PlainLoop):
    """16-bit weights and optional fp32 master weights, implemented by hand.

    With masters: copy gradients to fp32, step, copy the masters to the weights.
    Without: step on the weights, without a loss scale.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, work: Workload, *, masters: bool
    ) -> None:
        """Convert the model to 16 bits; with masters, pass those to the optimizer."""
        self.dtype = formats.parse(work.dtype).dtype
        scaled = self.dtype if masters else None
        super().__init__(model, optimizer, loss_of, work.device, scaled)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        if masters:
            (group,) = optimizer.param_groups
            originals = [p.detach().clone() for p in group["params"]]
            self.pairs = list(zip(group["params"], originals, strict=True))
            group["params"] = originals
        model.to(self.dtype)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, with its graph."""
        inputs, targets = batch
        return loss_of(self.model, (inputs.to(self.dtype), targets.to(self.dtype)))

    def update(self) -> None:
        """Step the optimizer on the masters, and copy them to the weights."""
        for weight, master in self.pairs:
            if weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None
        super().update()
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)


class AccelerateLoop:
    """A loop over Hugging Face Accelerate."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, work: Workload) -> None:
        """Let Accelerate prepare model and optimizer."""
        self._accelerator: Any = import_module("accelerate").Accelerator(
            mixed_precision=work.dtype,
            cpu=work.device == "cpu",
            gradient_accumulation_steps=work.accumulate,
        )
        self.model, self._optimizer = self._accelerator.prepare(model, optimizer)

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        return loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""
        for batch in batches:
            with self._accelerator.accumulate(self.model):
                loss = self.forward(batch)
                self._accelerator.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()
        return loss.detach()


class FabricLoop:
    """A loop over Lightning Fabric."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, work: Workload, *, kind: str
    ) -> None:
        """Let Fabric set up model and optimizer.

        Args:
            model: In fp32.
            optimizer: Optimizer of its parameters.
            work: Device and dtype.
            kind: "true": all in 16 bits, without masters; "mixed": autocast.
        """
        number = {"bf16": "bf16", "fp16": "16"}[work.dtype]
        self._fabric: Any = import_module("lightning_fabric").Fabric(
            accelerator=work.device, devices=1, precision=f"{number}-{kind}"
        )
        self.model, self._optimizer = self._fabric.setup(model, optimizer)

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        return loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""
        for batch in batches:
            loss = self.forward(batch)
            self._fabric.backward(loss / len(batches))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class SessionLoop:
    """A loop over a Session, whose `accumulate` is the number of micro-batches."""

    def __init__(self, session: Session, loss_of: LossOf) -> None:
        self.model, self.session = session.model, session
        self._loss_of = loss_of
        self._context: Any = None

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        with self.session.autocast() as self._context:
            return self._loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Run one step on the mean over micro-batches; return the last loss."""
        for batch in batches:
            loss = self.forward(batch)
            self.session.backward(loss)
            self.session.step()
        return loss.detach()

    def casts(self) -> int:
        """Return the casts made by the cache, which dispatch modes do not see."""
        cache = getattr(self._context, "cache", None)
        return cache.misses if cache is not None else 0


# The network shared by several benches


@dataclass(frozen=True)
class Workload:
    """Linear layers with ReLU between them, and how they are trained."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"bf16" or "fp16"."""
    layers: int
    width: int
    """Inputs and outputs of each layer."""
    batch: int
    """Examples of one micro-batch."""
    accumulate: int
    """Micro-batches of one step."""


def draw_batches(work: Workload) -> Batches:
    """Return the micro-batches, the same for every step."""
    torch.manual_seed(0)
    shape = work.batch, work.width

    def draw() -> Tensor:
        return torch.randn(shape, device=work.device)

    return [(draw(), draw()) for _ in range(work.accumulate)]


def make_network(work: Workload, seed: int) -> nn.Module:
    """Build the network; its weights depend only on the seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(work.device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a micro-batch."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def plain(
    model: nn.Module, optimizer: Optimizer, work: Workload, *, low: bool = True
) -> PlainLoop:
    """Return a plain loop on the network, in 16 bits or in fp32."""
    dtype = formats.parse(work.dtype).dtype if low else None
    return PlainLoop(model, optimizer, loss_of, work.device, dtype)


def session(
    model: nn.Module,
    optimizer: Optimizer,
    work: Workload,
    **settings: Any,  # noqa: ANN401
) -> SessionLoop:
    """Return a Session loop on the network; `settings` are arguments of `prepare`."""
    common: dict[str, Any] = {"dtype": work.dtype, "accumulate": work.accumulate}
    return SessionLoop(prepare(model, optimizer, **common | settings), loss_of)


MAKERS: dict[str, Callable[..., Loop]] = {
    "plain": plain,
    "manual": ManualLoop,
    "accelerate": AccelerateLoop,
    "fabric": FabricLoop,
    "session": session,
}
"""Name -> constructor of a loop: (network, optimizer, work, **settings)."""

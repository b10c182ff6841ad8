"""The updates that `halfstep bench optimizer` measures, and what each must move.

In: an optimizer, a form of master weights. Out: an object whose step updates weights
from gradients that are there, and that counts the bytes it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.session.session import Session

KINDS = ("weights", "gradients", "masters", "moments")
"""What the bytes of training are spent on; masters: whatever stands beside weights."""

_LR = 1e-3


@dataclass(frozen=True)
class Form:
    """One encoding of the master weights, and the bytes that it takes per parameter."""

    weight: int
    """Bytes, as for the others."""
    gradient: int
    """After the backward pass, before the update."""
    extra: int
    """Beside the weight: the master, or what a lean form keeps in its place."""
    moment: int
    """Each of the optimizer's."""
    settings: dict[str, Any]
    """For `prepare`; for torch's own optimizer, if `is_torch_optimizer`."""
    is_torch_optimizer: bool = False
    """torch's own optimizer over fp32 weights, without a Session."""

    def expected_bytes(self, moments: int) -> int:
        """Return the bytes that one parameter takes at the end of a backward pass."""
        return self.weight + self.gradient + self.extra + moments * self.moment

    def bytes_moved(self, moments: int) -> int:
        """Return the fewest bytes that an update reads and writes.

        All that it changes it reads and writes; but a gradient is only read, and a
        weight whose whole truth is its master is only written.
        """
        weight = self.weight * (1 if self.extra > self.weight else 2)
        gradient = self.gradient or self.weight
        return weight + gradient + 2 * (self.extra + moments * self.moment)


def _master(word: str, extra: int, moment: int, gradient: int = 2) -> Form:
    settings: dict[str, Any] = {"level": "O2", "master": word}
    if not gradient:
        settings["optimizer_in_backward"] = True
    return Form(2, gradient, extra, moment, settings)


FORMS = {
    "fp32": _master("fp32", 4, 4),
    "split": _master("split", 2, 4),
    "split-released": _master("split", 2, 4, gradient=0),
    "kahan": _master("kahan", 2, 2),
    "stochastic": _master("stochastic", 0, 2),
    "none": _master("none", 0, 2),
    "torch-foreach": Form(4, 4, 0, 4, {"foreach": True}, is_torch_optimizer=True),
    "torch-fused": Form(4, 4, 0, 4, {"fused": True}, is_torch_optimizer=True),
}
"""Word for the flag -> what is measured."""


@dataclass(frozen=True)
class Rule:
    """One of torch's optimizers."""

    kind: Callable[..., torch.optim.Optimizer]
    moments: int
    """Tensors as large as the weights that it keeps."""


RULES = {
    "sgd": Rule(partial(torch.optim.SGD, lr=_LR), 0),
    "sgd-momentum": Rule(partial(torch.optim.SGD, lr=_LR, momentum=0.9), 1),
    "adam": Rule(partial(torch.optim.Adam, lr=_LR), 2),
    "adamw": Rule(partial(torch.optim.AdamW, lr=_LR), 2),
}
"""Word for the flag -> the optimizer."""


@dataclass(frozen=True)
class Workload:
    """Which parameters are updated, and where."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"bf16" or "fp16"."""
    layers: int
    width: int
    """Rows and columns of each weight."""

    @property
    def parameters(self) -> int:
        """Return how many there are."""
        return self.layers * self.width**2


class Update(Protocol):
    """A model and an optimizer whose update can be measured."""

    model: nn.Module

    def backward(self) -> None:
        """Run a backward pass that gives each weight its gradient."""

    def write_gradients(self) -> None:
        """Write the gradients of a step; nothing else is left of it but `step`."""

    def step(self) -> object:
        """Update the weights; clear the gradients."""

    def memory(self) -> dict[str, int]:
        """Return the bytes held of each of `KINDS`."""


class TorchUpdate:
    """torch's own optimizer over fp32 weights."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sources: list[Tensor]
    ) -> None:
        """Take what is updated.

        Args:
            model: Linear layers without bias.
            optimizer: Over its parameters.
            sources: The gradient of each.
        """
        self.model, self._optimizer, self._sources = model, optimizer, sources
        self._buffers = [torch.empty_like(p) for p in model.parameters()]

    def backward(self) -> None:
        """Run a backward pass that gives each weight its gradient."""
        loss_of(self.model, self._sources).backward()  # type: ignore[no-untyped-call]

    def write_gradients(self) -> None:
        """Write the gradients of a step."""
        set_gradients(self.model, self._buffers, self._sources)

    def step(self) -> object:
        """Update the weights; clear the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        return None

    def memory(self) -> dict[str, int]:
        """Return the bytes held of each of `KINDS`, each storage once."""
        weights = list(self.model.parameters())
        moments = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return {
            "weights": storage_bytes(weights),
            "gradients": storage_bytes(p.grad for p in weights if p.grad is not None),
            "masters": 0,
            "moments": storage_bytes(moments),
        }


class SessionUpdate:
    """A Session."""

    def __init__(self, session: Session, sources: list[Tensor], device: str) -> None:
        """Take what is updated.

        Args:
            session: Over linear layers without bias.
            sources: The gradient of each.
            device: "cpu" or "cuda".
        """
        self.model = session.model
        self._session, self._sources = session, sources
        self._buffers = [torch.empty_like(p) for p in session.model.parameters()]
        self._unrelated = torch.zeros((), device=device, requires_grad=True)

    def backward(self) -> None:
        """Run a backward pass that gives each weight its gradient."""
        with self._session.autocast():
            loss = loss_of(self.model, self._sources)
        self._session.backward(loss)

    def write_gradients(self) -> None:
        """Write the gradients of a step, which a backward pass elsewhere announces.

        Why: so no part of the update, such as a cast of gradients, hides in it.
        """
        self._session.backward(self._unrelated * 1)
        self._unrelated.grad = None
        set_gradients(self.model, self._buffers, self._sources)

    def step(self) -> object:
        """Update the weights; clear the gradients."""
        return self._session.step()

    def memory(self) -> dict[str, int]:
        """Return the bytes held of each of `KINDS`."""
        sizes: dict[str, int] = self._session.memory()
        return sizes


def loss_of(model: nn.Module, sources: Sequence[Tensor]) -> Tensor:
    """Return a scalar whose gradients are the sources."""
    pairs = zip(model.parameters(), sources, strict=True)
    loss: Tensor = sum(
        ((weight * source.to(weight.dtype)).sum() for weight, source in pairs),
        start=torch.zeros((), device=sources[0].device),
    )
    return loss


def set_gradients(
    model: nn.Module, buffers: list[Tensor], sources: list[Tensor]
) -> None:
    """Write the sources into buffers that are there, and make them the gradients."""
    torch._foreach_copy_(buffers, sources)
    for weight, buffer in zip(model.parameters(), buffers, strict=True):
        weight.grad = buffer


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def draw_gradients(work: Workload) -> list[Tensor]:
    """Return the gradient of each weight, fp32, which 16 bits hold too."""
    torch.manual_seed(0)
    low_dtype = formats.parse(work.dtype).dtype
    shape = work.width, work.width
    return [
        torch.randn(shape, device=work.device).to(low_dtype).float()
        for _ in range(work.layers)
    ]


def make_update(
    rule: Rule, form: Form, work: Workload, sources: list[Tensor]
) -> Update:
    """Return an update; all begin with the same weights.

    Raises:
        UserError: If the form does not serve this optimizer or dtype.
    """
    torch.manual_seed(1)
    layers = (nn.Linear(work.width, work.width, bias=False) for _ in range(work.layers))
    model = nn.Sequential(*layers).to(work.device)
    if form.is_torch_optimizer:
        return TorchUpdate(
            model, rule.kind(model.parameters(), **form.settings), sources
        )
    optimizer = rule.kind(model.parameters())
    session: Session = prepare(model, optimizer, dtype=work.dtype, **form.settings)
    return SessionUpdate(session, sources, work.device)

"""The training loops that benches compare: torch.amp's, and ours.

In: a model, an optimizer, and a function from model and batch to loss. Out: an object
with one method for a forward pass, and one for a step of the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.casting.autocast_mode import Autocast
    from halfstep.casting.policy_autocast import PolicyAutocast
    from halfstep.session.session import Session

LossOf: TypeAlias = "Callable[[nn.Module, Any], Tensor]"
"""From a model and a batch to the batch's mean loss."""


class Loop(Protocol):
    """A model that learns."""

    model: nn.Module

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401 -- whatever the model takes
        """Return the loss of a batch, with its graph."""

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""

    def casts(self) -> int:
        """Return how many casts of weights were made where torch shows none."""


class PlainLoop:
    """A loop as tutorials write it: torch.autocast, torch.amp.GradScaler for fp16."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOf,
        device: str,
        dtype: torch.dtype | None,
    ) -> None:
        """Take what it trains.

        Args:
            model: On its device, in fp32.
            optimizer: Over its parameters.
            loss_of: From model and batch to loss.
            device: "cpu" or "cuda".
            dtype: The 16-bit dtype; None trains in fp32.
        """
        self.model = model
        self._optimizer = optimizer
        self._loss_of = loss_of
        self._device = device
        self._dtype = dtype
        self._scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        enabled = self._dtype is not None
        with torch.autocast(self._device, self._dtype, enabled=enabled):
            return self._loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for batch in batches:
            loss = self.forward(batch)
            self._scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return loss.detach()

    def casts(self) -> int:
        """Return 0: torch shows all of them."""
        return 0


class SessionLoop:
    """A loop over a Session."""

    def __init__(self, session: Session, loss_of: LossOf) -> None:
        """Take a session whose `accumulate` is the number of micro-batches."""
        self.model = session.model
        self._session = session
        self._loss_of = loss_of
        self._region: Autocast | PolicyAutocast | None = None

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        """Return the loss of a batch, with its graph."""
        with self._session.autocast() as self._region:
            return self._loss_of(self.model, batch)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Step once, on the mean over micro-batches; return the loss of the last."""
        for batch in batches:
            loss = self.forward(batch)
            self._session.backward(loss)
            self._session.step()
        return loss.detach()

    def casts(self) -> int:
        """Return how many the cache has made; it hides them from dispatch modes."""
        cache = getattr(self._region, "cache", None)
        return cache.misses if cache is not None else 0

"""A copy of a model at work at one level, for passes that leave the model alone.

In: a model, perhaps its optimizer, a level. Out: passes over batches with all that is
to be known of them, and whole training steps with the time they took.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.boundaries import Boundaries, Trace
from halfstep.errors import UserError
from halfstep.formats import is_low
from halfstep.nested import tensors
from halfstep.preparing import prepare
from halfstep.scaler import ScaleRule
from halfstep.scaler.exponents import BINS, count, unscaled
from halfstep.scaler.measured import nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import Node

    from halfstep.choice import Choice
    from halfstep.policy import Policy

LossFn: TypeAlias = "Callable[[nn.Module, Any], Tensor]"

_ANY = 2.0**-126, 2.0**127
"""Scales that fp32 holds as powers of two."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a twin."""

    loss: float
    scale: float
    gradients: dict[str, Tensor]
    """Of parameters, by name: fp32, unscaled, dense."""
    trace: Trace
    histogram: Tensor
    """Exponents of unscaled gradients in the twin's format (`scaler.exponents`), of
    activations and of weights as they arrive. int64, shape (BINS,), on the CPU."""
    saved_bytes: int
    """What the forward pass kept for the backward pass, weights and buffers apart."""

    @property
    def finite(self) -> bool:
        """Neither gradients of parameters nor those that made them hold inf or NaN."""
        good = all(bool(torch.isfinite(g).all()) for g in self.gradients.values())
        return good and not int(self.histogram[-1])


class Twin:
    """A copy of a model and of its optimizer, prepared at a level.

    Every pass begins with the same random state and buffers: dropout masks and batch
    statistics are those of any other twin's pass. On a GPU masks depend on the format,
    so there the copies' own dropout layers let everything through.

    Args:
        model: Stays as it is.
        optimizer: Over its parameters, copied with them; None makes an AdamW.
        choice: Level and format.
        policy: As for `prepare`.
        state: Random state that each pass begins with.

    Raises:
        UserError: If it cannot be copied, or `prepare` refuses it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        choice: Choice,
        policy: Policy,
        state: RandomState,
    ) -> None:
        twin, stepper = _copied(model, optimizer)
        self.notes: list[str] = []
        """What `prepare` warned of."""
        self._low = choice.format.dtype
        self._random = state
        self.device = next(twin.parameters()).device
        if self.device.type != "cpu":
            _let_through(twin)
        rule = ScaleRule.parse(1.0)
        with _noted(self.notes):
            self.session = prepare(
                twin, stepper, choice, policy=policy, loss_scale=rule
            )
        self._buffers = [(one, one.clone()) for one in twin.buffers()]

    @property
    def model(self) -> nn.Module:
        """The copy."""
        return self.session.model

    def run(
        self,
        loss_fn: LossFn,
        batch: object,
        scale: float = 1.0,
        *,
        others: frozenset[int] = frozenset(),
    ) -> Pass:
        """Run a batch forward and backward; weights stay.

        Args:
            loss_fn: Gives the loss of a model on a batch, shape ().
            batch: What it takes.
            scale: Of the loss, a power of two.
            others: Ids of parameters that no loss may depend on.

        Raises:
            UserError: If the loss is none that can be trained with.
        """
        self.begin(scale)
        session, seen = self.session, _Saved(self.model)
        tally = _Tally(self._low)
        with Boundaries(self.model) as boundaries:
            with session.autocast(), seen.counting():
                loss = loss_fn(session.model, batch)
                _check_loss(loss, others)
            boundaries.end_forward()
            with tally.over(loss):
                session.backward(loss)
        gradients = self._gradients(scale, tally)
        session.zero_grad()
        power = torch.tensor(scale, dtype=torch.float32)
        return Pass(
            loss.detach().double().item(),
            scale,
            gradients,
            boundaries.trace(),
            unscaled(tally.total(), power),
            seen.bytes,
        )

    def _gradients(self, scale: float, tally: _Tally) -> dict[str, Tensor]:
        """Return the gradients that a backward pass left, unscaled in fp32."""
        found = {}
        for name, param in self.model.named_parameters():
            if param.grad is None:
                continue
            dense = param.grad.detach()
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            tally.add(dense)  # as leaves, they come to no node
            found[name] = dense.to(torch.float32, copy=True).div_(scale)
        return found

    def begin(self, scale: float) -> None:
        """Put random state and buffers back, and set the scale."""
        self._random.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        scaler = self.session.scaler
        power = torch.full_like(scaler.state.scale, min(max(scale, _ANY[0]), _ANY[1]))
        scaler.state = replace(scaler.state, scale=power)

    def step(self, loss_fn: LossFn, batch: object) -> float:
        """Make a whole training step, which changes the copy; return its seconds."""
        self._wait()
        began = time.perf_counter()
        with self.session.autocast():
            loss = loss_fn(self.session.model, batch)
        self.session.backward(loss)
        with _noted(self.notes):
            self.session.step()
        self._wait()
        return time.perf_counter() - began

    def memory(self, loss_fn: LossFn, batch: object) -> dict[str, int]:
        """Return the bytes that training holds after a backward pass, by purpose.

        Comes after a step, which makes the optimizer's state.
        """
        with self.session.autocast():
            loss = loss_fn(self.session.model, batch)
        self.session.backward(loss)
        held = self.session.memory()
        self.session.zero_grad()
        return held

    def weights_finite(self) -> bool:
        """Say whether no weight is inf or NaN. Waits for the device."""
        return all(bool(torch.isfinite(one).all()) for one in self.model.parameters())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a copy of a model, and of its optimizer or a new one over the copy."""
    try:
        twin, stepper = copy.deepcopy((model, optimizer))
    except Exception as error:
        message = (
            f"{type(model).__name__} cannot be copied, and check works on copies: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        raise UserError(message) from error
    if stepper is None:
        learning = [param for param in twin.parameters() if param.requires_grad]
        stepper = torch.optim.AdamW(learning, fused=True)
    for param in twin.parameters():
        param.grad = None
    return twin, stepper


def _let_through(model: nn.Module) -> None:
    """Switch off what draws masks in a copy."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Take warnings down instead of showing them, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        if str(one.message) not in notes:
            notes.append(str(one.message))


class RandomState:
    """The random state of torch, Python and numpy, as it was when this was made.

    Args:
        devices: Devices whose generators count besides the CPU's.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {
            device: torch.cuda.get_rng_state(device)
            for device in devices
            if device.type == "cuda"
        }
        self._python = random.getstate()
        # Only if somebody uses it: the library does not.
        self._numpy = sys.modules.get("numpy")
        self._numpys = self._numpy.random.get_state() if self._numpy else None

    def restore(self) -> None:
        """Put all of it back."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpys)


class _Saved:
    """Counts the bytes that a forward pass keeps for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        self._seen = {one.untyped_storage().data_ptr() for one in own}
        self.bytes = 0

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return what counts while it is open."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor.detach()  # not itself: an output would hold its own graph


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class _Tally:
    """Counts the exponents of gradients of one dtype, scaled, as they flow.

    Args:
        dtype: Of the gradients that count.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Each device has an autograd thread of its own.
        self._counts: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def over(self, loss: Tensor) -> Iterator[None]:
        """Look at what comes to each node of the graph of a loss."""
        assert loss.grad_fn is not None  # noqa: S101 -- it was checked
        nodes = [node for node in nodes_of(loss.grad_fn) if not _is_leaf(node)]
        handles = [node.register_prehook(self._look) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.add(gradient)

    def add(self, gradient: Tensor) -> None:
        """Count one gradient."""
        if gradient.dtype == self._dtype:
            before = self._counts.get(gradient.device, 0)
            self._counts[gradient.device] = before + count(gradient)

    def total(self) -> Tensor:
        """Return the counts of all devices. int64, shape (BINS,), on the CPU."""
        total = torch.zeros(BINS, dtype=torch.int64)
        for counts in self._counts.values():
            total += counts.cpu()
        return total


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _check_loss(loss: object, others: frozenset[int]) -> None:
    """Refuse what cannot be trained with, and losses of another model."""
    if not isinstance(loss, Tensor):
        message = (
            f"loss_fn returned a value of type {type(loss).__name__}: return the loss, "
            "a tensor of shape ()."
        )
        raise UserError(message)
    if loss.shape:
        message = (
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}: return one "
            "number, such as its mean()."
        )
        raise UserError(message)
    if not loss.is_floating_point() or loss.grad_fn is None:
        message = (
            f"loss_fn returned a {loss.dtype} without a graph: no gradient would flow; "
            "compute it from the model's output, without detach(), item() or no_grad()."
        )
        raise UserError(message)
    leaves = {id(node.variable) for node in nodes_of(loss.grad_fn) if _is_leaf(node)}  # type: ignore[attr-defined]
    if leaves & others:
        message = (
            "loss_fn uses the model that was given to check, not the copy it is called "
            "with: write loss_fn(model, batch) with its own argument."
        )
        raise UserError(message)


def check_model(model: nn.Module) -> None:
    """Refuse models that no fp32 reference can be made of.

    Raises:
        UserError: If it is wrapped, learns nothing, or is stored in 16 bits.
    """
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        message = f"check(model=...) got a {kind}: give the bare model, model.module."
        raise UserError(message)
    if not any(param.requires_grad for param in model.parameters()):
        message = f"{kind} has no parameter that learns: there is nothing to check."
        raise UserError(message)
    for name, param in model.named_parameters():
        if is_low(param.dtype):
            message = (
                f"parameter {name!r} is stored in {param.dtype}: check compares with "
                "fp32, and needs the fp32 weights; load the model in fp32."
            )
            raise UserError(message)
        if param.is_meta or hasattr(param, "to_local"):
            state = "on the meta device" if param.is_meta else "sharded"
            message = f"parameter {name!r} is {state}: check needs a whole model."
            raise UserError(message)


def misplaced(model: nn.Module, batch: object) -> str:
    """Return what to say where a batch lies on another device than the model, or ""."""
    home = next(model.parameters()).device
    for tensor in tensors(batch):
        if tensor.device != home:
            return (
                f"the batch holds a tensor on {tensor.device}, the model is on {home}: "
                f"move it, as in batch.to({str(home)!r})."
            )
    return ""

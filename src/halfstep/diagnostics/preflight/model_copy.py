"""A copy of a model at work at one level, for passes that leave the model alone."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.casting.convert_model import allow_overflow
from halfstep.diagnostics.preflight.validation import (
    check_gradients,
    check_loss,
    is_leaf,
)
from halfstep.diagnostics.probe.hooks import Hooks
from halfstep.diagnostics.replay.model_snapshot import ModelSnapshot
from halfstep.diagnostics.replay.search import find_nonfinite, find_overflow
from halfstep.errors import UserError
from halfstep.machine import fp16_emulation
from halfstep.machine import recommendation as choosing
from halfstep.masters.encoding import NONE
from halfstep.numerics.exponents import BINS, count_exponents, unscale_histogram
from halfstep.numerics.formats import FP16
from halfstep.scaling import ScaleRule
from halfstep.scaling.strategies import nodes_of
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from halfstep._torch.rng_state import RandomState
    from halfstep.machine.recommendation import Choice
    from halfstep.nonfinite.origin import BadOp
    from halfstep.policy.rules import Policy

LossFn: TypeAlias = "Callable[[nn.Module, Any], Tensor]"

_ANY = 2.0**-126, 2.0**127
"""Scales that fp32 holds as powers of two."""

_NEVER = sys.maxsize
"""Steps from one count of lost updates to the next: those that are timed count none."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a copy."""

    loss: float
    scale: float
    gradients: dict[str, Tensor]
    """Of parameters, by name: fp32, unscaled, dense."""
    gradients_finite: bool
    peaks: dict[str, float]
    """Largest finite magnitudes by a probe's names; empty where none was attached."""
    histogram: Tensor
    """Exponents of unscaled gradients in the copy's format (`numerics.exponents`), of
    activations and of weights as they arrive; zeros where they were not counted.
    int64, shape (BINS,), on the CPU."""
    saved_bytes: int
    """What the forward pass kept for the backward pass, weights and buffers apart."""

    @property
    def finite(self) -> bool:
        """Neither gradients of parameters nor those that made them hold inf or NaN."""
        return self.gradients_finite and not int(self.histogram[-1])

    @property
    def sound(self) -> bool:
        """Neither the loss is inf or NaN, nor any of these."""
        return self.finite and math.isfinite(self.loss)


class ModelCopy:
    """A copy of a model and of its optimizer, prepared at a level.

    Every pass begins with the same random state and buffers: dropout masks and batch
    statistics are those of any other copy's pass. On a GPU masks depend on the format,
    so there the copies' own dropout layers let everything through. Without an optimizer
    it makes an AdamW.

    Raises:
        UserError: If it cannot be copied, or `prepare` refuses it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        choice: Choice,
        policy: Policy,
        master: str,
        state: RandomState,
    ) -> None:
        model_copy, stepper = _copied(model, optimizer)
        rates = [float(group.get("lr", math.nan)) for group in stepper.param_groups]
        self.optimizer = f"{type(stepper).__name__}, lr={max(rates):g}"
        """Its kind and learning rate, and whether it was given."""
        if optimizer is None:
            self.optimizer += ", as none was given"
        self.notes: list[str] = []
        """What `prepare` warned of."""
        self._low = choice.format.dtype
        self._random = state
        self.device = next(model_copy.parameters()).device
        if self.device.type != "cpu":
            _disable_dropout(model_copy)
        has_masters = choice.level.masters and master != NONE
        self.weight_nan_warning = choosing.weight_nan_warning(
            choice, stepper, masters=has_masters
        )
        """What will make NaN of weights, "" where nothing does."""
        self.emulates_fp16 = choice.format == FP16 and fp16_emulation.is_needed(
            self.device.type
        )
        """Passes, not steps, compute fp16 products in fp32 and round them."""
        lossy = choice.level.low_weights and not has_masters
        rule = ScaleRule.parse(1.0)
        with _collecting_warnings(self.notes), allow_overflow():
            self.session = prepare(
                model_copy,
                stepper,
                choice,
                policy=policy,
                loss_scale=rule,
                master=master if choice.level.masters else "fp32",
            )
        self._counts_rounding = lossy
        self._snapshot = ModelSnapshot(model_copy)

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
        counted: bool = True,
        probed: bool = False,
    ) -> Pass:
        """Run a batch forward and backward; weights stay.

        Args:
            loss_fn: Gives the loss of a model on a batch, shape ().
            batch: What it takes.
            scale: Of the loss, a power of two.
            others: Ids of parameters that no loss may depend on.
            counted: Count exponents, which takes about as long as the pass.
            probed: Read the ranges of modules.
        """
        self.begin(scale)
        session, saved = self.session, _SavedBytes(self.model)
        exponents = _GradientExponents(self._low if counted else None)
        peaks: dict[str, float] = {}
        with self._products(), _reading_peaks(self.model, peaks, on=probed):
            with session.autocast(), saved.counting():
                loss = loss_fn(session.model, batch)
                check_loss(loss, others)
            with exponents.over(loss):
                session.backward(loss)
        gradients = self._gradients(scale, exponents)
        check_gradients(gradients)
        session.zero_grad()
        power = torch.tensor(scale, dtype=torch.float32)
        return Pass(
            loss.detach().double().item(),
            scale,
            gradients,
            all(bool(torch.isfinite(one).all()) for one in gradients.values()),
            peaks,
            unscale_histogram(exponents.total(), power),
            saved.bytes,
        )

    @torch.no_grad()
    def forward(
        self, loss_fn: LossFn, batch: object, after: Callable[..., None]
    ) -> None:
        """Run a batch forward; `after` gets module, args, kwargs, output of each."""
        self.begin(1.0)
        hooks = [
            module.register_forward_hook(after, with_kwargs=True)
            for module in self.model.modules()
        ]
        try:
            with self._products(), self.session.autocast():
                loss_fn(self.session.model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    def find_overflow(self, loss_fn: LossFn, batch: object) -> BadOp | None:
        """Return the first operation that overflows its dtype, hidden or not."""
        self.begin(1.0)

        def step() -> Tensor:
            with self.session.autocast():
                return loss_fn(self.session.model, batch)

        with self._products():
            return find_overflow(self.model, step, 1.0)

    def find_nonfinite(
        self, loss_fn: LossFn, batch: object, scale: float
    ) -> BadOp | None:
        """Return what makes inf or NaN of a batch: an overflow before what shows it.

        The inf of x * x comes first, though only the NaN of inf / inf reaches the loss.
        """
        self.begin(scale)

        def step() -> Tensor:
            with self.session.autocast():
                return loss_fn(self.session.model, batch)

        with self._products():
            return find_overflow(self.model, step, scale) or find_nonfinite(
                self.model, step, scale=scale
            )

    def _products(self) -> contextlib.AbstractContextManager[object]:
        """Return a region in which fp16 takes no minutes where a CPU has none."""
        if self.emulates_fp16:
            return fp16_emulation.Fp32Matmuls()  # type: ignore[no-untyped-call]
        return contextlib.nullcontext()

    def _gradients(
        self, scale: float, exponents: _GradientExponents
    ) -> dict[str, Tensor]:
        """Return the gradients that a backward pass left, unscaled in fp32."""
        grads = {}
        for name, param in self.model.named_parameters():
            if param.grad is None:
                continue
            dense = param.grad.detach()
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            dense = torch.view_as_real(dense) if dense.is_complex() else dense
            exponents.add(dense)  # as leaves, they come to no node
            grads[name] = dense.to(torch.float32, copy=True).div_(scale)
        return grads

    def begin(self, scale: float) -> None:
        """Put random state and buffers back, and set the scale."""
        self._random.restore()
        self._snapshot.restore()
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
        with _collecting_warnings(self.notes):
            self.session.step()
        self._wait()
        return time.perf_counter() - began

    def last_step(self, loss_fn: LossFn, batch: object) -> dict[str, int]:
        """Make one more step, not timed, and count in it the updates lost to rounding.

        Returns:
            The bytes that training holds after the backward pass, by purpose.
        """
        session = self.session
        with session.autocast():
            loss = loss_fn(session.model, batch)
        session.backward(loss)
        memory = session.memory()
        if self._counts_rounding:
            session.count_rounding_loss(every=1)
        with _collecting_warnings(self.notes):
            session.step()
        if self._counts_rounding:  # steps to come are timed
            session.count_rounding_loss(every=_NEVER)
        return memory

    def lost_share(self) -> float | None:
        """Return the share of the last step's updates lost to rounding, 0 to 1.

        None where none was counted. Waits for the device.
        """
        groups = self.session.optimizer.param_groups
        lost = total = 0.0
        for one in self.session.lost_updates():
            share = one.share
            if share is not None:
                size = sum(param.numel() for param in groups[one.group]["params"])
                lost, total = lost + share * size, total + size
        return lost / total if total else None

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
        model_copy, stepper = copy.deepcopy((model, optimizer))
    except Exception as error:
        message = (
            f"{type(model).__name__} cannot be copied, and check works on copies: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        raise UserError(message) from error
    if not all(param.is_leaf for param in model_copy.parameters()):
        message = (
            f"a copy of {type(model).__name__} has no weights of its own, and check "
            "works on copies: give the model as it was before torch.jit."
        )
        raise UserError(message)
    if stepper is None:
        learning = [param for param in model_copy.parameters() if param.requires_grad]
        fused = all(param.is_floating_point() for param in learning)
        stepper = torch.optim.AdamW(learning, fused=fused)
    for param in model_copy.parameters():
        param.grad = None
    return model_copy, stepper


def _disable_dropout(model: nn.Module) -> None:
    """Switch off what draws masks in a copy."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


@contextlib.contextmanager
def _reading_peaks(
    model: nn.Module, peaks: dict[str, float], *, on: bool
) -> Iterator[None]:
    """Read the largest magnitudes of outputs and gradients, by a probe's names."""
    if not on:
        yield
        return
    hooks = Hooks(model, (), full=True)
    try:
        yield
    finally:
        hooks.detach()
    for (number, _), counts in hooks.records.stats.items():
        name = hooks.names[number]
        peaks[name] = max(peaks.get(name, 0.0), counts.extremes[0].item())


@contextlib.contextmanager
def _collecting_warnings(notes: list[str]) -> Iterator[None]:
    """Take warnings down instead of showing them, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        if str(one.message) not in notes:
            notes.append(str(one.message))


class _SavedBytes:
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


class _GradientExponents:
    """Counts the exponents of gradients of one dtype, scaled, as they flow.

    Single numbers are left out: what makes the loss out of means computes in fp32. With
    dtype None it counts nothing.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        # Each device has an autograd thread of its own.
        self._counts: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def over(self, loss: Tensor) -> Iterator[None]:
        """Look at what comes to each node of the graph of a loss."""
        if self._dtype is None:
            yield
            return
        assert loss.grad_fn is not None  # noqa: S101 -- it was checked
        nodes = [node for node in nodes_of(loss.grad_fn) if not is_leaf(node)]
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
        if gradient.dtype == self._dtype and gradient.ndim:
            before = self._counts.get(gradient.device, 0)
            self._counts[gradient.device] = before + count_exponents(gradient)

    def total(self) -> Tensor:
        """Return the counts of all devices. int64, shape (BINS,), on the CPU."""
        total = torch.zeros(BINS, dtype=torch.int64)
        for counts in self._counts.values():
            total += counts.cpu()
        return total

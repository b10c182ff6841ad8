"""Runs passes and steps at one level on a copy of a model, which stays unchanged."""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from halfstep.casting.convert_model import allow_overflow
from halfstep.diagnostics.replay.model_snapshot import ModelSnapshot
from halfstep.diagnostics.replay.search import check_loss, find_nonfinite, find_overflow
from halfstep.errors import UserError
from halfstep.machine import recommendation as choosing
from halfstep.masters.encoding import NONE
from halfstep.nonfinite.graph import nodes_of
from halfstep.numerics.exponents import BINS, count_exponents, unscale_histogram
from halfstep.numerics.local_tensor import local_part
from halfstep.scaling import ScaleRule
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import Node

    from halfstep._torch.rng_state import RandomState
    from halfstep.machine.recommendation import Choice
    from halfstep.nonfinite.origin import BadOp
    from halfstep.policy.rules import Policy

LossFn: TypeAlias = "Callable[[nn.Module, Any], Tensor]"

_SAMPLE = 65_536
"""Values of a tensor that are compared."""


class ModuleCall(NamedTuple):
    """One call of a module in a forward pass."""

    path: str
    kind: str
    """Class name of the module."""
    inputs: list[Tensor]
    """Samples of its floating arguments, in fp32."""
    outputs: list[Tensor]


@dataclass(frozen=True)
class Pass:
    """The results of one forward and backward pass of a copy."""

    loss: float
    scale: float
    gradients: dict[str, Tensor]
    """Parameter name -> gradient: fp32, unscaled, dense."""
    gradients_finite: bool
    histogram: Tensor
    """Exponents (`numerics.exponents`) of unscaled gradients in the copy's format, of
    activations and parameters; zeros if not counted. int64, shape (BINS,), CPU."""
    saved_bytes: int
    """Bytes saved for the backward pass, without weights and buffers."""

    @property
    def finite(self) -> bool:
        """Whether gradients of parameters and counted activations are finite."""
        return self.gradients_finite and not int(self.histogram[-1])

    @property
    def sound(self) -> bool:
        """Whether the loss is finite too."""
        return self.finite and math.isfinite(self.loss)


class ModelCopy:
    """A copy of a model and of its optimizer, prepared at a level.

    Every pass begins with the same random state and buffers, so dropout masks and batch
    statistics are the same in all copies. On a GPU masks depend on the dtype, so there
    dropout layers of copies are disabled. Without an optimizer, an AdamW is made.

    Raises:
        UserError: If the model cannot be copied, or `prepare` raises it.
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
        """Type and learning rate, and whether the optimizer is a default."""
        if optimizer is None:
            self.optimizer += ", as none was given"
        self.notes: list[str] = []
        """Warnings of `prepare` and of steps."""
        self._low = choice.format.dtype
        self._random = state
        self.device = next(model_copy.parameters()).device
        if self.device.type != "cpu":
            _disable_dropout(model_copy)
        has_masters = choice.level.masters and master != NONE
        self.weight_nan_warning = choosing.weight_nan_warning(
            choice, stepper, masters=has_masters
        )
        """Why weights will become NaN; "" if they will not."""
        with _collecting_warnings(self.notes), allow_overflow():
            self.session = prepare(
                model_copy,
                stepper,
                choice,
                policy=policy,
                loss_scale=ScaleRule.parse(1.0),
                master=master if choice.level.masters else "fp32",
            )
        self._counts_rounding = choice.level.low_weights and not has_masters
        self._snapshot = ModelSnapshot(model_copy)

    @property
    def model(self) -> nn.Module:
        """The copy of the model."""
        return self.session.model

    def run(
        self,
        loss_fn: LossFn,
        batch: object,
        scale: float = 1.0,
        *,
        others: frozenset[int] = frozenset(),
        counted: bool = True,
    ) -> Pass:
        """Run a forward and backward pass; weights do not change.

        Args:
            loss_fn: Returns the loss of a model on a batch, shape ().
            batch: Argument of `loss_fn`.
            scale: Loss scale, a power of two.
            others: id() of parameters that the loss must not depend on.
            counted: Count exponents, which takes about as long as the pass.
        """
        self.begin(scale)
        session, saved = self.session, SavedBytes(self.model)
        exponents = _GradientExponents(self._low if counted else None)
        with session.autocast(), saved.counting():
            loss = loss_fn(session.model, batch)
            check_loss("loss_fn", loss)
            _check_own_model(loss, others)
        with exponents.over(loss):
            session.backward(loss)
        gradients = self._gradients(scale, exponents)
        if not gradients:
            raise UserError(
                "no gradient reaches any parameter of the model: loss_fn(model, batch) "
                "must make its loss from what the model it is given returns."
            )
        session.zero_grad()
        power = torch.tensor(scale, dtype=torch.float32)
        return Pass(
            loss.detach().double().item(),
            scale,
            gradients,
            all(bool(torch.isfinite(one).all()) for one in gradients.values()),
            unscale_histogram(exponents.total(), power),
            saved.bytes,
        )

    @torch.no_grad()
    def module_calls(self, loss_fn: LossFn, batch: object) -> list[ModuleCall]:
        """Run a forward pass; return the calls in the order in which they return."""
        calls: list[ModuleCall] = []

        def after(path: str, module: nn.Module, *call: Any) -> None:  # noqa: ANN401
            *inputs, output = call
            samples = _sample(inputs), _sample(output)
            calls.append(ModuleCall(path, type(module).__name__, *samples))

        self.begin(1.0)
        with contextlib.ExitStack() as stack:
            for path, module in self.model.named_modules():
                hook = partial(after, path)
                stack.enter_context(
                    module.register_forward_hook(hook, with_kwargs=True)
                )
            self._loss(loss_fn, batch)
        return calls

    def find_nonfinite(
        self, loss_fn: LossFn, batch: object, scale: float
    ) -> BadOp | None:
        """Return the operation that makes inf or NaN; prefer the first overflow.

        The inf of x * x is reported, though only the NaN of inf / inf reaches the loss.
        """
        self.begin(scale)
        step = partial(self._loss, loss_fn, batch)
        overflow = find_overflow(self.model, step, scale)
        return overflow or find_nonfinite(self.model, step, scale=scale) or None

    def _loss(self, loss_fn: LossFn, batch: object) -> Tensor:
        with self.session.autocast():
            return loss_fn(self.session.model, batch)

    def _gradients(
        self, scale: float, exponents: _GradientExponents
    ) -> dict[str, Tensor]:
        """Return the gradients of the backward pass, unscaled in fp32."""
        grads = {}
        for name, param in self.model.named_parameters():
            if param.grad is None:
                continue
            dense = param.grad.detach()
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            dense = torch.view_as_real(dense) if dense.is_complex() else dense
            exponents.add(dense)  # leaf nodes have no hook of `exponents`
            grads[name] = dense.to(torch.float32, copy=True).div_(scale)
        return grads

    def begin(self, scale: float) -> None:
        """Restore random state and buffers, and set the loss scale."""
        self._random.restore()
        self._snapshot.restore()
        scaler = self.session.scaler
        if scale != scaler.state.scale.item():  # a scale of 1 that is set is unscaled
            power = torch.full_like(scaler.state.scale, scale)
            scaler.set_state(power, scaler.state.clean_steps)

    def step(self, loss_fn: LossFn, batch: object) -> float:
        """Run a training step, which changes the copy; return its seconds."""
        self._wait()
        began = time.perf_counter()
        self.session.backward(self._loss(loss_fn, batch))
        with _collecting_warnings(self.notes):
            self.session.step()
        self._wait()
        return time.perf_counter() - began

    def last_step(self, loss_fn: LossFn, batch: object) -> dict[str, int]:
        """Run a step that counts lost updates; return the bytes by purpose."""
        session = self.session
        session.backward(self._loss(loss_fn, batch))
        memory = session.memory()
        if self._counts_rounding:
            session.count_rounding_loss(every=1)
        with _collecting_warnings(self.notes):
            session.step()
        return memory

    def lost_share(self) -> float | None:
        """Return the share of the last step's updates lost to rounding, 0 to 1.

        None if they were not counted. Synchronizes with the device.
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
        """Return whether all weights are finite. Synchronizes with the device."""
        return all(bool(torch.isfinite(one).all()) for one in self.model.parameters())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a copy of the model, and of its optimizer or a new one for the copy."""
    try:
        model_copy, stepper = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied, and check works on copies: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    if stepper is None:
        learning = [param for param in model_copy.parameters() if param.requires_grad]
        fused = all(param.is_floating_point() for param in learning)
        stepper = torch.optim.AdamW(learning, fused=fused)
    for param in model_copy.parameters():
        param.grad = None
    return model_copy, stepper


def _check_own_model(loss: Tensor, others: frozenset[int]) -> None:
    """Check that a loss depends on the copy of a model, and on no parameter of it."""
    nodes: set[Any] = nodes_of(loss.grad_fn)
    if {id(node.variable) for node in nodes if _is_leaf(node)} & others:
        raise UserError(
            "loss_fn uses the model that was given to check, not the copy it is called "
            "with: write loss_fn(model, batch) with its own argument."
        )


def _is_leaf(node: Node) -> bool:
    """Return whether a node accumulates a gradient into a leaf, such as a weight."""
    return type(node).__name__ == "AccumulateGrad"


def _sample(value: object) -> list[Tensor]:
    """Return evenly spaced values, in fp32, of each floating tensor in `value`."""
    samples = []
    for each in _pytree.tree_leaves(value):
        strided = isinstance(each, Tensor) and each.layout == torch.strided
        if strided and each.is_floating_point() and each.numel():
            flat = each.detach().reshape(-1)
            some = flat[:: -(-len(flat) // _SAMPLE)]
            samples.append(some.to(torch.float32, copy=True))  # before in-place writes
    return samples


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


@contextlib.contextmanager
def _collecting_warnings(notes: list[str]) -> Iterator[None]:
    """Append warnings to `notes`, each once, instead of showing them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        if str(one.message) not in notes:
            notes.append(str(one.message))


class SavedBytes:
    """Counts the bytes that a forward pass saves for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        own = map(local_part, (*model.parameters(), *model.buffers()))
        self._seen = {one.untyped_storage().data_ptr() for one in own}
        self.bytes = 0

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
        # What FSDP2 gathers for the pass are other parameters than the model's own.
        is_weight = isinstance(base, nn.Parameter)
        if tensor.layout == torch.strided and not is_weight:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor.detach()  # a saved output would reference its own graph


class _GradientExponents:
    """Counts exponents of gradients of one dtype in a backward pass; none for None."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        # One tensor per device: each has its own autograd thread.
        self._counts: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def over(self, loss: Tensor) -> Iterator[None]:
        """Count the gradients that enter each node of a loss's graph."""
        if self._dtype is None:
            yield
            return
        assert loss.grad_fn is not None  # noqa: S101 -- it was checked

        def look(gradients: Sequence[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    self.add(gradient)

        with contextlib.ExitStack() as stack:
            for node in nodes_of(loss.grad_fn):
                if not _is_leaf(node):
                    stack.enter_context(node.register_prehook(look))
            yield

    def add(self, gradient: Tensor) -> None:
        """Count one gradient."""
        if gradient.dtype == self._dtype and gradient.ndim:
            before = self._counts.get(gradient.device, 0)
            self._counts[gradient.device] = before + count_exponents(gradient)

    def total(self) -> Tensor:
        """Return the counts of all devices. int64, shape (BINS,), on the CPU."""
        counts = [each.cpu() for each in self._counts.values()]
        return torch.stack([torch.zeros(BINS, dtype=torch.int64), *counts]).sum(0)

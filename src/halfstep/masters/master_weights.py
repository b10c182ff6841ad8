"""fp32 master weights for an optimizer whose model holds 16-bit parameters.

In: an optimizer over 16-bit parameters. Out: the same optimizer over their fp32 values;
gradients are accumulated in fp32, and updates are copied back to the model weights.
"""

from __future__ import annotations

import contextlib
from functools import partial, wraps
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch import optimizer_hooks
from halfstep._torch.optimizer_params import params_of
from halfstep._torch.storage_references import is_shared
from halfstep.errors import UserError, warn_caller
from halfstep.masters import (
    cpu_kernels,
    fused_step,
    generic_step,
    triton_kernels,
)
from halfstep.masters import encoding as forms
from halfstep.masters.encoding import PLAIN, MasterParam, RoundingRng
from halfstep.masters.fused_step import FusedStep, Kernel, ParamUpdate, Sgd
from halfstep.masters.generic_step import nan_placeholder
from halfstep.numerics.accumulate import add_
from halfstep.numerics.formats import is_low
from halfstep.numerics.local_tensor import clone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim import Optimizer


_WEIGHT, _VERSION = map(attrgetter, ("weight", "_version"))
_DISPATCH = attrgetter("__torch_dispatch__")


class MasterWeights:
    """fp32 master weights for the 16-bit parameters of any torch optimizer.

    An update is typically a thousandth of its weight, and bf16 loses more than half of
    such updates to rounding. With master weights the optimizer updates fp32 values, and
    the results are copied back to the 16-bit model weights.

    The optimizer's parameter groups then hold the master weights, which are parameters
    of their own; learning-rate schedules, added groups and `state_dict` work as before.
    With "split", "kahan" and "stochastic" no fp32 copy exists between steps: the master
    weights read as NaN, and `step` decodes them, some parameters at a time.

    Args:
        optimizer: Over 16-bit parameters, fp32 ones, or both; fp32 ones are unchanged.
        originals: Parameter -> its fp32 values, where they are known. The entries are
            removed. Otherwise a master weight starts from the 16-bit weight.
        master: "fp32", "split", "kahan" or "stochastic"; see `prepare`.
        seed: Seed of stochastic rounding. It must be the same on every rank, or the
            replicas diverge; therefore it is not taken from torch.

    Raises:
        UserError: If there is no such encoding, or it needs bf16 and weights are fp16.

    Example:
        >>> weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2.0**-10)
        >>> masters = MasterWeights(optimizer)
        >>> for _ in range(4):
        ...     weight.sum().backward()
        ...     masters.step()
        ...     optimizer.zero_grad()
        >>> weight[0].item(), optimizer.param_groups[0]["params"][0][0].item()
        (0.99609375, 0.99609375)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
    """

    has_masters = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        originals: dict[nn.Parameter, Tensor] | None = None,
        *,
        master: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.optimizer = optimizer
        encoding = forms.parse(master)
        if encoding is None:
            choices = ", ".join(forms.ENCODINGS)
            message = f"master={master!r} keeps no master weights; choose {choices}."
            raise UserError(message)
        self.encoding = encoding
        self.rng = RoundingRng(seed, 0)
        self.master_params: dict[Tensor, MasterParam] = {}
        """Master weight -> its `MasterParam`, in the order they were added."""
        self.param_index: dict[Tensor, int] = {}
        """Parameter of the optimizer -> its index, for stochastic rounding."""
        self.kernel: Kernel | None = None
        """Updates weights directly from 16-bit gradients; None if no kernel can."""
        self.kernel_description = ""
        """One line about the kernel, or why there is none."""
        self._fused_step: FusedStep | None = None
        self.stepping = False
        """Whether this class is calling `optimizer.step`."""
        self._synced: tuple[list[int], list[int]] = [], []
        """Version counters and addresses of the weights when they matched theirs."""
        self._address_of: Callable[[Tensor], int] = Tensor.data_ptr
        """`id` if weights are of a type without memory of its own, as FakeTensor."""
        self._warned_of_writes = False
        self._consume: Callable[[Tensor], None] | None = None
        self._hooked: set[Tensor] = set()
        self.add_new_params(originals)
        if self.has_masters:
            _clear_low_grads_too(optimizer, self.clear)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(16-bit parameter, fp32 master), in the order they were added."""
        return [(param.weight, param.master) for param in self.master_params.values()]

    def by_weight_id(self) -> dict[int, MasterParam]:
        """Return id of a 16-bit parameter -> its `MasterParam`."""
        return {id(param.weight): param for param in self.master_params.values()}

    @torch.no_grad()
    def add_new_params(
        self, originals: dict[nn.Parameter, Tensor] | None = None
    ) -> None:
        """Add master weights for 16-bit parameters that were added to the optimizer."""
        groups = self.optimizer.param_groups
        params = chain.from_iterable(map(itemgetter("params"), groups))
        if all(map(self.param_index.__contains__, params)):
            return
        by_weight = self.by_weight_id()
        self._check_new(groups, by_weight)
        self.sync_external_writes()
        for group in groups:
            for index, param in enumerate(group["params"]):
                current = by_weight.get(id(param))
                if current is not None:
                    # It comes back; meanwhile, `.data` may have been written.
                    current.follow_weight(self.encoding, self.rng)
                elif is_low(param.dtype):
                    value = (originals or {}).pop(param, param.detach()).float()
                    current = by_weight[id(param)] = self._new_param(param, value)
                    del value  # free it before the next large allocation
                else:
                    self.param_index.setdefault(param, len(self.param_index))
                    continue
                group["params"][index] = current.master
                self._take_state(param, current)
        types = map(type, map(_WEIGHT, self.master_params.values()))
        if {*map(_DISPATCH, types)} - {Tensor.__torch_dispatch__}:
            self._address_of = id
        model_params = [self.model_param(param) for param in self.param_index]
        chosen = _choose_kernel(self.optimizer, model_params)
        self.kernel, self.kernel_description = chosen
        self.mark_synced()

    def _check_new(
        self, groups: list[dict[str, Any]], by_weight: dict[int, MasterParam]
    ) -> None:
        """Raise if two groups share a weight, or no master weight can be made for one.

        torch refuses a parameter in two groups, but sees the master weight in one and
        the 16-bit weight in the other.
        """
        group_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            for param in group["params"]:
                own = self.master_params.get(param)
                weight = param if own is None else own.weight
                first = group_of.setdefault(id(weight), number)
                if first != number:
                    raise UserError(
                        f"a weight of shape {tuple(param.shape)} is in the optimizer's "
                        f"parameter groups {first} and {number}: take it out of one."
                    )
                if is_low(param.dtype) and id(param) not in by_weight:
                    forms.check(self.encoding, param.dtype)

    def _new_param(self, param: nn.Parameter, fp32: Tensor) -> MasterParam:
        param_index, encoding = len(self.param_index), self.encoding
        value = nan_placeholder(param) if encoding.is_compact else fp32
        master = nn.Parameter(value, requires_grad=param.requires_grad)
        residual: Tensor | None = master
        if encoding.is_compact:
            dtype = encoding.residual
            residual = None if dtype is None else torch.empty_like(param, dtype=dtype)
        indices = param_index, len(self.master_params)
        master_param = MasterParam(param, master, residual, *indices, param.dtype)
        if encoding.is_compact:
            master_param.encode_(encoding, fp32, self.rng)
        self.master_params[master] = master_param
        self.param_index[master] = param_index
        return master_param

    def _take_state(self, param: Tensor, master_param: MasterParam) -> None:
        """Give the master weight the optimizer's state of the 16-bit weight, if any."""
        state = self.optimizer.state
        if param in state:
            state[master_param.master] = state.pop(param)
            generic_step.narrow_states(
                self.optimizer, master_param, self.encoding, None
            )

    def model_param(self, param: Tensor) -> Tensor:
        """Return the model's parameter for a parameter of the optimizer."""
        master_param = self.master_params.get(param)
        return param if master_param is None else master_param.weight

    @torch.no_grad()
    def fp32_value(self, param: Tensor) -> Tensor:
        """Return the fp32 values of an optimizer's parameter.

        With "split", "kahan" and "stochastic" they are decoded into new memory.
        """
        master_param = self.master_params.get(param)
        if master_param is None or not self.encoding.is_compact:
            return param.detach()
        return master_param.decoded(self.encoding)

    @torch.no_grad()
    def set_fp32_(
        self, param: Tensor, fp32: Tensor, weight: Tensor | None = None
    ) -> None:
        """Set the fp32 values of an optimizer's parameter, and the model's weight.

        The 16-bit weight is `fp32` rounded, unless it is given.
        """
        master_param = self.master_params.get(param)
        if master_param is None:
            param.copy_(fp32)
            return
        value = fp32.to(param.device, param.dtype)
        master_param.encode_(self.encoding, value, self.rng)
        if weight is not None:
            master_param.weight.copy_(weight)
            residual = master_param.residual
            if residual is not None and residual.dtype == torch.bfloat16:
                # Several pairs have this sum; a resumed run needs the saved one.
                residual.copy_(value - master_param.weight)
        self.mark_synced()

    def accumulate_grads(self) -> None:
        """Add the 16-bit gradients to those of the master weights, and free them.

        Called after each backward pass, this accumulates micro-batches in fp32. The
        fp32 buffers are reused on a CPU, unless another tensor refers to their memory.
        """
        self.add_new_params()
        for master_param in self.master_params.values():
            _accumulate_(master_param)

    def accumulate_in_backward(self) -> None:
        """Accumulate each gradient in fp32 as soon as the backward pass produced it."""
        self.consume_in_backward(
            lambda param: _accumulate_(self.master_params[param]), self.master_params
        )

    def consume_in_backward(
        self, consume: Callable[[Tensor], None] | None, params: Iterable[Tensor] = ()
    ) -> None:
        """Call a function as soon as the backward pass has made a gradient.

        The 16-bit gradients of the whole model then never exist at once. Do not use it
        under DDP, which averages the 16-bit gradients.

        Args:
            consume: Takes the optimizer's parameter. None: leave gradients alone again.
            params: The optimizer's parameters to call it for.
        """
        self._consume = consume
        for param in params:
            weight = self.model_param(param)
            if weight.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                hook = partial(self._on_gradient, param)
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, param: Tensor, _: Tensor) -> None:
        if self._consume is not None:
            self._consume(param)

    def grads(self) -> list[tuple[Tensor, Tensor]]:
        """Return (optimizer's parameter, gradient) pairs, in fp32 or 16 bits.

        A parameter that is twice in its group is returned once.
        """
        grads = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                master_param = self.master_params.get(param)
                if master_param is not None and param.grad is not None:
                    _accumulate_(master_param)  # later passes belong to the sum
                gradient = param.grad
                if gradient is None and master_param is not None:
                    gradient = master_param.weight.grad
                if gradient is not None:
                    grads[id(param)] = (param, gradient)
        return [*grads.values()]

    @torch.no_grad()
    def update(self, inverse: Tensor, *, found_inf: Tensor | None = None) -> None:
        """Unscale, update and write the weights in one pass, with `kernel`.

        Args:
            inverse: 1 / loss scale, by which gradients are multiplied. fp32, shape ().
            found_inf: 1.0 to skip the step inside the kernel, shape ().
        """
        self.sync_external_writes()
        try:
            for group in self.optimizer.param_groups:
                self._update_group(group, group["params"], inverse, found_inf)
        except BaseException:
            self.mark_synced()  # earlier groups have been updated
            raise
        optimizer_hooks.notify(self.optimizer)
        self.advance_rng()

    @torch.no_grad()
    def update_param(
        self, group: dict[str, Any], param: Tensor, *, found_inf: Tensor
    ) -> None:
        """Update one parameter of a group with `kernel`; its gradient is unscaled."""
        one = torch.ones((), dtype=torch.float32, device=param.device)
        self._update_group(group, [param], one, found_inf)

    def _update_group(
        self,
        group: dict[str, Any],
        params: Iterable[Tensor],
        inverse: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        assert self.kernel is not None, "there is no kernel"  # noqa: S101
        if self._fused_step is None or self._fused_step.kernel is not self.kernel:
            parts = self.optimizer, self.encoding, self.master_params, self.param_index
            self._fused_step = FusedStep(self.kernel, *parts)
        self._fused_step.update(
            group, params, inverse=inverse, rng=self.rng, found_inf=found_inf
        )
        # Learning-rate schedulers check this flag, which torch's own step sets.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001

    @torch.no_grad()
    def step_param(self, param: Tensor) -> None:
        """Step the optimizer for one parameter, whose gradient is already unscaled."""
        master_param = self.master_params.get(param)
        if master_param is not None:
            _accumulate_(master_param)
        compact = self.master_params.values() if self.encoding.is_compact else ()
        with self.own_step():
            generic_step.step(
                self.optimizer, compact, self.encoding, self.rng, only=param
            )
            if master_param is not None and not self.encoding.is_compact:
                master_param.weight.copy_(master_param.master)

    def describe(self) -> str:
        """Return one line about how weights are updated."""
        name = type(self.optimizer).__name__
        why = fused_step.why_not_fused(self.optimizer)
        if self.kernel is not None and not why:
            return f"{name} in one pass over memory: {self.kernel_description}"
        way = "piece by piece" if self.encoding.is_compact else "then copied back"
        return f"{name}'s own step, {way}: {why or self.kernel_description}"

    def note(self) -> str:
        """Return one line with the encoding and the number of master weights."""
        count = sum(param.weight.numel() for param in self.master_params.values())
        return f"master weights of {count} numbers: {self.encoding.description}"

    @torch.no_grad()
    def broadcast_(self, broadcast: Callable[[list[Tensor]], None]) -> None:
        """Replace weights and residuals by those of rank 0, as `broadcast` does."""
        self.add_new_params()
        master_params = self.master_params.values()
        if not self.encoding.is_compact:
            # Weights may have been loaded since. No warning: DDP writes to weights too.
            # Compact encodings need no reset: their error is below rounding.
            for param in self._externally_written():
                param.reset_from_weight(self.encoding, self.rng)
        residuals = [p.residual for p in master_params if p.residual is not None]
        broadcast([param.weight.detach() for param in master_params])
        broadcast([residual.detach() for residual in residuals])
        self.mark_synced()

    def clear(self) -> None:
        """Clear 16-bit gradients, and sums of weights that left the optimizer."""
        groups = self.optimizer.param_groups
        present = set(map(id, chain(*map(itemgetter("params"), groups))))
        for master_param in self.master_params.values():
            master_param.weight.grad = None
            if id(master_param.master) not in present:
                master_param.master.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Accumulate gradients, step the optimizer, copy back to the model weights."""
        self.accumulate_grads()
        self.sync_external_writes()
        with self.own_step():
            if self.encoding.is_compact:
                compact = self.master_params.values()
                generic_step.step(self.optimizer, compact, self.encoding, self.rng)
            else:
                self.optimizer.step()
        self.publish()

    @contextlib.contextmanager
    def own_step(self) -> Iterator[None]:
        """Mark a step as made by this class instead of by the caller.

        If it raises, updates that were made until then stay.
        """
        try:
            self.stepping = True
            yield
        except BaseException:
            self._copy_back()
            self.mark_synced()  # or these writes would count as the caller's
            raise
        finally:
            self.stepping = False

    @torch.no_grad()
    def publish(self) -> None:
        """Copy fp32 master weights back to the model weights."""
        self._copy_back()
        self.advance_rng()

    @torch.no_grad()
    def _copy_back(self) -> None:
        if self.master_params and not self.encoding.is_compact:
            # Not those of weights that left the optimizer: nobody updates them.
            masters = [p for p in params_of(self.optimizer) if p in self.master_params]
            weights: list[Tensor] = [self.master_params[p].weight for p in masters]
            torch._foreach_copy_(weights, masters)

    def complete_update(self, before: RoundingRng) -> None:
        """Copy back an update that was interrupted; `before` it, `rng` was this."""
        if self.rng is before:
            self.publish()
        else:
            self.mark_synced()

    def advance_rng(self) -> None:
        """Advance the RNG of stochastic rounding by one step."""
        self.rng = RoundingRng(self.rng.seed, self.rng.step + 1)
        self.mark_synced()

    def set_rng(self, seed: int, step: int) -> None:
        """Set the RNG of stochastic rounding to the state of a saved run."""
        self.rng = RoundingRng(seed, step)

    def normalize_states(self) -> None:
        """Copy loaded optimizer state, and convert moments to the encoding's dtype.

        Without the copy, tensors would be shared with the state dict's optimizer.
        """
        for state in self.optimizer.state.values():
            tensors = [key for key, value in state.items() if torch.is_tensor(value)]
            state.update({key: clone(state[key]) for key in tensors})
        for master_param in self.master_params.values():
            generic_step.narrow_states(
                self.optimizer, master_param, self.encoding, None
            )

    def mark_synced(self) -> None:
        """Record that the model weights match the master weights now."""
        self._synced = self._marks()

    def mark_param_synced(self, param: Tensor) -> None:
        """Record so for one parameter, which has just been updated alone."""
        master_param = self.master_params.get(param)
        if master_param is not None:
            position, weight = master_param.position, master_param.weight
            versions, addresses = self._synced
            versions[position] = weight._version  # noqa: SLF001
            addresses[position] = self._address_of(weight)

    @torch.no_grad()
    def sync_external_writes(self) -> None:
        """Reset master weights whose model weights were changed outside the optimizer.

        `model.load_state_dict`, clamping or weight averaging change the model; without
        the reset the next step would undo that. Neither `p.data = ...` nor writes
        through `.data` increment the version counter. The former changes the address;
        the latter are not noticed.
        """
        for master_param in self.master_params.values():
            if master_param.weight.dtype != master_param.dtype:
                master_param.check()
        written = self._externally_written()
        if not written:
            return
        changed, versions = 0, self._synced[0]
        for param in written:
            # At a new address alone, compact encodings keep their low bits.
            is_moved = param.weight._version == versions[param.position]  # noqa: SLF001
            reset = param.follow_weight if is_moved else param.reset_from_weight
            changed += reset(self.encoding, self.rng)
        self.mark_synced()
        if changed and not self._warned_of_writes:
            # Once: programs that clamp their weights do so in each step.
            self._warned_of_writes = True
            warn_caller(
                f"weights were changed outside the optimizer ({changed} numbers): "
                "their master weights were reset to the 16-bit values, as after each "
                "later change. To load a checkpoint in fp32, load it before, or into "
                "the session."
            )

    def _marks(self) -> tuple[list[int], list[int]]:
        weights = [*map(_WEIGHT, self.master_params.values())]
        return [*map(_VERSION, weights)], [*map(self._address_of, weights)]

    def _externally_written(self) -> list[MasterParam]:
        """Return the parameters whose weights were written since `mark_synced`."""
        marks = self._marks()
        if marks == self._synced:
            return []
        now, before = zip(*marks, strict=True), zip(*self._synced, strict=True)
        rows = zip(self.master_params.values(), now, before, strict=True)
        return [param for param, mark, synced in rows if mark != synced]


class NoMasters(MasterWeights):
    """MasterWeights of an optimizer that updates the model's own parameters.

    `text` is what `note` returns.
    """

    has_masters = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, text: str = "master weights: none"
    ) -> None:
        super().__init__(optimizer)
        self._text = text

    def add_new_params(
        self, originals: dict[nn.Parameter, Tensor] | None = None
    ) -> None:
        """Do nothing."""

    def describe(self) -> str:
        """Return one line about how weights are updated."""
        name = type(self.optimizer).__name__
        can_fuse = type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        for group in self.optimizer.param_groups:
            # torch refuses fused=True beside these.
            chosen = [group.get(key) for key in ("fused", "foreach", "differentiable")]
            can_fuse &= not any(chosen)
        text = "; fused=True makes it one pass over memory" if can_fuse else ""
        return f"{name}'s own step{text}"

    def note(self) -> str:
        """Return one line about master weights."""
        return self._text


@torch.no_grad()
def _accumulate_(master_param: MasterParam) -> None:
    """Add a 16-bit gradient to the master's fp32 gradient, and free it."""
    weight = master_param.weight
    gradient, weight.grad = weight.grad, None
    if gradient is None:
        return
    total = master_param.master.grad
    if gradient.is_sparse or (total is not None and total.is_sparse):
        wide = gradient.float()
        if total is not None:
            # torch supports sparse + dense only with the dense operand first.
            wide = wide + total if total.is_sparse else total + wide
        master_param.master.grad = wide
    elif total is None:
        buffer = master_param.grad_buffer
        # Optimizers may refer to the gradient of their last step, as Adan does.
        if buffer is None or is_shared(buffer):
            buffer = torch.empty_like(weight, dtype=torch.float32)
        if weight.is_cpu:  # elsewhere the caching allocator makes new memory cheap
            master_param.grad_buffer = buffer
        master_param.master.grad = buffer.copy_(gradient).detach()
    elif (
        total.is_cpu
        and total.numel() >= _LARGE
        and total.is_contiguous()
        and gradient.is_contiguous()
        and cpu_kernels.available()
    ):
        item = ParamUpdate(total, gradient)
        one = torch.ones(())
        cpu_kernels.update([item], _SUM, PLAIN, inverse=one, clock=(0, 0))
        torch.autograd.graph.increment_version(total)
    else:
        add_(total, gradient)


_SUM = Sgd(-1.0, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
"""SGD with lr=-1 adds the gradient to the weight, in one pass over memory."""
_LARGE = 1 << 16
"""Elements from which calling the kernel is faster."""


def _clear_low_grads_too(optimizer: Optimizer, clear: Callable[[], None]) -> None:
    """Make `optimizer.zero_grad` also clear the model's 16-bit gradients."""
    own = optimizer.zero_grad

    @wraps(own)
    def zero_grad(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        own(*args, **kwargs)
        clear()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _choose_kernel(
    optimizer: Optimizer, model_params: list[Tensor]
) -> tuple[Kernel | None, str]:
    """Return the kernel for an optimizer, or None and the reason.

    `model_params` are the parameters of the model, not their master weights.
    """
    reason = _unsupported(optimizer, model_params)
    if reason:
        return None, reason
    device = model_params[0].device
    module: Any = triton_kernels
    if device.type == "cpu":
        module = cpu_kernels
        if not cpu_kernels.available():
            return None, cpu_kernels.describe()
    elif not triton_kernels.available(device):
        return None, f"no kernel for {device}"
    elif any(group.get("dampening") for group in optimizer.param_groups):
        # Whether a step filled the momentum buffer is known only on the device.
        return None, "dampening, and steps that are skipped on the device"
    on_device = module is triton_kernels
    kernel = Kernel(module.describe(), module.check_finite, module.update, on_device)
    return kernel, kernel.description


def _unsupported(optimizer: Optimizer, model_params: list[Tensor]) -> str:
    """Return why no kernel can update these parameters; "" if one can."""
    devices = sorted({str(param.device) for param in model_params})
    reason, groups = "", optimizer.param_groups
    if type(optimizer) not in fused_step.OPTIMIZERS:
        reason = "only the arithmetic of SGD, Adam and AdamW is built in"
    elif not model_params:
        reason = "it has no parameters"
    elif any(len({*group["params"]}) < len(group["params"]) for group in groups):
        reason = "a parameter is twice in its group"
    elif len(devices) > 1:
        reason = f"its parameters are on several devices: {', '.join(devices)}"
    elif any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in model_params):
        reason = "parameters are of a tensor subclass"
    elif not {param.dtype for param in model_params} <= {*fused_step.FLOATS}:
        reason = "parameters are not all bf16, fp16 or fp32"
    elif not all(map(_is_dense, model_params)):
        reason = "a parameter has gaps in memory"
    return reason


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps in memory, whatever its dimension order."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()

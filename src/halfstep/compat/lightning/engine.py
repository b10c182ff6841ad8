"""Runs the stages of a session's step from the hooks of Lightning's precision plugins.

The stages are those of `Session.step`: scale, backward, unscale, update.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from halfstep._torch.optimizer_params import params_of, unnamed
from halfstep.casting import convert_model, dtype_mismatch
from halfstep.distributed import bucketed_all_reduce
from halfstep.errors import UserError, warn_caller
from halfstep.machine.recommendation import resolve, warnings_for
from halfstep.masters import encoding
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.policy.rules import Policy
from halfstep.scaling import misuse
from halfstep.scaling.found_inf_reduction import reduce_found_inf
from halfstep.scaling.loss_scale import ScaleRule
from halfstep.scaling.loss_scaler import LossScaler
from halfstep.scaling.step_report import (
    Constant,
    NonFiniteParam,
    StepReport,
)
from halfstep.session import arguments, fsdp
from halfstep.session.autocast_contexts import AutocastContexts
from halfstep.session.model_hooks import CopyWarning
from halfstep.session.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from halfstep.casting.autocast_mode import Autocast, PolicyAutocast
    from halfstep.machine.recommendation import Choice
    from halfstep.masters import MasterWeights


class ConvertedModel:
    """A model whose weights are stored in the level's format until `restore`.

    `state_dict` returns fp32 values for 16-bit weights, and `load_state_dict` sets
    them, so that checkpoints are those of an fp32 model.
    """

    def __init__(self, model: nn.Module, choice: Choice, policy: Policy) -> None:
        self.choice, self.rules = choice, policy
        dtype = choice.format.dtype
        conversion = convert_model.convert_(model, choice.level, dtype, policy)
        self.policy = conversion.policy
        self.num_implied_rules = len(conversion.policy.rules) - len(policy.rules)
        self.fp32: dict[nn.Parameter, Tensor] = {}
        """16-bit weight -> its fp32 value, until it has a master weight."""
        self.low_weights: dict[nn.Parameter, nn.Parameter] = {}
        """fp32 parameter of an optimizer not attached yet -> 16-bit weight."""
        self.masters: list[MasterWeights] = []
        self._low_params: list[nn.Parameter] = []
        advice = "copy it before it is converted, and load its state_dict(), which is "
        advice += "fp32, into the copy"
        self._copy_warning = CopyWarning(
            choice.format.name, advice, lambda: self.fp32 or self.masters
        )
        if choice.level.masters:
            self.fp32 = conversion.originals
            self._low_params = [*self.fp32]
            put_fp32 = partial(self._put_fp32)  # torch sets an attribute on it
            model.register_state_dict_post_hook(put_fp32)  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(self._take_fp32)  # type: ignore[no-untyped-call]

    def separate(self, model: nn.Module) -> None:
        """Give the model new 16-bit parameters; the original ones become fp32 again.

        For optimizers made before the conversion that are attached at their first step:
        state loaded into them before that is not rounded.
        """
        for param, value in list(self.fp32.items()):
            low = nn.Parameter(param.data, requires_grad=param.requires_grad)
            self.low_weights[param] = low
            self.fp32[low] = self.fp32.pop(param)
            param.data = value
        for module in model.modules():
            for name, own in [*module._parameters.items()]:  # noqa: SLF001
                if own in self.low_weights:
                    setattr(module, name, self.low_weights[own])
        self._low_params = [*self.fp32]

    @torch.no_grad()
    def move_grads(self) -> None:
        """Add gradients of 16-bit weights to those of the fp32 parameters.

        A placeholder without memory remains in `.grad`: it shows whether `zero_grad` of
        an optimizer over the 16-bit weights was called.
        """
        for param, low in self.low_weights.items():
            if low.grad is not None:
                param.data = param.data.to(low.device)
                grad = low.grad.float()
                param.grad = grad if param.grad is None else param.grad + grad
                low.grad = low.new_zeros(()).expand_as(low)

    def clear_grads(self) -> None:
        """Clear gradients that `zero_grad` of an optimizer could not clear."""
        for param, low in self.low_weights.items():
            if low.grad is None:
                param.grad = None
            low.grad = None

    def reconvert(self) -> None:
        """Convert weights that `restore` made fp32 to 16 bits again."""
        for param in self._low_params:
            if param.dtype != self.choice.format.dtype:
                self.fp32[param] = param.data
                param.data = param.data.to(self.choice.format.dtype)

    @torch.no_grad()
    def restore(self) -> None:
        """Convert the weights back to fp32."""
        for param, value in self._fp32_values().items():
            param.data = value.to(param.device)
            param.grad = None
        self.fp32, self.masters = {}, []

    def _fp32_values(self) -> dict[nn.Parameter, Tensor]:
        """Return the fp32 value of each 16-bit weight."""
        values: dict[nn.Parameter, Tensor]
        # A frozen weight may have no fp32 value but its own.
        values = {param: self.fp32.get(param, param) for param in self._low_params}
        for param, master in (pair for each in self.masters for pair in each.pairs):
            # A callback may have written averages through `.data`, which changes no
            # version counter.
            value = master.detach().to(param.device)
            is_written = param.detach() != value.to(param.dtype)
            if is_written.any():
                value = torch.where(is_written, param.detach().float(), value)
            values[param] = value
        return {param: value.detach().float() for param, value in values.items()}

    def _put_fp32(
        self, model: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:
        """State-dict hook: replace 16-bit weights by fp32 values."""
        values = self._fp32_values()
        for name, param in model.named_parameters(remove_duplicate=False):
            key = prefix + name
            if param in values and state.get(key) is not param:  # not with keep_vars
                state[key] = values[param]

    @torch.no_grad()
    def _take_fp32(
        self, model: nn.Module, state: dict[str, Any], prefix: str, *_: object
    ) -> None:
        """Load hook: set fp32 values before the weights are loaded in 16 bits."""
        master_of = {w: (m, p) for m in self.masters for w, p in m.pairs}
        for name, param in model.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, Tensor) or value.shape != param.shape:
                continue  # load_state_dict reports it
            if param in master_of:
                masters, master = master_of[param]
                masters.set_fp32_(master, value)
            elif param in self.fp32:
                self.fp32[param].copy_(value)


_converted: WeakKeyDictionary[nn.Module, ConvertedModel] = WeakKeyDictionary()


@dataclass
class OptimizerEntry:
    """An attached optimizer."""

    step: OptimizerStep
    """Collects, unscales and clips its gradients, and updates."""
    num_skipped: Tensor
    num_attempted: int = 0
    first_applied: int = 0
    """Applied steps at the loaded checkpoint."""
    num_passes: int = 0
    """Backward passes since its last step."""
    stepped: tuple[TensorWeakRef, int] | None = None
    """A gradient of the last step, and its version after it."""
    checked: (
        tuple[Tensor, Tensor | None, Callable[[], tuple[NonFiniteParam, ...]]] | None
    ) = None
    """found_inf and norm of the current step, shape (), and what returns the
    non-finite parameters; None while gradients are scaled."""

    @property
    def num_applied(self) -> int:
        """Steps that updated the weights. May synchronize with the device."""
        return self.num_attempted - int(self.num_skipped)


class LevelEngine:
    """A level, a loss scale, and the models and optimizers that they apply to.

    The arguments are those of a plugin, and the program's call that `backward` serves,
    as errors name it.
    """

    def __init__(
        self,
        level: str,
        dtype: str | torch.dtype,
        policy: Policy | str,
        loss_scale: str | float | ScaleRule,
        backward_call: str,
    ) -> None:
        self._backward_call = backward_call
        self.choice = resolve(levels.parse(level), formats.parse(dtype), "cpu")
        if loss_scale == "auto":
            loss_scale = levels.DEFAULT_LOSS_SCALE[self.choice.format.name]
        if not isinstance(loss_scale, ScaleRule):
            loss_scale = ScaleRule.parse(loss_scale)
        self.rule = loss_scale
        self.policy = Policy.of(policy)
        self.last_step = StepReport(0, complete=False)
        self.group: dist.ProcessGroup | None = None
        """Ranks over which DDP averages gradients."""
        self.moves_grads = True
        """Whether to move gradients of 16-bit weights to their master weights after
        each backward pass: Lightning's wrappers call the optimizer class's `zero_grad`,
        which only clears gradients in the parameter groups."""
        self.scaler: LossScaler | None = None
        self.entries: dict[Optimizer, OptimizerEntry] = {}
        self._models: list[ConvertedModel] = []
        self._param_names: dict[int, str] = {}
        self._params: list[nn.Parameter] = []
        self._contexts: AutocastContexts | None = None
        self._saved: dict[str, Any] = {}
        self._found_inf: Tensor | None = None
        """Maximum over the steps since the last update of the scale."""
        self._num_passes = 0
        self._is_in_backward = False
        self._foreign_grads: dict[Tensor, TensorWeakRef] = {}
        """Model's parameter -> gradient to which another backward pass added."""
        self._hooks: list[RemovableHandle] = []
        self._averager = bucketed_all_reduce.BucketedAllReduce()

    def convert(self, model: nn.Module, *, separate: bool = False) -> None:
        """Convert a model's weights to the level's format, once more after `restore`.

        `separate`: its optimizers may exist, and are attached at their first step.
        """
        converted = _converted.get(model)
        if converted is None:
            arguments.check_fp32_weights(model, self.choice)
            converted = ConvertedModel(model, self.choice, self.policy)
            _converted[model] = converted
            if separate:
                converted.separate(model)
        was, now = (str(each.choice) for each in (converted, self))
        if was != now or converted.rules != self.policy:
            raise UserError(
                f"the model was converted before, at {was}, and this plugin is for "
                f"{now}, or has another policy: build the model anew."
            )
        converted.reconvert()
        if converted not in self._models:
            self._models.append(converted)
        for param in model.parameters():
            self._watch(param)
        self._param_names |= {id(p): name for name, p in model.named_parameters()}
        self._params += model.parameters()
        self._contexts = None

    def _watch(self, param: nn.Parameter) -> None:
        """Record the gradients that backward passes other than `backward` make.

        Versions of gradients would not tell them from a program's own edits.
        """
        if not param.is_floating_point():
            return
        is_trained = param.requires_grad
        param.requires_grad = True  # a frozen one may be unfrozen later
        register = param.register_post_accumulate_grad_hook
        self._hooks.append(register(self._record_foreign_grad))  # type: ignore[no-untyped-call]
        param.requires_grad = is_trained

    def _record_foreign_grad(self, param: Tensor) -> None:
        if not self._is_in_backward and param.grad is not None:
            self._foreign_grads[param] = TensorWeakRef(param.grad)

    def _has_foreign_grad(self, param: Tensor) -> bool:
        reference = self._foreign_grads.get(param)
        return reference is not None and reference() is param.grad is not None

    def drop_frozen(self) -> None:
        """Drop the fp32 values of weights that are in no optimizer."""
        for model in self._models:
            model.fp32.clear()

    def attach(self, optimizer: Optimizer) -> OptimizerEntry:
        """Give an optimizer master weights if the level has them."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "LBFGS evaluates the model inside its step; use another optimizer."
            )
        has_masters = self.choice.level.masters
        form = encoding.FP32 if has_masters else None
        device = self.device.type
        for text in warnings_for(self.choice, optimizer, device, masters=has_masters):
            warn_caller(text)
        grads = self._hand_over(optimizer)
        fp32 = {
            param: model.fp32.pop(param).to(param.device)
            for model in self._models
            for group in optimizer.param_groups
            for param in group["params"]
            if param in model.fp32
        }
        masters = fsdp.make_masters(nn.Module(), optimizer, self.choice, form, fp32)
        for model in self._models:
            model.masters.append(masters)
        for weight, master in masters.pairs:
            master.grad = grads.get(weight)
        if self.group is not None and masters.master_params:
            masters.broadcast_(partial(bucketed_all_reduce.broadcast_, self.group))
        entry = OptimizerEntry(
            OptimizerStep(masters, None, self.device),
            torch.zeros((), device=self.device),
            num_passes=self._num_passes,  # passes before a late attachment count too
        )
        self._load_counts(len(self.entries), entry)
        self.entries[optimizer] = entry
        return entry

    def _load_counts(self, number: int, entry: OptimizerEntry) -> None:
        counts = self._saved.get("steps", {}).pop(str(number), None)
        if counts is not None:
            entry.num_attempted, skipped = counts
            entry.num_skipped.fill_(skipped)
            entry.first_applied = entry.num_applied

    def _hand_over(self, optimizer: Optimizer) -> dict[Tensor, Tensor | None]:
        """Replace the fp32 parameters of an optimizer by the model's 16-bit weights.

        Returns their fp32 gradients. `MasterWeights` then puts fp32 master weights into
        the optimizer.
        """
        grads: dict[Tensor, Tensor | None] = {}
        fp32_param: dict[Tensor, nn.Parameter] = {}
        for model in self._models:
            fp32_param |= {low: param for param, low in model.low_weights.items()}
        for group in optimizer.param_groups:
            for index, own in enumerate(group["params"]):
                param = fp32_param.get(own, own)
                for model in self._models:
                    low = model.low_weights.pop(param, None)
                    if low is None:
                        continue
                    group["params"][index] = low
                    is_cleared = own is low and low.grad is None
                    grads[low] = None if is_cleared else param.grad
                    param.grad = None
                    if self._num_passes and not self._has_foreign_grad(low):
                        low.grad = None
                    state = optimizer.state.pop(param, {})
                    for key, value in state.items():
                        if torch.is_tensor(value) and value.dim():
                            state[key] = value.to(low.device)
                    if state:
                        optimizer.state[low] = state
        return grads

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return self._params[-1].device if self._params else torch.device("cpu")

    def forward_context(self) -> Autocast | PolicyAutocast:
        """Return the autocast context for a forward pass and its loss."""
        if self._contexts is None:
            rules = self._models[-1].policy if self._models else self.policy
            self._contexts = AutocastContexts(self.choice, rules, self.device.type)
        return self._contexts.select(record=False)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run the backward pass of the scaled loss by calling `run` with it.

        Raises:
            DtypeMismatch: In place of torch's error, if the pass mixes dtypes.
            LossScaleCollapse: If skipping has gone on for too long.
        """
        scaled = self._scale(loss)
        contexts = self._contexts
        accumulator = None if contexts is None else contexts.grad_accumulator
        if accumulator is not None:
            accumulator.start(scaled)
        self._is_in_backward = True
        try:
            # In manual optimization the forward pass's context is still open.
            with torch.autocast(loss.device.type, enabled=False):
                run(scaled)
        except Exception as error:
            mismatch = dtype_mismatch.explain(error)
            if mismatch is None:
                raise
            raise mismatch from error
        finally:
            self._is_in_backward = False
            if accumulator is not None:
                accumulator.stop()
        for model in self._models:
            model.move_grads()
        for entry in self.entries.values() if self.moves_grads else ():
            entry.step.masters.accumulate_grads()

    def _scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, after moving gradients of earlier passes to fp32."""
        scaler = self._require_scaler(loss.device)
        self._num_passes += 1
        for model in self._models:
            model.clear_grads()
        for entry in self.entries.values():
            entry.step.masters.accumulate_grads()
            entry.num_passes += 1
        self._update_scale(scaler)
        scaler.observe_loss(loss, self._name, self.policy)
        return scaler.scale(loss)

    def _require_scaler(self, device: torch.device) -> LossScaler:
        if self.scaler is None:
            self.scaler = LossScaler(self.rule, device)
            if "loss_scale" in self._saved:
                self.scaler.load_state_dict(self._saved.pop("loss_scale"))
        return self.scaler

    def _name(self, param: Tensor) -> str:
        for model in self._models:
            for masters in model.masters:
                param = masters.model_param(param)
        return self._param_names.get(id(param)) or unnamed(param)

    def entry(self, optimizer: Optimizer) -> OptimizerEntry:
        """Return the entry of an optimizer; attach it if needed."""
        return self.entries.get(optimizer) or self.attach(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients now, in fp32, in its parameters' `.grad`."""
        self._check(optimizer, in_place=True)

    def _check(self, optimizer: Optimizer, *, in_place: bool) -> OptimizerEntry:
        """Collect and unscale the gradients of a step, and check if they are finite."""
        entry = self.entry(optimizer)
        if entry.checked is not None:
            return entry
        self._check_passes(entry)
        if self.scaler is None:
            return entry
        step = entry.step
        if self.group is not None and entry.num_passes > 1:
            self._average_sums(entry, self.group)
        step.masters.add_new_params()
        params, grads = step.collect(self.scaler, in_fp32=False, in_place=in_place)
        if not grads:
            return entry
        found_inf, norm = step.check(grads, self.scaler)
        found_inf = reduce_found_inf(found_inf, grads, None)
        culprits: Callable[[], tuple[NonFiniteParam, ...]] = tuple
        if step.skips_on_device or found_inf:
            culprits = step.nonfinite_params(params, grads, self._name)
        entry.checked = found_inf, norm, culprits
        return entry

    def _check_passes(self, entry: OptimizerEntry) -> None:
        """Raise if the gradients of a step are not those that `backward` made."""
        masters = entry.step.masters
        if not entry.num_passes or self.rule.scales:
            params = map(masters.model_param, params_of(masters.optimizer))
            if any(map(self._has_foreign_grad, params)):
                raise misuse.foreign_gradients(self._backward_call)
        if entry.num_passes:
            return
        gradient = entry.step.first_grad()
        if gradient is None:
            return
        if entry.stepped is not None:
            reference, version = entry.stepped
            if reference() is gradient and gradient._version == version:  # noqa: SLF001
                raise misuse.step_without_backward(
                    entry.num_attempted, self._backward_call
                )
        if self.rule.scales:
            raise misuse.foreign_gradients(self._backward_call)
        self._require_scaler(self.device)  # the program assigned them to `.grad`

    def _average_sums(self, entry: OptimizerEntry, group: dist.ProcessGroup) -> None:
        """Average the fp32 sums of micro-batches over ranks.

        DDP averages only the `.grad` of 16-bit weights in the last backward pass; sums
        of earlier passes are in `.grad` of the master weights. Averaging the last
        pass's share again does not change it.
        """
        masters = entry.step.masters
        masters.accumulate_grads()
        dtypes = dict.fromkeys(masters.master_params, self.choice.format.dtype)
        self._averager.mean_(dtypes, group, num_summed=entry.num_passes)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights with an optimizer, unless a gradient is inf or NaN.

        Without gradients it only warns.

        Raises:
            RuntimeError: If another backward pass has made the gradients, or the last
                step has used them.
        """
        entry = self._check(optimizer, in_place=False)
        if entry.checked is None or self.scaler is None:
            name, cause = type(optimizer).__name__, misuse.why_no_gradients(optimizer)
            warn_caller(f"{name}.step() changed nothing: {cause}")
            return
        found_inf, norm, culprits = entry.checked
        step = entry.step
        entry.num_attempted += 1
        entry.num_skipped = entry.num_skipped + found_inf
        self.last_step = StepReport(
            entry.num_attempted,
            complete=True,
            scale_used=self.scaler.state.scale,
            found_inf=found_inf,
            norm=Constant(norm),
            culprits=culprits,
        )
        try:
            step.update(found_inf, norm)
        finally:
            entry.checked, entry.num_passes = None, 0
            gradient = step.first_grad()
            if gradient is not None:
                entry.stepped = TensorWeakRef(gradient), gradient._version  # noqa: SLF001
            step.clip = None
        if self._found_inf is not None:
            found_inf = torch.maximum(self._found_inf, found_inf)
        self._found_inf = found_inf
        if self._contexts is not None and self._models:
            implied = self._models[-1].num_implied_rules
            unmatched = self._contexts.after_step(implied)
            if unmatched and len(self.entries) == 1:
                warn_caller(unmatched)

    def _update_scale(self, scaler: LossScaler) -> None:
        """Update the loss scale after the steps since the last backward pass.

        Not in `step`: if two optimizers step after their backward passes, both must
        unscale by the same scale.
        """
        if self._found_inf is None:
            return
        found_inf, self._found_inf = self._found_inf, None
        before = scaler.state.scale
        scaler.update(found_inf, self.last_step.culprits)
        if self.rule.scales:
            self._rescale_grads(scaler.state.scale / before)

    @torch.no_grad()
    def _rescale_grads(self, ratio: Tensor) -> None:
        """Multiply gradients that other optimizers still accumulate by `ratio`."""
        if ratio.is_cpu and ratio == 1:
            return
        params = [*self._params, *(p for m in self._models for p in m.low_weights)]
        masters = (entry.step.masters for entry in self.entries.values())
        params += [master for each in masters for _, master in each.pairs]
        stand_ins = {low for m in self._models for low in m.low_weights.values()}
        for param in set(params) - stand_ins:
            if param.grad is not None:
                param.grad.mul_(ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale and counters as plain values. Synchronizes."""
        if self.scaler is None:
            return {}
        self._update_scale(self.scaler)
        steps = {
            str(number): (entry.num_attempted, int(entry.num_skipped))
            for number, entry in enumerate(self.entries.values())
        }
        scale = self.scaler.state_dict()
        return {"dtype": self.choice.format.name, "loss_scale": scale, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of this class, or of the `GradScaler` of Lightning's "16-mixed".

        The loss scale is loaded only if the state has the same 16-bit format.
        """
        if not state:
            return
        if {"scale", "_growth_tracker"} <= state.keys():
            loss_scale = {
                "scale": float(state["scale"]),
                "clean_steps": int(state["_growth_tracker"]),
                "hysteresis_left": self.rule.hysteresis,
                "skips_in_a_row": 0,
            }
            state = {"dtype": "fp16", "loss_scale": loss_scale, "steps": {}}
        if not {"dtype", "loss_scale", "steps"} <= state.keys():
            raise UserError(
                f"the precision state holds {[*state]}, and was not saved by "
                "halfstep: load the weights alone."
            )
        LossScaler.check(state["loss_scale"])
        self._saved = {"steps": dict(state["steps"])}
        if state["dtype"] == self.choice.format.name:
            self._saved["loss_scale"] = state["loss_scale"]
        self.scaler = self._found_inf = None
        for number, entry in enumerate(self.entries.values()):
            self._load_counts(number, entry)

    def release(self) -> None:
        """Convert the models' weights back to fp32, and drop the master weights."""
        for model in self._models:
            model.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._contexts = None

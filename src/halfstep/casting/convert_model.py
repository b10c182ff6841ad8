"""Converts a model to a level: 16-bit weights, fp32 modules, input and output casts.

In: a model, a level, a policy. Out: the model, its weights converted in place and with
forward hooks, and the fp32 values from which master weights are made.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from halfstep.casting import dtype_mismatch
from halfstep.casting.module_rules import (
    LevelHook,
    ModuleRuleHook,
    hooks_for,
    remove_hooks,
)
from halfstep.errors import UserError
from halfstep.numerics.formats import AUTOCAST_DTYPES, cast_floating, is_low, word
from halfstep.numerics.local_tensor import local_part
from halfstep.policy import decision, op_tables
from halfstep.policy import rules as policy_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from halfstep.policy.levels import Level
    from halfstep.policy.rules import Policy, Rule


@dataclass(frozen=True)
class Conversion:
    """The changes that `convert_` made to a model."""

    originals: dict[nn.Parameter, Tensor]
    """Parameter now stored in 16 bits -> its value before the conversion."""
    fp32_modules: tuple[str, ...]
    """Paths of the fp32 modules."""
    policy: Policy
    """The given rules, followed by those of the level."""


def convert_(
    model: nn.Module, level: Level, low_dtype: torch.dtype, rules: Policy
) -> Conversion:
    """Store a model's weights as the level says, in place, and register its hooks.

    Parameters keep their identity, so optimizers, tied weights and hooks still refer
    to them; those that share memory still do. Their gradients are cast too. Integer,
    bool, complex and float64 tensors are not changed, nor are tensors that are neither
    parameters nor buffers: autocast, if the level has it, casts them.

    Buffers are converted only at levels without autocast. Under autocast, operations
    cast buffers as needed and the stored values stay exact: rotary frequencies and
    running means lose digits in bf16, a mask of -1e9 becomes -inf in fp16. apex's O2
    has no autocast, so it must convert them.

    At levels with 16-bit weights, a model that is already in bf16 or fp16 is stored as
    if `model.float()` had been called first: normalisation and fp32 modules in fp32.

    A parametrized weight (torch.nn.utils.parametrize) is computed in fp32 from fp32
    parameters, and its layer gets it in 16 bits. `is_normalisation` decides by
    class names whether a module is a normalisation layer.

    If the level says so, inputs are cast to 16 bits and 16-bit outputs to fp32, so that
    a loss written by hand gets fp32. This costs one pass over the outputs and an fp32
    copy, which a loss under autocast would make anyway; the backward pass casts the
    copy's gradient to 16 bits. Hooks registered on the model before this call see
    16-bit outputs, later ones fp32. Only calls of the model are cast: `model.encode(x)`
    is not, nor are objects unknown to `cast_floating`, such as a KV cache.

    Args:
        model: The model. Not wrapped for data parallelism if weights become 16-bit:
            the wrapper's buckets keep the dtype from when it was created.
        level: The level.
        low_dtype: The 16-bit dtype.
        rules: Modules that its rules put in fp32 become fp32 modules.

    Raises:
        UserError: If a rule cannot be applied or matches no module; if the model is
            wrapped, or its weights have no values yet or would become inf. The model
            is then unchanged.
    """
    policy_rules.check_ops(rules)
    rules, hooks, fp32_modules, fp32_ids = _plan(model, level, rules)
    if not level.autocast:
        _refuse_autocast_rules(rules, level)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if wrapped and level.low_weights:
        raise UserError(
            f"level={level.name} changes the dtype of weights, and the model is "
            f"already in {type(model).__name__}. Prepare the bare model, then wrap "
            "session.model."
        )
    low_tensors, fp32_tensors = list[Tensor](), list[Tensor]()
    if level.low_weights:
        buffers = () if level.autocast else model.buffers()
        low_tensors = [
            tensor
            for tensor in chain(model.parameters(), buffers)
            if tensor.dtype in AUTOCAST_DTYPES - {low_dtype}
            and id(tensor) not in fp32_ids
        ]
        # In a model that is already 16-bit: tensors that the level stores in fp32.
        fp32_tensors = [
            tensor
            for tensor in chain(model.parameters(), model.buffers())
            if is_low(tensor.dtype) and id(tensor) in fp32_ids
        ]
        changed_ids = {id(tensor) for tensor in (*low_tensors, *fp32_tensors)}
        _refuse_unready(model, level, changed_ids)
        _check_overflow(model, low_tensors, low_dtype)
        if not level.autocast:
            _refuse_shared(model, level, fp32_modules, fp32_ids)
    _attach_hooks(model, hooks if level.low else [], fp32_modules, level, low_dtype)
    originals = {
        # Not `detach()`: that would share the weight's version counter.
        tensor: tensor.data
        for tensor in low_tensors
        if isinstance(tensor, nn.Parameter)
    }
    _store(low_tensors, low_dtype)
    _store(fp32_tensors, torch.float32)
    if low_tensors or fp32_tensors:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                # cuDNN needs an RNN's weights in one block; `Module.to` does the same.
                module.flatten_parameters()
    return Conversion(originals, tuple(fp32_modules), rules)


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that users call: the model, or an `nn.ModuleList`'s items."""
    return [*model] if isinstance(model, nn.ModuleList) else [model]


def low_parameters(model: nn.Module, level: Level, rules: Policy) -> list[nn.Parameter]:
    """Return the fp32 parameters that `convert_` would store in 16 bits."""
    if not level.low_weights:
        return []
    *_, fp32_ids = _plan(model, level, rules)
    params = model.parameters()
    return [p for p in params if p.dtype == torch.float32 and id(p) not in fp32_ids]


def _plan(
    model: nn.Module, level: Level, rules: Policy
) -> tuple[Policy, list[ModuleRuleHook], dict[str, nn.Module], set[int]]:
    """Return what the level makes of a model and the user's rules.

    Returns:
        The rules, followed by those of the level; their hooks; path -> fp32 module; ids
        of the parameters and buffers that are stored in fp32.
    """
    implied: tuple[Rule, ...] = ()
    if level.fp32_norms and rules.base == "torch":
        implied += (policy_rules.RMS_NORM,)
    modules = [*model.modules()]
    if level.low_weights and any(isinstance(m, ParametrizationList) for m in modules):
        implied += (policy_rules.PARAMETRIZED,)
    rules = replace(rules, rules=(*rules.rules, *implied))
    hooks = hooks_for(model, rules, implied)
    by_path = dict(model.named_modules())
    fp32_modules = {
        hook.path: by_path[hook.path]
        for hook in hooks
        if level.low and hook.category == op_tables.FP32
    }
    stored_in_fp32 = [*fp32_modules.values()]
    if level.fp32_norms:
        stored_in_fp32 += [
            module
            for module in modules
            if policy_rules.is_normalisation(policy_rules.type_names(module))
        ]
    fp32_ids = {
        id(tensor)
        for module in stored_in_fp32
        for tensor in (*module.parameters(), *module.buffers())
    }
    for module in modules if level.autocast and level.low_weights else ():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 -- no other way
            if isinstance(hook, SpectralNorm):
                # Its power iteration writes to fp32 buffers and rejects mixed dtypes.
                fp32_ids.add(id(getattr(module, f"{hook.name}_orig")))
    return rules, hooks, fp32_modules, fp32_ids


def _attach_hooks(
    model: nn.Module,
    hooks: list[ModuleRuleHook],
    fp32_modules: dict[str, nn.Module],
    level: Level,
    low_dtype: torch.dtype,
) -> None:
    """Register the hooks of module rules and of the model's input and output casts."""
    for module in model.modules():
        remove_hooks(module, _is_of_level)
    for hook in hooks:
        module = model.get_submodule(hook.path)
        # An fp32 module has fp32 weights, so it runs in fp32 without autocast too.
        in_fp32_module = any(
            outer in fp32_modules for outer in decision.around(hook.path)[1:]
        )
        keeps_dtype = level.autocast and not (
            level.low_weights and isinstance(module, ParametrizationList)
        )
        hook.register(
            module,
            of_level=True,
            always_fp32=hook.path in fp32_modules,
            output_dtype=None if keeps_dtype or in_fp32_module else low_dtype,
        )
    for called in called_modules(model):
        if level.low_inputs:
            called.register_forward_pre_hook(_CastInputs(low_dtype), with_kwargs=True)
        if level.fp32_outputs:
            called.register_forward_hook(_cast_outputs)


def _is_of_level(hook: object) -> bool:
    """Return whether a level has registered a hook."""
    is_rule = isinstance(hook, ModuleRuleHook) and hook.of_level
    return is_rule or isinstance(hook, LevelHook) or hook is _cast_outputs


def _refuse_autocast_rules(rules: Policy, level: Level) -> None:
    """Raise if a rule needs autocast and the level has none."""
    for rule in rules.rules if level.low else ():
        if rule.kind == "op" or rule.category != op_tables.FP32:
            raise UserError(
                f"rule '{rule}' cannot be applied at level {level.name}, which has no "
                "autocast: there modules can only be kept in fp32, as in "
                "'module:PATH=fp32' or 'type:NAME=fp32'."
            )


def _refuse_unready(model: nn.Module, level: Level, changed_ids: set[int]) -> None:
    """Raise if weights have no values yet or were created in inference mode."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in changed_ids:
            continue
        if is_lazy(tensor):
            state = "has no shape yet"
            advice = "Call the model once, make the optimizer, then prepare"
        elif tensor.is_meta:
            state = "is on the meta device, without values"
            advice = "Call model.to_empty(), load its weights, then prepare"
        elif tensor.is_inference():
            state = "was made in inference mode and cannot be trained"
            advice = "Build the model outside torch.inference_mode()"
        else:
            continue
        raise UserError(
            f"level={level.name} stores {name!r} in 16 bits, but it {state}. {advice}."
        )


_overflow_allowed: ContextVar[bool] = ContextVar("_overflow_allowed", default=False)


@contextlib.contextmanager
def allow_overflow() -> Iterator[None]:
    """Allow weights to become inf inside: for `check`, which reports them."""
    token = _overflow_allowed.set(True)
    try:
        yield
    finally:
        _overflow_allowed.reset(token)


def refuse_overflow(
    named_tensors: Iterable[tuple[str, Tensor]], low_dtype: torch.dtype
) -> None:
    """Raise if weights would become inf in 16 bits.

    Args:
        named_tensors: (name, values about to be stored in 16 bits).
        low_dtype: The 16-bit dtype.

    Raises:
        UserError: With the name, the largest magnitude and ways to fix it.
    """
    for name, peak in _overflowing(named_tensors, low_dtype):
        path = name.rpartition(".")[0]
        cures = ["dtype='bf16'"] if low_dtype == torch.float16 else ["level='O1'"]
        if path:
            cures.append(f"the rule 'module:{path}=fp32'")
        raise UserError(
            f"parameter {name!r} reaches {peak:g}, and {word(low_dtype)} holds numbers "
            f"up to {torch.finfo(low_dtype).max:g}: it would become inf. "
            f"Use {' or '.join(cures)}."
        )


def _check_overflow(
    model: nn.Module, low_tensors: Iterable[Tensor], low_dtype: torch.dtype
) -> None:
    """Raise if weights become inf; only warn for buffers, which may be masks."""
    if _overflow_allowed.get():
        return
    low_ids = {id(tensor) for tensor in low_tensors}
    named_params = [pair for pair in model.named_parameters() if id(pair[1]) in low_ids]
    refuse_overflow(named_params, low_dtype)
    buffers = [pair for pair in model.named_buffers() if id(pair[1]) in low_ids]
    for name, peak in _overflowing(buffers, low_dtype):
        message = (
            f"buffer {name!r} reaches {peak:g} and becomes inf: {word(low_dtype)} "
            f"holds numbers up to {torch.finfo(low_dtype).max:g}. If that is no mask, "
            "use dtype='bf16', or level='O2', which leaves buffers as they are."
        )
        warnings.warn(message, stacklevel=5)


@torch.no_grad()
def _overflowing(
    named_tensors: Iterable[tuple[str, Tensor]], low_dtype: torch.dtype
) -> list[tuple[str, float]]:
    """Return (name, largest magnitude) of finite tensors that become inf when cast.

    Synchronizes with each device once.
    """
    local = [(name, local_part(tensor)) for name, tensor in named_tensors]
    pairs = [
        (n, t.detach()) for n, t in local if t.numel() and not _has_inner_tensors(t)
    ]
    if not pairs:
        return []
    norms = torch._foreach_norm([t for _, t in pairs], torch.inf)  # noqa: SLF001
    peaks = torch.stack([norm.float().to(norms[0].device) for norm in norms]).cpu()
    # Tensors that already hold inf or NaN are not caused by the conversion.
    return [
        (name, float(peak))
        for (name, _), peak in zip(pairs, peaks, strict=True)
        if peak.isfinite() and not peak.to(low_dtype).isfinite()
    ]


def _refuse_shared(
    model: nn.Module,
    level: Level,
    fp32_modules: dict[str, nn.Module],
    fp32_ids: set[int],
) -> None:
    """Raise if an fp32 module and a 16-bit module share a weight."""
    for path, module in model.named_modules():
        tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if not any(outer in fp32_modules for outer in decision.around(path)) and any(
            id(tensor) in fp32_ids for tensor in tensors
        ):
            raise UserError(
                f"module {path!r} shares a weight with one that a rule keeps in fp32, "
                f"and level {level.name} has no autocast to mix them: add the rule "
                f"'module:{path}=fp32', or drop the other."
            )


@torch.no_grad()
def _store(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Store tensors in a dtype; tensors that share memory still share it."""
    for group in _overlapping(tensors):
        if len(group) == 1:
            _set_data(group[0], group[0].data.to(dtype))
            continue
        start = min(tensor.storage_offset() for tensor in group)
        size = max(map(_storage_end, group)) - start
        merged = group[0].data.as_strided((size,), (1,), start).to(dtype)
        for tensor in group:
            offset = tensor.storage_offset() - start
            _set_data(tensor, merged.as_strided(tensor.shape, tensor.stride(), offset))


def _set_data(tensor: Tensor, value: Tensor) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    tensor.grad = None  # torch rejects a gradient of another dtype
    tensor.data = value
    if gradient is not None:
        tensor.grad = gradient.to(value.dtype)


def _overlapping(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors so that those that overlap in memory are in one group."""
    groups: list[list[Tensor]] = []
    stored: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() and not _has_inner_tensors(tensor):
            # Not the address: storages without memory all have the same. By dtype, for
            # offsets count elements.
            storage = tensor.untyped_storage()._cdata  # noqa: SLF001
            stored[storage, tensor.dtype].append(tensor)
        else:
            groups.append([tensor])
    for same_storage in stored.values():
        end = -1
        for tensor in sorted(same_storage, key=Tensor.storage_offset):
            if tensor.storage_offset() < end:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
            end = max(end, _storage_end(tensor))
    return groups


def _has_inner_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor wraps others: a sparse tensor, or a DTensor."""
    return tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__")


def _storage_end(tensor: Tensor) -> int:
    """Return the end of a tensor in its storage, in elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((n - 1) * s for n, s in steps)


@dataclass(frozen=True)
class _CastInputs(LevelHook):
    """Forward pre-hook: casts a model's floating inputs to its 16-bit dtype."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating((args, kwargs), self.dtype)


def _cast_outputs(_module: nn.Module, _args: object, output: object) -> object:
    """Forward hook: casts a model's 16-bit outputs to fp32."""
    if type(output) is Tensor:  # in every step of most models
        return output.float() if output.dtype in AUTOCAST_DTYPES else output
    return cast_floating(output, torch.float32)


@dataclass(frozen=True)
class DtypeErrorHook(LevelHook):
    """Forward hook: adds advice to errors about dtypes if autocast is off.

    Why: such errors are explained by the autocast context, which is missing here.
    """

    stored: str
    device: str

    def __call__(self, _module: nn.Module, _args: object, output: object) -> None:
        """Add the advice to the exception that the forward pass raised, if any."""
        if torch.compiler.is_compiling() or output is not None:
            return
        error = sys.exc_info()[1]
        if error is None or torch.is_autocast_enabled(self.device):
            return
        if dtype_mismatch.is_about_dtypes(error) and _ADVICE not in error.args[0]:
            advice = f"-> the model's weights are {self.stored}, {_ADVICE}"
            error.args = (f"{error.args[0].rstrip()}\n{advice}", *error.args[1:])


_ADVICE = (
    "and it was called outside of session.autocast(): open "
    "`with session.autocast():` around the call."
)

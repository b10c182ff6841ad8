"""Which weights are stored in 16 bits, and which modules run apart in fp32.

In: a model, a level, a policy. Out: the same model with its weights converted in
place, the fp32 originals for whoever needs masters, and hooks that keep modules in
fp32 or cast what goes into the model and comes out of it.
"""

from __future__ import annotations

import contextlib
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

from halfstep.casting.module_rules import ModuleRuleHook, hooks_for
from halfstep.errors import UserError
from halfstep.numerics.formats import cast_floating, is_low, word
from halfstep.numerics.local_tensor import local_part
from halfstep.policy import decision, op_tables
from halfstep.policy import rules as policy_rules
from halfstep.policy.rules import Policy, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from halfstep.policy.levels import Level


RMS_NORM = Rule(
    "type",
    "RMSNorm",
    op_tables.FP32,
    "its kernel takes no mix of dtypes, as the other norms' do: fp32 apart",
)
"""Where weights are low and norms are not, torch's RMSNorm runs as an island. The lean
table needs no such rule: it casts the weight to the format of the input."""
PARAMETRIZED = Rule(
    "type",
    "ParametrizationList",
    op_tables.FP32,
    "orthogonal maps and power iterations work in fp32; the weight made is low",
)
"""Where weights are low, one that is computed from others is computed in fp32, from
fp32 parameters, and rounded once: they need no masters, and none is kept for them."""

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Conversion:
    """What was changed in a model."""

    originals: dict[nn.Parameter, Tensor]
    """Parameter now stored low -> its value before the conversion."""
    fp32_modules: tuple[str, ...]
    """Paths of the modules that run in fp32 apart from the rest."""
    policy: Policy
    """The rules in force: those given, and behind them those of the level."""


def convert_(
    model: nn.Module, level: Level, low_dtype: torch.dtype, rules: Policy
) -> Conversion:
    """Store a model's weights as the level says, in place.

    Parameters keep their identity, so optimizers, tied weights and hooks still refer
    to them; those that share memory still do. Gradients they hold are cast with them.
    Integer, bool, complex and float64 tensors stay as they are, and so do tensors
    that are neither parameters nor buffers: autocast, where there is some, casts them.

    Buffers become low at levels without autocast only. Under autocast, operations cast
    those that meet 16-bit numbers as they need, and what is stored stays exact: rotary
    frequencies and running means lose digits in bf16, a mask of -1e9 becomes -inf in
    fp16. apex's O2 has no autocast, and must halve them.

    Where weights become low, a model that came in 16 bits, of either format, is stored
    as if `model.float()` had been called first: normalisation and islands in fp32.

    A parametrized weight (torch.nn.utils.parametrize) is computed in fp32 from fp32
    parameters and handed to its layer low. Whether a module is a normalisation layer
    tells its class, or the name of its class: `policy.is_normalisation`.

    What the model is called with is cast where the level says so, and what it returns:
    its 16-bit tensors become fp32, so that a loss written by hand sees fp32. That costs
    one pass over the outputs, and their fp32 copy, which a loss in a region would make
    for itself; the backward pass casts the copy's gradient to 16 bits.
    Hooks that the user registered on the model before see its outputs low, later ones
    see fp32. Only a call of the model passes here: `model.encode(x)` does not, nor does
    what an object of a kind unknown to `cast_floating` holds, a cache say.

    Args:
        model: Bare, not wrapped for data parallelism when weights become low: the
            wrapper's buckets have the dtype that it saw.
        level: What is stored low, and whether normalisation is spared.
        low_dtype: The 16-bit dtype.
        rules: Modules that its rules put in fp32 stay fp32 and run as islands.

    Raises:
        UserError: If a rule cannot be applied, matches no module, or the model is
            wrapped, or has no numbers yet, or such as become inf. Nothing is changed
            then.
    """
    policy_rules.check_ops(rules)
    implied = _level_rules(model, level, rules)
    rules = replace(rules, rules=(*rules.rules, *implied))
    hooks = hooks_for(model, rules, implied)
    if not level.autocast:
        _refuse_autocast_rules(rules, level)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if wrapped and level.low_weights:
        message = (
            f"level={level.name} changes the dtype of weights, and the model is "
            f"already in {type(model).__name__}. Prepare the bare model, then wrap "
            "session.model."
        )
        raise UserError(message)
    fp32_modules = _fp32_modules(model, level, hooks)
    low_tensors, fp32_tensors = list[Tensor](), list[Tensor]()
    if level.low_weights:
        fp32_ids = _fp32_tensor_ids(model, level, [*fp32_modules.values()])
        buffers = () if level.autocast else model.buffers()
        low_tensors = [
            tensor
            for tensor in chain(model.parameters(), buffers)
            if tensor.dtype in _FLOATS - {low_dtype} and id(tensor) not in fp32_ids
        ]
        # Of a model that came in 16 bits: what the level keeps in fp32 becomes it.
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
                # cuDNN wants the weights of one in one piece, as `Module.to` knows.
                module.flatten_parameters()
    return Conversion(originals, tuple(fp32_modules), rules)


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return what is called: the model, or the parts of an `nn.ModuleList`."""
    return [*model] if isinstance(model, nn.ModuleList) else [model]


def low_parameters(model: nn.Module, level: Level, rules: Policy) -> list[nn.Parameter]:
    """Return the fp32 parameters that `convert_` would store in 16 bits."""
    if not level.low_weights:
        return []
    implied = _level_rules(model, level, rules)
    hooks = hooks_for(model, replace(rules, rules=(*rules.rules, *implied)), implied)
    fp32_modules = _fp32_modules(model, level, hooks)
    fp32_ids = _fp32_tensor_ids(model, level, [*fp32_modules.values()])
    params = model.parameters()
    return [p for p in params if p.dtype == torch.float32 and id(p) not in fp32_ids]


def _fp32_modules(
    model: nn.Module, level: Level, hooks: list[ModuleRuleHook]
) -> dict[str, nn.Module]:
    """Return the modules, by path, that run in fp32 apart from the rest."""
    return {
        hook.path: model.get_submodule(hook.path)
        for hook in hooks
        if level.low and hook.category == op_tables.FP32
    }


def _level_rules(model: nn.Module, level: Level, rules: Policy) -> tuple[Rule, ...]:
    """Return the rules that the level itself brings."""
    implied: tuple[Rule, ...] = ()
    if level.fp32_norms and rules.base == "torch":
        implied += (RMS_NORM,)
    if level.low_weights and any(map(_is_parametrized, model.modules())):
        implied += (PARAMETRIZED,)
    return implied


def _is_parametrized(module: nn.Module) -> bool:
    """Say whether a module makes a weight from others."""
    return isinstance(module, ParametrizationList)


def _attach_hooks(
    model: nn.Module,
    hooks: list[ModuleRuleHook],
    fp32_modules: dict[str, nn.Module],
    level: Level,
    low_dtype: torch.dtype,
) -> None:
    """Let modules obey the rules, and cast what goes into the model and comes out."""
    for hook in hooks:
        module = model.get_submodule(hook.path)
        # The weights of an island stay fp32, so it runs in fp32 outside regions too.
        is_fp32_module = hook.path in fp32_modules
        in_fp32_module = any(
            outer in fp32_modules for outer in decision.around(hook.path)[1:]
        )
        keeps_dtype = level.autocast and not (
            level.low_weights and _is_parametrized(module)
        )
        hook.register(
            module,
            always_fp32=is_fp32_module,
            output_dtype=None if keeps_dtype or in_fp32_module else low_dtype,
        )
    for called in called_modules(model):
        if level.low_inputs:
            called.register_forward_pre_hook(_CastInputs(low_dtype), with_kwargs=True)
        if level.fp32_outputs:
            called.register_forward_hook(_cast_outputs)


def _refuse_autocast_rules(rules: Policy, level: Level) -> None:
    """Refuse rules that only autocast can obey, where there is none."""
    for rule in rules.rules if level.low else ():
        if rule.kind == "op" or rule.category != op_tables.FP32:
            message = (
                f"rule '{rule}' cannot be applied at level {level.name}, which has no "
                "autocast: there modules can only be kept in fp32, as in "
                "'module:PATH=fp32' or 'type:NAME=fp32'."
            )
            raise UserError(message)


def _refuse_unready(model: nn.Module, level: Level, changed_ids: set[int]) -> None:
    """Refuse weights without values, or made in inference mode."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in changed_ids:
            continue
        if is_lazy(tensor):
            state = "has no shape yet"
            advice = "Call the model once, make the optimizer, then prepare"
        elif tensor.is_meta:
            state = "is on the meta device, without numbers"
            advice = "Call model.to_empty(), load its weights, then prepare"
        elif tensor.is_inference():
            state = "was made in inference mode, which nothing can train"
            advice = "Build the model outside torch.inference_mode()"
        else:
            continue
        message = f"level={level.name} stores {name!r} low, but it {state}. {advice}."
        raise UserError(message)


_overflow_allowed: ContextVar[bool] = ContextVar("_overflow_allowed", default=False)


@contextlib.contextmanager
def allow_overflow() -> Iterator[None]:
    """Store weights that become inf all the same: for `check`, which reports them."""
    token = _overflow_allowed.set(True)
    try:
        yield
    finally:
        _overflow_allowed.reset(token)


def refuse_overflow(
    named_tensors: Iterable[tuple[str, Tensor]], low_dtype: torch.dtype
) -> None:
    """Refuse weights that would become inf in 16 bits: nothing could train on.

    Args:
        named_tensors: (name, values about to be stored low).
        low_dtype: The dtype.

    Raises:
        UserError: With the name, the largest magnitude, and what holds it.
    """
    for name, peak in _overflowing(named_tensors, low_dtype):
        path = name.rpartition(".")[0]
        cures = ["dtype='bf16'"] if low_dtype == torch.float16 else ["level='O1'"]
        if path:
            cures.append(f"the rule 'module:{path}=fp32'")
        message = (
            f"parameter {name!r} reaches {peak:g}, and {word(low_dtype)} holds numbers "
            f"up to {torch.finfo(low_dtype).max:g}: it would become inf. "
            f"Use {' or '.join(cures)}."
        )
        raise UserError(message)


def _check_overflow(
    model: nn.Module, low_tensors: Iterable[Tensor], low_dtype: torch.dtype
) -> None:
    """Refuse weights that become inf, and warn of buffers: a mask may be meant to."""
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
    """Return names and largest magnitudes of finite numbers that become inf in `low`.

    The devices are waited for once.
    """
    local = [(name, local_part(tensor)) for name, tensor in named_tensors]
    pairs = [
        (n, t.detach()) for n, t in local if t.numel() and not _has_inner_tensors(t)
    ]
    if not pairs:
        return []
    norms = torch._foreach_norm([t for _, t in pairs], torch.inf)  # noqa: SLF001
    peaks = torch.stack([norm.float().to(norms[0].device) for norm in norms]).cpu()
    # What is inf or NaN before was not made so here.
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
    """Refuse a weight shared by an fp32 module and a 16-bit module."""
    for path, module in model.named_modules():
        tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if not any(outer in fp32_modules for outer in decision.around(path)) and any(
            id(tensor) in fp32_ids for tensor in tensors
        ):
            message = (
                f"module {path!r} shares a weight with one that a rule keeps in fp32, "
                f"and level {level.name} has no autocast to mix them: add the rule "
                f"'module:{path}=fp32', or drop the other."
            )
            raise UserError(message)


def _fp32_tensor_ids(
    model: nn.Module, level: Level, fp32_modules: list[nn.Module]
) -> set[int]:
    """Return the ids of parameters and buffers that keep fp32."""
    modules = list(fp32_modules)
    if level.fp32_norms:
        modules += [
            module
            for module in model.modules()
            if policy_rules.is_normalisation(policy_rules.type_names(module))
        ]
    fp32_ids = {
        id(tensor)
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    for module in model.modules() if level.autocast else ():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 -- no other way
            if isinstance(hook, SpectralNorm):
                # Its power iteration writes into fp32 buffers and takes no mix.
                fp32_ids.add(id(getattr(module, f"{hook.name}_orig")))
    return fp32_ids


@torch.no_grad()
def _store(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Store tensors in a dtype; those that overlap in memory still do."""
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
    tensor.grad = None  # it must have its tensor's dtype
    tensor.data = value
    if gradient is not None:
        tensor.grad = gradient.to(value.dtype)


def _overlapping(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups: views of the same numbers are in one."""
    groups: list[list[Tensor]] = []
    stored: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() and not _has_inner_tensors(tensor):
            # Not its address, which storages without memory have in common.
            stored[tensor.untyped_storage()._cdata].append(tensor)  # noqa: SLF001
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
    """Say whether a tensor, sparse or of a class such as DTensor, has others inside."""
    return tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__")


def _storage_end(tensor: Tensor) -> int:
    """Return where in its storage a tensor ends, in elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((n - 1) * s for n, s in steps)


@dataclass(frozen=True)
class _CastInputs:
    """Forward pre-hook: casts a model's floating inputs to its 16-bit dtype."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating((args, kwargs), self.dtype)


def _cast_outputs(_module: nn.Module, _args: object, output: object) -> object:
    """Forward hook: casts what a model returns to fp32, float64 and ids apart."""
    return cast_floating(output, torch.float32)

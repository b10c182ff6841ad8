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

from halfstep.casting.module_rules import Scope, scopes_of
from halfstep.errors import UserError
from halfstep.numerics.formats import cast_floating, is_low, word
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
    islands: tuple[str, ...]
    """Paths of the modules that run in fp32 apart from the rest."""
    policy: Policy
    """The rules in force: those given, and behind them those of the level."""


def convert_(
    model: nn.Module, level: Level, low: torch.dtype, rules: Policy
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
        low: The 16-bit dtype.
        rules: Modules that its rules put in fp32 stay fp32 and run as islands.

    Raises:
        UserError: If a rule cannot be applied, matches no module, or the model is
            wrapped, or has no numbers yet, or such as become inf. Nothing is changed
            then.
    """
    policy_rules.check_ops(rules)
    implied = _implied(model, level, rules)
    rules = replace(rules, rules=(*rules.rules, *implied))
    scopes = scopes_of(model, rules, implied)
    if not level.autocast:
        _refuse_what_needs_regions(rules, level)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if wrapped and level.low_weights:
        message = (
            f"level={level.name} changes the dtype of weights, and the model is "
            f"already in {type(model).__name__}. Prepare the bare model, then wrap "
            "session.model."
        )
        raise UserError(message)
    islands = {
        scope.path: model.get_submodule(scope.path)
        for scope in scopes
        if level.low and scope.category == op_tables.FP32
    }
    chosen, widened = list[Tensor](), list[Tensor]()
    if level.low_weights:
        spared = _spared(model, level, [*islands.values()])
        buffers = () if level.autocast else model.buffers()
        chosen = [
            tensor
            for tensor in chain(model.parameters(), buffers)
            if tensor.dtype in _FLOATS - {low} and id(tensor) not in spared
        ]
        # Of a model that came in 16 bits: what the level keeps in fp32 becomes it.
        widened = [
            tensor
            for tensor in chain(model.parameters(), model.buffers())
            if is_low(tensor.dtype) and id(tensor) in spared
        ]
        changed = {id(tensor) for tensor in (*chosen, *widened)}
        _refuse_unready(model, level, changed)
        _check_overflow(model, chosen, low)
        if not level.autocast:
            _refuse_shared(model, level, islands, spared)
    _attach(model, scopes if level.low else [], islands, level, low)
    originals = {
        # Not `detach()`: that would share the weight's version counter.
        tensor: tensor.data
        for tensor in chosen
        if isinstance(tensor, nn.Parameter)
    }
    _store(chosen, low)
    _store(widened, torch.float32)
    if chosen or widened:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                # cuDNN wants the weights of one in one piece, as `Module.to` knows.
                module.flatten_parameters()
    if level.low_inputs:
        model.register_forward_pre_hook(_Entry(low), with_kwargs=True)
    if level.fp32_outputs:
        model.register_forward_hook(_exit)
    return Conversion(originals, tuple(islands), rules)


def _implied(model: nn.Module, level: Level, rules: Policy) -> tuple[Rule, ...]:
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


def _attach(
    model: nn.Module,
    scopes: list[Scope],
    islands: dict[str, nn.Module],
    level: Level,
    low: torch.dtype,
) -> None:
    """Let modules obey the rules."""
    for scope in scopes:
        module = model.get_submodule(scope.path)
        # The weights of an island stay fp32, so it runs in fp32 outside regions too.
        apart = scope.path in islands
        inside = any(outer in islands for outer in decision.around(scope.path)[1:])
        keeps = level.autocast and not (level.low_weights and _is_parametrized(module))
        scope.hook(module, always=apart, back=None if keeps or inside else low)


def _refuse_what_needs_regions(rules: Policy, level: Level) -> None:
    """Refuse rules that only autocast can obey, where there is none."""
    for rule in rules.rules if level.low else ():
        if rule.kind == "op" or rule.category != op_tables.FP32:
            message = (
                f"rule '{rule}' cannot be applied at level {level.name}, which has no "
                "autocast: there modules can only be kept in fp32, as in "
                "'module:PATH=fp32' or 'type:NAME=fp32'."
            )
            raise UserError(message)


def _refuse_unready(model: nn.Module, level: Level, chosen: set[int]) -> None:
    """Refuse weights without numbers, or with such as no optimizer may touch."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in chosen:
            continue
        if is_lazy(tensor):
            state = "has no shape yet"
            right = "Call the model once, make the optimizer, then prepare"
        elif tensor.is_meta:
            state = "is on the meta device, without numbers"
            right = "Call model.to_empty(), load its weights, then prepare"
        elif tensor.is_inference():
            state = "was made in inference mode, which nothing can train"
            right = "Build the model outside torch.inference_mode()"
        else:
            continue
        message = f"level={level.name} stores {name!r} low, but it {state}. {right}."
        raise UserError(message)


_reported: ContextVar[bool] = ContextVar("_reported", default=False)


@contextlib.contextmanager
def overflow_reported() -> Iterator[None]:
    """Store weights that become inf all the same: for `check`, which reports them."""
    token = _reported.set(True)
    try:
        yield
    finally:
        _reported.reset(token)


def refuse_overflow(named: Iterable[tuple[str, Tensor]], low: torch.dtype) -> None:
    """Refuse weights that would become inf in 16 bits: nothing could train on.

    Args:
        named: (name, values about to be stored low).
        low: The dtype.

    Raises:
        UserError: With the name, the largest magnitude, and what holds it.
    """
    for name, peak in _overflowing(named, low):
        path = name.rpartition(".")[0]
        cures = ["dtype='bf16'"] if low == torch.float16 else ["level='O1'"]
        if path:
            cures.append(f"the rule 'module:{path}=fp32'")
        message = (
            f"parameter {name!r} reaches {peak:g}, and {word(low)} holds numbers up to "
            f"{torch.finfo(low).max:g}: it would become inf. Use {' or '.join(cures)}."
        )
        raise UserError(message)


def _check_overflow(
    model: nn.Module, chosen: Iterable[Tensor], low: torch.dtype
) -> None:
    """Refuse weights that become inf, and warn of buffers: a mask may be meant to."""
    if _reported.get():
        return
    lowered = {id(tensor) for tensor in chosen}
    owned = [pair for pair in model.named_parameters() if id(pair[1]) in lowered]
    refuse_overflow(owned, low)
    buffers = [pair for pair in model.named_buffers() if id(pair[1]) in lowered]
    for name, peak in _overflowing(buffers, low):
        message = (
            f"buffer {name!r} reaches {peak:g} and becomes inf: {word(low)} holds "
            f"numbers up to {torch.finfo(low).max:g}. If that is no mask, use "
            "dtype='bf16', or level='O2', which leaves buffers as they are."
        )
        warnings.warn(message, stacklevel=5)


@torch.no_grad()
def _overflowing(
    named: Iterable[tuple[str, Tensor]], low: torch.dtype
) -> list[tuple[str, float]]:
    """Return names and largest magnitudes of finite numbers that become inf in `low`.

    The devices are waited for once.
    """
    local = [(n, t.to_local() if hasattr(t, "to_local") else t) for n, t in named]
    pairs = [(n, t.detach()) for n, t in local if t.numel() and not _wraps(t)]
    if not pairs:
        return []
    norms = torch._foreach_norm([t for _, t in pairs], torch.inf)  # noqa: SLF001
    peaks = torch.stack([norm.float().to(norms[0].device) for norm in norms]).cpu()
    # What is inf or NaN before was not made so here.
    return [
        (name, float(peak))
        for (name, _), peak in zip(pairs, peaks, strict=True)
        if peak.isfinite() and not peak.to(low).isfinite()
    ]


def _refuse_shared(
    model: nn.Module, level: Level, islands: dict[str, nn.Module], spared: set[int]
) -> None:
    """Refuse a weight tied between an island and a module that runs low."""
    for path, module in model.named_modules():
        own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if not any(outer in islands for outer in decision.around(path)) and any(
            id(tensor) in spared for tensor in own
        ):
            message = (
                f"module {path!r} shares a weight with one that a rule keeps in fp32, "
                f"and level {level.name} has no autocast to mix them: add the rule "
                f"'module:{path}=fp32', or drop the other."
            )
            raise UserError(message)


def _spared(model: nn.Module, level: Level, islands: list[nn.Module]) -> set[int]:
    """Return the ids of parameters and buffers that keep fp32."""
    kept = list(islands)
    if level.fp32_norms:
        kept += [
            module
            for module in model.modules()
            if policy_rules.is_normalisation(policy_rules.type_names(module))
        ]
    spared = {
        id(tensor)
        for module in kept
        for tensor in (*module.parameters(), *module.buffers())
    }
    for module in model.modules() if level.autocast else ():
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 -- no other way
            if isinstance(hook, SpectralNorm):
                # Its power iteration writes into fp32 buffers and takes no mix.
                spared.add(id(getattr(module, f"{hook.name}_orig")))
    return spared


@torch.no_grad()
def _store(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Store tensors in a dtype; those that overlap in memory still do."""
    for alike in _overlapping(tensors):
        if len(alike) == 1:
            _put(alike[0], alike[0].data.to(dtype))
            continue
        start = min(tensor.storage_offset() for tensor in alike)
        size = max(map(_end, alike)) - start
        whole = alike[0].data.as_strided((size,), (1,), start).to(dtype)
        for tensor in alike:
            place = tensor.storage_offset() - start
            _put(tensor, whole.as_strided(tensor.shape, tensor.stride(), place))


def _put(tensor: Tensor, value: Tensor) -> None:
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
        if tensor.numel() and not _wraps(tensor):
            # Not its address, which storages without memory have in common.
            stored[tensor.untyped_storage()._cdata].append(tensor)  # noqa: SLF001
        else:
            groups.append([tensor])
    for together in stored.values():
        end = -1
        for tensor in sorted(together, key=Tensor.storage_offset):
            if tensor.storage_offset() < end:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
            end = max(end, _end(tensor))
    return groups


def _wraps(tensor: Tensor) -> bool:
    """Say whether a tensor, sparse or of a class such as DTensor, has others inside."""
    return tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__")


def _end(tensor: Tensor) -> int:
    """Return where in its storage a tensor ends, in elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((n - 1) * s for n, s in steps)


@dataclass(frozen=True)
class _Entry:
    """Forward pre-hook: casts a model's floating inputs to its 16-bit dtype."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating((args, kwargs), self.dtype)


def _exit(_module: nn.Module, _args: object, output: object) -> object:
    """Forward hook: casts what a model returns to fp32, float64 and ids apart."""
    return cast_floating(output, torch.float32)

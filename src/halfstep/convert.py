"""Which weights are stored in 16 bits, and which modules run apart in fp32.

In: a model, a level, a policy. Out: the same model with its weights converted in
place, the fp32 originals for whoever needs masters, and hooks that keep modules in
fp32 or cast the model's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import optable, policy
from halfstep.errors import UserError
from halfstep.formats import cast_floating
from halfstep.policy import Policy, Rule
from halfstep.scopes import Scope, scopes_of

if TYPE_CHECKING:
    from halfstep.levels import Level


RMS_NORM = Rule(
    "type",
    "RMSNorm",
    optable.FP32,
    "its kernel takes no mix of dtypes, as the other norms' do: fp32 apart",
)
"""Where weights are low and norms are not, torch's RMSNorm runs as an island. The lean
table needs no such rule: it casts the weight to the format of the input."""


@dataclass(frozen=True)
class Conversion:
    """What was changed in a model."""

    originals: dict[nn.Parameter, Tensor]
    """Parameter now stored low -> its fp32 value before the conversion."""
    islands: tuple[str, ...]
    """Paths of the modules that run in fp32 apart from the rest."""
    policy: Policy
    """The rules in force: those given, and behind them those of the level."""


def convert_(
    model: nn.Module, level: Level, low: torch.dtype, rules: Policy
) -> Conversion:
    """Store a model's weights as the level says, in place.

    Parameters keep their identity, so optimizers, tied weights and hooks still refer
    to them. Integer, bool, complex and float64 tensors stay as they are.

    Args:
        model: Bare, not wrapped for data parallelism when weights become low: the
            wrapper's buckets have the dtype that it saw.
        level: What is stored low, and whether normalisation is spared.
        low: The 16-bit dtype.
        rules: Modules that its rules put in fp32 stay fp32 and run as islands.

    Raises:
        UserError: If a rule cannot be applied, matches no module, or the model is
            wrapped.
    """
    policy.check_ops(rules)
    implied: tuple[Rule, ...] = ()
    if level.fp32_norms and rules.base == "torch":
        implied = (RMS_NORM,)
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
    islands = _attach(model, scopes if level.low else [], level, low)
    if not level.low_weights:
        return Conversion({}, tuple(islands), rules)
    spared = _spared(model, level, list(islands.values()))
    originals = {}
    # Buffers are tables and statistics (rotary frequencies, running means), small and
    # read as they are: they become low only where nothing casts in between.
    buffers = [] if level.autocast else [*model.buffers()]
    for tensor in [*model.parameters(), *buffers]:
        if id(tensor) in spared or tensor.dtype != torch.float32:
            continue
        if isinstance(tensor, nn.Parameter):
            originals[tensor] = tensor.detach()
        tensor.data = tensor.data.to(low)
    if level.low_inputs:
        model.register_forward_pre_hook(_Entry(low), with_kwargs=True)
    return Conversion(originals, tuple(islands), rules)


def _attach(
    model: nn.Module, scopes: list[Scope], level: Level, low: torch.dtype
) -> dict[str, nn.Module]:
    """Let modules obey the rules; return those that run in fp32, by path."""
    islands: dict[str, nn.Module] = {}
    for scope in scopes:
        module = model.get_submodule(scope.path)
        apart = scope.category == optable.FP32
        inside = any(outer in policy.around(scope.path) for outer in islands)
        # Their weights stay fp32, so they run in fp32 outside regions too.
        back = None if level.autocast or inside else low
        scope.hook(module, always=apart, back=back)
        if apart:
            islands[scope.path] = module
    return islands


def _refuse_what_needs_regions(rules: Policy, level: Level) -> None:
    """Refuse rules that only autocast can obey, where there is none."""
    for rule in rules.rules if level.low else ():
        if rule.kind == "op" or rule.category != optable.FP32:
            message = (
                f"rule '{rule}' cannot be applied at level {level.name}, which has no "
                "autocast: there modules can only be kept in fp32, as in "
                "'module:PATH=fp32' or 'type:NAME=fp32'."
            )
            raise UserError(message)


def _spared(model: nn.Module, level: Level, islands: list[nn.Module]) -> set[int]:
    """Return the ids of parameters and buffers that keep fp32."""
    kept = list(islands)
    if level.fp32_norms:
        kept += [
            module
            for module in model.modules()
            if policy.is_normalisation(policy.type_names(module))
        ]
    return {
        id(tensor)
        for module in kept
        for tensor in (*module.parameters(), *module.buffers())
    }


@dataclass(frozen=True)
class _Entry:
    """Forward pre-hook: casts a model's floating inputs to its 16-bit dtype."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating((args, kwargs), self.dtype)

"""Which weights are stored in 16 bits, and which modules run apart in fp32.

In: a model, a level, a policy. Out: the same model with its weights converted in
place, the fp32 originals for whoever needs masters, and hooks that keep modules in
fp32 or cast the model's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep import optable, policy
from halfstep.casting import autocast
from halfstep.errors import UserError
from halfstep.formats import cast_floating
from halfstep.policy import Policy, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.levels import Level


RMS_NORM = Rule(
    "type",
    "RMSNorm",
    optable.FP32,
    "its kernel takes no mix of dtypes, as the other norms' do: fp32 apart",
)
"""Where weights are low and norms are not, torch's RMSNorm runs as an island."""


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
    _check_rules(rules)
    if level.fp32_norms:
        rules = Policy((*rules.rules, RMS_NORM))
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if wrapped and level.low_weights:
        message = (
            f"level={level.name} changes the dtype of weights, and the model is "
            f"already in {type(model).__name__}. Prepare the bare model, then wrap "
            "session.model."
        )
        raise UserError(message)
    islands = _islands(model, rules) if level.low else {}
    for island in islands.values():
        attach_island(island, back=None if level.autocast else low)
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


def _check_rules(rules: Policy) -> None:
    for rule in rules.rules:
        if rule.kind == "op" or rule.category != optable.FP32:
            message = (
                f"rule '{rule}' cannot be applied: the eager engine keeps whole "
                "modules in fp32. Write 'module:PATH=fp32' or 'type:NAME=fp32'."
            )
            raise UserError(message)


def _islands(model: nn.Module, rules: Policy) -> dict[str, nn.Module]:
    """Return the modules that the rules put in fp32, outermost only."""
    found: dict[str, nn.Module] = {}
    types = {path: policy.type_names(m) for path, m in model.named_modules()}
    for rule in rules.rules:
        if rule is not RMS_NORM and not (
            rule.matches("module", types)
            or any(rule.matches("type", names) for names in types.values())
        ):
            message = f"rule '{rule}' matches no module; see model.named_modules()."
            raise UserError(message)
    for path, module in model.named_modules():
        decision = policy.decide(
            None,
            (torch.float32,),
            "cpu",
            policy=rules,
            module=path,
            types=types[path],
        )
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if decision.category == optable.FP32 and not inside:
            found[path] = module
    return found


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


def attach_island(module: nn.Module, back: torch.dtype | None = None) -> None:
    """Let a module run in fp32, whatever region it is called in.

    Args:
        module: Its parameters and buffers are fp32.
        back: Its output is cast to this; None: it stays fp32, for whatever autocast
            makes of it. Without autocast, the next layer takes no other dtype than
            that of its weights.
    """
    gate = _Island(back)
    module.register_forward_pre_hook(gate.open, with_kwargs=True)
    module.register_forward_hook(gate.close, always_call=True)


class _Island:
    """Casts a module's inputs to fp32 and turns autocast off while it runs."""

    def __init__(self, back: torch.dtype | None) -> None:
        self._back = back
        self._closed: list[autocast] = []

    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        device = next(_tensors(module, args, kwargs)).device.type
        region = autocast(device, enabled=False)
        region.__enter__()
        self._closed.append(region)
        return cast_floating((args, kwargs), torch.float32)

    def close(self, _module: nn.Module, _args: object, output: object) -> object:
        """Forward hook; runs after an error too."""
        self._closed.pop().__exit__(None, None, None)
        return cast_floating(output, self._back) if self._back else None


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    yield from (item for item in (*args, *kwargs.values()) if torch.is_tensor(item))
    yield from module.parameters()
    yield torch.empty(0)


@dataclass(frozen=True)
class _Entry:
    """Forward pre-hook: casts a model's floating inputs to its 16-bit dtype."""

    dtype: torch.dtype

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating((args, kwargs), self.dtype)

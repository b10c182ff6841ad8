"""Applies module and type rules of a policy by forward hooks.

The hooks are active only in contexts with that policy, also in recomputed segments and
in replicas of `nn.DataParallel`.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep._torch.dynamo import dynamo_disable
from halfstep.casting import active_context, dispatch_kernels, dispatch_table
from halfstep.casting.active_context import CastContext
from halfstep.distributed import ddp
from halfstep.errors import UserError
from halfstep.numerics.formats import cast_floating
from halfstep.policy import decision, op_tables, rules
from halfstep.policy.rules import KEEP, Policy, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_attached: weakref.WeakKeyDictionary[nn.Module, dict[Policy, set[int]]] = (
    weakref.WeakKeyDictionary()
)


def attach(model: nn.Module, policy: Policy) -> None:
    """Register hooks on a model's modules for the module and type rules of a policy.

    Further calls with the same model and policy only handle modules added since.

    Raises:
        UserError: If a module or type rule matches no module.
    """
    model = ddp.unwrap(model)
    attached = _attached.setdefault(model, {})
    module_ids = {id(module) for module in model.modules()}
    attached_ids = attached.get(policy, set())
    if module_ids == attached_ids:
        return
    for hook in hooks_for(model, policy):
        module = model.get_submodule(hook.path)
        if id(module) not in attached_ids:
            hook.register(module)
    attached[policy] = module_ids


@contextlib.contextmanager
def restore_registry() -> Iterator[None]:
    """Restore the registry on exit, for a caller that removes hooks added inside."""
    before = {model: dict(done) for model, done in _attached.items()}
    try:
        yield
    finally:
        _attached.clear()
        _attached.update(before)


def hooks_for(
    model: nn.Module, policy: Policy, implied: tuple[Rule, ...] = ()
) -> list[ModuleRuleHook]:
    """Return a hook for each module where another rule applies than in its parent.

    Args:
        model: The model, unwrapped.
        policy: The policy.
        implied: Those of its rules that need not match a module.

    Raises:
        UserError: If another module or type rule matches no module.
    """
    class_names = {path: rules.type_names(m) for path, m in model.named_modules()}
    types: dict[str, tuple[str, ...]] = {}
    for path, names in class_names.items():
        types[path] = (*names, *(types[_parent(path)] if path else ()))
    for rule in policy.rules:
        if rule.kind == "op" or rule in implied:
            continue
        if not (
            rule.matches("module", class_names)
            or any(rule.matches("type", names) for names in class_names.values())
        ):
            message = f"rule '{rule}' matches no module; see model.named_modules()."
            raise UserError(message)
    rule_indices = {
        p: decision.deciding_rule(policy, p, names) for p, names in types.items()
    }
    # An nn.ModuleList is never called, so its rule is attached to each of its modules.
    lists = {p for p, m in model.named_modules() if _is_list(m)}
    rule_starts = {
        path: index
        for path, index in rule_indices.items()
        if index is not None
        and path not in lists
        and (not path or rule_indices[_parent(path)] != index or _parent(path) in lists)
    }
    return [
        ModuleRuleHook(
            policy,
            index,
            path,
            types[path],
            has_no_inner_rules=_has_no_inner_rules(policy, path, rule_starts),
        )
        for path, index in rule_starts.items()
    ]


def _has_no_inner_rules(policy: Policy, path: str, rule_starts: dict[str, int]) -> bool:
    """Return whether no other rule applies to anything inside a module."""
    earlier = policy.rules[: rule_starts[path]]
    inside = (path in decision.around(_parent(other)) for other in rule_starts if other)
    return not any(rule.kind == "op" for rule in earlier) and not any(inside)


def _is_list(module: nn.Module) -> bool:
    # Static lookup: reading `forward` of a scripted class raises.
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward is nn.Module.forward


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


class LevelHook:
    """Base of the hooks that a level registers on a model.

    Copies of a model have copies of them, which `remove_hooks` removes where a copy is
    converted in its turn.
    """


_HOOK_TABLES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_state_dict_hooks": (),
}
"""Tables of a module's hooks -> tables of their options."""


def remove_hooks(module: nn.Module, is_old: Callable[[object], bool]) -> None:
    """Remove hooks from a module: functions, or objects whose methods are hooks."""
    for name, options in _HOOK_TABLES.items():
        hooks = getattr(module, name)
        for key, hook in [*hooks.items()]:
            if is_old(getattr(hook, "__self__", hook)):
                for each in (name, *options):
                    getattr(module, each).pop(key, None)


class ModuleRuleHook:
    """Forward hooks that apply one rule to a module and its submodules."""

    def __init__(
        self,
        policy: Policy,
        rule_index: int,
        path: str,
        types: tuple[str, ...],
        *,
        has_no_inner_rules: bool,
    ) -> None:
        """Store the rule and where it applies; `types` are of enclosing modules too."""
        self.policy = policy
        self.rule_index = rule_index
        self.path = path
        self.types = types
        self._has_no_inner_rules = has_no_inner_rules
        earlier = [r for r in policy.rules[:rule_index] if r.kind == "op"]
        rules = *earlier, Rule("op", "*", self.category)
        self._inner_policy = Policy(rules, policy.base)
        self.of_level = False
        """Whether a level has registered it, and not a context."""
        self._always_fp32 = False
        self._output_dtype: torch.dtype | None = None

    @property
    def category(self) -> str:
        """Category of the rule: "low", "fp32", "promote", "keep" or "banned"."""
        return self.policy.rules[self.rule_index].category

    def register(
        self,
        module: nn.Module,
        *,
        of_level: bool = False,
        always_fp32: bool = False,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """Register the hooks on a module, in place of equal ones of a model's copy.

        Args:
            module: The module at `path`.
            of_level: A level registers it, and not a context.
            always_fp32: Run in fp32 inside and outside of autocast, since its weights
                are fp32.
            output_dtype: Dtype to cast the output to, needed without autocast, where
                the next layer accepts only the dtype of its weights. None: no cast.
        """
        self.of_level = of_level
        self._always_fp32, self._output_dtype = always_fp32, output_dtype
        remove_hooks(module, self._is_same)
        # First, since another pre-hook may raise: `post_forward` needs the entry.
        module.register_forward_pre_hook(
            self.pre_forward, with_kwargs=True, prepend=True
        )
        module.register_forward_hook(self.post_forward, always_call=True)

    def _is_same(self, other: object) -> bool:
        return isinstance(other, ModuleRuleHook) and (
            (self.policy, self.rule_index, self.path, self.of_level)
            == (other.policy, other.rule_index, other.path, other.of_level)
        )

    @dynamo_disable
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook; torch.compile does not trace it."""
        device, context = self._active_context()
        if context is not None:
            context.matched_rules.add(self.rule_index)
        elif not self._always_fp32:
            self._enter(_no_op)
            return None
        if self.category == op_tables.BANNED:
            self._enter(_no_op)
            raise RuntimeError(
                f"module {self.path!r} is banned by the rule "
                f"'{self.policy.rules[self.rule_index]}', and was called."
            )
        # Without inner rules and a record, disabling autocast has the same effect as a
        # kernel per operation, costs less, and is visible to third-party code.
        is_all_or_nothing = self._has_no_inner_rules and self.category in {
            op_tables.FP32,
            KEEP,
        }
        if context is not None and (
            context.observe is not None or not is_all_or_nothing
        ):
            self._push_rule(device, context)
        else:
            device = device or next(_tensors(module, args, kwargs)).device.type
            enabled = torch.is_autocast_enabled(device)
            leave = partial(torch.set_autocast_enabled, device, enabled)
            self._enter(leave, context)
            torch.set_autocast_enabled(device, False)  # noqa: FBT003 -- torch's own
        if self.category == op_tables.FP32:
            return cast_floating((args, kwargs), torch.float32)
        if self.category == op_tables.LOW:
            return cast_floating((args, kwargs), torch.get_autocast_dtype(device))
        return None

    def _active_context(self) -> tuple[str, CastContext | None]:
        """Return (device, active context with this policy), or ("", None)."""
        for device in dispatch_kernels.KEYS:
            context = active_context.active(device)
            is_ours = context is not None and context.policy == self.policy
            if is_ours and torch.is_autocast_enabled(device):
                return device, context
        return "", None

    def _push_rule(self, device: str, context: CastContext) -> None:
        """Push a context in which the rule applies to every operation of the tables."""
        op_casts = dispatch_table.op_casts_for(
            self.policy,
            device,
            module=self.path,
            types=self.types,
            cache_weights=context.cache is not None,
        )
        inner = CastContext(
            self.policy,
            op_casts,
            context.cache,
            context.matched_rules,
            context.observe,
            self.path,
            self.types,
            context,
        )
        entry = active_context.push(device, inner, self._inner_policy)
        self._enter(partial(active_context.pop, entry), context)

    def _enter(
        self, leave: Callable[[], object], context: CastContext | None = None
    ) -> None:
        """Store what ends the call, for the forward hook or the end of the context."""
        root = None if context is None else context.root
        active_context.thread_rules().append((self, leave, root))

    @dynamo_disable
    def post_forward(self, _module: nn.Module, _args: object, output: object) -> object:
        """Forward hook; runs after an error too."""
        calls = active_context.thread_rules()
        if calls and calls[-1][0] is self:  # else `pre_forward` did not run
            calls[-1][1]()
            calls.pop()
        if self._output_dtype is None:
            return None
        return cast_floating(output, self._output_dtype)


def _no_op() -> None:
    """Do nothing: the rule was not active."""


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from (item for item in (*args, *kwargs.values()) if torch.is_tensor(item))
    yield torch.empty(0)

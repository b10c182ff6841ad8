"""Rules on modules: what runs inside them runs as the rule says.

In: a model and a policy. Out: hooks on the modules that a rule speaks of. They act in
regions under that policy, in recomputations and replicas too, and nowhere else.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.amp.autocast_mode import autocast as torch_autocast

from halfstep.casting import (
    active_context,
    compile_guard,
    dispatch_kernels,
    dispatch_table,
    recompute,
)
from halfstep.casting.active_context import CastContext
from halfstep.casting.entered_contexts import PerThreadStack
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
    """Let a model's modules obey a policy's rules, in regions under that policy.

    Once is enough: more calls with the same model and policy do nothing, but for
    modules that are new in it.

    Raises:
        UserError: If a rule on modules or types matches none.
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
    """Forget at the end what is attached meanwhile, as somebody takes the hooks off."""
    before = {model: dict(done) for model, done in _attached.items()}
    try:
        yield
    finally:
        _attached.clear()
        _attached.update(before)


def hooks_for(
    model: nn.Module, policy: Policy, implied: tuple[Rule, ...] = ()
) -> list[ModuleRuleHook]:
    """Return the modules where a rule begins to decide, and which.

    Args:
        model: Bare, as it was built.
        policy: The policy.
        implied: Those of its rules that need not match.

    Raises:
        UserError: If another rule on modules or types matches no module.
    """
    types = dict(_class_names(model))
    for rule in policy.rules:
        if rule.kind == "op" or rule in implied:
            continue
        class_names = {path: rules.type_names(m) for path, m in model.named_modules()}
        if not (
            rule.matches("module", class_names)
            or any(rule.matches("type", names) for names in class_names.values())
        ):
            message = f"rule '{rule}' matches no module; see model.named_modules()."
            raise UserError(message)
    rule_indices = {
        p: decision.deciding_rule(policy, p, names) for p, names in types.items()
    }
    # A list of modules is never called: its rule begins at each module in it.
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
    """Say whether no other rule decides anything inside a scope."""
    earlier = policy.rules[: rule_starts[path]]
    inside = (path in decision.around(_parent(other)) for other in rule_starts if other)
    return not any(rule.kind == "op" for rule in earlier) and not any(inside)


def _is_list(module: nn.Module) -> bool:
    # Of a scripted class, to read `forward` raises.
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward is nn.Module.forward


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _class_names(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each module's path, and its class names with those of all around it."""
    names_of: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        around = names_of[_parent(path)] if path else ()
        names_of[path] = (*rules.type_names(module), *around)
        yield path, names_of[path]


class _Entry(NamedTuple):
    """What a call of the module has entered."""

    leave: Callable[[], object]
    forget: Callable[[], object]
    """Takes it from the list of what the context around has to leave."""


class ModuleRuleHook:
    """A module and all inside it, for which one rule decides."""

    def __init__(
        self,
        policy: Policy,
        rule_index: int,
        path: str,
        types: tuple[str, ...],
        *,
        has_no_inner_rules: bool,
    ) -> None:
        """Name the scope.

        Args:
            policy: The policy.
            rule_index: Index of the rule that decides.
            path: The module's.
            types: Class names of the module and of those around it.
            has_no_inner_rules: No other rule decides anything inside.
        """
        self.policy = policy
        self.rule_index = rule_index
        self.path = path
        self.types = types
        self._has_no_inner_rules = has_no_inner_rules
        earlier = [r for r in policy.rules[:rule_index] if r.kind == "op"]
        rules = *earlier, Rule("op", "*", self.category)
        self._inner_policy = Policy(rules, policy.base)
        self._always_fp32 = False
        self._output_dtype: torch.dtype | None = None
        self._entries: PerThreadStack[_Entry] = PerThreadStack()

    @property
    def category(self) -> str:
        """How the module runs: "low", "fp32", "promote", "keep" or "banned"."""
        return self.policy.rules[self.rule_index].category

    def register(
        self,
        module: nn.Module,
        *,
        always_fp32: bool = False,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """Let a module obey the rule from now on.

        Args:
            module: The one at the scope's path.
            always_fp32: In fp32 inside and outside of every region, as the dtype of
                its weights demands.
            output_dtype: Its output is cast to this; None: it stays as autocast
                leaves it. Without autocast, the next layer takes no other
                dtype than that of its weights.
        """
        self._always_fp32, self._output_dtype = always_fp32, output_dtype
        # Before all other hooks, which may raise: then it must be open to be closed.
        module.register_forward_pre_hook(
            self.pre_forward, with_kwargs=True, prepend=True
        )
        module.register_forward_hook(self.post_forward, always_call=True)

    @_disable_dynamo
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook; torch.compile does not look into it."""
        device, context = self._active_context()
        if context is not None:
            context.matched_rules.add(self.rule_index)
        elif not self._always_fp32:
            self._enter(_no_op, None)
            return None
        if self.category == op_tables.BANNED:
            self._enter(_no_op, None)
            message = (
                f"module {self.path!r} is banned by the rule "
                f"'{self.policy.rules[self.rule_index]}', and was called."
            )
            raise RuntimeError(message)
        # Where nothing else has a say and nobody observes, autocast off says the same
        # as a kernel for each operation, costs less, and third-party code asks for it.
        is_all_or_nothing = self._has_no_inner_rules and self.category in {
            op_tables.FP32,
            KEEP,
        }
        if context is not None and (
            context.recorder is not None or not is_all_or_nothing
        ):
            self._push_rule(device, context)
        else:
            # torch's own, not one of ours: no user code runs that could edit weights.
            device = device or next(_tensors(module, args, kwargs)).device.type
            autocast_off = torch_autocast(device, enabled=False)
            autocast_off.__enter__()  # type: ignore[no-untyped-call]
            self._enter(lambda: autocast_off.__exit__(None, None, None), context)
        if self.category == op_tables.FP32:
            return cast_floating((args, kwargs), torch.float32)
        if self.category == op_tables.LOW:
            return cast_floating((args, kwargs), torch.get_autocast_dtype(device))
        return None

    def _active_context(self) -> tuple[str, CastContext | None]:
        """Return the region that is open under this policy, and its device."""
        for device in dispatch_kernels.KEYS:
            context = active_context.active(device)
            is_ours = context is not None and context.policy == self.policy
            if is_ours and torch.is_autocast_enabled(device):
                return device, context
        return "", None

    def _push_rule(self, device: str, context: CastContext) -> None:
        """Put the rule in force for every operation that has a row."""
        op_casts = dispatch_table.op_casts_for(
            self.policy,
            device,
            module=self.path,
            types=self.types,
            cache_weights=context.cache is not None,
        )
        dispatch_kernels.install(op_casts)
        inner = CastContext(
            self.policy,
            op_casts,
            context.cache,
            context.matched_rules,
            context.recorder,
            self.path,
            self.types,
            context,
        )
        pushed = recompute.push(device, inner)
        guard = compile_guard.set_policy_guard(self._inner_policy)

        def leave() -> None:
            compile_guard.restore_policy_guard(guard)
            recompute.pop(pushed)

        self._enter(leave, context)

    def _enter(self, leave: Callable[[], object], context: CastContext | None) -> None:
        """Take note of what `close` must leave, and the context if no hook runs."""
        if context is None:
            self._entries.push(_Entry(leave, _no_op))
            return
        abandoned = context.root.abandoned

        def abandon() -> None:
            self._entries.pop_own()
            leave()

        item = threading.get_ident(), abandon
        self._entries.push(_Entry(leave, lambda: abandoned.remove(item)))
        abandoned.append(item)

    @_disable_dynamo
    def post_forward(self, _module: nn.Module, _args: object, output: object) -> object:
        """Forward hook; runs after an error too."""
        entry = self._entries.pop_own()
        if entry is not None:  # else a hook of somebody's raised before ours ran
            entry.forget()
            entry.leave()
        return (
            None
            if self._output_dtype is None
            else cast_floating(output, self._output_dtype)
        )


def _no_op() -> None:
    """Leave nothing: the scope was not in force."""


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from (item for item in (*args, *kwargs.values()) if torch.is_tensor(item))
    yield torch.empty(0)

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
from halfstep.casting.active_context import Frame
from halfstep.casting.entered_contexts import Entries
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


def attach(model: nn.Module, steered: Policy) -> None:
    """Let a model's modules obey a policy's rules, in regions under that policy.

    Once is enough: more calls with the same model and policy do nothing, but for
    modules that are new in it.

    Raises:
        UserError: If a rule on modules or types matches none.
    """
    model = ddp.unwrap(model)
    done = _attached.setdefault(model, {})
    now = {id(module) for module in model.modules()}
    before = done.get(steered, set())
    if now == before:
        return
    for scope in scopes_of(model, steered):
        module = model.get_submodule(scope.path)
        if id(module) not in before:
            scope.hook(module)
    done[steered] = now


@contextlib.contextmanager
def forgotten_after() -> Iterator[None]:
    """Forget at the end what is attached meanwhile, as somebody takes the hooks off."""
    before = {model: dict(done) for model, done in _attached.items()}
    try:
        yield
    finally:
        _attached.clear()
        _attached.update(before)


def scopes_of(
    model: nn.Module, steered: Policy, implied: tuple[Rule, ...] = ()
) -> list[Scope]:
    """Return the modules where a rule begins to decide, and which.

    Args:
        model: Bare, as it was built.
        steered: The policy.
        implied: Those of its rules that need not match.

    Raises:
        UserError: If another rule on modules or types matches no module.
    """
    types = dict(_types(model))
    for rule in steered.rules:
        if rule.kind == "op" or rule in implied:
            continue
        own = {path: rules.type_names(m) for path, m in model.named_modules()}
        if not (
            rule.matches("module", own)
            or any(rule.matches("type", names) for names in own.values())
        ):
            message = f"rule '{rule}' matches no module; see model.named_modules()."
            raise UserError(message)
    ruling = {
        p: decision.deciding_rule(steered, p, names) for p, names in types.items()
    }
    # A list of modules is never called: its rule begins at each module in it.
    lists = {p for p, m in model.named_modules() if _is_list(m)}
    found = {
        path: index
        for path, index in ruling.items()
        if index is not None
        and path not in lists
        and (not path or ruling[_parent(path)] != index or _parent(path) in lists)
    }
    return [
        Scope(steered, index, path, types[path], alone=_alone(steered, path, found))
        for path, index in found.items()
    ]


def _alone(steered: Policy, path: str, found: dict[str, int]) -> bool:
    """Say whether no other rule decides anything inside a scope."""
    earlier = steered.rules[: found[path]]
    inside = (path in decision.around(_parent(other)) for other in found if other)
    return not any(rule.kind == "op" for rule in earlier) and not any(inside)


def _is_list(module: nn.Module) -> bool:
    # Of a scripted class, to read `forward` raises.
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward is nn.Module.forward


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _types(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each module's path, and its class names with those of all around it."""
    known: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        around = known[_parent(path)] if path else ()
        known[path] = (*rules.type_names(module), *around)
        yield path, known[path]


class _Entry(NamedTuple):
    """What a call of the module has entered."""

    leave: Callable[[], object]
    forget: Callable[[], object]
    """Takes it from the list of what the context around has to leave."""


class Scope:
    """A module and all inside it, for which one rule decides."""

    def __init__(
        self,
        steered: Policy,
        rule: int,
        path: str,
        types: tuple[str, ...],
        *,
        alone: bool,
    ) -> None:
        """Name the scope.

        Args:
            steered: The policy.
            rule: Index of the rule that decides.
            path: The module's.
            types: Class names of the module and of those around it.
            alone: No other rule decides anything inside.
        """
        self.policy = steered
        self.rule = rule
        self.path = path
        self.types = types
        self._alone = alone
        earlier = [r for r in steered.rules[:rule] if r.kind == "op"]
        rules = *earlier, Rule("op", "*", self.category)
        self._inside = Policy(rules, steered.base)
        self._always = False
        self._back: torch.dtype | None = None
        self._entries: Entries[_Entry] = Entries()

    @property
    def category(self) -> str:
        """How the module runs: "low", "fp32", "promote", "keep" or "banned"."""
        return self.policy.rules[self.rule].category

    def hook(
        self,
        module: nn.Module,
        *,
        always: bool = False,
        back: torch.dtype | None = None,
    ) -> None:
        """Let a module obey the rule from now on.

        Args:
            module: The one at the scope's path.
            always: In fp32 whatever region it is called in, and outside regions: what
                its weights are stored in demands it.
            back: Its output is cast to this; None: it stays as it is, for whatever
                autocast makes of it. Without autocast, the next layer takes no other
                dtype than that of its weights.
        """
        self._always, self._back = always, back
        # Before all other hooks, which may raise: then it must be open to be closed.
        module.register_forward_pre_hook(self.open, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.close, always_call=True)

    @_disable_dynamo
    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook; torch.compile does not look into it."""
        device, frame = self._region()
        if frame is not None:
            frame.matched.add(self.rule)
        elif not self._always:
            self._enter(_nothing, None)
            return None
        if self.category == op_tables.BANNED:
            self._enter(_nothing, None)
            message = (
                f"module {self.path!r} is banned by the rule "
                f"'{self.policy.rules[self.rule]}', and was called."
            )
            raise RuntimeError(message)
        # Where nothing else has a say and nobody observes, autocast off says the same
        # as a kernel for each operation, costs less, and third-party code asks for it.
        plain = self._alone and self.category in {op_tables.FP32, KEEP}
        if frame is not None and (frame.recorder is not None or not plain):
            self._steer(device, frame)
        else:
            # torch's own, not one of ours: no user code runs that could edit weights.
            device = device or next(_tensors(module, args, kwargs)).device.type
            region = torch_autocast(device, enabled=False)
            region.__enter__()  # type: ignore[no-untyped-call]
            self._enter(lambda: region.__exit__(None, None, None), frame)
        if self.category == op_tables.FP32:
            return cast_floating((args, kwargs), torch.float32)
        if self.category == op_tables.LOW:
            return cast_floating((args, kwargs), torch.get_autocast_dtype(device))
        return None

    def _region(self) -> tuple[str, Frame | None]:
        """Return the region that is open under this policy, and its device."""
        for device in dispatch_kernels.KEYS:
            frame = active_context.in_force(device)
            ours = frame is not None and frame.policy == self.policy
            if ours and torch.is_autocast_enabled(device):
                return device, frame
        return "", None

    def _steer(self, device: str, frame: Frame) -> None:
        """Put the rule in force for every operation that has a row."""
        rows = dispatch_table.rows_for(
            self.policy,
            device,
            module=self.path,
            types=self.types,
            weights=frame.cache is not None,
        )
        dispatch_kernels.install(rows)
        inner = Frame(
            self.policy,
            rows,
            frame.cache,
            frame.matched,
            frame.recorder,
            self.path,
            self.types,
            frame,
        )
        pushed = recompute.push(device, inner)
        shown = compile_guard.show(self._inside)

        def leave() -> None:
            compile_guard.restore(shown)
            recompute.pop(pushed)

        self._enter(leave, frame)

    def _enter(self, leave: Callable[[], object], frame: Frame | None) -> None:
        """Take note of what `close` must leave, and the context if no hook runs."""
        if frame is None:
            self._entries.push(_Entry(leave, _nothing))
            return
        abandoned = frame.root.abandoned

        def abandon() -> None:
            self._entries.pop_own()
            leave()

        item = threading.get_ident(), abandon
        self._entries.push(_Entry(leave, lambda: abandoned.remove(item)))
        abandoned.append(item)

    @_disable_dynamo
    def close(self, _module: nn.Module, _args: object, output: object) -> object:
        """Forward hook; runs after an error too."""
        entry = self._entries.pop_own()
        if entry is not None:  # else a hook of somebody's raised before ours ran
            entry.forget()
            entry.leave()
        return None if self._back is None else cast_floating(output, self._back)


def _nothing() -> None:
    """Leave nothing: the scope was not in force."""


def _tensors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from (item for item in (*args, *kwargs.values()) if torch.is_tensor(item))
    yield torch.empty(0)

"""Tracks the module, and the pass, in which the current operation runs.

Nodes of the backward pass are mapped to modules by sequence number: autograd numbers a
node before its operation runs, so the first operation at a number made that node.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from halfstep.diagnostics.replay import tensor_facts
from halfstep.distributed.ddp import is_bypassed, unwrap
from halfstep.errors import UserError
from halfstep.nonfinite.graph import snake_case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

ROOT, LOSS, INPUT = "model", "loss", "input"
"""The model itself; operations after its forward pass; operations before it."""

_POSITIONAL = {
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
}
_LOSS_NAMES = ("Loss", "Criterion")
"""Suffixes of class names of losses."""


@dataclass(eq=False)
class Place:
    """One call of a module."""

    module: str
    """Path; or one of `ROOT`, `LOSS`, `INPUT`."""
    kind: str
    """Class name; "" outside of the model."""
    caller: Place | None = None
    """The module call that made this one."""
    computes_loss: bool = False
    """Whether a module inside the model computes a loss; set after it has run."""

    @property
    def is_module(self) -> bool:
        """Whether a module rule can match it."""
        return self.module not in {ROOT, LOSS, INPUT}

    def is_inside(self, other: Place) -> bool:
        """Return whether a rule for the other module matches this one too."""
        return other.is_module and f"{self.module}.".startswith(f"{other.module}.")

    @property
    def is_loss(self) -> bool:
        """Whether it is part of the loss function, inside the model or not."""
        inside = self.caller is not None and self.caller.is_loss
        return self.module == LOSS or self.computes_loss or inside


class ModuleStack:
    """Tracks modules and nodes inside its `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.root = unwrap(model)
        self._paths = {id(m): path or ROOT for path, m in self.root.named_modules()}
        self._owners = {
            id(param): Place(path or ROOT, type(module).__name__)
            for path, module in self.root.named_modules()
            for param in module.parameters(recurse=False)
        }
        self._stack: list[tuple[nn.Module, Place | None]] = []
        self._nodes: dict[int, tuple[Place, str]] = {}
        self._highest = 0
        self._hooks: list[RemovableHandle] = []
        self._ran = self._done = False
        self._sums: list[Place] = []
        self._refs: list[object] = []
        self.arguments: dict[int, str] = {}
        """Storage of an argument of the model -> its name."""

    def __enter__(self) -> Self:
        """Register the hooks."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave_outer, always_call=True),
            self.root.register_forward_pre_hook(self._called, with_kwargs=True),
        ]
        # Registered last: operations of other hooks are part of the module.
        for module in self.root.modules():
            hook = module.register_forward_hook(self._leave, always_call=True)
            self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()

    def _called(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in _POSITIONAL]
        names += [f"argument {index}" for index in range(len(names), len(args))]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for path, part in _named(name, value):
                key = tensor_facts.storage_key(part)
                if key:
                    self.arguments[key] = path
                    self._refs.append(tensor_facts.storage_ref(part))

    def _enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        del args
        ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        if ddp and not is_bypassed(module):
            raise UserError(
                "step() of find_nonfinite runs a DistributedDataParallel that is not "
                "in the model it was given, and would wait for other processes: give "
                "that wrapper as the model."
            )
        path = self._paths.get(id(module))
        kind = type(module).__name__
        caller = self._stack[-1][1] if self._stack else None
        self._ran = self._ran or path is not None
        if path is None and caller is not None:
            path = caller.module  # a module made in forward, such as a loss
        place = None if path is None else Place(path, kind, caller)
        inner = id(module) in self._paths and self._running() is None
        if inner and any(True for _ in module.parameters(recurse=False)):
            # A scalar that a module with weights uses afterwards is not the loss.
            for one in self._sums:
                one.computes_loss = False
            self._sums.clear()
        self._stack.append((module, place))

    def _leave_outer(self, module: nn.Module, args: object, output: object) -> None:
        if id(module) not in self._paths:
            self._leave(module, args, output)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        del args
        if self._stack and self._stack[-1][0] is module:
            _, place = self._stack.pop()
            if place is not None and module is not self.root:
                self._detect_loss(module, place, output)
        self._done = self._done or module is self.root

    def _detect_loss(self, module: nn.Module, place: Place, output: object) -> None:
        """Find losses: torch's; by name; scalars that no module with weights uses."""
        sizes = [part.dim() for part in tensor_facts.floats(output)]
        named = place.kind.endswith(_LOSS_NAMES) and (
            output is None or sizes[:1] == [0]
        )
        place.computes_loss = named or isinstance(module, nn.modules.loss._Loss)  # noqa: SLF001
        if not place.computes_loss and sizes and not any(sizes):
            place.computes_loss = True
            self._sums.append(place)

    @staticmethod
    def node() -> Node | None:
        """Return the current node of the backward pass; None in a forward pass.

        Also None while activation checkpointing recomputes a forward pass.
        """
        return None if torch.is_grad_enabled() else ModuleStack._running()

    @staticmethod
    def _running() -> Node | None:
        return torch._C._current_autograd_node()  # noqa: SLF001

    def current(self) -> Place:
        """Return the module call in which the current operation runs."""
        node = self.node()
        if node is not None:
            return self._origin_of(node)[0]
        inside = self._stack[-1][1] if self._stack else None
        if inside is not None:
            return inside
        backward_node = self._running()
        if backward_node is not None:
            return self._origin_of(backward_node)[0]
        return Place(LOSS if self._done or self._ran else INPUT, "")

    def forward_op(self) -> str:
        """Return the op whose derivative is computed; "" in a custom Function."""
        node = self.node()
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        return "" if node is None or custom else self._origin_of(node)[1]

    def receiver(self, node: Node, dtype: torch.dtype) -> tuple[Place, str] | None:
        """Return the operation whose result gets a gradient of `dtype` from `node`.

        None if a leaf gets it.
        """
        for maker, output in node.next_functions:
            # A node's incoming gradients have the metadata of its outputs.
            if maker and maker._input_metadata[output].dtype == dtype:  # noqa: SLF001
                return self._nodes.get(maker._sequence_nr())  # noqa: SLF001
        return None

    def note(self, op: str) -> None:
        """Record an operation that may have made an autograd node."""
        if self.node() is None:
            node_number = torch._C._autograd._get_sequence_nr() - 1  # noqa: SLF001
            self._nodes.setdefault(node_number, (self.current(), op))
            self._highest = max(self._highest, node_number)

    def _origin_of(self, node: Node) -> tuple[Place, str]:
        number = node._sequence_nr()  # noqa: SLF001
        entry = self._nodes.get(number)
        if entry is not None:
            return entry
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return self._owners.get(id(leaf), Place(ROOT, "")), ""
        place = Place(LOSS if number > self._highest else ROOT, "")
        kind = re.sub(r"Backward\d*$", "", node.name())
        return place, snake_case(kind)


def _named(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in an argument, each with its path."""
    if isinstance(value, dict | list | tuple):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in inside:
            yield from _named(f"{name}[{key!r}]", item)
    else:
        yield from ((name, part) for part in tensor_facts.floats(value))

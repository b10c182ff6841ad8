"""Restores a model after a replay: parameters, gradients, buffers, flags, hooks.

Also restores plain containers in its modules and the state of the random generators.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch.rng_state import RandomState
from halfstep.casting import module_rules
from halfstep.diagnostics.probe.hooks import all_paused
from halfstep.diagnostics.replay import tensor_facts
from halfstep.diagnostics.replay.gradients import is_sharded
from halfstep.distributed import ddp
from halfstep.nonfinite.domains import local_data

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = {dict, OrderedDict, defaultdict, Counter, list, set, deque}
"""Container types that are restored, and searched for tensors."""


@contextlib.contextmanager
def restored_after(
    model: nn.Module, generator_state: Tensor | None
) -> Iterator[ModelSnapshot]:
    """Restore the model on exit; inside, DDP, torch.compile and probes are disabled.

    Call the snapshot's `save` with each tensor that is about to be written. The random
    state inside starts as `generator_state`, or torch's current one.
    """
    leaves = [(param, param.grad, param.requires_grad) for param in model.parameters()]
    with contextlib.ExitStack() as stack:
        random_state = RandomState({param.device for param in model.parameters()})
        stack.callback(random_state.restore)
        stack.enter_context(all_paused())
        stack.enter_context(module_rules.restore_registry())
        snapshot = ModelSnapshot(model)
        stack.callback(snapshot.restore)
        if generator_state is not None:
            torch.set_rng_state(generator_state)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(ddp.bypassed(module))
        stack.enter_context(warnings.catch_warnings())
        # torch warns of global module hooks on compiled wrappers; ours handle them.
        warnings.filterwarnings(
            "ignore", "Using `torch.compile\\(module\\)` when there"
        )
        torch.clear_autocast_cache()
        try:
            yield snapshot
        finally:
            torch.clear_autocast_cache()
            for param, gradient, requires_grad in leaves:
                param.grad = gradient
                param.requires_grad_(requires_grad)


class ModelSnapshot:
    """A snapshot of the containers of a model's modules, and of the tensors in them.

    Buffers, hooks, flags and caches of a module are all in its dictionaries, so copying
    these restores them consistently (a cache with its size).
    """

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, list[Tensor]] = {}
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._data: list[tuple[Tensor, Tensor]] = []
        buffers = [*model.buffers()]
        # Batch norm kernels write to running statistics without declaring it.
        for buffer in buffers:
            self._numbers.append((buffer, buffer.detach().clone()))
        seen = {id(buffer) for buffer in buffers}
        sharded = is_sharded(model)
        for module in ddp.unwrap(model).modules():
            own = vars(module)
            # FSDP2 replaces parameters in this dict and tracks that elsewhere.
            self._scan(own, seen, *([own.get("_parameters")] * sharded))
        for param in model.parameters():
            self._save_on_write(param, seen)
            self._save_on_write(param.grad, seen)
            # Setting `.data` dispatches no operation.
            if not sharded and type(param.data) is Tensor and _is_strided(param):
                self._data.append((param, param.data))

    def _scan(self, container: Any, seen: set[int], *left_out: object) -> None:  # noqa: ANN401
        if id(container) in seen or any(container is one for one in left_out):
            return
        seen.add(id(container))
        if not isinstance(container, tuple):
            self._containers.append((container, copy.copy(container)))
        for value in _items(container):
            if type(value) in _PLAIN or isinstance(value, tuple):
                self._scan(value, seen, *left_out)
            elif isinstance(value, Tensor):
                self._save_on_write(value, seen)

    def _save_on_write(self, tensor: Tensor | None, seen: set[int]) -> None:
        """Register a tensor to be saved before its first write."""
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            self._tensors.setdefault(_memory(tensor), []).append(tensor)

    def save(self, written: Tensor) -> None:
        """Save a tensor that is about to be written."""
        for tensor in self._tensors.pop(_memory(written), ()):
            self._numbers.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Restore the contents, and remove items added since."""
        for container, before in self._containers:
            _restore_container(container, before)
        for param, data in self._data:
            same = param.dtype == data.dtype and _is_strided(param)
            if not (same and param.is_set_to(data)):
                param.data = data
        with torch.no_grad():
            for tensor, numbers in self._numbers:
                if tensor.shape != numbers.shape:
                    tensor.resize_(numbers.shape)
                # Only if changed: writing bumps the version that a graph may check.
                values, before = local_data(tensor), local_data(numbers)
                if not tensor.is_meta and not torch.equal(values, before):
                    tensor.copy_(numbers)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _memory(tensor: Tensor) -> int:
    return tensor_facts.storage_key(local_data(tensor))


def _restore_container(container: Any, before: Any) -> None:  # noqa: ANN401
    """Restore a container from its copy unless its items are unchanged."""
    now, then = [*map(id, _items(container))], [*map(id, _items(before))]
    if now == then and [*container] == [*before]:
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


def _items(container: Any) -> Any:  # noqa: ANN401
    return container.values() if isinstance(container, dict) else container

"""Runs an unedited training script in mixed precision, by patching torch.

The outermost call of a module runs under the lean policy and returns fp32. fp16 losses
are scaled, and gradients unscaled before they reach `.grad`. A step with non-finite
gradients is skipped, and so is its scheduler's step.

Patched for the life of the process: `nn.Module.__call__`, `torch.autograd.backward` and
`grad`, `Tensor.register_hook`, `Optimizer.__init__` and `profile_hook_step` (torch's
wrapper of every optimizer's step), `step` of the schedulers, `autocast.__enter__` and
`GradScaler.__init__`. A script with mixed precision of its own is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep._torch.optimizer_params import name_of, named_parameters, params_of
from halfstep.launch import PID_VARIABLE, print_line
from halfstep.launch.scaled_backward import (
    OverflowFlags,
    find_inf,
    leaf_nodes,
    listed,
    scale_of_pass,
    scaled_roots,
    unscaled_leaves,
    wrap_register_hook,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from halfstep.casting.autocast_mode import Autocast, PolicyAutocast
    from halfstep.numerics.formats import FloatFormat
    from halfstep.scaling.loss_scaler import LossScaler
    from halfstep.scaling.step_report import NonFiniteParam

Function = Callable[..., Any]
_LOW_DTYPES = (torch.bfloat16, torch.float16)
_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
_BY_HAND = {
    "bf16": "If the script updates them by hand, no update with inf or NaN is "
    "skipped: check for them, or step an optimizer of torch.optim.",
    "fp16": "If the script updates them by hand, run in bf16 or step an optimizer "
    "of torch.optim.",
}
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


@functools.cache  # two installed copies have two entry points
def install(dtype: str) -> None:
    """Patch torch for mixed precision in this process."""
    training = ScriptTraining(dtype)
    targets: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (nn.Module, "__call__", training.wrap_module_call),
        (torch.autograd, "backward", training.wrap_backward),
        (torch.autograd, "grad", training.wrap_grad),
        (Tensor, "register_hook", wrap_register_hook),
        (Optimizer, "__init__", training.wrap_optimizer_init),
        (Optimizer, "profile_hook_step", training.wrap_profile_hook_step),
        (LRScheduler, "__init__", training.wrap_scheduler_init),
        (torch.autocast, "__enter__", training.wrap_autocast_enter),
        (GradScaler, "__init__", training.wrap_grad_scaler_init),
    ]
    # All before the first is set: one that torch lacks must leave torch as it is.
    wrappers = [_wrapper(*target) for target in targets]
    for (owner, name, _), wrapper in zip(targets, wrappers, strict=True):
        setattr(owner, name, wrapper)
    for kind in (LRScheduler, *_subclasses(LRScheduler)):
        training.wrap_schedulers_of(kind)
    atexit.register(training.report)


def _wrapper(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    original = vars(owner)[name]
    is_static = isinstance(original, staticmethod)
    function = original.__func__ if is_static else original
    wrapper = functools.update_wrapper(wrap(function), function)
    return staticmethod(wrapper) if is_static else wrapper


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [each for sub in direct for each in (sub, *_subclasses(sub))]


class _ThreadState(threading.local):
    """Which patched functions this thread is inside; nested calls are not patched."""

    forward_or_backward = False
    """In the outermost call of a module, or in a backward pass."""
    backward = False
    own_autocast = False
    """Entering an autocast context of halfstep."""
    step = False
    """In an optimizer's step."""
    scheduler = False
    """In a scheduler's step."""


class ScriptTraining:
    """Mixed precision of one process whose script is not edited."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._pid = dtype, os.getpid()
        self._format: FloatFormat | None = None
        """None until the first module call, whose device decides what "auto" means."""
        self._scaler: LossScaler | None = None
        """Created with the format. On the host, where skipping is decided."""
        self._is_off = False
        self._thread = _ThreadState()
        self._lock = threading.Lock()
        self._num_open = 0
        """Running outermost module calls and backward passes, in all threads."""
        self._contexts: dict[str, Autocast | PolicyAutocast] = {}
        self._overflow_flags = OverflowFlags()
        self._is_first_rank = True
        """Set at the first module call, as the process group may be gone at exit."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._has_optimizer = self._has_functional_grads = False
        """Whether an optimizer of torch.optim was made, and `autograd.grad` or
        torch.func differentiated by weights."""
        self._stepped_ids: set[int] = set()
        """id() of parameters of optimizers that stepped."""
        self._unstepped: list[set[int]] = []
        """id() of the parameters of passes none of whose parameters was stepped."""
        self._has_reported_zeros = False
        self._found_inf: bool | None = None
        """Whether any step since the last backward pass overflowed; None: no step."""
        self._culprits: tuple[NonFiniteParam, ...] = ()
        self._steps_of: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        """Optimizer -> [steps applied, steps skipped]."""
        self._steps_when_scheduled: WeakKeyDictionary[LRScheduler, list[int]] = (
            WeakKeyDictionary()
        )
        """Scheduler -> counts of its optimizer at the scheduler's last step."""
        self._all_steps = [0, 0]
        self._are_float64: set[bool] = set()
        """Whether all weights of a module are float64, of those that were called."""
        self._forward_seconds = 0.0
        self._start = time.perf_counter()

    # Forward passes

    def wrap_module_call(self, original: Function) -> Function:
        """Wrap `nn.Module.__call__`: its outermost call runs under the policy."""
        thread = self._thread

        def call(module: nn.Module, *args: object, **kwargs: object) -> object:
            if (
                thread.forward_or_backward
                or self._is_off
                or torch.compiler.is_compiling()
                or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            ):
                return original(module, *args, **kwargs)
            if isinstance(module, ParametrizationList):
                # Reading `layer.weight` calls it, and parametrize may store the result.
                with self._inside():
                    return original(module, *args, **kwargs)
            context = self._context(self._device_type(module, args, kwargs))
            if context is None:
                return original(module, *args, **kwargs)
            start = time.perf_counter()
            with self._inside(), self._opened(context):
                output = original(module, *args, **kwargs)
            self._forward_seconds += time.perf_counter() - start
            from halfstep.numerics.formats import cast_floating

            # Losses that are functions run outside the context.
            return cast_floating(output, torch.float32)

        return call

    @contextlib.contextmanager
    def _inside(self, *, backward: bool = False) -> Iterator[None]:
        thread = self._thread
        before = thread.forward_or_backward, thread.backward
        thread.forward_or_backward, thread.backward = True, backward
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
            thread.forward_or_backward, thread.backward = before

    @contextlib.contextmanager
    def _opened(self, context: Autocast | PolicyAutocast) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._thread.own_autocast = True
            try:
                stack.enter_context(context)
            finally:
                self._thread.own_autocast = False
            yield

    def _device_type(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> str:
        """Return the device of a model or a loss module; "" for a metric.

        A metric has no parameters, and its inputs do not require gradients.
        """
        from halfstep.numerics.formats import tensors_in

        param = next(module.parameters(), None)
        if param is not None:
            if param.dtype in _LOW_DTYPES:
                self._switch_off("its model has 16-bit weights")
            is_float64 = all(p.dtype == torch.float64 for p in module.parameters())
            self._are_float64.add(is_float64)
            return param.device.type
        if not torch.is_grad_enabled():
            return ""
        inputs = tensors_in([args, kwargs])
        return next((t.device.type for t in inputs if t.requires_grad), "")

    def _context(self, device_type: str) -> Autocast | PolicyAutocast | None:
        """Return the autocast context to enter for a device; None for none."""
        if device_type not in _DEVICE_TYPES:
            return None
        is_enabled = torch.is_autocast_enabled(device_type)
        if self._num_open and (is_enabled or _is_torch_thread()):
            return None  # the thread of a replica, or a recomputation
        if is_enabled:
            self._switch_off("it opens autocast contexts")
        elif "apex.amp" in sys.modules:
            self._switch_off("it imports apex.amp")
        if self._is_off:
            return None
        if device_type not in self._contexts:
            from halfstep.casting.autocast_mode import autocast

            dtype = self._resolve_format(device_type).dtype
            self._contexts[device_type] = autocast(device_type, dtype, policy="lean")
        return self._contexts[device_type]

    def _resolve_format(self, device_type: str) -> FloatFormat:
        with self._lock:  # concurrent first calls must create one scaler
            if self._format is not None:
                return self._format
            from halfstep.machine import hardware, recommendation
            from halfstep.numerics import formats
            from halfstep.scaling.loss_scale import ScaleRule
            from halfstep.scaling.loss_scaler import LossScaler

            format_ = recommendation.resolve("O1", self._dtype, device_type).format
            rule = "dynamic" if format_ is formats.FP16 else "none"
            self._scaler = LossScaler(ScaleRule.parse(rule))
            self._is_first_rank = _is_first_rank()
            caution = hardware.emulation_warning(format_.name, device_type)
            if caution and self._is_first_rank:
                print_line(caution)
            self._format = format_
        return format_

    def _switch_off(self, reason: str) -> None:
        if not self._is_off and _is_first_rank():
            print_line(
                f"the script has mixed precision of its own ({reason}): left alone."
            )
        self._is_off = True

    def wrap_autocast_enter(self, original: Function) -> Function:
        """Wrap `autocast.__enter__` to detect scripts that use autocast."""

        def enter(context: torch.autocast) -> object:
            thread = self._thread
            is_low = context._enabled and context.fast_dtype in _LOW_DTYPES  # noqa: SLF001
            if (
                is_low
                and not (self._is_off or thread.own_autocast or thread.backward)
                and not torch.compiler.is_compiling()
                and not (self._num_open and _is_torch_thread())
            ):
                self._switch_off("it opens autocast contexts")
            return original(context)

        return enter

    def wrap_grad_scaler_init(self, original: Function) -> Function:
        """Wrap `GradScaler.__init__` to detect scripts that scale losses."""

        def init(scaler: GradScaler, *args: object, **kwargs: object) -> None:
            original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._switch_off("it makes a GradScaler")

        return init

    # Backward passes

    def wrap_grad(self, original: Function) -> Function:
        """Wrap `torch.autograd.grad`: runs it outside the policy, without scaling."""

        def grad(outputs: object, inputs: object, *args: object, **kwargs: Any) -> Any:  # noqa: ANN401
            in_func = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
            inputs = listed(inputs)  # once: it may be a generator
            has_params = any(isinstance(each, nn.Parameter) for each in inputs)
            if self._contexts and (in_func or has_params):
                self._has_functional_grads = True
            return self._run_backward(original, outputs, inputs, *args, **kwargs)

        return grad

    def _run_backward(
        self, original: Function, *args: object, **kwargs: object
    ) -> object:
        """Run a backward pass outside the policy; recomputations in it restore it."""
        if self._is_off or not self._contexts:
            return original(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._inside(backward=True))
            for device_type in self._contexts:
                if torch.is_autocast_enabled(device_type):  # inside a module's forward
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            return original(*args, **kwargs)

    def wrap_backward(self, original: Function) -> Function:
        """Wrap `torch.autograd.backward`: scale losses, unscale before `.grad`."""

        def backward(
            tensors: object,
            grad_tensors: object = None,
            *args: object,
            **kwargs: object,
        ) -> None:
            scaler, thread = self._scaler, self._thread
            if self._is_off or scaler is None:
                original(tensors, grad_tensors, *args, **kwargs)
                return
            roots = listed(tensors)  # once: it may be a generator
            if thread.backward or (self._num_open and _is_torch_thread()):
                # Reentrant checkpointing, within a pass whose roots are scaled.
                scale = scale_of_pass()
                nodes = [
                    node
                    for node in leaf_nodes(roots)
                    # Not checkpointing's detached inputs, which pass gradients on.
                    if isinstance(node.variable, nn.Parameter)
                ]
                with unscaled_leaves(roots, nodes, scale or 1.0):
                    original(roots, grad_tensors, *args, **kwargs)
                return
            nodes = leaf_nodes(roots) if scaler.rule.scales else []
            leaves = [node.variable for node in nodes]
            self._update_scale(leaves)
            for root in roots:
                if isinstance(root, Tensor) and root.ndim == 0:
                    scaler.observe_loss(root, lambda p: name_of(p, self._steps_of))
            if not scaler.rule.scales:
                self._run_backward(original, roots, grad_tensors, *args, **kwargs)
                if not (any(self._all_steps) or self._unstepped):  # a walk takes time
                    self._note_pass(node.variable for node in leaf_nodes(roots))
                return
            with_grad = {id(leaf) for leaf in leaves if leaf.grad is not None}
            scale = scaler.state.scale.item()
            no_grads = [None] * len(roots)
            grads = no_grads if grad_tensors is None else listed(grad_tensors)
            scaled, grads = scaled_roots(roots, grads, scale)
            with unscaled_leaves(scaled, nodes, scale):
                self._run_backward(original, scaled, grads, *args, **kwargs)
            reached = [leaf for leaf in leaves if leaf.grad is not None]
            # Before the script clips by value, which would make an inf finite.
            found_inf = find_inf([leaf.grad for leaf in reached])
            self._note_pass(reached)
            by_hand, has_steps = self._outside_optimizers(reached)
            if has_steps:
                self._overflow_flags.add(reached, with_grad, found_inf)
            else:  # the pass counts as a step
                self._found_inf = bool(self._found_inf) or bool(found_inf)
            if by_hand and found_inf:
                self._zero_by_hand(by_hand)

        return backward

    def _note_pass(self, leaves: Iterable[Tensor]) -> None:
        """Note the parameters that a pass reached, if none of them was stepped."""
        ids = {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}
        if ids and ids.isdisjoint(self._stepped_ids.union(*self._unstepped)):
            self._unstepped.append(ids)

    def _outside_optimizers(self, leaves: list[Tensor]) -> tuple[list[Tensor], bool]:
        """Return (parameters of no optimizer, whether an optimizer may have a leaf).

        Wrappers such as FSDP put other parameters than the graph's into the optimizer.
        """
        if self._has_optimizer and dist.is_available() and dist.is_initialized():
            return [], True
        owned = {id(p) for each in tuple(self._optimizers) for p in params_of(each)}
        params = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        by_hand: list[Tensor] = [param for param in params if id(param) not in owned]
        all_by_hand = 0 < len(by_hand) == len(params)
        return by_hand, self._has_optimizer and not all_by_hand

    @torch.no_grad()
    def _zero_by_hand(self, params: list[Tensor]) -> None:
        """Zero overflowed gradients of parameters that are in no optimizer.

        Why zeros: there is no step to skip, and inf would reach the weights.
        """
        from halfstep.scaling.step_report import find_nonfinite_params

        grads = [(name_of(p, ()), p.grad) for p in params if p.grad is not None]
        self._culprits = find_nonfinite_params(grads)
        for _, gradient in grads:
            gradient.zero_()
        if not self._has_reported_zeros and self._is_first_rank:
            print_line(
                "gradients overflowed for weights that are in no optimizer of "
                "torch.optim, so they are 0 in `.grad`, as for a skipped step. "
                + _BY_HAND["fp16"]
            )
        self._has_reported_zeros = True

    # Steps

    def wrap_optimizer_init(self, original: Function) -> Function:
        """Wrap `Optimizer.__init__`, to know which parameters have an optimizer."""

        def init(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        return init

    def wrap_profile_hook_step(self, original: Function) -> Function:
        """Wrap torch's wrapper of a class's `step`, called for its first optimizer."""

        def profile_hook_step(step: Function) -> Function:
            self._has_optimizer = True
            return self._wrap_step(original(step))

        return profile_hook_step

    def _wrap_step(self, original: Function) -> Function:
        """Wrap a step: skip it if a gradient is non-finite."""

        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
            has_closure = callable(args[0] if args else kwargs.get("closure"))
            untouched = self._scaler is None and not has_closure
            if self._is_off or untouched or self._thread.step:
                return original(optimizer, *args, **kwargs)
            self._thread.step = True
            try:
                if has_closure:
                    return self._step_with_closure(optimizer, *args, **kwargs)
                skipped = self._has_overflow(optimizer)
                result = None if skipped else original(optimizer, *args, **kwargs)
                self._count(optimizer, skipped=skipped)
                return result
            finally:
                self._thread.step = False

        return step

    def _step_with_closure(
        self, optimizer: Optimizer, closure: Function, *args: object, **kwargs: object
    ) -> object:
        from halfstep.scaling.grad_scaler_step import step_or_undo

        loss: object = None
        skipped = False

        def evaluate() -> object:
            nonlocal loss
            loss = closure()
            return loss

        def overflowed() -> bool:
            nonlocal skipped
            skipped = self._has_overflow(optimizer)
            return skipped

        result = step_or_undo(optimizer, evaluate, overflowed, *args, **kwargs)
        self._count(optimizer, skipped=skipped)
        return loss if skipped else result

    def _has_overflow(self, optimizer: Optimizer) -> bool:
        """Return whether a step's gradients are non-finite; synchronizes."""
        from halfstep.scaling.found_inf_reduction import reduce_found_inf
        from halfstep.scaling.step_report import find_nonfinite_params

        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        flags = [find_inf(grads), *self._overflow_flags.of_step(params)]
        # Before the reduction, as each rank of FSDP sees only its shard. On the
        # parameters' device, as ranks with empty shards take part too.
        device = params[0].device if params else flags[0].device
        found_inf = torch.stack([flag.to(device) for flag in flags]).amax()
        is_fsdp1 = any(getattr(param, "_fsdp_flattened", False) for param in params)
        group = dist.group.WORLD if is_fsdp1 else None
        has_overflow = bool(reduce_found_inf(found_inf, grads, group))
        if has_overflow:
            named = named_parameters(optimizer)
            pairs = [(name, p.grad) for name, p in named if p.grad is not None]
            self._culprits = find_nonfinite_params(pairs)
        self._found_inf = bool(self._found_inf) or has_overflow
        return has_overflow

    def _count(self, optimizer: Optimizer, *, skipped: bool) -> None:
        for counts in (self._steps_of.setdefault(optimizer, [0, 0]), self._all_steps):
            counts[skipped] += 1
        ids = set(map(id, params_of(optimizer)))
        if not ids <= self._stepped_ids:
            self._stepped_ids |= ids
            self._unstepped = [each for each in self._unstepped if not each & ids]

    def _update_scale(self, leaves: Sequence[Tensor]) -> None:
        """Update the loss scale from the overflows since the last pass.

        A script that checks for inf itself discards the gradients without a step; that
        counts as an overflow too. `leaves` are those that the next pass will reach.

        Raises:
            LossScaleCollapse: If steps overflow at the minimum scale for too long.
        """
        if self._scaler is None:
            return
        if self._found_inf is None and self._overflow_flags.discarded(leaves):
            self._found_inf = True
        if self._found_inf is None:
            return
        found_inf, culprits = torch.tensor(float(self._found_inf)), self._culprits
        self._found_inf, self._culprits = None, ()
        self._scaler.update(found_inf, lambda: culprits)

    # Schedules

    def wrap_scheduler_init(self, original: Function) -> Function:
        """Wrap `LRScheduler.__init__`, to wrap classes that a script defines."""

        def init(scheduler: LRScheduler, *args: object, **kwargs: object) -> None:
            for kind in type(scheduler).__mro__:
                self.wrap_schedulers_of(kind)
            original(scheduler, *args, **kwargs)

        return init

    def wrap_schedulers_of(self, kind: type) -> None:
        """Wrap `step` of a scheduler class: do nothing after skipped steps."""
        original = vars(kind).get("step")
        is_wrapped = hasattr(original, "halfstep")
        if original is None or kind is ReduceLROnPlateau or is_wrapped:
            return

        @functools.wraps(original)
        def step(scheduler: LRScheduler, *args: object, **kwargs: object) -> None:
            thread = self._thread
            if thread.scheduler or not self._all_skipped_since(scheduler):
                before, thread.scheduler = thread.scheduler, True
                try:
                    original(scheduler, *args, **kwargs)
                finally:
                    thread.scheduler = before

        step.halfstep = True  # type: ignore[attr-defined]
        kind.step = step  # type: ignore[attr-defined]

    def _all_skipped_since(self, scheduler: LRScheduler) -> bool:
        """Return whether all steps since the scheduler's last one were skipped."""
        counts = list(self._steps_of.get(scheduler.optimizer, (0, 0)))
        seen = self._steps_when_scheduled.get(scheduler, counts)
        self._steps_when_scheduled[scheduler] = counts
        return counts[0] == seen[0] and counts[1] > seen[1]

    # The end

    def report(self) -> None:
        """Print a summary at exit; nothing in processes that did not train.

        Nor in forked processes, whose counts are the parent's.
        """
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        is_launcher = main is not None and main.name in _LAUNCHERS
        is_fork = os.getpid() != self._pid
        if self._is_off or is_launcher or is_fork or not self._is_first_rank:
            return
        applied, skipped = self._all_steps
        if self._format is None:
            if os.environ.get(PID_VARIABLE) == str(os.getpid()):
                print_line("this process called no module: nothing ran in 16 bits.")
            return
        steps = f"{applied + skipped} optimizer steps, {skipped} skipped"
        forward, elapsed = self._forward_seconds, time.perf_counter() - self._start
        seconds = f"{forward:.1f} of {elapsed:.1f} s"
        precision, bits = f"O1 {self._format}", "16-bit "
        if self._are_float64 == {True}:
            precision, bits = "the weights are float64, which no level casts", ""
        is_unstepped = self._has_functional_grads and not any(self._all_steps)
        if self._unstepped or is_unstepped:
            text = _BY_HAND[self._format.name]
            if self._has_functional_grads and self._format.name == "fp16":
                text += " torch.autograd.grad and torch.func scale no loss."
            print_line(f"weights got gradients, and no optimizer stepped them. {text}")
        print_line(f"{precision}: {steps}; {bits}forward passes took {seconds}.")


def _is_first_rank() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _is_torch_thread() -> bool:
    """Return whether torch started this thread, as for backward passes on GPUs."""
    return isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001

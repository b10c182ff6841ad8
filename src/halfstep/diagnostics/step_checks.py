"""Checks of losses, weights and sums, which `step_calls` runs while a program trains.

If every value of a weight is exactly representable in 16 bits, the weight was rounded:
of fp32 values that never were, about one in 8,192 is representable in fp16.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from halfstep._torch.optimizer_params import named_parameters
from halfstep.diagnostics.replay.tensor_facts import floats
from halfstep.nonfinite.graph import nodes_of
from halfstep.nonfinite.optimizer_eps import CURE, eps_underflows
from halfstep.numerics import formats
from halfstep.reporting.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from halfstep.nonfinite.graph import Edge
    from halfstep.reporting.finding import Severity

SCALED_LOSS, ROUNDED_STATE, LOW_SUM = "loss scale", "rounded state", "16-bit sum"
"""Names of the rules."""


class Findings(dict[str, Finding]):
    """Findings by their advice; of several with the same advice the first is kept."""

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        self.setdefault(finding.advice, finding)

    def record(
        self,
        rule: str,
        where: str,
        measured: str,
        advice: str,
        severity: Severity = "error",
        source: str = "its calls",
        weight: float = 0.8,
    ) -> None:
        """Make a finding of these values, and add it."""
        self.add(Finding(severity, rule, where, measured, "", source, advice, weight))


_PROPORTIONAL = 0.1
"""Largest relative difference of two gradient norms that should be equal: rounding of
float16 gradients at half the scale differs by less."""


class ScaledLosses:
    """Checks that every gradient is multiplied by the loss scale exactly once.

    Walks the autograd graphs of the losses that a program passes to `GradScaler.scale`
    and to backward passes.
    """

    def __init__(self, findings: Findings) -> None:
        self._record = partial(
            findings.record, SCALED_LOSS, "the step", source="its graphs", weight=0.9
        )
        self._scaled: dict[Any, int] = {}
        """Graph node of a scaled loss -> id() of its scaler."""
        self._waiting: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """id() of a parameter with a gradient -> id() of its scaler, 0 for none."""
        self._has_checked_functions = False

    def end_step(self) -> None:
        """Drop the graphs of the step."""
        self._scaled.clear()

    def on_scale(self, scaler: object, scaled: Tensor) -> None:
        """Record a scaled loss."""
        if scaled.grad_fn is not None:
            self._scaled[scaled.grad_fn] = id(scaler)

    def on_backward(self, loss: object) -> None:
        """Check the scalers of all gradients that a backward pass adds to."""
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if node is None or not (self._scaled or self._waiting):
            return
        scaled = {node} & self._scaled.keys()

        def is_unscaled(edge: Edge) -> bool:
            scaled.update({edge[0]} & self._scaled.keys())
            return edge[0] not in scaled

        by_scaler = {0: set() if scaled else nodes_of(node, is_unscaled)}
        for each in scaled:
            by_scaler.setdefault(self._scaled[each], set()).update(nodes_of(each))
        seen: dict[int, int] = {}
        for scaler, nodes in by_scaler.items():
            for param in _leaves(nodes):
                wait = self._waiting.get(id(param))
                others = {seen.setdefault(id(param), scaler)}
                if wait is not None and wait[0]() is param and param.grad is not None:
                    others |= {wait[1]} if bool(param.grad.any()) else set()
                self._compare(scaler, others, param)
                self._waiting[id(param)] = weakref.ref(param), scaler
        if isinstance(loss, Tensor) and len(by_scaler) > 1:
            self._check_functions(loss)

    def on_step(self, optimizer: Optimizer) -> None:
        """Drop the gradients that an optimizer step used."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._waiting.pop(id(param), None)

    def _compare(self, scaler: int, others: set[int], param: Tensor) -> None:
        name = f"a weight of shape {tuple(param.shape)}"
        if others == {scaler}:
            return
        if 0 in {scaler, *others}:
            self._record(
                "a loss that no scaler scaled adds to gradients of a scaled one "
                f"({name}): its share vanishes when they are unscaled",
                "Scale each loss: scaler.scale(loss).backward(); or add the losses "
                "first.",
            )
        else:
            self._record(
                "two GradScalers scale losses of one model: their gradients "
                f"({name}) are summed at different scales",
                "Scale all losses of a model by one scaler, and update it once.",
            )

    def _check_functions(self, loss: Tensor) -> None:
        """Check that the backward of custom functions is linear in its gradient."""
        nodes: set[Any] = nodes_of(loss.grad_fn)
        kinds = {
            type(node)._forward_cls  # type: ignore[attr-defined] # noqa: SLF001
            for node in nodes
            if isinstance(node, BackwardCFunction)
        }
        theirs = [each for each in kinds if each.__module__.split(".")[0] != "torch"]
        recomputes = len(theirs) < len(kinds)  # checkpointing may run only once
        if not theirs or recomputes or self._has_checked_functions:
            return
        self._has_checked_functions = True
        params = [each for each in _leaves(nodes) if each.numel()]
        norms = []
        with contextlib.suppress(RuntimeError):  # the program's own pass raises it
            for factor in (1.0, 0.5):
                start = torch.full_like(loss, factor)
                grads = torch.autograd.grad(
                    loss, params, start, retain_graph=True, allow_unused=True
                )
                some = [grad.float().norm() for grad in grads if grad is not None]
                norms.append(float(torch.stack(some).norm()) / factor)
        both = len(norms) == 2  # noqa: PLR2004 -- False if a pass raised
        # False for non-finite norms.
        if both and abs(norms[0] - norms[1]) > _PROPORTIONAL * max(norms):
            names = ", ".join(sorted(each.__name__ for each in theirs))
            self._record(
                f"{names}: gradients behind it do not follow the loss scale: at "
                "half of it they are not half",
                f"backward() of {names} must multiply by the gradient that it is "
                "given.",
            )


def _leaves(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors of a graph's nodes."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


_FEW = 8
"""Tensors with fewer values are ignored: they may be representable by chance."""
_LOST_MOMENTS = 0.01
"""Share of second moments that may be 0 where the first moment is not."""


class RoundedState:
    """Checks before updates whether fp32 weights or moments were rounded to 16 bits."""

    def __init__(self, findings: Findings) -> None:
        self._record = partial(
            findings.record, ROUNDED_STATE, source="its numbers", weight=0.7
        )
        self._before: dict[Optimizer, list[Tensor]] = {}
        """Copies of each optimizer's weights before its first observed update."""

    @torch.no_grad()
    def on_update(self, optimizer: Optimizer) -> None:
        """Check weights, moments, eps and weight decay before an update."""
        named = [each for each in named_parameters(optimizer) if _is_full(each[1])]
        now = [param.detach().clone() for _, param in named]
        before = self._before.setdefault(optimizer, now)
        dtype = _dtype_of(now)
        if dtype is not None:
            word, name = formats.word(dtype), named[0][0]
            if before is now:
                self._record(
                    name,
                    f"{word} represents all weights exactly: they were rounded to "
                    f"{word} in a checkpoint, or by a cast and back",
                    "Save the float32 weights: model.state_dict() of O1, "
                    "session.state_dict() of O2.",
                    "note",
                )
            elif not all(map(torch.equal, before, now)):
                self._record(
                    name,
                    f"weights were cast to {word} and back in the step: what an "
                    "update adds below its precision is lost",
                    "Validate under autocast, or cast a copy: "
                    "copy.deepcopy(model).half().",
                )
        self._check_moments(optimizer)
        for each in eps_underflows(optimizer):
            self._record(each.optimizer, str(each), f"Use {CURE}.")
        self._check_decay(optimizer)

    def _check_decay(self, optimizer: Optimizer) -> None:
        """Report weight decay whose factor rounds to 1 in the dtype of the weights."""
        for number, group in enumerate(optimizer.param_groups):
            decay = float(group.get("lr", 0.0)) * group.get("weight_decay", 0.0)
            # Fused kernels apply decay and update in fp32 and round once.
            if not group.get("decoupled_weight_decay") or group.get("fused"):
                continue
            for dtype in filter(formats.is_low, {p.dtype for p in group["params"]}):
                if 0 < decay < torch.finfo(dtype).eps / 4:
                    self._record(
                        f"parameter group {number}",
                        f"weight decay has no effect in {formats.word(dtype)}: "
                        f"1 - lr * weight_decay = 1 - {decay:.1g} is rounded to 1",
                        "Keep weights or master weights in float32 (level O2).",
                        "note",
                    )

    def _check_moments(self, optimizer: Optimizer) -> None:
        """Report second moments that became 0: the next update is lr * m / eps."""
        num_lost, count, first = 0, 0, ""
        for name, param in named_parameters(optimizer):
            state = optimizer.state.get(param, {})
            mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
            if isinstance(mean, Tensor) and isinstance(square, Tensor):
                lost = int(((square == 0) & (mean != 0)).sum())
                num_lost, count = num_lost + lost, count + mean.numel()
                first = first or (name if lost else "")
        if num_lost > _LOST_MOMENTS * max(1, count):
            self._record(
                first,
                f"exp_avg_sq is 0 where exp_avg is not, at {num_lost} of {count} "
                "places: it was kept or saved in float16, and the next update is "
                "exp_avg / eps",
                "Keep the optimizer's state in float32 (weights in float32 and "
                "autocast, or O2), and save it so; this state is lost.",
            )


def _is_full(param: Tensor) -> bool:
    dense = type(param.data) is Tensor and param.layout == torch.strided
    return dense and param.dtype == torch.float32 and param.numel() >= _FEW


def _dtype_of(weights: list[Tensor]) -> torch.dtype | None:
    """Return the 16-bit dtype that represents all weights exactly, or None.

    Constant weights, such as a norm's ones, are ignored.
    """
    varied = [each for each in weights if bool((each != each.flatten()[0]).any())]
    for dtype in (torch.bfloat16, torch.float16):
        if varied and all(torch.equal(each, each.to(dtype).float()) for each in varied):
            return dtype
    return None


_STILL = 0.9
"""Smallest share of unchanged among the values that fp32 changes, to be reported."""
_LOST_GRADS = 0.05
"""Largest relative error of accumulated gradients that is not reported. Our choice:
many times the error of rounding a sum to bf16 once."""
_FP32_NOISE = 2.0**-20
"""Relative changes up to this may come from rounding in fp32."""


@dataclass
class _LowPrecisionSum:
    """A 16-bit tensor written in place, and the same operations done in fp32."""

    target: Tensor
    copies: tuple[Tensor, Tensor] | None = None
    """`target` from before this update, and in fp32 with the same operations applied;
    None if it was not written since the last update."""
    num_updates: int = 0
    num_due: int = 0
    """Values that change in fp32, summed over all updates."""
    num_changed: int = 0
    """How many of these changed in `target` too."""

    def in_fp32(self) -> Tensor:
        """Return the fp32 copy, made before the first write of an update."""
        if self.copies is None:
            self.copies = self.target.clone(), self.target.float()
        return self.copies[1]

    def end_update(self) -> None:
        """Count the values that an update changed."""
        if self.copies is None:
            return
        before, exact = self.copies
        wide = before.float()
        due = (exact - wide).abs() > _FP32_NOISE * wide.abs()
        self.num_updates += 1
        self.num_due += int(due.sum())
        self.num_changed += int((due & (self.target != before)).sum())
        self.copies = None

    @property
    def stands_still(self) -> bool:
        """Whether nearly all values that change in fp32 do not change in 16 bits."""
        lost = self.num_due - self.num_changed
        return self.num_updates > 1 and lost > 0 and lost >= _STILL * self.num_due


_IN_PLACE = {
    **dict.fromkeys(("add_", "__iadd__"), "add_"),
    **dict.fromkeys(("sub_", "__isub__"), "sub_"),
    **dict.fromkeys(("mul_", "__imul__"), "mul_"),
    **dict.fromkeys(("div_", "__itruediv__"), "div_"),
    **{name: name for name in ("lerp_", "addcmul_", "addcdiv_")},
}


class LowPrecisionSums(TorchFunctionMode):
    """Finds 16-bit averages and sums that stop changing: addends are rounded away.

    Observes in-place writes between an update and the next pass. Between a backward
    pass and the update it looks for results that overflow float16.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_after_backward = False
        self._overflow = ""
        """Name of the function whose float16 result overflowed, or ""."""
        self._sums: dict[tuple[int, torch.Size], _LowPrecisionSum] = {}
        self._is_on = False
        self._outer: object = None
        """The innermost function mode when the step began."""

    def on_step(self) -> None:
        """Record which function mode is active at the start of a step."""
        self._outer = _get_current_function_mode()  # type: ignore[no-untyped-call]

    def begin(self, *, after_backward: bool = False) -> None:
        """Start observing, unless the step itself has entered a function mode."""
        outer = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if not self._is_on and outer is self._outer:
            self._is_after_backward = after_backward
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop observing, and count what changed."""
        is_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if self._is_on and is_top:  # else the program entered a mode of its own
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for each in self._sums.values():
                each.end_update()

    def report(self, findings: Findings) -> None:
        """Add a finding of an overflow, or of values that stopped changing."""
        still = [each for each in self._sums.values() if each.stands_still]
        if self._overflow:
            findings.record(
                *(LOW_SUM, f"{self._overflow} of gradients"),
                "makes inf of finite numbers in float16, which holds 65504, between "
                "the backward pass and the update: 1 / inf is 0",
                "Compute it of grad.float(), or train weights in float32.",
            )
        elif still:
            first = still[0].target
            others = f" and {len(still) - 1} more" if len(still) > 1 else ""
            findings.record(
                *(LOW_SUM, f"a tensor of shape {tuple(first.shape)}{others}"),
                f"averaged or summed in place in {formats.word(first.dtype)}, and at "
                f"least {_STILL:.0%} of its values did not change in "
                f"{still[0].num_updates} steps: the added values are lost to rounding",
                "Keep averages and sums in float32; average weights of O2 and O3 "
                "inside session.weights().",
            )

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function, and repeat in fp32 what it writes to a 16-bit tensor."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).removeprefix("_foreach_")
        if self._is_after_backward:
            result = func(*args, **kwargs)
            if name != "__get__" and not self._overflow and _overflows(args, result):
                self._overflow = name
            return result
        if args and name in _IN_PLACE:
            many = isinstance(args[0], list | tuple)
            rows = _rows(args) if many else [tuple(args)]
            with torch.no_grad():
                for row in rows:
                    self._apply(_IN_PLACE[name], row, kwargs)
        return func(*args, **kwargs)

    def _apply(self, name: str, row: Sequence[Any], kwargs: dict[str, Any]) -> None:
        target = row[0]
        if type(target) not in {Tensor, torch.nn.Parameter}:
            return
        if not formats.is_low(target.dtype) or target.layout != torch.strided:
            return
        key = target.data_ptr(), target.shape
        total = self._sums.setdefault(key, _LowPrecisionSum(target.detach()))
        others = [
            each.float()
            if isinstance(each, Tensor) and each.is_floating_point()
            else each
            for each in row[1:]
        ]
        getattr(total.in_fp32(), name)(*others, **kwargs)


def _overflows(args: object, result: object) -> bool:
    """Return whether a float16 result has inf although all arguments are finite."""
    half = [each for each in floats(result) if each.dtype == torch.float16]
    return any(bool(each.isinf().any()) for each in half) and all(
        bool(each.isfinite().all()) for each in floats(args)
    )


class LowPrecisionGrads:
    """Compares 16-bit gradients accumulated over backward passes with fp32 sums."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, tuple[Tensor, int]] = {}
        """Parameter -> fp32 sum of its gradients, and the number of passes in it."""
        self._worst = 0.0, 0, torch.bfloat16
        """Largest relative error of a sum, its number of passes, and its dtype."""

    @contextlib.contextmanager
    def backward_pass(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Accumulate 16-bit gradients in fp32 too while a backward pass runs inside."""
        low = [p for p in params if p.requires_grad and formats.is_low(p.dtype)]
        with contextlib.ExitStack() as hooks:
            for p in low:
                hooks.enter_context(p.register_hook(partial(self._add, p)))  # type: ignore[no-untyped-call]
            yield
        for param in low:
            self._compare(param)

    def _add(self, param: Tensor, grad: Tensor) -> None:
        grad = grad.detach().float()
        total, count = self._sums.get(param, (grad, 0))
        is_first = not count or param.grad is None or not bool(param.grad.any())
        self._sums[param] = (grad, 1) if is_first else (total + grad, count + 1)

    @torch.no_grad()
    def _compare(self, param: Tensor) -> None:
        total, count = self._sums.get(param, (param, 0))
        if count < 2 or param.grad is None:  # noqa: PLR2004 -- two terms make a sum
            return
        size = float(total.norm())
        error = float((param.grad.float() - total).norm()) / (size or 1.0)
        self._worst = max(
            self._worst, (error, count, param.dtype), key=lambda row: row[0]
        )

    def report(self, findings: Findings) -> None:
        """Add a finding if accumulation in 16 bits lost too much."""
        error, num_passes, dtype = self._worst
        if _LOST_GRADS < error < float("inf"):
            findings.record(
                *(LOW_SUM, "gradients"),
                f"those of {num_passes} backward passes are added up in "
                f"{formats.word(dtype)}, and {error:.0%} of the sum is lost to "
                "rounding",
                "Keep weights in float32 and use autocast, or let "
                f"halfstep.prepare(model, optimizer, 'O2', accumulate={num_passes}) "
                "add in float32.",
                source="its backward passes",
            )


def _rows(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each single call that a `_foreach_` call stands for."""
    count = len(args[0])
    columns = [
        each if isinstance(each, list | tuple) else [each] * count for each in args
    ]
    return list(zip(*columns, strict=True))

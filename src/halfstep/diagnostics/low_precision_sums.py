"""Finds 16-bit sums and averages that stop changing because addends are rounded away.

Observes the in-place operations between an optimizer update and the next pass (by a
`TorchFunctionMode`), what the program computes from gradients before the update, and
gradients accumulated over several backward passes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from halfstep.diagnostics.replay.tensor_facts import floats
from halfstep.numerics import formats
from halfstep.reporting.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

RULE = "16-bit sum"


def _finding(
    where: str, measured: str, advice: str, source: str = "its calls"
) -> Finding:
    return Finding("error", RULE, where, measured, "", source, advice, 0.8)


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
    before: Tensor
    """Copy of `target` from before this update."""
    exact: Tensor
    """fp32 copy of `before` with the same operations applied."""
    num_updates: int = 0
    num_due: int = 0
    """Values that change in fp32, summed over all updates."""
    num_changed: int = 0
    """How many of these changed in `target` too."""

    def restart(self) -> None:
        """Copy `target` before an update."""
        self.before, self.exact = self.target.clone(), self.target.float()

    def close(self) -> None:
        """Count the values that an update changed."""
        before = self.before.float()
        due = (self.exact - before).abs() > _FP32_NOISE * before.abs()
        self.num_updates += 1
        self.num_due += int(due.sum())
        self.num_changed += int((due & (self.target != self.before)).sum())

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
    """Observes in-place writes between an update and the next pass.

    Between a backward pass and the update it looks for results that overflow float16.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_after_backward = False
        self._overflow = ""
        """Name of the function whose float16 result overflowed, or ""."""
        self._sums: dict[tuple[int, torch.Size], _LowPrecisionSum] = {}
        self._open: set[tuple[int, torch.Size]] = set()
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
            for key in self._open:
                self._sums[key].close()
            self._open.clear()

    def findings(self) -> tuple[Finding, ...]:
        """Return a finding of an overflow, or of values that stopped changing."""
        if self._overflow:
            measured = (
                "makes inf of finite numbers in float16, which holds 65504, between "
                "the backward pass and the update: 1 / inf is 0"
            )
            advice = "Compute it of grad.float(), or train weights in float32."
            return (_finding(f"{self._overflow} of gradients", measured, advice),)
        still = [each for each in self._sums.values() if each.stands_still]
        if not still:
            return ()
        first = still[0].target
        others = f" and {len(still) - 1} more" if len(still) > 1 else ""
        word = formats.word(first.dtype)
        measured = (
            f"averaged or summed in place in {word}, and at least {_STILL:.0%} of its "
            f"values did not change in {still[0].num_updates} steps: the added values "
            "are lost to rounding"
        )
        advice = (
            "Keep averages and sums in float32; average weights of O2 and O3 inside "
            "session.weights()."
        )
        where = f"a tensor of shape {tuple(first.shape)}{others}"
        return (_finding(where, measured, advice),)

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
        if key not in self._open:
            self._open.add(key)
            if key not in self._sums:
                low = target.detach()
                self._sums[key] = _LowPrecisionSum(low, low, low)
            self._sums[key].restart()
        others = [
            each.float()
            if isinstance(each, Tensor) and each.is_floating_point()
            else each
            for each in row[1:]
        ]
        getattr(self._sums[key].exact, name)(*others, **kwargs)


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

    def findings(self) -> tuple[Finding, ...]:
        """Return a finding if accumulation in 16 bits lost too much, else none."""
        error, num_passes, dtype = self._worst
        if not _LOST_GRADS < error < float("inf"):
            return ()
        measured = (
            f"those of {num_passes} backward passes are added up in "
            f"{formats.word(dtype)}, and {error:.0%} of the sum is lost to rounding"
        )
        advice = (
            "Keep weights in float32 and use autocast, or let halfstep.prepare(model, "
            f"optimizer, 'O2', accumulate={num_passes}) add in float32."
        )
        return (_finding("gradients", measured, advice, "its backward passes"),)


def _rows(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each single call that a `_foreach_` call stands for."""
    count = len(args[0])
    columns = [
        each if isinstance(each, list | tuple) else [each] * count for each in args
    ]
    return list(zip(*columns, strict=True))

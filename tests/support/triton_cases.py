"""Fused updates by Triton's kernels beside those in C.

In: a device. Out: cases, each of which raises where the two differ in a bit.
"""

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import kernel_twin
import pytest
import torch
from torch import Tensor

from halfstep.masters import cpu_kernels
from halfstep.masters import triton_kernels as tk
from halfstep.masters.fused_step import Adam, ParamUpdate, Rule, Sgd
from halfstep.numerics.norms import absmax_of, nonfinite_marks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
CLOCK = (12345678901234567890, 7)
CANARY = 8
"""Numbers beyond each tensor that nobody may write."""
NUMEL = (1, 7, 0, 1023, 1024, 1025, 3000)
GRADIENTS = (BF16, FP16, FP32)
WEIGHTS = {
    "plain": (FP32,),
    "fp32": (BF16, FP16),
    "split": (BF16,),
    "kahan": (BF16,),
    "stochastic": (BF16,),
}
SGD = Sgd(0.1, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
ADAM = Adam(
    *(1e-2, 0.9, 0.999, 1e-8, 0.0), decoupled=False, amsgrad=False, maximize=False
)
RULES: dict[str, Rule] = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.9, dampening=0.3, maximize=True),
    "nesterov": replace(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": replace(ADAM, weight_decay=0.1, beta1=0.0),
    "near": replace(ADAM, beta1=0.3),
    "adamw": replace(ADAM, weight_decay=0.1, decoupled=True, maximize=True),
    "amsgrad": replace(ADAM, amsgrad=True),
}
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-30, 65520.0]


def guarded(values: Tensor, offset: int, device: torch.device) -> Tensor:
    memory = torch.full((offset + len(values) + CANARY,), 3, dtype=values.dtype)
    memory = memory.to(device)
    memory[offset : len(memory) - CANARY] = values.to(device)
    return memory[offset : len(memory) - CANARY]


def canaries(tensor: Tensor) -> Tensor:
    end = tensor.storage_offset() + len(tensor)
    return tensor.as_strided((CANARY,), (1,), end)


def item_of(
    form: str, rule: Rule, numel: int, dtypes: tuple[torch.dtype, ...], index: int
) -> ParamUpdate:
    torch.manual_seed(index)
    lean = form in ("kahan", "stochastic")
    truth, gradient = torch.randn(numel), torch.randn(numel)
    if numel > len(SPECIAL):
        truth[: len(SPECIAL)] = torch.tensor(SPECIAL)
        gradient[-len(SPECIAL) :] = torch.tensor(SPECIAL)
    (own,) = kernel_twin.make(rule, form, dtypes[0], sizes=((numel,),))
    kernel_twin.encode(form, truth, own, None)
    weight, extra = own.weight, own.residual
    count = 2 + rule.amsgrad if isinstance(rule, Adam) else int(rule.momentum != 0)
    first = bool(isinstance(rule, Sgd) and index % 2)
    states = [torch.rand(numel) for _ in range(count)]
    if first:
        states = [torch.full_like(state, torch.nan) for state in states]
    offset = index % 2
    move = partial(guarded, offset=offset, device=CPU)
    return ParamUpdate(
        move(weight),
        move(gradient.to(dtypes[1])),
        None if extra is None else move(extra),
        tuple(move(state.to(BF16 if lean else FP32)) for state in states),
        torch.tensor(10.0**index) if isinstance(rule, Adam) else None,
        is_first_step=first,
        param_index=index,
    )


def items_of(form: str, rule: Rule) -> list[ParamUpdate]:
    dtypes = list(product(WEIGHTS[form], GRADIENTS))
    return [
        item_of(form, rule, numel, dtypes[index % len(dtypes)], index)
        for index, numel in enumerate(NUMEL)
    ]


def moved(item: ParamUpdate, device: torch.device) -> ParamUpdate:
    """Return a copy of an item on a device, guarded alike."""
    offset = item.weight.storage_offset()
    move = partial(guarded, offset=offset, device=device)
    return replace(
        item,
        weight=move(item.weight),
        gradient=move(item.gradient),
        residual=None if item.residual is None else move(item.residual),
        states=tuple(move(state) for state in item.states),
        step=None if item.step is None else item.step.to(device, copy=True),
    )


def parts(item: ParamUpdate) -> dict[str, Tensor]:
    named = {"weight": item.weight, "gradient": item.gradient}
    named |= {} if item.residual is None else {"extra": item.residual}
    named |= {} if item.step is None else {"step": item.step}
    return named | {f"state {n}": state for n, state in enumerate(item.states)}


def update_in_c(item: ParamUpdate, rule: Rule, form: str, inverse: Tensor) -> None:
    kernel_twin.ready(cpu_kernels)
    cpu_kernels.update([item], rule, form, inverse=inverse, clock=CLOCK)


def same(ours: Tensor, other: Tensor, where: str, nan: Tensor | None = None) -> None:
    ours = ours.cpu()
    either = ours.isnan() & other.isnan()
    if nan is not None:
        either |= nan
    bits = torch.int32 if ours.element_size() == 4 else torch.int16
    wrong = ((ours.view(bits) != other.view(bits)) & ~either).nonzero().flatten()
    assert not len(wrong), (
        f"{where}: {len(wrong)} of {len(ours)}, first {int(wrong[0])}: "
        f"{ours[wrong[0]]}, not {other[wrong[0]]}"
    )


def check_update(form: str, name: str, skip: float, device: torch.device) -> None:
    rule = RULES[name]
    expected = items_of(form, rule)
    ours = [moved(item, device) for item in expected]
    inverse = torch.tensor(2.0**-3)
    found = torch.tensor(skip, device=device)
    tk.update(
        *(ours, rule, form), inverse=inverse.to(device), clock=CLOCK, found_inf=found
    )
    for item, twin in zip(ours, expected, strict=True):
        if twin.step is not None and not skip:
            twin.step += 1  # ours counts by itself
        if not skip and len(twin.weight):
            update_in_c(twin, rule, form, inverse)
        nan = twin.weight.isnan()
        for part, tensor in parts(item).items():
            where = f"{form} {name} {part} of {len(nan)}"
            # The low half of a NaN is payload.
            lost = nan if form == "split" and part == "extra" else None
            same(tensor.view(-1), parts(twin)[part].view(-1), where, lost)
            if part != "step":
                assert bool((canaries(tensor) == 3).all()), f"{where}: beyond the end"


def check_split(device: torch.device) -> None:
    torch.manual_seed(0)
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    low = torch.randint(0, 1 << 16, high.shape, dtype=torch.int32)
    edges = [torch.full_like(low, edge) for edge in (0, 0x7FFF, 0x8000, 0xFFFF)]
    master = torch.cat([high | part for part in (low, *edges)]).view(FP32)
    (item,) = kernel_twin.make(SGD, "split", sizes=(tuple(master.shape),))
    kernel_twin.encode("split", master, item, None)
    item.gradient = torch.zeros_like(item.weight)
    ours = moved(item, device)
    one = torch.ones((), device=device)
    tk.update([ours], SGD, "split", inverse=one, clock=CLOCK, found_inf=one - one)
    nan = master.isnan()
    same(ours.weight, item.weight, "weight")
    assert ours.residual is not None
    assert item.residual is not None
    same(ours.residual, item.residual, "remainder", nan)
    same(kernel_twin.truth_of(moved(ours, CPU), "split"), master, "master")


def check_edges(device: torch.device) -> None:
    numel = 1500
    largest = torch.full((numel,), torch.finfo(BF16).max, dtype=BF16)
    largest[::2] *= -1
    beyond = -largest.float() / 32
    zeros = torch.zeros(numel, dtype=BF16)
    below = torch.full((numel,), -5, dtype=torch.int16)
    one = torch.ones((), device=device)
    for form, twin in (
        ("stochastic", ParamUpdate(largest, beyond, param_index=1)),
        ("split", ParamUpdate(zeros, zeros.clone(), below)),
    ):
        ours = moved(twin, device)
        tk.update([ours], SGD, form, inverse=one, clock=CLOCK, found_inf=one - one)
        update_in_c(twin, SGD, form, torch.ones(()))
        for part, tensor in parts(twin).items():
            same(parts(ours)[part], tensor, f"{form} {part}")
        assert bool(ours.weight.isfinite().all())


def check_lazy(device: torch.device) -> None:
    one = torch.ones((), device=device)
    item = ParamUpdate(one.repeat(9), one.repeat(9))
    item.gradient = torch._neg_view(2 * item.gradient)
    tk.update([item], SGD, "plain", inverse=one, clock=CLOCK, found_inf=one - one)
    assert torch.equal(item.weight.cpu(), 1 + torch.full((9,), 2.0) * SGD.lr)


def check_look(device: torch.device) -> None:
    for dtype, numel, bad in product(GRADIENTS, (1, 4096, 9001), (None, 0, -1)):
        for value in ([torch.inf], [-torch.inf], [torch.nan], [torch.nan, torch.inf]):
            torch.manual_seed(numel)
            whole = [guarded(torch.randn(n).to(dtype), n % 2, device) for n in (5, 0)]
            whole.append(guarded(torch.randn(numel).to(dtype), numel % 2, device))
            exact = sum(float(g.double().square().sum()) for g in whole)
            if bad is not None:  # the second in another block, if there is one
                for number, each in enumerate(value[:numel]):
                    whole[-1][bad - number] = each
            alone, nothing, marks_alone = tk.check_each(whole, norm=False)
            found, total, marks = tk.check_each(whole, norm=True)
            same(marks, nonfinite_marks(whole, absmax_of(whole)).cpu(), f"{dtype}")
            assert torch.equal(marks_alone, marks)
            assert alone == found == float(bad is not None)
            assert nothing is None
            assert found.dtype == FP32
            assert found.shape == ()
            assert total is not None
            if bad is None:
                # Each of n sums of positive numbers rounds once: 2**-53 of them.
                assert abs(float(total) - exact) <= (numel + 5) * 2.0**-52 * exact
                again = tk.check_finite(whole, norm=True)[1]
                assert torch.equal(total, again)  # type: ignore[arg-type]
    huge = torch.tensor([[1e30, 2e-30], [3e38, 0.0]], device=device)
    found, total = tk.check_finite([huge.t(), huge.half()[1:, 1]], norm=True)
    assert found == 0
    assert float(total) == pytest.approx(9e76)  # type: ignore[arg-type]


def check_launches(device: torch.device) -> None:
    seen: list[tuple[str, list[Any], dict[str, Any]]] = []
    true = tk._code()

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                plain = [arg for arg in args if not torch.is_tensor(arg)]
                seen.append((self.name, plain, kwargs))
                true[self.name][grid](*args, **kwargs)

            return launch

    one = torch.ones((), device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tk, "_code", lambda: {name: Counted(name) for name in true})
        for lr in (0.0, 1.0, 1, 16, 0.3):
            rule = replace(ADAM, lr=lr)
            items = [item_of("split", rule, 8, (BF16, BF16), 2 * n) for n in range(9)]
            ours = [moved(item, device) for item in items]
            tk.update(ours, rule, "split", inverse=one, clock=CLOCK, found_inf=one)
            tk.check_finite([item.gradient for item in ours], norm=True)
    assert [name for name, *_ in seen[:3]] == ["correct", "update", "check_finite"]
    assert all(seen[n] == seen[n % 3] for n in range(len(seen)))
    assert len(seen) == 15


CASES: dict[str, Callable[[torch.device], None]] = {
    **{
        f"{form} {rule}": partial(check_update, form, rule, 0.0)
        for form, rule in product(WEIGHTS, RULES)
    },
    **{
        f"{form} {rule} skipped": partial(check_update, form, rule, 1.0)
        for form, rule in product(WEIGHTS, ("nesterov", "amsgrad"))
    },
    "split": check_split,
    "edges": check_edges,
    "lazy": check_lazy,
    "look": check_look,
    "launches": check_launches,
}


def verdicts() -> dict[str, str]:
    said = {}
    for name, case in CASES.items():
        try:
            case(CPU)
        except Exception:  # noqa: BLE001 -- one must not hide the others
            said[name] = traceback.format_exc()
        else:
            said[name] = ""
    return said

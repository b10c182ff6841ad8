"""Laws of every kernel for the CPU: torch's own operations, and compiled C."""

import math
from typing import Any

import kernel_twin as twin
import numpy as np
import pytest
import torch

from halfstep.masters import cpu_kernels, eager_kernels
from halfstep.masters.fused_step import Adam, Sgd

every_kernel = pytest.mark.parametrize("kernel", [eager_kernels, cpu_kernels])


@every_kernel
@twin.every_rule
@twin.every_float
def test_plain_is_torch(kernel: Any, rule: Sgd | Adam, dtype: torch.dtype) -> None:
    """Law: without masters, a step is torch.optim's own within the derived bound."""
    twin.ready(kernel)
    items = twin.make(rule, "plain")
    inverse = 0.125
    for number in range(2):
        twin.next_step(items, dtype, number)
        before = twin.copied(items)
        kernel.update(
            items, rule, "plain", inverse=torch.tensor(inverse), clock=(0, number)
        )
        for item, old in zip(items, before, strict=True):
            allowed = twin.bound(rule, old, inverse)
            right = twin.optimizer_of(rule, old, inverse)
            assert twin.beyond(item.weight, right, allowed.weight) == 0
            pairs = zip(item.states, old.states, allowed.states, strict=True)
            for got, wanted, limit in pairs:
                assert twin.beyond(got, wanted, limit) == 0


@every_kernel
@twin.every_rule
@twin.every_float
@pytest.mark.parametrize(
    ("form", "low"),
    [*((form, torch.bfloat16) for form in twin.FORMS[1:]), ("fp32", torch.float16)],
)
def test_forms_are_plain(
    kernel: Any, rule: Sgd | Adam, dtype: torch.dtype, form: str, low: torch.dtype
) -> None:
    """Law: each form is the plain form, then the form's own rounding, bit for bit."""
    twin.ready(kernel)
    items = twin.make(rule, form, low)
    inverse = torch.tensor(0.5)
    for number in range(2):
        twin.next_step(items, dtype, number)
        plain = [twin.plainly(item, form) for item in items]
        clock = (2**40 + 3, number)
        kernel.update(plain, rule, "plain", inverse=inverse, clock=clock)
        kernel.update(items, rule, form, inverse=inverse, clock=clock)
        for item, fp32 in zip(items, plain, strict=True):
            wanted = twin.in_form(fp32, item, form, clock)
            for got, right in zip(twin.held(item), wanted, strict=True):
                assert twin.same_bits(got, right)


@every_kernel
@twin.every_form
@pytest.mark.parametrize("rule", [twin.NESTEROV, twin.AMSGRAD])
def test_threads(kernel: Any, rule: Sgd | Adam, form: str) -> None:
    """Law: the number of threads changes no bit."""
    twin.ready(kernel)
    items = twin.make(rule, form, sizes=((70001,), (5,), (40000,)))
    twin.next_step(items, torch.bfloat16, 0)
    results = []
    for threads in (1, 2, 3):
        mine = twin.copied(items)
        with twin.using_threads(threads):
            kernel.update(mine, rule, form, inverse=torch.tensor(0.5), clock=(1, 2))
        results.append(mine)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            for mine, yours in zip(twin.held(one), twin.held(two), strict=True):
                assert twin.same_bits(mine, yours)


@every_kernel
@twin.every_form
def test_not_finite(kernel: Any, form: str) -> None:
    """Law: inf and NaN in a gradient reach the weight, and only their own element."""
    twin.ready(kernel)
    items = twin.make(twin.SGD, form, sizes=((40,),))
    twin.next_step(items, torch.float32, 0)
    bad = [math.inf, -math.inf, math.nan]
    items[0].gradient[[0, 17, 39]] = torch.tensor(bad)
    kernel.update(items, twin.SGD, form, inverse=torch.tensor(1.0), clock=(0, 0))
    truth = twin.truth_of(items[0], form)
    assert truth.isfinite().sum() == 37
    if form != "kahan":
        # An infinite weight with no rest is infinite; see bf16_codecs.py.
        assert truth[0] == -math.inf
        assert truth[17] == math.inf
    weight = items[0].weight
    assert weight[39].isnan()
    assert weight[0] == -math.inf
    assert weight[17] == math.inf


@every_kernel
def test_empty_lists(kernel: Any) -> None:
    """Law: no items, and only empty ones, are no mistake."""
    twin.ready(kernel)
    one = torch.tensor(1.0)
    kernel.update([], twin.ADAMW, "split", inverse=one, clock=(0, 0))
    for norm in (True, False):
        found, total = kernel.check_finite([], norm=norm)
        assert found.item() == 0
        assert (total is not None) == norm
        found, _ = kernel.check_finite([torch.empty(0)], norm=norm)
        assert found.item() == 0


@every_kernel
@pytest.mark.parametrize("mixed", [torch.bfloat16, torch.float16])
def test_mixed_gradients(kernel: Any, mixed: torch.dtype) -> None:
    """Law: gradients of several dtypes in one list are each read as what they are."""
    twin.ready(kernel)
    items = twin.make(twin.SGD, "fp32", sizes=((9,), (9,)))
    twin.next_step(items, torch.float32, 0)
    items[1].gradient = items[1].gradient.to(mixed)
    alone = twin.copied(items)
    one = torch.tensor(1.0)
    kernel.update(items, twin.SGD, "fp32", inverse=one, clock=(0, 0))
    for item in alone:
        kernel.update([item], twin.SGD, "fp32", inverse=one, clock=(0, 0))
    for together, apart in zip(items, alone, strict=True):
        assert twin.same_bits(together.weight, apart.weight)


@every_kernel
def test_strided_gradient(kernel: Any) -> None:
    """Law: a gradient that autograd left transposed is read in its weight's order."""
    twin.ready(kernel)
    items = twin.make(twin.SGD, "plain", sizes=((30, 20),))
    before = items[0].weight.clone()
    items[0].gradient = torch.randn(20, 30).t()
    one = torch.tensor(1.0)
    kernel.update(items, twin.SGD, "plain", inverse=one, clock=(0, 0))
    step = items[0].gradient * torch.tensor(twin.SGD.lr)
    assert torch.equal(items[0].weight, before - step)
    assert kernel.check_finite([items[0].gradient], norm=True)[0].item() == 0


@every_kernel
@twin.every_float
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_look_finds(
    kernel: Any, dtype: torch.dtype, value: float, *, norm: bool
) -> None:
    """Law: one bad number anywhere is found, at either end and in the middle."""
    twin.ready(kernel)
    tensors = [torch.ones(size).to(dtype) for size in twin.SIZES]
    assert kernel.check_finite(tensors, norm=norm)[0].item() == 0
    for tensor in tensors:
        flat = tensor.view(-1)
        for at in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
            flat[at] = value
            assert kernel.check_finite(tensors, norm=norm)[0].item() == 1
            flat[at] = 1


@every_kernel
@twin.every_float
def test_look_sums(kernel: Any, dtype: torch.dtype) -> None:
    """Law: the sum of squares is numpy's in fp64, whatever the number of threads.

    Squares of fp32 are exact in fp64, and all terms are positive: n additions are off
    by at most n * 2**-53 relative.
    """
    twin.ready(kernel)
    tensors = [torch.randn(size).to(dtype) for size in twin.SIZES]
    # The largest and the smallest numbers neither overflow nor vanish.
    tensors.append(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny]))
    tensors[-1] = tensors[-1].to(dtype)
    for some in (tensors[:-1], tensors):
        right = sum(float(np.sum(t.double().numpy() ** 2)) for t in some)
        count = sum(tensor.numel() for tensor in some)
        sums = []
        for threads in (1, 2, 3):
            with twin.using_threads(threads):
                found, total = kernel.check_finite(some, norm=True)
            assert found.item() == 0
            assert found.dtype == torch.float32
            assert total.dtype == torch.float64
            sums.append(total.item())
        assert len(set(sums)) == 1
        assert abs(sums[0] - right) <= 2 * count * 2.0**-53 * right


@pytest.mark.parametrize("form", twin.FORMS)
@twin.every_rule
def test_kernels_agree(rule: Sgd | Adam, form: str) -> None:
    """Law: both kernels agree bit for bit, but for torch's square root.

    Adam's weights may differ as two computations may; moments take no root.
    """
    twin.ready(cpu_kernels)
    mine = twin.make(rule, form)
    twin.next_step(mine, torch.bfloat16, 0)
    yours = twin.copied(mine)
    before = [twin.plainly(item, form) for item in mine]
    one = torch.tensor(0.5)
    cpu_kernels.update(mine, rule, form, inverse=one, clock=(3, 4))
    eager_kernels.update(yours, rule, form, inverse=one, clock=(3, 4))
    for item, other, old in zip(mine, yours, before, strict=True):
        for one_, two in zip(item.states, other.states, strict=True):
            assert twin.same_bits(one_, two)
        if isinstance(rule, Sgd):
            assert twin.same_bits(item.weight, other.weight)
        elif form not in twin.LEAN:
            limit = twin.bound(rule, old, 0.5).weight
            truths = twin.truth_of(item, form), twin.truth_of(other, form)
            assert twin.beyond(*truths, limit) == 0

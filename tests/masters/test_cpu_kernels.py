"""The compiled kernels beside torch and a slow twin, also in other builds."""

import math
from typing import Any

import kernel_twin as twin
import numpy as np
import pytest
import torch

from halfstep.masters import c_compiler, cpu_kernels
from halfstep.masters.cpu_kernels import Kernels
from halfstep.masters.fused_step import Adam, ParamUpdate, Sgd

ASCENT = Sgd(-1.0, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
"""Adds the gradient to the weight."""
STILL = Sgd(0.0, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
"""Leaves the truth alone, and publishes it."""


@pytest.fixture(scope="module", params=["own", "portable"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    twin.ready(cpu_kernels)
    compiler = c_compiler.find()
    if request.param == "portable":
        command = (*compiler.command, "-DHALFSTEP_PORTABLE")
        compiler = c_compiler.Compiler(command, compiler.version)
    job = c_compiler.CompiledLibrary(cpu_kernels.SOURCE, cpu_kernels.works)
    return Kernels(job.load_or_compile(compiler)[0], cpu_kernels.runtime())


def update(
    kernels: Kernels,
    items: list[ParamUpdate],
    rule: Sgd | Adam,
    form: str,
    inverse: float,
    clock: tuple[int, int],
) -> None:
    factor = torch.tensor(inverse)
    cpu_kernels.update(items, rule, form, inverse=factor, clock=clock, kernels=kernels)


@twin.every_rule
def test_plain_is_torch(kernels: Kernels, rule: Sgd | Adam) -> None:
    """Law: without masters, a step is torch.optim's own within the derived bound.

    It is the slow twin's bit for bit, but for torch's square root in Adam's weights.
    """
    items = twin.make(rule, "plain")
    inverse = 0.125
    for number in range(2):
        twin.next_step(items, number)
        before = twin.copied(items)
        update(kernels, items, rule, "plain", inverse, (0, number))
        for item, old in zip(items, before, strict=True):
            slow = twin.copied(old)
            twin.update(slow, rule, inverse)
            exact = [*zip(item.states, slow.states, strict=True)]
            if isinstance(rule, Sgd):
                exact.append((item.weight, slow.weight))
            for got, right in exact:
                assert twin.same_bits(got, right)
            allowed = twin.bound(rule, old, inverse)
            assert twin.beyond(item.weight, slow.weight, allowed.weight) == 0
            torchs = twin.optimizer_of(rule, old, inverse)
            assert twin.beyond(item.weight, torchs, allowed.weight) == 0
            pairs = zip(item.states, old.states, allowed.states, strict=True)
            for got, wanted, limit in pairs:
                assert twin.beyond(got, wanted, limit) == 0


@twin.every_rule
@pytest.mark.parametrize(
    ("form", "low"),
    [*((form, torch.bfloat16) for form in twin.FORMS[1:]), ("fp32", torch.float16)],
)
def test_forms_are_plain(
    kernels: Kernels, rule: Sgd | Adam, form: str, low: torch.dtype
) -> None:
    """Law: each form is the plain form, then the form's own rounding, bit for bit."""
    items = twin.make(rule, form, low)
    for number in range(2):
        twin.next_step(items, number)
        plain = [twin.plainly(item, form) for item in items]
        clock = (2**40 + 3, number)
        update(kernels, plain, rule, "plain", 0.5, clock)
        update(kernels, items, rule, form, 0.5, clock)
        for item, fp32 in zip(items, plain, strict=True):
            wanted = twin.in_form(fp32, item, form, clock)
            for got, right in zip(twin.held(item), wanted, strict=True):
                assert twin.same_bits(got, right)


@twin.every_form
@pytest.mark.parametrize("rule", [twin.NESTEROV, twin.AMSGRAD])
def test_threads(kernels: Kernels, rule: Sgd | Adam, form: str) -> None:
    """Law: the number of threads changes no bit."""
    items = twin.make(rule, form, sizes=((70001,), (5,), (40000,)))
    twin.next_step(items, 0)
    results = []
    for threads in (1, 2, 3):
        mine = twin.copied(items)
        with twin.using_threads(threads):
            update(kernels, mine, rule, form, 0.5, (1, 2))
        results.append([part for item in mine for part in twin.held(item)])
    for other in results[1:]:
        assert all(map(twin.same_bits, results[0], other))


@twin.every_form
def test_not_finite(kernels: Kernels, form: str) -> None:
    """Law: inf and NaN in a gradient reach the weight, and only their own element."""
    items = twin.make(twin.SGD, form, sizes=((40,),))
    twin.next_step(items, 0)
    bad = [math.inf, -math.inf, math.nan]
    items[0].gradient[[0, 17, 39]] = torch.tensor(bad)
    update(kernels, items, twin.SGD, form, 1.0, (0, 0))
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


def check(kernels: Kernels, gradients: list[torch.Tensor], *, norm: bool) -> Any:
    return cpu_kernels.check_finite(gradients, norm=norm, kernels=kernels)


def test_empty_lists(kernels: Kernels) -> None:
    """Law: no items, and only empty ones, are no mistake."""
    update(kernels, [], twin.ADAMW, "split", 1.0, (0, 0))
    for gradients in ([], [torch.empty(0)]):
        for norm in (True, False):
            found, total = check(kernels, gradients, norm=norm)
            assert found.item() == 0
            assert (total is not None) == norm


def test_strided_gradient(kernels: Kernels) -> None:
    """Law: a gradient that autograd left transposed is read in its weight's order."""
    items = twin.make(twin.SGD, "plain", sizes=((30, 20),))
    before = items[0].weight.clone()
    items[0].gradient = torch.randn(20, 30).t()
    update(kernels, items, twin.SGD, "plain", 1.0, (0, 0))
    step = items[0].gradient * torch.tensor(twin.SGD.lr)
    assert torch.equal(items[0].weight, before - step)
    assert check(kernels, [items[0].gradient], norm=True)[0].item() == 0


@twin.every_float
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_look_finds(kernels: Kernels, dtype: torch.dtype, value: float) -> None:
    """Law: one bad number anywhere is found, at either end and in the middle."""
    tensors = [torch.ones(size).to(dtype) for size in twin.SIZES]
    for norm in (True, False):
        assert check(kernels, tensors, norm=norm)[0].item() == 0
        for tensor in tensors:
            flat = tensor.view(-1)
            for at in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
                flat[at] = value
                assert check(kernels, tensors, norm=norm)[0].item() == 1
                flat[at] = 1


@twin.every_float
def test_look_sums(kernels: Kernels, dtype: torch.dtype) -> None:
    """Law: the sum of squares is numpy's in fp64, whatever the number of threads.

    Squares of fp32 are exact in fp64, and all terms are positive: n additions are off
    by at most n * 2**-53 relative.
    """
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
                found, total = check(kernels, some, norm=True)
            assert found.item() == 0
            assert found.dtype == torch.float32
            assert total.dtype == torch.float64
            sums.append(total.item())
        assert len(set(sums)) == 1
        assert abs(sums[0] - right) <= 2 * count * 2.0**-53 * right


def all_bits() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def edges() -> torch.Tensor:
    """Return fp32 numbers: each high half with low halves at which roundings turn.

    fp16 rounds at bit 12 of a normal number and higher up for subnormal ones; the high
    halves that bf16 does not have vary those bits.
    """
    low = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    low += [0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    high = all_bits().to(torch.int32) << 16
    return torch.cat([high | word for word in low]).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gradient(kernels: Kernels, dtype: torch.dtype) -> None:
    """Law: each of the 65,536 gradients is read as what torch reads."""
    gradient = all_bits().view(dtype)
    weight = torch.zeros(gradient.shape)
    item = ParamUpdate(weight, gradient)
    update(kernels, [item], ASCENT, "plain", 1.0, (0, 0))
    assert twin.same_bits(weight, 0 + gradient.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_rounding(kernels: Kernels, dtype: torch.dtype) -> None:
    """Law: masters are published as torch rounds them: subnormal, tied, too large."""
    master = edges()
    weight = torch.zeros(master.shape, dtype=dtype)
    gradient = torch.zeros(master.shape, dtype=dtype)
    item = ParamUpdate(weight, gradient, master)
    update(kernels, [item], STILL, "fp32", 1.0, (0, 0))
    assert twin.same_bits(master, edges())
    assert twin.same_bits(weight, edges().to(dtype))


@pytest.mark.parametrize("form", ["split", "kahan", "stochastic"])
def test_every_encoding(kernels: Kernels, form: str) -> None:
    """Law: each form rounds numbers at all edges as its room of torch operations."""
    truth = 0 + edges()
    item = twin.make(ASCENT, form, sizes=((truth.numel(),),))[0]
    item.weight.zero_()
    if item.residual is not None:
        item.residual.zero_()
    item.gradient = truth
    fp32 = ParamUpdate(truth, truth)
    wanted = twin.in_form(fp32, item, form, (7, 8))
    update(kernels, [item], ASCENT, form, 1.0, (7, 8))
    assert all(map(twin.same_bits, twin.held(item), wanted))


@pytest.mark.parametrize("form", ["split", "kahan"])
def test_every_decoding(kernels: Kernels, form: str) -> None:
    """Law: each weight with each kind of rest is decoded as by torch operations."""
    rests = [0, 1, 0x3F80, 0x7FFF, 0x8000 - (1 << 16), 0xBF80 - (1 << 16), -1]
    high = all_bits().repeat(len(rests)).view(torch.bfloat16)
    extra = torch.tensor(rests, dtype=torch.int16).repeat_interleave(1 << 16)
    extra = extra if form == "split" else extra.view(torch.bfloat16)
    nothing = torch.zeros(high.shape)
    item = ParamUpdate(high, nothing, extra)
    fp32 = twin.plainly(item, form)
    wanted = twin.in_form(fp32, item, form, (0, 0))
    update(kernels, [item], STILL, form, 1.0, (0, 0))
    assert all(map(twin.same_bits, twin.held(item), wanted))


def test_one_thread(kernels: Kernels) -> None:
    """Law: without a runtime of torch's, one thread computes the same bits."""
    alone = Kernels(kernels.library, None)
    items = twin.make(twin.AMSGRAD, "stochastic", sizes=((70001,), (5,)))
    twin.next_step(items, 0)
    mine = twin.copied(items)
    with twin.using_threads(2):
        update(kernels, items, twin.AMSGRAD, "stochastic", 0.5, (1, 2))
        update(alone, mine, twin.AMSGRAD, "stochastic", 0.5, (1, 2))
        gradients = [item.gradient for item in items]
        both = [check(each, gradients, norm=True)[1] for each in (kernels, alone)]
    assert both[0] == both[1]
    for one, other in zip(items, mine, strict=True):
        assert all(map(twin.same_bits, twin.held(one), twin.held(other)))


def test_large_numbers_of_a_clock(kernels: Kernels) -> None:
    """Law: seeds, steps and indices count modulo 2**64, negative ones too."""
    item = twin.make(twin.SGD, "stochastic", sizes=((99,),))[0]
    item.gradient, item.param_index = torch.randn(99), 2**40 + 1
    clock = (-3, 2**64 + 5)
    fp32 = twin.plainly(item, "stochastic")
    update(kernels, [fp32], twin.SGD, "plain", 1.0, clock)
    wanted = twin.in_form(fp32, item, "stochastic", clock)
    update(kernels, [item], twin.SGD, "stochastic", 1.0, clock)
    assert twin.same_bits(item.weight, wanted[0])


def test_many_small_tensors(kernels: Kernels) -> None:
    """Law: threads share a thousand tensors, none is left out, none taken twice."""
    items = twin.make(twin.SGD, "plain", sizes=[(size,) for size in range(1000)])
    twin.next_step(items, 0)
    before = [item.weight.clone() for item in items]
    with twin.using_threads(2):
        update(kernels, items, ASCENT, "plain", 1.0, (0, 0))
    for item, weight in zip(items, before, strict=True):
        assert torch.equal(item.weight, weight + item.gradient)


def test_lazy_signs(kernels: Kernels) -> None:
    """Law: a gradient whose sign is yet to be turned is read as torch reads it."""
    number = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j])
    gradient = torch._neg_view(torch.tensor([2.0, -4.0, 6.0]))
    assert gradient.is_neg()
    assert number.conj().imag.is_neg(), "autograd of complex numbers gives such"
    weight = torch.zeros(3)
    item = ParamUpdate(weight, gradient)
    update(kernels, [item], ASCENT, "plain", 1.0, (0, 0))
    assert torch.equal(weight, torch.tensor([-2.0, 4.0, -6.0]))
    assert check(kernels, [gradient], norm=True)[1] == 56


def test_self_check_in_any_mood(kernels: Kernels) -> None:
    """Law: neither a default dtype nor flushed subnormals make the check fail."""
    torch.set_default_dtype(torch.float64)
    flushed = torch.set_flush_denormal(True)
    try:
        assert not flushed or c_compiler.flushes_subnormals()
        assert cpu_kernels.works(kernels.library)
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)
    assert not c_compiler.flushes_subnormals()
    assert cpu_kernels.works(kernels.library)

"""The compiled kernels: every bit pattern, and other builds of them."""

import kernel_twin as twin
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


def norm_of(gradients: list[torch.Tensor], kernels: Kernels) -> float:
    squares = cpu_kernels.check_finite(gradients, norm=True, kernels=kernels)[1]
    return squares.item()


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
    twin.next_step(items, torch.bfloat16, 0)
    mine = twin.copied(items)
    with twin.using_threads(2):
        update(kernels, items, twin.AMSGRAD, "stochastic", 0.5, (1, 2))
        update(alone, mine, twin.AMSGRAD, "stochastic", 0.5, (1, 2))
        gradients = [item.gradient for item in items]
        both = [norm_of(gradients, each) for each in (kernels, alone)]
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
    twin.next_step(items, torch.float32, 0)
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
    assert norm_of([gradient], kernels) == 56


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

"""autograd.Functions under autocast: `custom_fwd` and `custom_bwd`, in both styles.

torch's own decorators on a classic Function are the oracle.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from twins import Contexts, autocast_state, entered, same_bits

from halfstep.casting import custom_functions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

REGIONS: list[Contexts] = [(), (BF16,), (FP16,), (FP16, None), (BF16, FP16)]
IN_REGIONS = pytest.mark.parametrize("regions", REGIONS)
CASTS = pytest.mark.parametrize("cast_inputs", [None, FP32, BF16, FP16])


def state() -> tuple[object, ...]:
    return autocast_state()[:2]


Log = list[tuple[object, ...]]


def backward_of(log: Log) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        log.append(("backward", x.dtype, w.dtype, grad.dtype, *state()))
        return grad @ w.mT, x.mT @ grad

    return backward


def classic(amp: Any, log: Log, cast_inputs: torch.dtype | None) -> Any:
    """Return a classic x @ w whose methods log what they see, decorated by `amp`."""

    class Product(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            log.append(("forward", x.dtype, w.dtype, *state()))
            ctx.save_for_backward(x, w)
            return x @ w

        backward = staticmethod(amp.custom_bwd(device_type="cpu")(backward_of(log)))

    return Product


def with_setup(log: Log, cast_inputs: torch.dtype | None, bwd: Any = None) -> Any:
    """Return the same in the other style; `bwd` replaces its backward."""

    class Product(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @custom_functions.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(x: Tensor, w: Tensor) -> Tensor:
            log.append(("forward", x.dtype, w.dtype, *state()))
            return x @ w

        @staticmethod
        @custom_functions.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            assert output.grad_fn is None
            ctx.save_for_backward(*inputs)

        backward = staticmethod(
            custom_functions.custom_bwd(bwd or backward_of(log), device_type="cpu")
        )

    return Product


def operands(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    return x, torch.randn(4, 2, dtype=dtype, requires_grad=True)


def whole() -> tuple[Tensor, Tensor]:
    """Return two matrices of -1, 0 and 1: bf16 holds all that is derived from them."""
    x, w = operands()
    x, w = (each.detach().round().clamp(-1, 1) for each in (x, w))
    return x.requires_grad_(), w.requires_grad_()


def run(product: Any, regions: Contexts, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Return output and gradients; backward runs outside of the region."""
    x, w = operands(dtype)
    with entered(regions):
        y = product.apply(x, w)
    return [y, *torch.autograd.grad(y.square().sum(), (x, w))]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(map(same_bits, left, right))


@IN_REGIONS
@CASTS
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
@pytest.mark.parametrize("style", ["classic", "setup_context"])
def test_it_is_torchs(
    regions: Contexts, cast_inputs: torch.dtype | None, dtype: torch.dtype, style: str
) -> None:
    """Law: a Function sees and returns, to the bit, what a classic one does in torch.

    Also with `setup_context`, for which torch has no decorator.
    """
    log: Log = []
    expected_log: Log = []
    if style == "classic":
        product = classic(custom_functions, log, cast_inputs)
    else:
        product = with_setup(log, cast_inputs)
    actual = run(product, regions, dtype)
    expected = run(classic(torch.amp, expected_log, cast_inputs), regions, dtype)
    assert_same(actual, expected)
    assert log == expected_log
    assert [entry[0] for entry in log] == ["forward", "backward"]


def unmarked(amp: Any) -> None:
    product = classic(amp, [], None)

    class Forgot(product):  # type: ignore[misc, valid-type]
        forward = staticmethod(product.forward.__wrapped__)

    Forgot.apply(*operands()).sum().backward()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda amp: amp.custom_fwd(device_type=torch.device("cpu")),
        lambda amp: amp.custom_bwd(device_type=0),
        lambda amp: amp.custom_fwd(print, device_type=None),
        lambda amp: amp.custom_fwd(),
        lambda amp: amp.custom_fwd(print, "cpu"),
        lambda amp: amp.custom_bwd(device_type="cpu")(print)(),
        lambda amp: classic(amp, [], None).apply(torch.ones(2, 2)),
        lambda amp: classic(amp, [], None).apply(torch.ones(2, 2), torch.ones(3, 3)),
        unmarked,
    ],
)
def test_errors_are_torchs(wrong: Callable[[Any], object]) -> None:
    """Law: wrong use of the decorators gets torch's own error."""
    with pytest.raises(Exception, match=r".") as theirs:
        wrong(torch.amp)
    with pytest.raises(theirs.type) as ours:
        wrong(custom_functions)
    assert str(ours.value) == str(theirs.value)


def test_stand_in_for_a_ctx() -> None:
    """Law: methods called by hand, with an object in place of the ctx, work too.

    A decorated method keeps its name.
    """
    x, w = operands()
    results = []
    for amp in (torch.amp, custom_functions):
        log: Log = []
        ctx = SimpleNamespace(saved_tensors=(x, w))
        ctx.save_for_backward = lambda *saved: saved
        product = classic(amp, log, BF16)
        assert [product.forward.__name__, product.backward.__name__] == [
            "forward",
            "backward",
        ]
        with torch.autocast("cpu", FP16):
            y = product.forward(ctx, x, w)
        results.append([y, *product.backward(ctx, y.float()), log])
    assert_same(results[0][:3], results[1][:3])
    assert results[0][3:] == results[1][3:]


# What setup_context gets


def test_the_output_is_not_cast() -> None:
    """Law: `setup_context` gets inputs as forward did, and forward's own output."""
    seen: list[object] = []
    fwd = custom_functions.custom_fwd(device_type="cpu", cast_inputs=BF16)

    class Wide(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(x: Tensor) -> Tensor:
            return x.float() * 2

        @staticmethod
        @fwd
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            del ctx
            assert not torch.is_grad_enabled()
            seen.extend((inputs[0].dtype, output.dtype, state()))

    with torch.autocast("cpu", FP16):
        Wide.apply(torch.randn(2))  # type: ignore[no-untyped-call]
    assert seen == [BF16, FP32, (False, FP16)]


def test_undecorated_setup_context() -> None:
    """Law: backward without a known region is an error that names the Function."""
    product = with_setup([], None)
    bare = product.setup_context.__wrapped__

    class Lost(product):  # type: ignore[misc, valid-type]
        setup_context = staticmethod(bare)

    x, w = operands()
    with pytest.raises(RuntimeError, match=r"decorate Lost\.setup_context"):
        Lost.apply(x, w).sum().backward()
    with pytest.raises(RuntimeError, match=r"^LostGenerated\.backward does not know"):
        grad(lambda x: Lost.apply(x, w).sum())(x.detach())


def test_exceptions_restore_the_state() -> None:
    """Law: after an error in forward or backward, autocast is as it was."""

    def broken(ctx: Any, grad: Tensor) -> None:
        del ctx, grad
        assert state() == (True, FP16)
        raise ZeroDivisionError

    before = state()
    with torch.autocast("cpu", FP16):
        for product in (classic(custom_functions, [], FP32), with_setup([], FP32)):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                product.apply(torch.ones(2, 3), torch.ones(2, 3))
            assert state() == (True, FP16)
        y = with_setup([], None, broken).apply(*operands())
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert state() == before


@pytest.mark.parametrize("cast_inputs", [None, BF16])
def test_func_grad_and_vmap(cast_inputs: torch.dtype | None) -> None:
    """Law: functorch's transforms give what they do for operands cast by hand."""
    product = with_setup([], cast_inputs).apply
    x, w = (each.detach() for each in whole())
    rows = x[:, None, :]

    def loss(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: of(x, w).float().square().sum()

    def results(of: Callable[..., Tensor]) -> list[Tensor]:
        first = grad(loss(of), argnums=(0, 1))
        rowwise = vmap(of, in_dims=(0, None))
        return [
            *first(x, w),
            grad(lambda x, w: first(x, w)[1].sum())(x, w),
            rowwise(rows, w),
            vmap(grad(loss(of)), in_dims=(0, None))(rows, w),
            grad(loss(rowwise))(rows, w),
            jacrev(of)(x, w),
        ]

    with entered((BF16,)):
        actual = results(product)
    assert_same(actual, results(lambda x, w: x.to(BF16) @ w.to(BF16)))

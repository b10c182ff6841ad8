"""16-bit gradients added up in fp32: the same numbers, less memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.casting.grad_accumulation import Fp32GradAccumulator
from halfstep.numerics.accumulate import add_

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONES = torch.ones(4, 3, dtype=BF16)
LOW = pytest.mark.parametrize("dtype", [BF16, FP16])


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return (torch.randn(shape) * torch.exp2(torch.randn(shape) * 3)).to(dtype)


def added(total: Tensor, part: Tensor) -> Any:
    """Return a sum by numpy: each number rounded once, to fp32."""
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        exact = total.double().numpy() + part.double().numpy()
    return exact.astype(np.float32)


SHAPES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "empty": ((0, 3), lambda t: t),
    "every other": ((5, 8), lambda t: t[:, ::2]),
    "expanded": ((5, 1), lambda t: t.expand(5, 7)),
    "one chunk": ((1 << 18,), lambda t: t),
    "more": (((1 << 18) + 1,), lambda t: t),
    "large transposed": ((3, 1 << 18), lambda t: t.T),
}


@LOW
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_fp32_arithmetic(shape: str, dtype: torch.dtype) -> None:
    """Law: the sum is that of fp32 numbers, rounded once, in any memory layout."""
    size, view = SHAPES[shape]
    for dense_total, dense_part in ((False, False), (True, False), (False, True)):
        total, part = view(random(*size)), view(random(*size, dtype=dtype))
        if dense_total or shape == "expanded":  # what is expanded takes no sum
            total = total.contiguous()
        if dense_part:
            part = part.contiguous()
        expected, kept = added(total, part), part.clone()
        place = total.data_ptr()
        add_(total, part)
        np.testing.assert_array_equal(total.numpy(), expected)
        assert total.data_ptr() == place
        assert torch.equal(part, kept)


def test_a_sum_makes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is large is added in pieces of at most a chunk."""
    sizes: list[int] = []
    whole = torch._foreach_add_

    def watch(totals: Any, parts: Any) -> None:
        sizes.extend(part.numel() for part in parts)
        whole(totals, parts)

    monkeypatch.setattr(torch, "_foreach_add_", watch)
    add_(torch.zeros(3, 1 << 17), torch.ones(3, 1 << 17, dtype=BF16))
    assert sizes == [1 << 18, 1 << 17]


def opened() -> Fp32GradAccumulator:
    """Return one that takes gradients here, as in a backward pass that it has begun."""
    gradients = Fp32GradAccumulator()
    gradients._graph_task = torch._C._current_graph_task_id()
    return gradients


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 3))


@torch.no_grad()
def take(gradients: Fp32GradAccumulator, param: Tensor, part: Tensor) -> bool:
    """Offer a gradient as a backward pass does: grad mode is off."""
    return gradients.accumulate(param, part)


REFUSALS: dict[str, Callable[[Any, Any], object]] = {
    "closed": lambda gradients, _: gradients.stop(),
    "in another pass": lambda gradients, _: setattr(gradients, "_graph_task", 7),
    "hook": lambda _, param: param.register_hook(lambda grad: grad),
    "hook after": lambda _, param: param.register_post_accumulate_grad_hook(print),
    "sparse sum": lambda _, param: setattr(
        param, "grad", torch.zeros(4, 3).to_sparse()
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_left_to_autograd(why: str) -> None:
    """Law: closed, hooked or sparse: it is refused, and nothing has changed."""
    gradients, param = opened(), weight()
    REFUSALS[why](gradients, param)
    before = param.grad
    assert not take(gradients, param, ONES)
    assert param.grad is before


def test_which_gradients_are_left_to_autograd() -> None:
    """Law: sparse ones, fp32 ones, and those that shall have gradients themselves.

    A hook that is gone is none.
    """
    gradients, param = opened(), weight()
    for part in (ONES.to_sparse(), ONES.float()):
        assert not take(gradients, param, part)
    assert not gradients.accumulate(param, ONES)
    assert param.grad is None
    param.register_hook(lambda grad: grad).remove()
    param.register_post_accumulate_grad_hook(lambda _: None).remove()
    assert take(gradients, param, ONES)


def test_the_backward_pass_of_a_loss() -> None:
    """Law: taken are gradients of the pass that begins at the loss, while it runs.

    Not those of a pass inside it, nor of one before or after.
    """
    gradients, param = Fp32GradAccumulator(), weight()
    taken: dict[str, bool] = {}

    def offer(where: str) -> None:
        with torch.no_grad():
            taken[where] = gradients.accumulate(param, ONES)

    def inside(grad: Tensor) -> Tensor:
        offer("in it")
        other = torch.ones((), requires_grad=True)
        with torch.enable_grad():
            twice: Any = other * 2
            twice.register_hook(lambda _: offer("nested"))
            torch.autograd.grad(twice, [other])
        offer("in it again")
        return grad

    start = torch.ones((), requires_grad=True)
    middle: Any = start * 1
    middle.register_hook(inside)
    loss: Any = middle * 1
    offer("before")
    gradients.start(loss)
    offer("begun")
    loss.backward()
    gradients.stop()
    offer("after")
    assert taken == {
        "before": False,
        "begun": False,
        "in it": True,
        "nested": False,
        "in it again": True,
        "after": False,
    }
    gradients.start(torch.ones(()))
    gradients.stop()


def test_buffers_serve_again() -> None:
    """Law: on a CPU the memory of a gradient serves the next step's."""
    gradients, param = opened(), weight()
    places = set()
    for number in range(4):
        assert take(gradients, param, torch.full((4, 3), number, dtype=BF16))
        assert param.grad.tolist() == [[number] * 3] * 4
        places.add(param.grad.data_ptr())
        param.grad = None
    assert len(places) == 1


KEPT: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "view": lambda grad: grad[0],
    "flat": lambda grad: grad.view(-1),
    "numpy": lambda grad: grad.numpy(),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_kept_gradients_stay(keep: Callable[[Tensor], Any]) -> None:
    """Law: a gradient that somebody has kept is never written over."""
    gradients, param = opened(), weight()
    kept = []
    for number in range(3):
        take(gradients, param, torch.full((4, 3), number, dtype=BF16))
        kept.append(keep(param.grad))
        param.grad = None
    for number, one in enumerate(kept):
        assert (one == number).all()


def test_layout_and_memory() -> None:
    """Law: a gradient lies as its weight, in other memory than autograd's."""
    shape = (2, 3, 4, 5)
    param = nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
    part = torch.ones(shape, dtype=BF16)
    take(opened(), param, part)
    assert param.grad.stride() == param.stride()
    part.zero_()
    assert (param.grad == 1).all()


def test_buffers_end_with_their_weight() -> None:
    """Law: a buffer that fits no more is left; neither outlives the model."""
    gradients, param = opened(), weight()
    take(gradients, param, ONES)
    param.grad = None
    param.data = torch.zeros(2)
    take(gradients, param, torch.ones(2, dtype=BF16))
    assert torch.equal(param.grad, torch.ones(2))  # type: ignore[arg-type]
    gone = weakref.ref(param)
    del param
    gc.collect()
    assert gone() is None
    assert len(gradients._buffers) == 0

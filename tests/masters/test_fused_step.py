"""Tensors that a kernel would read as something else, rejected before it does."""

from functools import partial
from typing import Any

import kernel_twin as twin
import pytest
import torch

from halfstep.errors import UserError
from halfstep.masters import cpu_kernels, triton_kernels

LOW, WIDE = torch.ones(8).bfloat16(), torch.ones(8)
ITEMS: list[tuple[str, Any, str]] = [
    ("gradient", WIDE.double(), "gradient 1 is 8 numbers of torch.float64 on cpu"),
    ("gradient", torch.ones(7), "A gradient has another size than its weight: "),
    ("gradient", WIDE.to("meta"), "gradient 1 is 8 numbers of torch.float32 on meta"),
    ("weight", WIDE.half(), "weight of parameter 1 is 8 numbers of torch.float16"),
    ("weight", torch.ones(16).bfloat16()[::2], "on cpu with strides (2,); "),
    ("residual", torch.ones(7, dtype=torch.int16), "residual of parameter 1 is 7 num"),
    ("residual", None, "residual of parameter 1 is missing"),
    ("residual", WIDE, "residual of parameter 1 is 8 numbers of torch.float32"),
    ("states", (WIDE, LOW), "state exp_avg_sq of parameter 1 is 8 numbers of torch.bf"),
    ("states", (WIDE,), "state exp_avg_sq of parameter 1 is missing"),
    ("states", (WIDE.to("meta"), WIDE), "of torch.float32 on meta"),
    ("states", (torch.ones(1).expand(8), WIDE), "with strides (0,); "),
    ("states", (torch._neg_view(WIDE), WIDE), "without gaps or lazy signs"),
    ("step", torch.ones((), dtype=torch.float64), "step of parameter 1 is 1 numbers"),
    ("step", None, "step of parameter 1 is missing"),
]


@pytest.mark.parametrize("kernel", [cpu_kernels, triton_kernels])
@pytest.mark.parametrize(("name", "value", "words"), ITEMS)
def test_refused(kernel: Any, name: str, value: Any, words: str) -> None:
    """Law: what a kernel would misread is refused, with its place; nothing changes."""
    one = torch.ones(())
    more = {"found_inf": one} if kernel is triton_kernels else {}
    if kernel is cpu_kernels:
        twin.ready(kernel)
    items = twin.make(twin.ADAMW, "split", sizes=((6,), (8,)))
    twin.next_step(items, 0)
    setattr(items[1], name, value)
    before = [tensor.clone() for tensor in twin.held(items[0])]
    with pytest.raises(UserError) as caught:
        kernel.update(items, twin.ADAMW, "split", inverse=one, clock=(0, 0), **more)
    assert words in str(caught.value)
    for now, then in zip(twin.held(items[0]), before, strict=True):
        assert twin.same_bits(now, then)


@pytest.mark.parametrize("kernel", [cpu_kernels, triton_kernels])
def test_gradients_refused(kernel: Any) -> None:
    """Law: of gradients alone, the dtype and the device are checked."""
    if kernel is cpu_kernels:
        twin.ready(kernel)
    with pytest.raises(UserError, match=r"gradient 1 is 8 numbers of torch\.int32"):
        kernel.check_finite([WIDE, WIDE.int()], norm=True)
    with pytest.raises(UserError, match=r"gradient 1 is .* on meta"):
        kernel.check_finite([WIDE, WIDE.to("meta")], norm=True)


def test_a_weight_that_grows() -> None:
    """Law: at the same address, too, a weight of another size is checked again."""
    one, (item,) = torch.ones(()), twin.make(twin.ADAMW, "split", sizes=((8,),))
    memory = torch.ones(16).bfloat16()
    item.weight, item.gradient = memory[:8], memory[8:]
    update = partial(twin.ready(cpu_kernels).update, inverse=one, clock=(0, 0))
    update([item], twin.ADAMW, "split")
    item.weight, item.gradient = memory, memory.clone()
    with pytest.raises(UserError, match="residual of parameter 0 is 8 numbers"):
        update([item], twin.ADAMW, "split")

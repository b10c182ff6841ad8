"""apex's multi_tensor_apply and amp_C: what they write, and what sets the flag."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from halfstep.compat.apex import amp_C
from halfstep.compat.apex.amp import AmpError
from halfstep.compat.apex.multi_tensor_apply import multi_tensor_applier

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


scale = partial(multi_tensor_applier, amp_C.multi_tensor_scale)
axpby = partial(multi_tensor_applier, amp_C.multi_tensor_axpby)
l2norm = partial(multi_tensor_applier, amp_C.multi_tensor_l2norm)


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def two(dtype: torch.dtype, *, spoilt: float = 0.5) -> list[Tensor]:
    return [torch.tensor([1.0, -2.0, spoilt], dtype=dtype), torch.ones(2, 2).to(dtype)]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale(source: torch.dtype, target: torch.dtype) -> None:
    """Law: outputs are inputs times the scale, in the outputs' dtype."""
    seen, outputs = flag(), [torch.zeros(3, dtype=target), torch.empty(2, 2).to(target)]
    scale(seen, [two(source), outputs], 1 / 4)
    assert torch.equal(outputs[0], torch.tensor([0.25, -0.5, 0.125], dtype=target))
    assert torch.equal(outputs[1], torch.full((2, 2), 0.25, dtype=target))
    assert seen.item() == 0


def test_scale_in_place_and_in_fp32() -> None:
    """Law: an input may be its output; 60000 * 2 / 4 does not pass through inf."""
    tensors = [torch.tensor([60000.0]).half()]
    scale(flag(), [tensors, tensors], 0.5)
    assert tensors[0].item() == 30000
    seen = flag()
    wide = [torch.zeros(1)]
    scale(seen, [[torch.tensor([60000.0]).half()], wide], 2.0)
    assert (wide[0].item(), seen.item()) == (120000, 0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_flag_of_scale(bad: float) -> None:
    """Law: an input that is not finite sets the flag and goes on; nothing clears it."""
    seen, outputs = flag(), two(torch.float32)
    for spoilt in (bad, 0.5):
        inputs = two(torch.float16, spoilt=spoilt)
        scale(seen, [inputs, outputs], 1.0)
        assert seen.item() == 1
        expected = torch.tensor(spoilt)
        assert torch.equal(outputs[0][2].isfinite(), expected.isfinite())


@pytest.mark.parametrize(
    ("check", "x_bad", "y_bad", "found"),
    [
        (-1, True, False, 1),
        (-1, False, True, 1),
        (-1, False, False, 0),
        (0, True, False, 1),
        (0, False, True, 0),
        (1, True, False, 0),
        (1, False, True, 1),
    ],
)
def test_axpby(check: int, x_bad: bool, y_bad: bool, found: int) -> None:
    """Law: a*x + b*y, and the flag looks at x (0), y (1) or both (-1)."""
    x = two(torch.float16, spoilt=math.inf if x_bad else 0.5)
    y = two(torch.float32, spoilt=math.nan if y_bad else 0.5)
    seen = flag()
    axpby(seen, [x, y, y], 2.0, -3.0, check)
    # 2 * 1 - 3 * 1, 2 * -2 - 3 * -2; and of ones.
    assert y[0][:2].tolist() == [-1.0, 2.0]
    assert torch.equal(y[1], torch.full((2, 2), -1.0))
    assert seen.item() == found


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype: torch.dtype) -> None:
    """Law: the root of all squares, in fp32, and of each tensor where asked."""
    tensors = [
        torch.tensor([3.0, 4.0], dtype=dtype),
        torch.full((4, 36), 1.0).to(dtype),
    ]
    norm, each = l2norm(flag(), [tensors], True)  # noqa: FBT003
    assert (norm.dtype, norm.tolist(), each.tolist()) == (
        torch.float32,
        [13.0],
        [5.0, 12.0],
    )
    _, none = l2norm(flag(), [tensors])
    assert none.shape == (0,)


def test_l2norm_beyond_fp16_and_fp32() -> None:
    """Law: squares beyond fp16 count; beyond fp32 the norm is inf and sets the flag."""
    seen = flag()
    large = [torch.full((4,), 30000.0).half()]
    norm, _ = l2norm(seen, [large])
    assert (norm.item(), seen.item()) == (60000, 0)
    huge = [torch.full((4,), 1e38)]
    norm, _ = l2norm(seen, [huge])
    assert (norm.item(), seen.item()) == (math.inf, 1)


def test_nothing_in_the_lists() -> None:
    """Law: empty lists write nothing, and have norm 0."""
    seen = flag()
    scale(seen, [[], []], 1.0)
    axpby(seen, [[], [], []], 1.0, 1.0, -1)
    norm, each = l2norm(seen, [[]], True)  # noqa: FBT003
    assert (norm.tolist(), each.tolist(), seen.item()) == ([0.0], [], 0)


def test_refusals() -> None:
    """Law: lists that do not match, and what is not there, are named."""
    one = [torch.ones(1)]
    with pytest.raises(
        AmpError, match=r"takes 2 lists of one length, not of.*\[1, 0\]"
    ):
        scale(flag(), [one, []], 1.0)
    with pytest.raises(AmpError, match="arg_to_check=2 must be 0"):
        axpby(flag(), [one, one, one], 1.0, 1.0, 2)
    with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_lamb is not here"):
        amp_C.multi_tensor_lamb  # noqa: B018
    assert not hasattr(amp_C, "multi_tensor_adam")
    multi_tensor_applier.check_avail()
    assert multi_tensor_applier.available

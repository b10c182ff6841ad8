"""Masks of fp32's lowest number, which is -inf in 16 bits: plans keep them in fp32."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_models import Odd, compiled, planned
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import halfstep as hs
from halfstep.graph import load_plan
from halfstep.graph.rewrite import saturating_cast

LOWEST = torch.finfo(torch.float32).min
LOWEST_BF16 = torch.finfo(torch.bfloat16).min
LOW_KINDS = dict.fromkeys(("add", "mul", "div", "masked_fill", "softmax"), "allow")
IN_BF16 = {"method": "painting", "kinds": LOW_KINDS}
"""Options of a plan that would add masks to scores in bf16."""
WAYS = pytest.mark.parametrize("way", [planned, compiled])


def padded_batch() -> Tensor:
    """Return three texts of 6 tokens: one of full length, one of 2, one of padding."""
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] = 1.0
    x[1, 2:, 0] = x[2, :, 0] = -1.0
    return x


def hidden(x: Tensor) -> Tensor:
    """Return which tokens are padding, of shape (B, 1, T)."""
    return (x[:, :, 0] < 0)[:, None]


def attend(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    return (m.scores(x) + mask).softmax(-1) @ x


def multiplied(m: Odd, x: Tensor) -> Tensor:
    return attend(m, x, (1.0 - (~hidden(x)).float()) * LOWEST)


def filled(m: Odd, x: Tensor) -> Tensor:
    mask = torch.full((6, 6), LOWEST).triu(1).expand(3, -1, -1)
    return attend(m, x, mask.masked_fill(hidden(x), LOWEST))


def biased(m: Odd, x: Tensor) -> Tensor:
    """Add a learned bias to the mask, as T5 does."""
    return attend(m, x, hidden(x).float() * LOWEST + m.a.bias[:6])


def scores_filled(m: Odd, x: Tensor) -> Tensor:
    return m.scores(x).masked_fill(hidden(x), LOWEST).softmax(-1) @ m.b(x)


def chosen_tensor(m: Odd, x: Tensor) -> Tensor:
    return attend(m, x, torch.where(hidden(x), torch.tensor(LOWEST), 0.0))


def written(m: Odd, x: Tensor) -> Tensor:
    mask = torch.zeros(3, 1, 6)
    mask[hidden(x)] = LOWEST
    return attend(m, x, mask)


def without_grad(m: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = hidden(x).float() * LOWEST
    return attend(m, x, mask)


def fused(m: Odd, x: Tensor) -> Tensor:
    mask = hidden(x).float() * LOWEST
    return scaled_dot_product_attention(m.a(x), m.b(x), x, mask.expand(-1, 6, -1))


def windowed(m: Odd, x: Tensor) -> Tensor:
    """Spread a mask by a matmul, as LED and Longformer do."""
    mask = hidden(x).float().masked_fill(hidden(x), LOWEST)
    window = torch.eye(6) + torch.eye(6).roll(1, 0)
    return attend(m, x, (mask @ window).clamp_min(LOWEST))


def from_buffer(m: Odd, x: Tensor) -> Tensor:
    return attend(m, x, m.mask.where(hidden(x), 0.0))


def made_finite(m: Odd, x: Tensor) -> Tensor:
    mask = torch.zeros(3, 1, 6).masked_fill(hidden(x), -math.inf)
    return attend(m, x, mask.nan_to_num())


def halves(m: Odd, x: Tensor) -> Tensor:
    causal = torch.full((6, 6), LOWEST / 2).triu(0)
    return attend(m, x, hidden(x).float() * (LOWEST / 2) + causal)


def scaled(m: Odd, x: Tensor) -> Tensor:
    return (m.scores(x).masked_fill(hidden(x), LOWEST / 4) / 0.25).softmax(-1) @ x


def pooled(m: Odd, kept: Tensor) -> Tensor:
    """Give a layer the lowest number, with weights so small that fp32 holds the sum."""
    return nn.functional.linear(kept.amax(1), m.b.weight / 64) / -LOWEST


def pooled_filled(m: Odd, x: Tensor) -> Tensor:
    return pooled(m, m.a(x).masked_fill(hidden(x).mT, LOWEST))


def pooled_tensor(m: Odd, x: Tensor) -> Tensor:
    return pooled(m, torch.where(hidden(x).mT, torch.tensor(LOWEST), m.a(x)))


def pooled_written(m: Odd, x: Tensor) -> Tensor:
    kept = m.a(x).clone()
    kept[hidden(x)[:, 0]] = LOWEST
    return pooled(m, kept)


def pooled_view(m: Odd, x: Tensor) -> Tensor:
    kept = m.a(x).clone()
    kept[2].fill_(LOWEST)
    return pooled(m, kept)


BODIES = [
    *(multiplied, filled, biased, scores_filled, chosen_tensor, written, without_grad),
    *(fused, windowed, from_buffer, made_finite, halves, scaled),
    *(pooled_filled, pooled_tensor, pooled_written, pooled_view),
]
TRACED = [windowed, written, from_buffer]


def grads_after(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's
@pytest.mark.parametrize(
    ("body", "way"),
    [(body, planned) for body in BODIES] + [(body, compiled) for body in TRACED],
)
def test_a_text_of_padding_is_as_in_fp32(
    body: Callable[..., Any], way: Callable[..., Any]
) -> None:
    """Law: a plan gives fp32's results and gradients, to bf16's precision; no NaN."""
    model, x = Odd(body), padded_batch()
    expected = model(x)
    expected_grads = grads_after(model, expected)
    output = way(model, x, **IN_BF16)(x)
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    grads = grads_after(model, output)
    assert grads.keys() == expected_grads.keys()
    torch.testing.assert_close(grads, expected_grads, rtol=0.1, atol=0.1)


def moved(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    return attend(m, x, mask.mT.mT.to(torch.float32) * hidden(x).float())


def summed(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    """Add a mask as nn.MultiheadAttention does if it returns weights."""
    mask = mask.expand(-1, 6, -1)
    return torch.baddbmm(mask, m.a(x), m.b(x).mT).softmax(-1) @ x


def summed_flat(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    rows = [
        torch.addmm(each.expand(6, -1), one, two.mT)
        for each, one, two in zip(mask, m.a(x), m.b(x), strict=True)
    ]
    return torch.stack(rows).softmax(-1) @ x


def filled_too(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return (m.scores(x) + mask).masked_fill(causal, LOWEST).softmax(-1) @ x


def added_to_parts(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    scores = m.scores(x)
    scores[..., :3] += mask[..., :3] * 1.0
    scores[..., 3:] += mask[..., 3:] * 1.0
    return scores.softmax(-1) @ x


def by_hand(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
    scores = m.scores(x) + mask
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ x


GIVEN = [moved, summed, summed_flat, filled_too, added_to_parts, by_hand]


@pytest.mark.parametrize(
    ("body", "way"), [*((body, planned) for body in GIVEN), (summed, compiled)]
)
def test_a_mask_as_input(body: Callable[..., Any], way: Callable[..., Any]) -> None:
    """Law: it does not matter whether the model makes the mask or is given it."""
    model, x = Odd(body), padded_batch()
    mask = hidden(x).float() * LOWEST
    output = way(model, x, mask, **IN_BF16)(x, mask)
    torch.testing.assert_close(output, model(x, mask), rtol=0.05, atol=0.05)


def test_buffers_without_numbers() -> None:
    """Law: a buffer that cannot be read, or has few bits, holds no mask."""
    model, x = Odd(lambda m, x: m.a(x) + m.mask.shape[0]), padded_batch()
    for dtype, device in ((torch.float8_e5m2, "cpu"), (torch.float32, "meta")):
        model.mask = torch.empty(8, device=device).to(dtype)
        assert planned(model, x)(x).shape == x.shape


def test_infinity_stays_infinite() -> None:
    """Law: a text masked with -inf is NaN where fp32 is, and weighs 0 elsewhere."""
    model, x = Odd(attend), padded_batch()
    for value in (-math.inf, math.inf):
        mask = torch.zeros(3, 1, 6).masked_fill(hidden(x), value)
        output, expected = planned(model, x, mask, **IN_BF16)(x, mask), model(x, mask)
        assert expected.isnan().any()
        kwargs = {"rtol": 0.05, "atol": 0.05, "equal_nan": True}
        torch.testing.assert_close(output, expected, **kwargs)
    mask = torch.full((3, 6, 6), LOWEST).masked_fill(hidden(x), -math.inf)
    spread = Odd(lambda m, x, mask: (m.scores(x) + mask, mask))
    sums, _ = planned(spread, x, mask, **IN_BF16)(x, mask)
    assert sums.isinf().equal(mask.isinf())


def read_exactly(m: Odd, x: Tensor, mask: Tensor) -> Any:
    """Compare masks, return them, and compute in float64."""
    own = torch.full((6,), LOWEST).masked_fill(hidden(x)[0, 0], 0.0)
    exact = own, mask == LOWEST, mask <= LOWEST, own.abs() >= -LOWEST, m.mask
    double = torch.full((2,), -1e200, dtype=torch.float64), x.double() * 1e300
    scores = (m.scores(x) + own + mask).softmax(-1)
    return scores, exact, double, x.double().clamp(max=1e45)


def compared(m: Odd, x: Tensor, mask: Tensor) -> Any:
    """Compare masked scores with fp32's, and with bf16's, lowest number; keep -0.0."""
    scores = m.scores(x) + mask
    kept = (m.a(x) + hidden(x).mT.float() * LOWEST).amax(1)
    filled = m.scores(x).masked_fill(hidden(x), LOWEST_BF16)
    fp32 = scores <= LOWEST, scores < 0.998 * LOWEST, kept <= LOWEST
    zeros = torch.signbit(-(x @ m.a.weight).relu())
    return scores, *fp32, filled == LOWEST_BF16, zeros


@pytest.mark.parametrize("body", [read_exactly, compared])
@pytest.mark.parametrize(
    ("way", "options"), [(planned, IN_BF16), (compiled, {"method": "min-cut"})]
)
def test_what_fp32_code_reads_is_exact(
    body: Callable[..., Any], way: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Law: comparisons, returned masks and float64 numbers are those of fp32."""
    model, x = Odd(body), padded_batch()
    mask = hidden(x).float() * LOWEST
    output, expected = way(model, x, mask, **options)(x, mask), model(x, mask)
    if body is compared:  # the other's fp32 scores are NaN
        torch.testing.assert_close(output[0], expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(output[1:], expected[1:], rtol=0, atol=0)


def test_a_saved_plan_keeps_masks_too(tmp_path: Path) -> None:
    """Law: so do a plan from its file, a copy and a pickle of the rewritten model."""
    model, x = Odd(fused), padded_batch()
    plan = hs.plan(model, [x], **IN_BF16)
    plan.save(tmp_path / "plan.toml")
    rewritten = hs.rewrite(model, plan)
    expected = rewritten(x)
    assert expected.isfinite().all()
    loaded = load_plan(tmp_path / "plan.toml", model, [x])
    assert hs.rewrite(model, loaded)(x).equal(expected)
    assert copy.deepcopy(rewritten)(x).equal(expected)
    assert pickle.loads(pickle.dumps(rewritten))(x).equal(expected)  # noqa: S301


@WAYS
def test_only_masks_stay_in_fp32(way: Callable[..., Any]) -> None:
    """Law: what multiplies an input, and what follows a softmax, is in bf16."""

    def body(m: Odd, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ m.a.weight).relu() @ m.b(x).mT
        weights = (scores + mask).float().softmax(-1).type_as(scores)
        return m.a(x + (weights @ x).relu() @ m.b.weight)

    low: dict[str, list[bool]] = {}

    def note(plan: Any) -> None:
        for node in plan.nodes:
            low.setdefault(node.op.partition(".")[0], []).append(node.low)

    inputs = padded_batch(), torch.zeros(3, 1, 6)
    if way is planned:
        note(hs.plan(Odd(body), inputs, **IN_BF16))
    else:
        way(Odd(body), on_plan=note, **IN_BF16)(*inputs)
    assert low["matmul"] == [True] * 4
    assert low["linear"] == [True] * 2
    assert low["relu"] == [True] * 2
    assert low["add"] == [False, True]


NUMBERS = [-0.0, 1.0 + 2**-9, -3e38, 1e-45, LOWEST, -LOWEST]
NUMBERS += [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_saturating_cast(dtype: torch.dtype) -> None:
    """Law: it is torch's cast but for finite numbers that overflow."""
    x = torch.tensor(NUMBERS)
    low, plain = saturating_cast(x, dtype), x.to(dtype)
    overflows = x.isfinite() & plain.isinf()
    largest = torch.finfo(dtype).max
    assert low[overflows].equal(x[overflows].sign().to(dtype) * largest)
    same = low[~overflows].view(torch.int16), plain[~overflows].view(torch.int16)
    assert same[0].equal(same[1])  # bits: NaN and -0.0

"""What the fused kernels are compared with: torch.optim, and its arithmetic.

In: a rule, and items before a step. Out: items to work on, torch's own optimizer over
the same numbers, how far two fp32 computations of one step may lie apart, and the slow
twin of the kernels, which rounds as they do.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.masters.encoding import ENCODINGS, RoundingRng
from halfstep.masters.fused_step import Adam, ParamUpdate, Sgd

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("plain", "fp32", "split", "kahan", "stochastic")
LEAN = ("kahan", "stochastic")
_FLAT = (0, 1, 7, 511, 512, 513, 4097)
SIZES = (*((size,) for size in _FLAT), (3, 5), (150, 467))
"""Nothing, odd ones, both sides of a block, and more than a chunk."""

SGD = Sgd(0.1, 0.0, 0.0, nesterov=False, weight_decay=0.0, maximize=False)
MOMENTUM = Sgd(0.1, 0.9, 0.1, nesterov=False, weight_decay=0.01, maximize=True)
NESTEROV = Sgd(0.1, 0.9, 0.0, nesterov=True, weight_decay=0.02, maximize=False)
ADAMW = Adam(0.01, 0.9, 0.999, 1e-8, 0.1, True, False, False)  # noqa: FBT003
AMSGRAD = Adam(0.01, 0.8, 0.99, 1e-6, 0.1, False, True, True)  # noqa: FBT003
FAR = Adam(0.01, 0.3, 0.9, 1e-8, 0.0, True, True, False)  # noqa: FBT003
"""beta1 below a half: torch.lerp then goes from the other end."""
RULES = (SGD, MOMENTUM, NESTEROV, ADAMW, AMSGRAD, FAR)


def ready(kernel: Any) -> Any:
    if hasattr(kernel, "available") and not kernel.available():
        pytest.skip(kernel.describe())
    return kernel


every_rule = pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
every_form = pytest.mark.parametrize("form", FORMS)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def make(
    rule: Sgd | Adam,
    form: str,
    low: torch.dtype = torch.bfloat16,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> list[ParamUpdate]:
    items = []
    kept = torch.bfloat16 if form in LEAN else torch.float32
    for index, size in enumerate(sizes):
        truth = torch.randn(size)
        weight = truth.clone() if form == "plain" else truth.to(low)
        extra = None
        if form in {"fp32", "split", "kahan"}:
            types = {"split": torch.int16, "kahan": torch.bfloat16}
            extra = truth.to(types.get(form, torch.float32))
        states = tuple(torch.zeros(size, dtype=kept) for _ in rule.state_keys)
        step = None if isinstance(rule, Sgd) else torch.zeros(())
        item = ParamUpdate(
            weight, weight, extra, states, step, is_first_step=True, param_index=index
        )
        encode(form, truth, item, None)
        items.append(item)
    return items


def next_step(items: Sequence[ParamUpdate], number: int) -> None:
    """Give the items gradients for a step, in each dtype in turn."""
    for index, item in enumerate(items, start=number):
        dtype = FLOATS[index % len(FLOATS)]
        item.gradient = torch.randn(item.weight.shape).to(dtype)
        item.is_first_step = number == 0
        if item.step is not None:
            item.step += 1


copied = copy.deepcopy


def truth_of(item: ParamUpdate, form: str) -> Tensor:
    """Return the fp32 truth that an item holds, in memory of its own."""
    truth = torch.empty(item.weight.shape)
    if form == "plain":
        return truth.copy_(item.weight)
    ENCODINGS[form].decode_(item.weight, item.residual, truth)
    return truth


def encode(form: str, truth: Tensor, item: ParamUpdate, sixteen: Tensor | None) -> None:
    """Put a truth into an item, by torch's operations."""
    if form == "plain":
        item.weight.copy_(truth)
    else:
        ENCODINGS[form].encode_(truth, item.weight, item.residual, sixteen)


def plainly(item: ParamUpdate, form: str) -> ParamUpdate:
    """Return the fp32 numbers behind an item, as an item of the form "plain"."""
    states = tuple(state.float().clone() for state in item.states)
    step = None if item.step is None else item.step.clone()
    truth = truth_of(item, form)
    return ParamUpdate(
        truth, item.gradient, None, states, step, item.is_first_step, item.param_index
    )


@torch.no_grad()
def in_form(
    plain: ParamUpdate, like: ParamUpdate, form: str, clock: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return weight, extra and states that fp32 results become in a form."""
    out, rng = copied(like), RoundingRng(*clock)
    encode(form, plain.weight, out, rng.random_bits16(like.param_index, 0, out.weight))
    for number, state in enumerate(plain.states):
        if form in LEAN:
            rng.round_(like.param_index, number + 1, state, out.states[number])
        else:
            out.states[number].copy_(state)
    return held(out)


def held(item: ParamUpdate) -> tuple[Tensor, ...]:
    extra = () if item.residual is None else (item.residual,)
    return (item.weight, *extra, *item.states)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    whole = torch.int32 if one.dtype == torch.float32 else torch.int16
    equal = one.view(whole) == other.view(whole)
    return bool((equal | (one.isnan() & other.isnan())).all())


def optimizer_of(rule: Sgd | Adam, item: ParamUpdate, inverse: float) -> Tensor:
    """Return the weight after torch's own step, which updates the item's states."""
    param = nn.Parameter(item.weight.clone())
    param.grad = item.gradient.float() * torch.tensor(inverse)
    numbers: dict[str, Any] = asdict(rule) | {"foreach": False}
    kind: Any = torch.optim.SGD
    if isinstance(rule, Adam):
        numbers["betas"] = numbers.pop("beta1"), numbers.pop("beta2")
        kind = torch.optim.AdamW if numbers.pop("decoupled") else torch.optim.Adam
    optimizer = kind([param], **numbers)
    if isinstance(rule, Adam) or not item.is_first_step:
        state = dict(zip(rule.state_keys, item.states, strict=True))
        if item.step is not None:
            state["step"] = item.step - 1  # torch counts the step itself
        optimizer.state[param] = state
    optimizer.step()
    for key, kept in zip(rule.state_keys, item.states, strict=True):
        kept.copy_(optimizer.state[param][key])
    return param.detach()


@torch.no_grad()
def update(item: ParamUpdate, rule: Sgd | Adam, inverse: float) -> None:
    """Update an item of the form "plain", each operation rounded by itself.

    Why not torch's own: `add(alpha=...)` uses fused multiply-add for full vectors but
    two roundings at the ends of a thread's range.
    """
    w, states = item.weight, item.states
    g = item.gradient.float() * (-inverse if rule.maximize else inverse)
    if isinstance(rule, Adam) and rule.decoupled:
        w *= 1 - rule.lr * rule.weight_decay
    elif rule.weight_decay:
        g += w * rule.weight_decay
    if isinstance(rule, Adam):
        _adam(rule, w, g, states, item)
        return
    if rule.momentum:
        (buffer,) = states
        if item.is_first_step:
            buffer.copy_(g)
        else:
            buffer.mul_(rule.momentum).add_(g * (1 - rule.dampening))
        g = g + buffer * rule.momentum if rule.nesterov else buffer
    w -= g * rule.lr


def _adam(
    rule: Adam, w: Tensor, g: Tensor, states: tuple[Tensor, ...], item: ParamUpdate
) -> None:
    assert item.step is not None
    at = item.step.item()
    a, b = states[:2]
    near = 1 - rule.beta1
    # torch.lerp starts from the nearer end point.
    a.copy_(a + (g - a) * near if near < 0.5 else g - (g - a) * (1 - near))
    b.mul_(rule.beta2).add_(g * (1 - rule.beta2) * g)
    square = b
    if rule.amsgrad:
        square = torch.maximum(states[2], b, out=states[2])
    below = square.sqrt() / (1 - rule.beta2**at) ** 0.5 + rule.eps
    w -= a / below * (rule.lr / (1 - rule.beta1**at))


@dataclass(frozen=True)
class Bound:
    weight: Tensor
    states: tuple[Tensor, ...]


ROUNDINGS = 12
"""On the longest way from an input to the weight, numbers of the rule included. Adam:
g (2), m (4), v beside it counts half (3), root, correction and its rounding, eps,
quotient, step size and its rounding, product, difference: less than 12 for m's way."""

U = 2.0**-24
"""One fp32 rounding, relative."""


def bound(rule: Sgd | Adam, item: ParamUpdate, inverse: float) -> Bound:
    """Return how far two fp32 computations of a step may lie apart.

    Formula: a sum of products that takes n roundings is off by at most n u of the same
    sum over absolute values (Higham, 2002, section 3.1); two computations by twice
    that. Adam's quotient m / (sqrt(v) / c + eps) adds the relative error of its
    denominator: of positive terms alone, but for a gradient in which weight decay
    cancels. An error e of g changes sqrt(v) by at most sqrt(1 - beta2) e.

    Args:
        rule: With which numbers.
        item: Of the form "plain", before the step.
        inverse: Of the loss scale.
    """
    n = 2 * ROUNDINGS * U
    w = item.weight.double()
    g = item.gradient.double() * inverse
    decay = rule.weight_decay
    coupled = isinstance(rule, Sgd) or not rule.decoupled
    size_g = g.abs() + (decay * w.abs() if coupled else 0)
    signed = -g if rule.maximize else g
    true_g = signed + (decay * w if coupled else 0)
    old = [state.double() for state in item.states]
    if isinstance(rule, Sgd):
        if not old:
            return Bound(n * (w.abs() + rule.lr * size_g), ())
        keep = 1 - rule.dampening
        size = rule.momentum * old[0].abs() + keep * size_g
        if item.is_first_step:
            size = size_g
        used = size_g + rule.momentum * size if rule.nesterov else size
        return Bound(n * (w.abs() + rule.lr * used), (n * size,))
    assert item.step is not None
    at = item.step.item()
    # Both ways of torch.lerp are covered: each takes the difference of g and m.
    size_m = 2 * (old[0].abs() + size_g)
    m = rule.beta1 * old[0] + (1 - rule.beta1) * true_g
    v = rule.beta2 * old[1] + (1 - rule.beta2) * true_g**2
    size_v = rule.beta2 * old[1] + (1 - rule.beta2) * size_g**2
    top = torch.maximum(v, old[2]) if rule.amsgrad else v
    root = (1 - rule.beta2**at) ** 0.5
    below = top.sqrt() / root + rule.eps
    step = rule.lr / (1 - rule.beta1**at)
    slip = n * size_g * (1 - rule.beta2) ** 0.5 / root / below
    weight = n * (w.abs() + step * size_m / below) + step * m.abs() / below * slip
    return Bound(weight, (n * size_m, *(n * size_v,) * (1 + rule.amsgrad)))


def beyond(one: Tensor, other: Tensor, allowed: Tensor) -> float:
    # What is smaller than all normal fp32 is rounded to a multiple of 2**-149.
    excess = (one.double() - other.double()).abs() - allowed - 2.0**-148
    return max(0.0, excess.max().item()) if excess.numel() else 0.0


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Compares a level with fp32: gradients by cosine and SQNR, outputs of each module.

The first module with a wrong output for correct inputs may, for example, compute
positions, angles or counts in 16 bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from halfstep.diagnostics.preflight.model_copy import LossFn, ModelCopy


@dataclass(frozen=True)
class GradientSimilarity:
    """The similarity of gradients q to their reference x, both unscaled."""

    where: str
    """The module that owns the parameters."""
    numbers: int
    cosine: float
    """<x, q> / (|x| |q|), -1 to 1; 1 if both are zero, 0 if one is; NaN if q has inf or
    NaN."""
    sqnr: float
    """10 log10(sum x**2 / sum (x - q)**2), in dB; inf if they are equal."""
    flushed: float
    """Share of the non-zero values of x that are zero in q, 0 to 1."""
    norm: float
    """|x|."""


def compare_gradients(
    reference: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    owner: Callable[[str], str],
) -> tuple[GradientSimilarity, tuple[GradientSimilarity, ...]]:
    """Compare gradients, all together and by the module that owns them.

    Sums are computed in fp64 on the device.

    Args:
        reference: Parameter name -> gradient x.
        other: Parameter name -> gradient q; a missing one on either side is zeros.
        owner: Returns the group of a name.

    Returns:
        Similarity of all ("all"), and of each group in the order of its first name.
    """
    sums: dict[str, list[Tensor]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for name in dict.fromkeys([*reference, *other]):
        like = reference[name] if name in reference else other[name]
        pair = (each.get(name, torch.zeros_like(like)) for each in (reference, other))
        x, q = (each.double() for each in pair)
        sums[owner(name)].append(_sums(x, q).cpu())
        sizes[owner(name)] += like.numel()
    groups = {name: torch.stack(rows).sum(0) for name, rows in sums.items()}
    layers = tuple(_similarity(name, sizes[name], row) for name, row in groups.items())
    rows = [*groups.values()] or [torch.zeros(6, dtype=torch.float64)]
    return _similarity("all", sum(sizes.values()), torch.stack(rows).sum(0)), layers


def worst_first(rows: Iterable[GradientSimilarity]) -> list[GradientSimilarity]:
    """Return the rows in the order of their cosines, NaN first."""
    return sorted(rows, key=lambda row: (not math.isnan(row.cosine), row.cosine))


def _sums(x: Tensor, q: Tensor) -> Tensor:
    """Return <x, q>, |x|**2, |q|**2, |x - q|**2, numbers of flushed and non-zero x."""
    seen = x != 0
    return torch.stack(
        [
            (x * q).sum(),
            (x * x).sum(),
            (q * q).sum(),
            (x - q).square().sum(),
            (seen & (q == 0)).sum().double(),
            seen.sum().double(),
        ]
    )


def _similarity(where: str, numbers: int, sums: Tensor) -> GradientSimilarity:
    product, xx, qq, error, lost, seen = sums.tolist()
    return GradientSimilarity(
        where,
        numbers,
        cosine=_cosine(product, xx, qq),
        sqnr=_decibels(xx, error),
        flushed=lost / seen if seen else 0.0,
        norm=math.sqrt(xx),
    )


def _cosine(product: float, xx: float, qq: float) -> float:
    if not (math.isfinite(xx) and math.isfinite(qq)):
        return math.nan
    if xx == 0 or qq == 0:
        return float(xx == qq)
    return product / math.sqrt(xx) / math.sqrt(qq)


def _decibels(signal: float, noise: float) -> float:
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


FAR = 0.2
"""Relative error above which an output is wrong. Our choice: 50 roundings to bf16 in
one direction."""
CLOSE = 0.05
"""Relative error up to which inputs are correct."""
_SAMPLE = 65_536
"""Values of a tensor that are compared."""


@dataclass(frozen=True)
class OutputError:
    """A module whose output at the level differs from that in fp32."""

    path: str
    kind: str
    error: float
    """Norm of the output's difference over the norm of fp32's output."""
    inputs: float
    rule: str = ""
    """Rule that fixes it; "" if none does."""


def output_errors(
    fp32_copy: ModelCopy, low_copy: ModelCopy, loss_fn: LossFn, batch: object
) -> Iterator[OutputError]:
    """Yield the errors of each module call, in the order in which modules return.

    None if the two passes ran different modules.
    """
    right, low = (_calls(each, loss_fn, batch) for each in (fp32_copy, low_copy))
    if [path for path, *_ in right] == [path for path, *_ in low]:
        for (path, kind, *samples), (_, _, *others) in zip(right, low, strict=True):
            inputs, error = map(_error, samples, others)
            yield OutputError(path, kind, error, inputs)


def _calls(
    model_copy: ModelCopy, loss_fn: LossFn, batch: object
) -> list[tuple[str, str, list[Tensor], list[Tensor]]]:
    """Return path, type and samples of inputs and outputs of each module call."""
    calls: list[tuple[str, str, list[Tensor], list[Tensor]]] = []
    paths = {module: path for path, module in model_copy.model.named_modules()}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401
        samples = _sample((args, kwargs)), _sample(output)
        calls.append((paths[module], type(module).__name__, *samples))

    model_copy.forward(loss_fn, batch, after)
    return calls


def _sample(value: object) -> list[Tensor]:
    """Return evenly spaced values, in fp32, of each floating tensor in `value`."""
    tensors = [each for each in _pytree.tree_leaves(value) if isinstance(each, Tensor)]
    samples = []
    for each in tensors:
        if each.is_floating_point() and each.layout == torch.strided and each.numel():
            flat = each.detach().reshape(-1)
            some = flat[:: -(-len(flat) // _SAMPLE)]
            samples.append(some.to(torch.float32, copy=True))  # before in-place writes
    return samples


def _error(right: list[Tensor], low: list[Tensor]) -> float:
    """Return the largest relative error; 0 if no tensors can be compared."""
    errors = [0.0]
    for one, other in zip(right, low, strict=False):
        if one.shape == other.shape and bool(one.isfinite().all()):
            difference, size = float((other - one).norm()), float(one.norm())
            errors.append(difference / size if size else 0.0)
    return max(errors)

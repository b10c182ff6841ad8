"""Computes the similarity of two sets of gradients: cosine, SQNR and flushed share."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


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


def compare(
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
    names = [*reference, *(name for name in other if name not in reference)]
    for name in names:
        one, two = reference.get(name), other.get(name)
        like = one if one is not None else two
        assert like is not None  # noqa: S101 -- it is of one of the two
        x = torch.zeros_like(like) if one is None else one
        q = torch.zeros_like(like) if two is None else two
        sums[owner(name)].append(_sums(x.double(), q.double()).cpu())
        sizes[owner(name)] += like.numel()
    groups = {name: torch.stack(rows).sum(0) for name, rows in sums.items()}
    layers = tuple(_similarity(name, sizes[name], row) for name, row in groups.items())
    rows = [*groups.values()] or [torch.zeros(6, dtype=torch.float64)]
    return _similarity("all", sum(sizes.values()), torch.stack(rows).sum(0)), layers


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

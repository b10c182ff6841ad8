"""Encodings of master weights: what is stored beside a 16-bit weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError, format_value
from halfstep.masters import bf16_codecs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


_PART_NUMEL = 1 << 18
"""Elements encoded at once, to bound intermediate results (8 bytes per element)."""


def _in_parts(*tensors: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:  # noqa: ANN401
    """Yield (start, slices) for ranges of _PART_NUMEL elements; None stays None."""
    present = [tensor for tensor in tensors if tensor is not None]
    size = present[0].numel()
    if size <= _PART_NUMEL or not all(tensor.is_contiguous() for tensor in present):
        yield 0, tensors
        return
    flat = [None if tensor is None else tensor.view(-1) for tensor in tensors]
    for start in range(0, size, _PART_NUMEL):
        parts = (t if t is None else t[start : start + _PART_NUMEL] for t in flat)
        yield start, tuple(parts)


@dataclass(frozen=True, slots=True)
class RoundingRng:
    """Random bits as a pure function of seed, step, parameter and element index."""

    seed: int
    step: int
    """Number of updates so far; the same on every rank, saved in checkpoints."""

    def random_bits16(
        self, param_index: int, tensor_index: int, like: Tensor, start: int = 0
    ) -> Tensor:
        """Return 16 random bits for each element of `like`, int32.

        `tensor_index` is 0 for the weight, 1 to 3 for the optimizer's states; `start`
        is the index of the first element within the parameter.
        """
        stream, half = divmod(tensor_index, 2)
        key = bf16_codecs.key(self.seed, self.step, param_index, stream)
        return bf16_codecs.random_bits16(key, like.numel(), like.device, start)[half]

    def round_(
        self, param_index: int, tensor_index: int, values: Tensor, low: Tensor
    ) -> None:
        """Round fp32 `values` to bf16 stochastically, into `low`."""
        for start, (part, out) in _in_parts(values, low):
            bits = self.random_bits16(param_index, tensor_index, part, start)
            bf16_codecs.stochastic_round_(part, out, bits)


@dataclass(frozen=True, slots=True)
class MasterEncoding:
    """One way to store an fp32 value as a 16-bit weight plus a residual."""

    name: str
    """The value of the `master=` argument."""
    description: str
    residual: torch.dtype | None
    """Dtype of the residual; fp32: the residual is the master weight itself."""
    state_dtype: torch.dtype
    """Dtype of the optimizer's moments."""

    @property
    def is_compact(self) -> bool:
        """Whether fp32 values exist only during an update."""
        return self.residual != torch.float32

    def encode_(
        self,
        fp32: Tensor,
        weight: Tensor,
        residual: Tensor | None,
        random_bits: Tensor | None,
    ) -> None:
        """Encode `fp32`; `random_bits` are for stochastic rounding."""
        if residual is None and random_bits is not None:
            bf16_codecs.stochastic_round_(fp32, weight, random_bits)
        elif residual is None:
            weight.copy_(fp32)
        elif self.residual == torch.int16:
            bf16_codecs.split_encode_(fp32, weight, residual)
        elif self.residual == torch.bfloat16:
            bf16_codecs.kahan_encode_(fp32, weight, residual)
        else:
            residual.copy_(fp32)
            weight.copy_(fp32)

    def decode_(self, weight: Tensor, residual: Tensor | None, fp32: Tensor) -> None:
        """Decode into `fp32`."""
        if residual is None:
            fp32.copy_(weight)
        elif self.residual == torch.int16:
            bf16_codecs.split_decode_(weight, residual, fp32)
        elif self.residual == torch.bfloat16:
            bf16_codecs.kahan_decode_(weight, residual, fp32)
        else:
            fp32.copy_(residual)


@dataclass(slots=True)
class MasterParam:
    """One 16-bit weight, its fp32 master and its residual."""

    weight: nn.Parameter
    master: nn.Parameter
    """The optimizer's fp32 parameter; with compact encodings NaN outside of updates."""
    residual: Tensor | None
    """What is stored beside the weight; None with "stochastic"."""
    param_index: int
    """Index of the parameter, for stochastic rounding."""
    position: int
    """Index among the master weights."""
    dtype: torch.dtype
    """Dtype of the weight when it got its master."""
    grad_buffer: Tensor | None = None
    """fp32 memory for the gradient sum on a CPU, reused if no other tensor uses it."""

    def check(self) -> None:
        """Reject a weight whose dtype was changed."""
        if self.weight.dtype != self.dtype:
            raise UserError(
                f"a weight of shape {tuple(self.weight.shape)} became "
                f"{self.weight.dtype} after prepare, which stored it as {self.dtype}: "
                "leave the model's dtype alone, and export session.weights()."
            )

    def decoded(self, encoding: MasterEncoding) -> Tensor:
        """Return the fp32 values, in new memory."""
        self.check()
        fp32 = torch.empty_like(self.weight, dtype=torch.float32)
        tensors = fp32, self.weight.detach(), self.residual
        for _, (part, weight, residual) in _in_parts(*tensors):
            encoding.decode_(weight, residual, part)
        return fp32

    def encode_(self, encoding: MasterEncoding, fp32: Tensor, rng: RoundingRng) -> None:
        """Encode the values of `fp32` into weight and residual."""
        tensors = fp32, self.weight.detach(), self.residual
        for start, (part, weight, residual) in _in_parts(*tensors):
            bits = None
            if residual is None:
                bits = rng.random_bits16(self.param_index, 0, part, start)
            encoding.encode_(part, weight, residual, bits)

    def match_layout(self) -> None:
        """Give the residual the weight's memory layout, which kernels rely on.

        Why: the originals' layout may differ, and `model.to(memory_format=...)` changes
        only the weights.
        """
        residual = self.residual
        if residual is None or residual.stride() == self.weight.stride():
            return
        like = torch.empty_like(self.weight, dtype=residual.dtype)
        self.residual = like.copy_(residual)
        if residual.dtype == torch.float32:
            self.master.data = self.residual

    def follow_weight(self, encoding: MasterEncoding, rng: RoundingRng) -> int:
        """Reset what does not belong to the weight, if `.data` may have been written.

        Of a compact encoding that is a compensation term beyond half an ulp. Return how
        many elements of an fp32 master changed.
        """
        if not encoding.is_compact:
            return self.reset_from_weight(encoding, rng)
        if self.residual is not None and self.residual.dtype == torch.bfloat16:
            weight = self.weight.detach().float()
            half_ulp = torch.exp2(torch.frexp(weight).exponent.float() - 9)  # 8 digits
            beyond = self.residual.float().abs() > half_ulp * weight.ne(0)
            self.residual.masked_fill_(beyond, 0)
        return 0

    def reset_from_weight(self, encoding: MasterEncoding, rng: RoundingRng) -> int:
        """Reset the master from the weight; return how many elements changed."""
        weight = self.weight.detach()
        wide = weight.float()
        if encoding.is_compact:
            # The residual belongs to the old weights; which changed is unknown.
            self.encode_(encoding, wide, rng)
            return 0 if self.residual is None else wide.numel()
        low = self.master.detach().to(weight.device, weight.dtype)  # it may have moved
        differs = low.view(torch.int16) != weight.view(torch.int16)
        count = int(differs.sum())
        if count:
            self.master.copy_(torch.where(differs, wide, self.master.to(wide.device)))
        return count


# A further encoding needs two codecs in `bf16_codecs` and the choice of them above, a
# number in `cpu_kernels.ENCODING_CODES` and `kernels.c`, and branches of their decoding
# and encoding in `kernels.c`, `triton_jit.read_fp32` and `write_fp32`.
FP32 = MasterEncoding("fp32", "fp32, exact", torch.float32, torch.float32)
SPLIT = MasterEncoding(
    "split",
    "fp32 whose high half is the bf16 weight, exact",
    torch.int16,
    torch.float32,
)
KAHAN = MasterEncoding(
    "kahan",
    "bf16 weights and compensation, 16 bits of significand; bf16 moments, unbiased",
    torch.bfloat16,
    torch.bfloat16,
)
STOCHASTIC = MasterEncoding(
    "stochastic",
    "bf16 weights and moments, rounded at random: right on average",
    None,
    torch.bfloat16,
)
ENCODINGS = {e.name: e for e in (FP32, SPLIT, KAHAN, STOCHASTIC)}

PLAIN = "plain"
"""The kernels' name for fp32 parameters, which have no master weight."""
WEIGHT_DTYPES: dict[str, tuple[torch.dtype, ...]] = {PLAIN: (torch.float32,)} | {
    name: (torch.bfloat16,) if e.is_compact else (torch.bfloat16, torch.float16)
    for name, e in ENCODINGS.items()
}
"""Encoding -> dtypes of weights that it supports."""
RESIDUAL_DTYPES = {name: e.residual for name, e in ENCODINGS.items() if e.residual}
BF16_STATE_ENCODINGS = [
    name for name, e in ENCODINGS.items() if e.state_dtype == torch.bfloat16
]

NONE = "none"
"""No master weights: the optimizer updates the 16-bit weights directly."""


def parse(name: str) -> MasterEncoding | None:
    """Return the encoding called `name`; None for "none"."""
    if not isinstance(name, str) or name not in {*ENCODINGS, NONE}:
        choices = ", ".join([*ENCODINGS, NONE])
        raise UserError(
            f"master={format_value(name)} is not a form of master weights; "
            f"choose {choices}."
        )
    return ENCODINGS.get(name)


def check(encoding: MasterEncoding, dtype: torch.dtype) -> None:
    """Reject an encoding that does not support the dtype of the weights."""
    if encoding.is_compact and dtype != torch.bfloat16:
        raise UserError(
            f"master={encoding.name!r} needs bf16 weights, not {dtype}: only bf16 is "
            "the high half of fp32. Use dtype='bf16' or master='fp32'."
        )

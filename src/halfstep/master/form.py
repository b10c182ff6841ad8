"""The forms of master weights: what is kept beside a 16-bit weight, and how.

In: a word. Out: a `Form`, which takes the truth apart into a weight and what is kept,
and puts it together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.errors import UserError
from halfstep.master import kahan, split, stochastic

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Clock:
    """Where in the stream of random numbers an update stands."""

    seed: int
    step: int
    """Updates so far; the same on every rank, and kept in checkpoints."""

    def sixteen(self, index: int, number: int, like: Tensor) -> Tensor:
        """Return 16 random bits for each number of a tensor, int32.

        Args:
            index: Of the parameter.
            number: 0 for the weight, 1 and on for the optimizer's state tensors.
            like: On the device, and as long.
        """
        stream, half = divmod(number, 2)
        key = stochastic.key(self.seed, self.step, index, stream)
        return stochastic.random16(key, like.numel(), like.device)[half]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to keep what 16 bits cannot hold."""

    name: str
    """The word that users type."""
    promise: str
    """What it is exact about, for people."""
    extra: torch.dtype | None
    """What is kept beside each weight: fp32 is the master itself."""
    states: torch.dtype
    """What the optimizer's moments are kept in."""

    @property
    def lean(self) -> bool:
        """The fp32 truth exists only while it is updated."""
        return self.extra != torch.float32

    def encode_(
        self,
        truth: Tensor,
        weight: Tensor,
        extra: Tensor | None,
        sixteen: Tensor | None,
    ) -> None:
        """Take fp32 numbers apart.

        Args:
            truth: fp32.
            weight: What the model holds; written.
            extra: What is kept beside it, if anything is; written.
            sixteen: Random bits, where nothing is kept.
        """
        if extra is None and sixteen is not None:
            stochastic.round_(truth, weight, sixteen)
        elif extra is None:
            weight.copy_(truth)
        elif self.extra == torch.int16:
            split.encode_(truth, weight, extra)
        elif self.extra == torch.bfloat16:
            kahan.encode_(truth, weight, extra)
        else:
            extra.copy_(truth)
            weight.copy_(truth)

    @staticmethod
    def random_(truth: Tensor, low: Tensor, sixteen: Tensor) -> None:
        """Round fp32 numbers to bf16 at random; `low` is written."""
        stochastic.round_(truth, low, sixteen)

    def decode_(self, weight: Tensor, extra: Tensor | None, truth: Tensor) -> None:
        """Put fp32 numbers together; `truth` is written."""
        if extra is None:
            truth.copy_(weight)
        elif self.extra == torch.int16:
            split.decode_(weight, extra, truth)
        elif self.extra == torch.bfloat16:
            kahan.decode_(weight, extra, truth)
        else:
            truth.copy_(extra)


@dataclass(slots=True)
class Slot:
    """One 16-bit weight, and the truth behind it."""

    weight: nn.Parameter
    """The model's parameter."""
    master: nn.Parameter
    """The optimizer's, in fp32; in a lean form NaN, but while it is updated."""
    extra: Tensor | None
    """What is kept beside the weight."""
    number: int
    """Of the parameter, for random rounding."""
    buffer: Tensor | None = None
    """Where fp32 gradients are added up, kept from step to step."""

    def decode_(self, form: Form, truth: Tensor) -> None:
        """Write the fp32 truth to a tensor."""
        form.decode_(self.weight.detach(), self.extra, truth)

    def encode_(self, form: Form, truth: Tensor, clock: Clock) -> None:
        """Take the fp32 truth from a tensor."""
        bits = None
        if self.extra is None:
            bits = clock.sixteen(self.number, 0, truth)
        form.encode_(truth, self.weight.detach(), self.extra, bits)

    def lie_alike(self) -> None:
        """Lay out what is kept as the weight is laid out: kernels go by memory.

        Why: originals may lie otherwise, and `model.to(memory_format=...)` moves
        weights alone.
        """
        extra = self.extra
        if extra is None or extra.stride() == self.weight.stride():
            return
        self.extra = torch.empty_like(self.weight, dtype=extra.dtype).copy_(extra)
        if extra.dtype == torch.float32:
            self.master.data = self.extra


FP32 = Form("fp32", "fp32 masters, exact", torch.float32, torch.float32)
SPLIT = Form(
    "split",
    "fp32 masters whose high half is the bf16 weight, exact",
    torch.int16,
    torch.float32,
)
KAHAN = Form(
    "kahan",
    "bf16 weights with a bf16 rest, 16 bits of significand; bf16 moments, unbiased",
    torch.bfloat16,
    torch.bfloat16,
)
STOCHASTIC = Form(
    "stochastic",
    "bf16 weights and moments, rounded at random: right on average",
    None,
    torch.bfloat16,
)
FORMS = {form.name: form for form in (FP32, SPLIT, KAHAN, STOCHASTIC)}

NONE = "none"
"""The word for no masters: the optimizer updates 16-bit weights as they are."""


def parse(word: str) -> Form | None:
    """Return the form that a word names; None for "none".

    Raises:
        UserError: If no form has this name.
    """
    if word == NONE:
        return None
    if word not in FORMS:
        choices = ", ".join([*FORMS, NONE])
        message = f"master={word!r} is not a form of master weights; choose {choices}."
        raise UserError(message)
    return FORMS[word]


def kept(word: str) -> Form:
    """Return the form that a word names, where there must be masters.

    Raises:
        UserError: If no form has this name, or it is "none".
    """
    found = parse(word)
    if found is None:
        message = f"master={word!r} keeps no master weights; choose {', '.join(FORMS)}."
        raise UserError(message)
    return found


def check(form: Form, dtype: torch.dtype) -> None:
    """Refuse a form for weights that it cannot serve.

    Raises:
        UserError: If it needs bf16 weights, and they are fp16.
    """
    if form.lean and dtype != torch.bfloat16:
        message = (
            f"master={form.name!r} needs bf16 weights, not {dtype}: only bf16 is the "
            "high half of fp32. Use dtype='bf16' or master='fp32'."
        )
        raise UserError(message)

"""The forms of master weights: what is kept beside a 16-bit weight, and how.

In: a word. Out: a `Form`, which takes the truth apart into a weight and what is kept,
and puts it together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError, shown
from halfstep.masters import kahan_codec, split_codec, stochastic_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


_PART = 1 << 18
"""Numbers worked on at once: what is made on the way, 8 bytes for each, stays small."""


def _in_parts(*tensors: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:  # noqa: ANN401
    """Yield the place where a part begins, and that part of each tensor, or None."""
    held = [tensor for tensor in tensors if tensor is not None]
    size = held[0].numel()
    if size <= _PART or not all(tensor.is_contiguous() for tensor in held):
        yield 0, tensors
        return
    flat = [None if tensor is None else tensor.view(-1) for tensor in tensors]
    for start in range(0, size, _PART):
        parts = (t if t is None else t[start : start + _PART] for t in flat)
        yield start, tuple(parts)


@dataclass(frozen=True, slots=True)
class Clock:
    """Where in the stream of random numbers an update stands."""

    seed: int
    step: int
    """Updates so far; the same on every rank, and kept in checkpoints."""

    def sixteen(self, index: int, number: int, like: Tensor, start: int = 0) -> Tensor:
        """Return 16 random bits for each number of a tensor, int32.

        Args:
            index: Of the parameter.
            number: 0 for the weight, 1 and on for the optimizer's state tensors.
            like: On the device, and as long.
            start: Place of its first number in the parameter.
        """
        stream, half = divmod(number, 2)
        key = stochastic_codec.key(self.seed, self.step, index, stream)
        return stochastic_codec.random16(key, like.numel(), like.device, start)[half]

    def round_(self, index: int, number: int, values: Tensor, low: Tensor) -> None:
        """Round fp32 numbers to bf16 at random; `low` is written.

        Args:
            index: Of the parameter.
            number: As for `sixteen`.
            values: fp32.
            low: bf16, of the same shape.
        """
        for start, (part, out) in _in_parts(values, low):
            stochastic_codec.round_(part, out, self.sixteen(index, number, part, start))


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
            stochastic_codec.round_(truth, weight, sixteen)
        elif extra is None:
            weight.copy_(truth)
        elif self.extra == torch.int16:
            split_codec.encode_(truth, weight, extra)
        elif self.extra == torch.bfloat16:
            kahan_codec.encode_(truth, weight, extra)
        else:
            extra.copy_(truth)
            weight.copy_(truth)

    def decode_(self, weight: Tensor, extra: Tensor | None, truth: Tensor) -> None:
        """Put fp32 numbers together; `truth` is written."""
        if extra is None:
            truth.copy_(weight)
        elif self.extra == torch.int16:
            split_codec.decode_(weight, extra, truth)
        elif self.extra == torch.bfloat16:
            kahan_codec.decode_(weight, extra, truth)
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
    dtype: torch.dtype
    """The weight's when it was adopted."""
    hooked: bool = False
    """Its gradients are looked after as they arrive."""
    buffer: Tensor | None = None
    """Where fp32 gradients are added up, kept from step to step."""

    def check(self) -> None:
        """Refuse a weight whose dtype was changed.

        Raises:
            UserError: With what to do instead.
        """
        if self.weight.dtype != self.dtype:
            message = (
                f"a weight of shape {tuple(self.weight.shape)} became "
                f"{self.weight.dtype} after prepare, which stored it as {self.dtype}: "
                "leave the model's dtype alone, and export session.weights()."
            )
            raise UserError(message)

    def decode_(self, form: Form, truth: Tensor) -> None:
        """Write the fp32 truth to a tensor."""
        self.check()
        tensors = truth, self.weight.detach(), self.extra
        for _, (part, weight, extra) in _in_parts(*tensors):
            form.decode_(weight, extra, part)

    def encode_(self, form: Form, truth: Tensor, clock: Clock) -> None:
        """Take the fp32 truth from a tensor."""
        tensors = truth, self.weight.detach(), self.extra
        for start, (part, weight, extra) in _in_parts(*tensors):
            bits = None
            if extra is None:
                bits = clock.sixteen(self.number, 0, part, start)
            form.encode_(part, weight, extra, bits)

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

    def reread(self, form: Form, clock: Clock) -> int:
        """Take the weight for the truth; return how many numbers had changed."""
        weight = self.weight.detach()
        wide = weight.float()
        if form.lean:
            # What is kept belonged to other weights, and nobody knows to which.
            self.encode_(form, wide, clock)
            return 0 if self.extra is None else wide.numel()
        low = self.master.detach().to(weight.dtype)
        other = low.view(torch.int16) != weight.view(torch.int16)
        self.master.copy_(torch.where(other, wide, self.master))
        return int(other.sum())


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

PLAIN = "plain"
"""The word of kernels for fp32 parameters of the same optimizer, without masters."""
WEIGHTS: dict[str, tuple[torch.dtype, ...]] = {PLAIN: (torch.float32,)} | {
    form.name: (torch.bfloat16,) if form.lean else (torch.bfloat16, torch.float16)
    for form in FORMS.values()
}
"""Form -> dtypes of weights."""
EXTRA = {form.name: form.extra for form in FORMS.values() if form.extra is not None}
"""Form -> dtype of what is kept beside a weight."""
LOW_STATES = tuple(f.name for f in FORMS.values() if f.states == torch.bfloat16)
"""Forms whose moments are bf16."""

NONE = "none"
"""The word for no masters: the optimizer updates 16-bit weights as they are."""


def parse(word: str) -> Form | None:
    """Return the form that a word names; None for "none".

    Raises:
        UserError: If no form has this name.
    """
    if not isinstance(word, str) or word not in {*FORMS, NONE}:
        choices = ", ".join([*FORMS, NONE])
        message = (
            f"master={shown(word)} is not a form of master weights; choose {choices}."
        )
        raise UserError(message)
    return FORMS.get(word)


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

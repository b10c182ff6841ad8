"""`BadOp`: the operation that made the first inf or NaN, with cause and advice."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.reporting.finding import Finding
from halfstep.reporting.table import Report


def module_rule(path: str) -> str:
    """Return a rule that keeps a module, and the same in other layers, in fp32."""
    return f"module:{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', path)}=fp32"


@dataclass(frozen=True, kw_only=True, repr=False)
class BadOp(Report):
    """The operation that made the first inf or NaN of a step, and why.

    It is falsy if there was no inf or NaN; then the cause is "none".
    """

    phase: str
    """"forward" or "backward" pass; "input" or a stored "weight" before it; or "none"
    if a replay was finite."""
    module: str = "model"
    """Path in the model; "model" for the model itself, "loss" after its forward pass,
    "input" before it."""
    kind: str = ""
    """Class name of that module; "" outside of the model."""
    op: str = ""
    """The operation, such as "linear", "softmax" or "mm"; "" if none ran."""
    step: int | None = None
    """Optimizer step; None if unknown."""
    scale: float
    """Loss scale of the backward pass."""
    dtype: str = ""
    """Format of its result, such as "float16"."""
    inputs: float | None = None
    """Largest finite magnitude of its inputs; None if unknown."""
    nonfinite_kind: str = ""
    """"inf" or "NaN"; "" if unknown, or if there was none: then the phase is "none", or
    the dtype is "int64" for an index out of range."""
    wide: str = "not run"
    """Whether its result in fp32 is "finite" or "not finite"; or "not run"."""
    cause: str
    """"data": the model's input; "label": what the loss compares with; "learning rate":
    training diverged before; "loss function": it overflowed, and the model did not;
    "forward range", "backward range": a dtype overflowed; "weight": a parameter or
    buffer was non-finite before the step; "zero": an operation met a value at which it,
    or its derivative, is infinite or undefined; "hardware": an exact replay was finite;
    "another process": it was finite here, and other processes share gradients with this
    one; "none": loss and gradients are finite."""
    evidence: str
    """What was observed, with numbers."""
    advice: str
    """The flag, policy rule or code change that fixes it."""
    reproduced: bool
    """A replay reproduced it. False: the replay was finite, or there was none."""
    rule: str = ""
    """The policy rule in the advice, such as "module:decoder.*.wo=fp32", or "". From a
    graph alone there may be several, joined by " + "."""
    normal: bool = False
    """Whether it is expected: dynamic loss scaling finds a scale that avoids it."""

    def __bool__(self) -> bool:
        """Return whether there was an inf or NaN."""
        return self.cause != "none"

    @property
    def place(self) -> str:
        """Module and operation, such as "decoder.block.5.ff.wo (linear)"."""
        return f"{self.module} ({self.op})" if self.op else self.module

    def __str__(self) -> str:
        """Return it as sentences."""
        at = "" if self.step is None else f" at step {self.step}"
        if not self:
            return f"Nothing found{at}: {self.evidence}."
        # Integers cannot be inf or NaN: an index is out of range.
        if self.phase == "none" or self.dtype == "int64":
            return f"{self.place}{at}: {self.evidence}. {self.advice}"
        verb = {"input": "received", "weight": "holds"}.get(self.phase, "produced")
        passed = " in the backward pass" if self.phase == "backward" else ""
        head = f"{self.place} {verb} {self.nonfinite_kind or 'inf or NaN'}{passed}{at}"
        return f"{head}: {self.evidence}. {self.advice}"

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> BadOp:
        """Return the BadOp that `data` describes; unknown keys are ignored."""
        return cls(**{name: data[name] for name in cls.__annotations__ if name in data})

    def finding(self) -> Finding:
        """Return it as a finding of the doctor."""
        return Finding(
            severity="note" if self.normal else "error",
            rule="bad op",
            where=self.place,
            measured=f"{self.cause}: {self.evidence}",
            limit="",
            source="a replay of the step" if self.reproduced else "the failing step",
            advice=self.advice,
            weight=1.0,
        )

"""The first operation that made an inf or a NaN: where, from what, why, what to do.

In: plain values from a replay. Out: a `BadOp` that prints as sentences, becomes JSON,
and is a `Finding` for the doctor.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.errors import UserError
from halfstep.reporting.finding import Finding

CAUSES = (
    "data",
    "label",
    "learning rate",
    "loss function",
    "forward range",
    "backward range",
    "weight",
    "zero",
    "hardware",
    "another process",
)
"""data: what went into the model; label: what the loss compares with; learning rate:
training ran away before; loss function: it left its range after the model had not;
forward range and backward range: a format was left; weight: a parameter or buffer was
not finite before the step; zero: an operation met a value where it, or its slope, is
infinite or undefined; hardware: an exact replay was finite; another process: it was
finite here, and other processes share gradients with this one."""

PHASES = ("forward", "backward", "input", "weight", "none")
"""Where it arose: in a pass; before it, in what came in or in what is stored; or
nowhere, because a replay was finite."""

_WIDE = ("finite", "not finite", "not run")


def module_rule(path: str) -> str:
    """Return a rule that keeps a module, and its like in other layers, in float32."""
    return f"module:{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', path)}=fp32"


@dataclass(frozen=True, kw_only=True)
class BadOp:
    """What made the first inf or NaN of a step, and how sure that is.

    Raises:
        UserError: If a word is none of those listed.
    """

    phase: str
    """One of `PHASES`."""
    module: str = "model"
    """Path in the model; "model" for the model itself, "loss" after its forward pass,
    "input" before it."""
    kind: str = ""
    """Class name of that module; "" outside of the model."""
    op: str = ""
    """aten's word for it, such as "linear", "softmax" or "mm"; "" if none ran."""
    step: int | None = None
    """Of the optimizer; None if nobody said."""
    scale: float
    """Loss scale of the backward pass."""
    dtype: str = ""
    """Format of its result, such as "float16"."""
    inputs: float | None = None
    """Largest finite magnitude that it took in; None if that was not seen."""
    nonfinite_kind: str = ""
    """"inf" or "NaN"; "" where it is not known which, or there was none: then the
    phase is "none", or the dtype "int64", of an index that points nowhere."""
    wide: str = "not run"
    """What its result is in float32: "finite", "not finite", "not run"."""
    cause: str
    """One of `CAUSES`."""
    evidence: str
    """What was seen, with numbers."""
    advice: str
    """The flag, policy row or code change that mends it."""
    reproduced: bool
    """A replay showed it. False: the replay was finite, or there was none."""
    rule: str = ""
    """The policy row in the advice, such as "module:decoder.*.wo=fp32"; else "". Of a
    graph alone there may be several, joined by " + "."""
    normal: bool = False
    """It is no fault: a smaller loss scale, which dynamic scaling finds, cures it."""

    def __post_init__(self) -> None:
        words = (("phase", PHASES), ("cause", CAUSES), ("wide", _WIDE))
        for name, allowed in words:
            given = getattr(self, name)
            if given not in allowed:
                message = f"{name}={given!r} of a BadOp: use {', '.join(allowed)}."
                raise UserError(message)

    @property
    def place(self) -> str:
        """Module and operation, such as "decoder.block.5.ff.wo (linear)"."""
        return f"{self.module} ({self.op})" if self.op else self.module

    def __str__(self) -> str:
        """Return it as sentences."""
        at = "" if self.step is None else f" at step {self.step}"
        # Whole numbers hold neither inf nor NaN: an index points nowhere.
        if self.phase == "none" or self.dtype == "int64":
            return f"{self.place}{at}: {self.evidence}. {self.advice}"
        is_stored = self.phase in {"input", "weight"}
        verb = (
            "took in" if self.phase == "input" else "holds" if is_stored else "produced"
        )
        passed = " in the backward pass" if self.phase == "backward" else ""
        head = f"{self.place} {verb} {self.nonfinite_kind or 'inf or NaN'}{passed}{at}"
        return f"{head}: {self.evidence}. {self.advice}"

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; all floats are finite or null."""
        inputs = (
            self.inputs if self.inputs is None or math.isfinite(self.inputs) else None
        )
        return asdict(self) | {"inputs": inputs}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> BadOp:
        """Return the value that `data` was made from, other keys left aside."""
        return cls(**{name: data[name] for name in cls.__annotations__ if name in data})

    def finding(self) -> Finding:
        """Return what the doctor says of it."""
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

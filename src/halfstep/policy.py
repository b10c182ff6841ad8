"""The one decider: in which dtype does this operation or module run, and why?

In: an operation, the dtypes of its operands, a device, the module it runs in. Out: a
`Decision`. A `Policy` is data: the user's rules in front of torch's own table for the
device. No other room may answer the question.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from halfstep import optable
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEEP = "keep"
CATEGORIES = (optable.LOW, optable.FP32, optable.PROMOTE, KEEP, optable.BANNED)
_KINDS = ("op", "module", "type")
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rule:
    """One row: what runs how, and why.

    `Rule.parse("module:encoder.layers.3.*=fp32")` undoes `str(rule)`.
    """

    kind: str
    """"op" (an aten name), "module" (a path in the model) or "type" (a class name)."""
    pattern: str
    """A glob over names of that kind; `*` also crosses dots."""
    category: str
    """"low", "fp32", "promote", "keep" (as called) or "banned"."""
    reason: str = field(default="your rule", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            message = f"rule {str(self)!r}: kind {self.kind!r} is not one of {_KINDS}."
            raise UserError(message)
        if not self.pattern or " + " in self.pattern:
            message = (
                f"rule {str(self)!r}: pattern {self.pattern!r} must be a glob without "
                "' + ', which parts rules; '*' matches every name."
            )
            raise UserError(message)
        if self.category not in CATEGORIES:
            message = (
                f"rule {str(self)!r}: {self.category!r} is not a category; choose "
                f"one of {', '.join(CATEGORIES)}."
            )
            raise UserError(message)

    @classmethod
    def parse(cls, word: str) -> Rule:
        """Return the rule that a word such as "type:LayerNorm=fp32" spells.

        Raises:
            UserError: If the word is not KIND:PATTERN=CATEGORY.
        """
        target, equals, category = word.rpartition("=")
        kind, colon, pattern = target.partition(":")
        if not (equals and colon and pattern):
            message = (
                f"rule {word!r} is not KIND:PATTERN=CATEGORY; write for example "
                "'module:classifier=fp32' or 'type:LayerNorm=fp32'."
            )
            raise UserError(message)
        return cls(kind, pattern, category)

    def __str__(self) -> str:
        """Return the word that `parse` turns back into this rule."""
        return f"{self.kind}:{self.pattern}={self.category}"

    def matches(self, kind: str, names: Iterable[str]) -> bool:
        """Say whether this row speaks of something of that kind with those names."""
        return kind == self.kind and any(
            fnmatch.fnmatchcase(name, self.pattern) for name in names
        )


@dataclass(frozen=True)
class Policy:
    """Rules in front of torch's own table; the first that matches decides."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, word: str) -> Policy:
        """Return the policy that a word spells: "torch", or "torch + RULE + RULE ...".

        Raises:
            UserError: If the word does not begin with "torch", or a rule is malformed.
        """
        base, *rules = (part.strip() for part in word.split(" + "))
        if base != "torch":
            message = f"policy={base!r} is not known; the named policy is 'torch'."
            raise UserError(message)
        return cls(tuple(Rule.parse(rule) for rule in rules))

    def __str__(self) -> str:
        """Return the word that `parse` turns back into this policy."""
        return " + ".join(["torch", *map(str, self.rules)])

    def __add__(self, rule: Rule) -> Policy:
        """Return a policy in which `rule` comes before those that are there."""
        return Policy((rule, *self.rules))


TORCH = Policy()
"""torch's own table for the device, and nothing else."""


@dataclass(frozen=True)
class Decision:
    """In which dtype something runs, and why."""

    dtype: torch.dtype | None
    """Floating operands are cast to it; None: they stay as they are."""
    category: str
    """The category, or "fp32_result": fp32 out, operands not copied."""
    reason: str
    row: str
    """The row that decided, as text."""


def decide(
    op: str | None,
    dtypes: Sequence[torch.dtype],
    device: str,
    *,
    policy: Policy = TORCH,
    low: torch.dtype = torch.bfloat16,
    module: str = "",
    types: Sequence[str] = (),
) -> Decision:
    """Return the dtype in which an operation, or a module as a whole, runs.

    Order: the user's rules (each against the module's path, its types and the
    operation), then torch's table for the device, then: as called.

    Args:
        op: aten's name, with overload where the table has it ("softmax.int"); None
            asks about a module as a whole, which only rules can answer.
        dtypes: Dtypes of the floating operands.
        device: "cpu" or "cuda".
        policy: The rules in front of torch's table.
        low: The 16-bit dtype in use.
        module: Path of the module that runs it; "" is the model itself.
        types: Class names of that module, its bases included.

    Raises:
        UserError: If there is no table for the device.
    """
    if device not in optable.TABLES:
        message = f"device={device!r} has no table; choose {', '.join(optable.TABLES)}."
        raise UserError(message)
    names = {"op": [op] if op else [], "module": [module], "type": types}
    for rule in policy.rules:
        if rule.matches(rule.kind, names[rule.kind]):
            category, reason, row = rule.category, rule.reason, str(rule)
            break
    else:
        category = optable.TABLES[device].get(op or "", KEEP)
        reason = optable.REASONS.get(category, "no row: it runs as it is called")
        row = f"torch {device} table: {op}={category}" if op else "no row"
    return Decision(_cast_to(category, dtypes, low), category, reason, row)


def _cast_to(
    category: str, dtypes: Sequence[torch.dtype], low: torch.dtype
) -> torch.dtype | None:
    """Return what floating operands are cast to under a category."""
    eligible = [dtype for dtype in dtypes if dtype in _AUTOCAST_DTYPES]
    if not eligible or category in (KEEP, optable.FP32_RESULT, optable.BANNED):
        return None
    if category == optable.PROMOTE:
        # torch refuses a mix of the two 16-bit formats; fp32 holds both.
        return low if set(eligible) == {low} else torch.float32
    return low if category == optable.LOW else torch.float32


def is_normalisation(types: Iterable[str]) -> bool:
    """Say whether a module with these class names is a normalisation layer.

    Model libraries write their own (LlamaRMSNorm, T5LayerNorm); the name tells.
    """
    return any(name.endswith(optable.NORMALISATION) for name in types)


def type_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the class names of a module, its bases included, nearest first."""
    return tuple(cls.__name__ for cls in type(module).__mro__)

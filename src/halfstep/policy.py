"""The one decider: in which dtype does this operation or module run, and why?

In: an operation, the dtypes of its operands, a device, the module it runs in. Out: a
`Decision`. A `Policy` is data: the user's rules in front of a named table, torch's own
or the lean one. No other room may answer the question.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Self

import torch

from halfstep import optable, policy_file
from halfstep.errors import UserError, require
from halfstep.policy_file import KINDS

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

KEEP = "keep"
CATEGORIES = (optable.LOW, optable.FP32, optable.PROMOTE, KEEP, optable.BANNED)
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEFAULT_REASON = "your rule"
_SPLIT = " + "
_TENSORS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"}
_MACHINERY = """
    prim prims debugprims rngprims inductor_prims inductor profiler quantized _quantized
    quantization onednn mkldnn mkldnn_prepacked mkl sparse c10d _c10d_functional
    _c10d_functional_autograd symm_mem _dtensor static_runtime export debug_mode_ops
    _native _test
"""
"""Namespaces of torch that no model's author calls; some write without saying so."""


@dataclass(frozen=True)
class Rule:
    """One row: what runs how, and why.

    `Rule.parse("module:encoder.layers.3.*=fp32")` undoes `str(rule)`.
    """

    kind: str
    """"op" (an aten name), "module" (a path in the model) or "type" (a class name)."""
    pattern: str
    """A glob over names of that kind, `*` also crossing dots; or a regular expression
    between slashes, which must match the whole name."""
    category: str
    """"low", "fp32", "promote", "keep" (as called) or "banned"."""
    reason: str = field(default=_DEFAULT_REASON, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            message = f"rule {str(self)!r}: kind {self.kind!r} is not one of {KINDS}."
            raise UserError(message)
        if not self.pattern or _SPLIT in self.pattern:
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
        try:
            _compiled(self.pattern)
        except (re.error, OverflowError) as error:
            message = (
                f"rule {str(self)!r}: {self.pattern!r} is no regular expression: "
                f"{error}. Mend it, or write a glob, without the slashes."
            )
            raise UserError(message) from None

    @classmethod
    def parse(cls, word: str) -> Self:
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
        return kind == self.kind and any(map(_compiled(self.pattern).fullmatch, names))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    expression = len(pattern) > 1 and pattern[0] == pattern[-1] == "/"
    return re.compile(pattern[1:-1] if expression else fnmatch.translate(pattern))


@dataclass(frozen=True)
class Policy:
    """Rules in front of a named table; the first that matches decides."""

    rules: tuple[Rule, ...] = ()
    base: str = "torch"
    """"torch": torch's own table for the device. "lean": one table for all devices,
    in which normalisation and softmax run in 16 bits where their kernels accumulate in
    fp32."""

    def __post_init__(self) -> None:
        if self.base not in optable.NAMED:
            named = " and ".join(repr(name) for name in optable.NAMED)
            message = (
                f"policy={self.base!r} is not known; the named policies are {named}."
            )
            raise UserError(message)

    @classmethod
    def of(cls, given: Policy | str | os.PathLike[str]) -> Policy:
        """Return a policy, or the one that a word spells, or a file holds.

        Raises:
            UserError: If it is none of the three, or the word or file is malformed.
        """
        if isinstance(given, str):
            return cls.parse(given)
        if hasattr(given, "__fspath__"):
            return cls.load(given)
        right = "'lean', 'torch', either with rules, a TOML file, or a Policy"
        require("policy", given, isinstance(given, Policy), right)
        return given

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the policy that a word spells: "lean", or "torch + RULE + RULE ...".

        A word that ends in ".toml" is the path of a file, as `load` reads it.

        Raises:
            UserError: If the word begins with no named policy, or a rule is malformed.
        """
        if word.endswith(".toml"):
            return cls.load(word)
        base, *rules = (part.strip() for part in word.split(_SPLIT))
        return cls(tuple(Rule.parse(rule) for rule in rules), base)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the policy that a file holds; undoes `save`.

        Raises:
            UserError: If it cannot be read; names the file and the rule.
        """
        base, rules = policy_file.read(path)
        place = f"policy file {str(path)!r}"
        try:
            policy = cls(base=base)
            for number, rule in enumerate(rules, 1):
                place = f"policy file {str(path)!r}, rule {number}"
                kind = next(kind for kind in KINDS if kind in rule)
                reason = rule.get("reason", _DEFAULT_REASON)
                made = Rule(kind, rule[kind], rule["run"], reason)
                policy = replace(policy, rules=(*policy.rules, made))
        except UserError as error:
            message = f"{place}: {error}"
            raise UserError(message) from None
        return policy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy, reasons included, as TOML that `load` reads."""
        words = [
            {rule.kind: rule.pattern, "run": rule.category, "reason": rule.reason}
            for rule in self.rules
        ]
        policy_file.write(path, self.base, words)

    def __str__(self) -> str:
        """Return the word that `parse` turns back into this policy."""
        return _SPLIT.join([self.base, *map(str, self.rules)])

    def __add__(self, rule: Rule | str) -> Policy:
        """Return a policy in which `rule` comes before those that are there."""
        first = Rule.parse(rule) if isinstance(rule, str) else rule
        return Policy((first, *self.rules), self.base)


TORCH = Policy()
"""torch's own table for the device, and nothing else."""
LEAN = Policy(base="lean")
"""One table for all devices, and nothing else."""


@dataclass(frozen=True)
class Decision:
    """In which dtype something runs, and why."""

    dtype: torch.dtype | None
    """Floating operands are cast to it; None: they stay as they are."""
    category: str
    """The rule's or the row's; of rows also "follow" (the first operand's format) and
    "fp32_result" (fp32 out, operands not copied)."""
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
    operation), then the policy's table for the device, then: as called.

    Args:
        op: aten's name, with overload where the table has it ("softmax.int"), or
            another library's ("ns::name"); None asks about a module as a whole, which
            only rules can answer.
        dtypes: Dtypes of the floating operands, in order.
        device: "cpu", "cuda", "mps" or "xpu".
        policy: The rules, and the table behind them.
        low: The 16-bit dtype in use.
        module: Path of the module that runs it; "" is the model itself. A rule that
            matches the path of a module around it speaks of it too.
        types: Class names of that module and of those around it, bases included.

    Raises:
        UserError: If there is no table for the device.
    """
    if device not in optable.TABLES:
        message = f"device={device!r} has no table; choose {', '.join(optable.TABLES)}."
        raise UserError(message)
    op = op.removeprefix("aten::") if op else None
    index = _first(policy, op, module, types)
    row = optable.NAMED[policy.base][device].get(op or "")
    if index is not None:
        rule = policy.rules[index]
        category, reason, text = rule.category, rule.reason, str(rule)
    else:
        category = row.category if row else KEEP
        reason = row.reason if row else "no row: it runs as it is called"
        text = f"{policy.base} {device} table: {op}={category}" if op else "no row"
    return Decision(cast_to(category, dtypes, low), category, reason, text)


def deciding_rule(
    policy: Policy, module: str = "", types: Sequence[str] = ()
) -> int | None:
    """Return the index of the first rule that speaks of a module as a whole.

    Args:
        policy: Its rules on operations have no say here.
        module: Path, as for `decide`.
        types: Class names, as for `decide`.

    Returns:
        None where no rule does.
    """
    return _first(policy, None, module, types)


def _first(
    policy: Policy, op: str | None, module: str, types: Sequence[str]
) -> int | None:
    """Return the index of the rule that decides."""
    if not policy.rules:
        return None
    names: Mapping[str, Sequence[str]] = {
        "op": _spellings(op) if op else (),
        "module": around(module),
        "type": types,
    }
    for index, rule in enumerate(policy.rules):
        if rule.matches(rule.kind, names[rule.kind]):
            return index
    return None


def _spellings(op: str) -> list[str]:
    """Return the names of an operation: with and without overload and "aten::"."""
    full = op if "::" in op else f"aten::{op}"
    names = [full, full.partition(".")[0]]
    return names + [name[6:] for name in names if name.startswith("aten::")]


def around(module: str) -> list[str]:
    """Return a module's path and those of the modules around it, the model's "" too."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def check_ops(policy: Policy) -> None:
    """Refuse a rule on operations that would change nothing.

    Why: a misspelt name matches nothing, and the run would go on as if the rule were
    in force. Asks torch each time, since libraries add operations: some milliseconds.

    Raises:
        UserError: If a rule matches no operation, or only such as cannot be cast.
    """
    rules = [rule for rule in policy.rules if rule.kind == "op"]
    names = [name for op in _known_ops() for name in _spellings(op)] if rules else []
    for rule in rules:
        if matching_ops(rule):
            continue
        near = difflib.get_close_matches(rule.pattern, names, n=1)
        message = f"rule {str(rule)!r} matches no operation; "
        if rule.matches("op", names):
            message = (
                f"rule {str(rule)!r} matches only operations that write in place, "
                "return views or take no tensor, and those cannot be cast: name others."
            )
        elif near:
            meant = Rule("op", near[0], rule.category)
            message += f"did you mean {str(meant)!r}?"
        else:
            message += "write aten's name, as in 'op:softmax', or 'op:library::name'."
        raise UserError(message)


def matching_ops(rule: Rule) -> tuple[str, ...]:
    """Return the full names ("aten::softmax.int") of operations that a rule speaks of.

    Only those whose operands can be cast: they take a tensor, write into no argument
    and return no view of one. Asks torch each time: some milliseconds.
    """
    machinery = set(_MACHINERY.split())
    return tuple(
        op
        for op in _known_ops()
        if rule.matches("op", _spellings(op))
        and op.partition("::")[0] not in machinery
        and _is_functional(op)
    )


def _known_ops() -> list[str]:
    return sorted(torch._C._dispatch_get_all_op_names())  # noqa: SLF001


def _is_functional(op: str) -> bool:
    """Say whether an operation takes a tensor, writes into none and returns no view."""
    name, _, overload = op.partition(".")
    schema = torch._C._get_schema(name, overload)  # noqa: SLF001
    takes = any(str(argument.type) in _TENSORS for argument in schema.arguments)
    writes = any(
        argument.alias_info and argument.alias_info.is_write
        for argument in schema.arguments
    )
    return takes and not writes and not any(out.alias_info for out in schema.returns)


def cast_to(
    category: str, dtypes: Sequence[torch.dtype], low: torch.dtype
) -> torch.dtype | None:
    """Return what floating operands are cast to under a category."""
    if category == optable.FOLLOW:
        return dtypes[0] if dtypes and dtypes[0] in _AUTOCAST_DTYPES else None
    if category == optable.FP32_IN_FP16:
        category = optable.FP32 if low == torch.float16 else KEEP
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

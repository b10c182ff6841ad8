"""Defines `Rule` and `Policy`: the user's rules, then a named op table.

`halfstep.policy.decision` evaluates them.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
import threading
import tomllib
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from halfstep.errors import UserError, require
from halfstep.policy import op_tables

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch.autograd.graph import Node

KINDS = ("op", "module", "type")
_TABLES = (
    'tables [[rule]] with one of op, module, type, for example module = "classifier", '
    'with run = "fp32", and perhaps with a reason.'
)
KEEP = "keep"
"""Category of operations that are not cast."""
CATEGORIES = (op_tables.LOW, op_tables.FP32, op_tables.PROMOTE, KEEP, op_tables.BANNED)
_DEFAULT_REASON = "your rule"
_SPLIT = " + "
_TENSORS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"}
_MACHINERY = """
    prim prims debugprims rngprims inductor_prims inductor profiler quantized _quantized
    quantization onednn mkldnn mkldnn_prepacked mkl sparse c10d _c10d_functional
    _c10d_functional_autograd symm_mem _dtensor static_runtime export debug_mode_ops
    _native _test
"""
"""torch's internal namespaces, which models do not call. Some of their operations write
in place although their schemas do not say so."""


@dataclass(frozen=True)
class Rule:
    """Operations or modules, and the dtype category in which they run.

    Raises:
        UserError: If a field is malformed.

    Example:
        >>> rule = Rule.parse("module:encoder.layers.3.*=fp32")
        >>> rule.kind, rule.pattern, rule.category
        ('module', 'encoder.layers.3.*', 'fp32')
    """

    kind: str
    """"op" (a name in torch.ops.aten), "module" (a path in the model) or "type" (a
    class name)."""
    pattern: str
    """A glob over such names, in which `*` also matches dots; or a regular expression
    between slashes, which must match the whole name."""
    category: str
    """"low" (16 bits), "fp32", "promote" (the widest operand's dtype), "keep" (as
    called) or "banned" (raises an error)."""
    reason: str = field(default=_DEFAULT_REASON, compare=False)
    """Why, for reports; it does not count in comparisons."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            message = f"rule {str(self)!r}: kind {self.kind!r} is not one of {KINDS}."
            raise UserError(message)
        if not self.pattern or _SPLIT in self.pattern:
            raise UserError(
                f"rule {str(self)!r}: pattern {self.pattern!r} must be a glob without "
                "' + ', which separates rules; '*' matches every name."
            )
        if self.category not in CATEGORIES:
            raise UserError(
                f"rule {str(self)!r}: {self.category!r} is not a category; choose "
                f"one of {', '.join(CATEGORIES)}."
            )
        try:
            _compiled(self.pattern)
        except (re.error, OverflowError) as error:
            raise UserError(
                f"rule {str(self)!r}: {self.pattern!r} is not a regular expression: "
                f"{error}. Fix it, or write a glob, without the slashes."
            ) from None

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the rule of a string such as "type:LayerNorm=fp32".

        Raises:
            UserError: If the string is not KIND:PATTERN=CATEGORY.
        """
        target, equals, category = word.rpartition("=")
        kind, colon, pattern = target.partition(":")
        if not (equals and colon and pattern):
            raise UserError(
                f"rule {word!r} is not KIND:PATTERN=CATEGORY; write for example "
                "'module:classifier=fp32' or 'type:LayerNorm=fp32'."
            )
        return cls(kind, pattern, category)

    def __str__(self) -> str:
        """Return the string that `parse` turns back into this rule."""
        return f"{self.kind}:{self.pattern}={self.category}"

    def matches(self, kind: str, names: Iterable[str]) -> bool:
        """Return whether the rule is of this kind and matches one of the names."""
        return kind == self.kind and any(map(_compiled(self.pattern).fullmatch, names))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    expression = len(pattern) > 1 and pattern[0] == pattern[-1] == "/"
    return re.compile(pattern[1:-1] if expression else fnmatch.translate(pattern))


@dataclass(frozen=True)
class Policy:
    """Rules, then a named table of operations; the first that matches decides.

    Raises:
        UserError: If there is no such table.

    Example:
        >>> policy = Policy.parse("lean + module:head=fp32")
        >>> print(policy + "op:softmax=fp32")
        lean + op:softmax=fp32 + module:head=fp32
    """

    rules: tuple[Rule, ...] = ()
    """In order of precedence."""
    base: str = "torch"
    """"torch": torch's own table for the device. "lean": one table for all devices,
    in which normalisation and softmax run in 16 bits where their kernels accumulate in
    fp32."""

    def __post_init__(self) -> None:
        if self.base not in op_tables.NAMED:
            named = " and ".join(repr(name) for name in op_tables.NAMED)
            message = (
                f"policy={self.base!r} is not known; the named policies are {named}."
            )
            if "=" in self.base:
                message += f" Rules follow one of them: 'lean + {self.base}'."
            raise UserError(message)

    @classmethod
    def of(cls, given: Policy | str | os.PathLike[str]) -> Policy:
        """Return the policy of an argument.

        Args:
            given: A policy, a string as for `parse`, or a path as for `load`.

        Raises:
            UserError: If it is none of the three, or string or file are malformed.
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
        """Return the policy of a string: "lean", or "torch + RULE + RULE ...".

        A string that ends in ".toml" is the path of a file, as for `load`.

        Raises:
            UserError: If it does not begin with a named policy, or a rule is malformed.
        """
        if word.endswith(".toml"):
            return cls.load(word)
        base, *rules = (part.strip() for part in word.split(_SPLIT))
        return cls(tuple(Rule.parse(rule) for rule in rules), base)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the policy in a TOML file, as `save` writes it.

        Raises:
            UserError: If it cannot be read; the message names the file and the rule.
        """
        file = f"policy file {str(path)!r}"
        try:
            content = tomllib.loads(Path(path).read_bytes().decode())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"{file} cannot be read: {why}. Give TOML as Policy.save writes it."
            ) from None
        base, tables = content.get("base"), content.pop("rule", [])
        has_parts = content.keys() == {"base"} and isinstance(tables, list)
        if not has_parts or not isinstance(base, str):
            raise UserError(
                f'{file}: it must have base = "torch" or "lean", and {_TABLES}'
            )
        place = file
        try:
            policy = cls(base=base)
            for number, table in enumerate(tables, 1):
                place = f"{file}, rule {number}"
                policy = replace(policy, rules=(*policy.rules, _rule_of(table)))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        return policy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy with its reasons as TOML, for `load`."""
        lines = [f"base = {_quoted(self.base)}"]
        for rule in self.rules:
            lines += ["", "[[rule]]", f"{rule.kind} = {_quoted(rule.pattern)}"]
            lines.append(f"run = {_quoted(rule.category)}")
            lines.append(f"reason = {_quoted(rule.reason)}")
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")

    def __str__(self) -> str:
        """Return the string that `parse` turns back into this policy."""
        return _SPLIT.join([self.base, *map(str, self.rules)])

    def __add__(self, rule: Rule | str) -> Policy:
        """Return a policy in which `rule` comes before the other rules."""
        first = Rule.parse(rule) if isinstance(rule, str) else rule
        return Policy((first, *self.rules), self.base)


def _rule_of(table: Any) -> Rule:  # noqa: ANN401
    """Return the rule of a table of a file."""
    keys = {*table} if isinstance(table, dict) else set()
    kinds = [kind for kind in KINDS if kind in keys]
    allowed = {*kinds, "run"} <= keys <= {*kinds, "run", "reason"}
    if len(kinds) != 1 or not allowed or not all(map(_is_text, table.values())):
        raise UserError(f"{table!r} is no rule; write {_TABLES}")
    (kind,) = kinds
    return Rule(kind, table[kind], table["run"], table.get("reason", _DEFAULT_REASON))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _quoted(text: str) -> str:
    # TOML has all of JSON's escapes, and requires DEL to be escaped, too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


TORCH = Policy()
"""torch's own table for the device, without rules."""
LEAN = Policy(base="lean")
"""halfstep's table, the same on all devices, without rules."""


class _ContextHistory(threading.local):
    """The autocast contexts with a policy that this thread entered last.

    `casting` writes it on entry to a context, `scaling` reads it for the advice on a
    loss.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[Policy, list[int]]] = deque(maxlen=16)
        """Policy; autograd's sequence numbers on entry and on exit."""

    def policy_of(self, nodes: Iterable[Node]) -> Policy:
        """Return the policy under which one of these autograd nodes was made."""
        numbers = [node._sequence_nr() for node in nodes]  # noqa: SLF001
        for policy, (start, stop) in reversed(self.last):
            if any(start <= number < stop for number in numbers):
                return policy
        return TORCH


context_history = _ContextHistory()


def _spellings(op: str) -> list[str]:
    """Return the names of an operation: with and without overload and "aten::"."""
    full = op if "::" in op else f"aten::{op}"
    names = [full, full.partition(".")[0]]
    return names + [name[6:] for name in names if name.startswith("aten::")]


def check_ops(policy: Policy) -> None:
    """Raise if an operation rule of a policy has no effect.

    A misspelt name would otherwise be ignored. It asks torch for its operations each
    time, since libraries add some; that takes milliseconds.

    Raises:
        UserError: If a rule matches no operation, or only some that cannot be cast.

    Example:
        >>> try:
        ...     check_ops(Policy.parse("torch + op:softmaks=fp32"))
        ... except UserError as error:
        ...     print(str(error).partition("; ")[2])
        did you mean 'op:softmax=fp32'?
    """
    rules = [rule for rule in policy.rules if rule.kind == "op"]
    names = [name for op in _all_op_names() for name in _spellings(op)] if rules else []
    for rule in rules:
        if matching_ops(rule):
            continue
        near = difflib.get_close_matches(rule.pattern, names, n=1)
        message = f"rule {str(rule)!r} matches no operation; "
        if near and not rule.matches("op", names):
            meant = Rule("op", near[0], rule.category)
            message += f"did you mean {str(meant)!r}?"
        else:
            message += (
                "write aten's name of one that can be cast, as in 'op:softmax', or "
                "'op:library::name'."
            )
        raise UserError(message)


def matching_ops(rule: Rule) -> tuple[str, ...]:
    """Return the full names of the operations that a rule applies to.

    Only operations that can be cast are included: they take a tensor, write into no
    argument and return no view of one. It takes milliseconds, as `check_ops`.

    Example:
        >>> matching_ops(Rule.parse("op:linear=fp32"))
        ('aten::linear',)
    """
    machinery = set(_MACHINERY.split())
    return tuple(
        op
        for op in _all_op_names()
        if rule.matches("op", _spellings(op))
        and op.partition("::")[0] not in machinery
        and _is_functional(op)
    )


def _all_op_names() -> list[str]:
    return sorted(torch._C._dispatch_get_all_op_names())  # noqa: SLF001


def _is_functional(op: str) -> bool:
    """Return whether an operation takes tensors, writes to none, returns no view."""
    name, _, overload = op.partition(".")
    try:
        schema = torch._C._get_schema(name, overload)  # noqa: SLF001
    except RuntimeError:  # a library may register kernels of an operation it lacks
        return False
    takes = any(str(argument.type) in _TENSORS for argument in schema.arguments)
    writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
    return takes and not writes and not any(out.alias_info for out in schema.returns)


RMS_NORM = Rule(
    "type",
    "RMSNorm",
    op_tables.FP32,
    "unlike other norms' kernels, its kernel rejects mixed dtypes",
)
"""At levels with 16-bit weights and fp32 norms, torch's RMSNorm is an fp32 module. The
lean table needs no such rule: it casts the weight to the dtype of the input."""
PARAMETRIZED = Rule(
    "type",
    "ParametrizationList",
    op_tables.FP32,
    "orthogonal maps and power iterations need fp32; their result is 16-bit",
)
"""At levels with 16-bit weights, a parametrized weight is computed in fp32 from fp32
parameters and rounded once. These parameters need no master weights and have none."""


def is_normalisation(types: Iterable[str]) -> bool:
    """Return whether a module with these class names is a normalisation layer.

    The end of the name decides, so that LlamaRMSNorm and T5LayerNorm are included.

    Args:
        types: Class names, as `type_names` returns them.

    Example:
        >>> is_normalisation(["LlamaRMSNorm", "Module"])
        True
    """
    return any(name.endswith(op_tables.NORMALISATION) for name in types)


def type_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the class names of a module and its bases, in method resolution order.

    Example:
        >>> type_names(torch.nn.Linear(2, 2))
        ('Linear', 'Module', 'object')
    """
    return tuple(cls.__name__ for cls in type(module).__mro__)

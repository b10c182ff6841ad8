"""Reads and writes a policy as a TOML file.

It works on strings only; `halfstep.policy.rules` makes a `Policy` of them. Errors name
the file and the rule.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

KINDS = ("op", "module", "type")
_EXAMPLE = 'module = "classifier", run = "fp32"'

Words = dict[str, str]
"""A rule: one of KINDS with its pattern, "run", and optionally "reason"."""


def write(path: str | os.PathLike[str], base: str, rules: Iterable[Words]) -> None:
    """Write a policy as TOML.

    Raises:
        UserError: If a string cannot be encoded as UTF-8.
    """
    lines = [f"base = {_quoted(base)}"]
    for rule in rules:
        lines += ["", "[[rule]]", *(f"{key} = {_quoted(rule[key])}" for key in rule)]
    text = "\n".join(lines) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        message = (
            f"policy file {str(path)!r} cannot hold {text[error.start]!r}, half of a "
            "surrogate pair: write the pattern or reason without it."
        )
        raise UserError(message) from None
    Path(path).write_bytes(data)


def _quoted(text: str) -> str:
    # TOML has all of JSON's escapes, and requires DEL to be escaped, too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(path: str | os.PathLike[str]) -> tuple[str, list[Words]]:
    """Return the base and the rules of a file.

    Raises:
        UserError: If the file cannot be read, or is malformed.
    """
    name = f"policy file {str(path)!r}"
    try:
        content = tomllib.loads(Path(path).read_bytes().decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"{name} cannot be read: {why}. Give TOML as Policy.save writes it."
        raise UserError(message) from None
    base, rules = content.get("base"), content.get("rule", [])
    unknown = sorted(content.keys() - {"base", "rule"})
    if unknown:
        message = f"{name}: {unknown[0]!r} is not known; write base and [[rule]]."
    elif not isinstance(base, str):
        message = f'{name}: base = {base!r} is not a string; write base = "torch".'
    elif not (
        isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules)
    ):
        message = f"{name}: rule is not a list of tables; start each with [[rule]]."
    else:
        return base, [_words(f"{name}, rule {n}", r) for n, r in enumerate(rules, 1)]
    raise UserError(message)


def _words(name: str, rule: dict[str, Any]) -> Words:
    """Return one rule, or raise if it is malformed."""
    kinds = [kind for kind in KINDS if kind in rule]
    unknown = sorted(rule.keys() - {*KINDS, "run", "reason"})
    wrong = [key for key, value in rule.items() if not isinstance(value, str)]
    if unknown:
        message = f"{name}: {unknown[0]!r} is not known; write for example {_EXAMPLE}."
    elif len(kinds) != 1:
        message = (
            f"{name} has {' and '.join(kinds) or 'no pattern'}; give exactly one of "
            f"{', '.join(KINDS)}, for example {_EXAMPLE}."
        )
    elif "run" not in rule:
        message = f"{name} does not say how to run; write for example {_EXAMPLE}."
    elif wrong:
        value = f"{wrong[0]} = {rule[wrong[0]]!r}"
        message = f"{name}: {value} is not a string; put it in quotes."
    else:
        return rule
    raise UserError(message)

"""Writes docs/errors.md, every error and warning, from the source.

Run `python docs/errors.py` after a change of a message. In: the modules of the package,
parsed and not imported. Out: a heading for each message, its first clause with `…` for
values, the message with {names} where it prints values, the function that raises it,
and what that function does.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import halfstep

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).resolve().parent
SOURCE = Path(halfstep.__file__).parent
PAGE = DOCS / "errors.md"
MARK = "<!-- Below: written by `python docs/errors.py`. -->"
"""What is above it on the page is written by hand."""
MAX_TEXTS = 12
"""Variants of one message that are listed; more are shown with {...} in their place."""
MAX_CHARS = 90
"""Characters of a heading, about."""
MAX_DEPTH = 6
"""Steps from a message to where its text is written."""
MIN_ARGS = 2
"""Arguments of halfstep.compat.require, which is not errors.require."""
MIN_WORDS = 3
"""Words of its own that a text needs to be a message."""
WARNINGS = {"warn", "warn_caller", "warning"}
FINDINGS = {"find", "call_order_finding"}
"""Functions that warn of what was measured, and what to do."""
TEXTS = ast.Constant | ast.JoinedStr | ast.Name
EXPECTED = {
    "require": "{value} must be {expected}.",
    "require_type": " is of type {type}; it must be {expected}.",
    "require_positive": "{value} must be {expected}.",
    "require_int": "{value} must be a whole number of at least {expected}.",
    "require_bool": "{value} must be True or False.",
}
"""Checks of errors.py -> what their message says after the argument's name."""
GROUPS = {
    "bench": "halfstep bench",
    "casting": "Autocast",
    "checkpoint": "Checkpoints",
    "compat": "Adapters (apex, Lightning, Accelerate, transformers)",
    "diagnostics": "Diagnostics (check, diagnose, find_nonfinite, Probe, doctor)",
    "distributed": "Processes",
    "graph": "Plans",
    "launch": "halfstep run",
    "machine": "Machine",
    "masters": "Master weights",
    "nonfinite": "Diagnostics (check, diagnose, find_nonfinite, Probe, doctor)",
    "numerics": "Formats and statistics",
    "parity": "halfstep compare",
    "policy": "Policies, rules and levels",
    "scaling": "Loss scaling and GradScaler",
    "session": "Sessions (prepare)",
    "train": "halfstep train and predict",
    "cli": "Command line",
    "testing": "Testing",
    "reporting": "Reports and tables",
}
OTHERS = "Other messages"
WRAPPERS = {"format_value", "join", "len", "list", "repr", "sorted", "str", "type"}
"""Functions whose argument says what a message prints."""


@dataclass
class Message:
    """What one place in the source tells a user."""

    texts: list[str]
    """The message, in each of its variants."""
    kind: str
    """Class of the exception, or "warning"."""
    module: str
    function: str
    purpose: str
    """First line of the function's docstring."""


@dataclass
class Scope:
    """A function, or the body of a module, and what is around it."""

    node: ast.AST
    name: str
    module: Module
    around: Scope | None = None
    purpose: str = ""
    args: list[str] = field(default_factory=list)

    @functools.cached_property
    def statements(self) -> list[ast.AST]:
        """All nodes of this scope, in order; those of functions in it left out."""
        nodes: list[ast.AST] = []
        pending = [*ast.iter_child_nodes(self.node)][::-1]
        while pending:
            nodes.append(pending.pop())
            if not isinstance(nodes[-1], ast.FunctionDef | ast.ClassDef | ast.Lambda):
                pending += [*ast.iter_child_nodes(nodes[-1])][::-1]
        return nodes

    def calls(self) -> Iterator[tuple[Scope, ast.Call]]:
        """Yield each call of this function in its file, and where it is."""
        short = self.name.rpartition(".")[2].strip("_")
        for caller in self.module.scopes:
            for node in caller.statements:
                if isinstance(node, ast.Call) and label(node.func) == short:
                    yield caller, node


@dataclass
class Module:
    """One file."""

    path: str
    scopes: list[Scope] = field(default_factory=list)


def read_module(path: Path) -> Module:
    """Parse a file; list its functions."""
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    module = Module(name.removesuffix(".__init__"))

    def visit(node: ast.AST, prefix: str, around: Scope | None, purpose: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                doc = (ast.get_docstring(child) or purpose).split("\n\n")[0]
                scope = around
                if isinstance(child, ast.FunctionDef):
                    args = child.args
                    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
                    names = [arg.arg for arg in every]
                    scope = Scope(
                        child, prefix + child.name, module, around, doc, names
                    )
                    module.scopes.append(scope)
                visit(child, f"{prefix}{child.name}.", scope, doc)
            else:
                visit(child, prefix, around, purpose)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = Scope(tree, "", module)
    module.scopes.append(top)
    visit(tree, "", top, "")
    return module


def label(node: ast.AST) -> str:
    """Return what stands for a value in a message: the name that says what it is."""
    name = ""
    match node:
        case ast.Attribute(attr="name" | "__name__"):
            name = label(node.value)
        case ast.Attribute():
            name = node.attr.strip("_")
        case ast.Name():
            name = node.id.strip("_")
        case ast.Subscript() | ast.Starred():
            name = label(node.value)
        case ast.BinOp():
            name = label(node.left)
        case ast.GeneratorExp() | ast.ListComp():
            name = label(node.generators[0].iter)
        case ast.Call():
            name = label(node.func)
            if name in WRAPPERS and node.args:
                name = label(node.args[0])
    return name


def value_of(node: ast.AST) -> str:
    """Return what stands for a value that is printed."""
    name = label(node)
    return "{" + name + "}" if name else "..."


def assigned(scope: Scope, name: str) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return what is assigned to a name in a scope, and what is added to it."""
    values: list[ast.AST] = []
    added: list[ast.AST] = []
    for node in scope.statements:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = [node.target]
        if not any(isinstance(t, ast.Name) and t.id == name for t in targets):
            continue
        value = getattr(node, "value", None)
        if value is not None:
            (added if isinstance(node, ast.AugAssign) else values).append(value)
    return values, added


class Reader:
    """Finds the texts that an expression can be."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = modules
        self.by_name: dict[str, list[Scope]] = {}
        for scope in itertools.chain.from_iterable(m.scopes for m in modules):
            self.by_name.setdefault(scope.name.rpartition(".")[2], []).append(scope)

    def texts(self, node: ast.AST, scope: Scope, depth: int = 0) -> list[str]:
        """Return the texts of an expression; {name} stands for what is not known."""
        deeper = depth + 1
        texts: list[str] = []
        match node if depth <= MAX_DEPTH else None:
            case ast.Constant():
                texts = [str(node.value)]
            case ast.JoinedStr():
                texts = self.formatted(node, scope, depth)
            case ast.IfExp():
                texts = self.texts(node.body, scope, deeper)
                texts += self.texts(node.orelse, scope, deeper)
            case ast.BoolOp():
                texts = [t for v in node.values for t in self.texts(v, scope, deeper)]
            case ast.BinOp(op=ast.Add()):
                sides = node.left, node.right
                texts = self.joined([self.texts(s, scope, deeper) for s in sides])
            case ast.BinOp(op=ast.Mod()):
                texts = self.texts(node.left, scope, deeper)
            case ast.Name():
                texts = self.named(node, scope, depth)
            case ast.Call():
                texts = self.called(node, scope, depth)
        return texts or [value_of(node)]

    def formatted(self, node: ast.JoinedStr, scope: Scope, depth: int) -> list[str]:
        """Return the texts of an f-string, a part's only where they are few or all."""
        for limit in (3, MAX_TEXTS):
            texts = self.joined(
                [self.part(v, scope, depth, limit) for v in node.values]
            )
            if any(map(is_text, texts)):
                break
        return texts

    def part(self, node: ast.AST, scope: Scope, depth: int, limit: int) -> list[str]:
        """Return the texts of a part of an f-string: values by name, words in full."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        assert isinstance(node, ast.FormattedValue)  # noqa: S101
        unknown = [value_of(node.value)]
        if node.conversion != -1 or node.format_spec is not None:
            return unknown
        texts = self.texts(node.value, scope, depth + 2)
        if len(texts) <= limit and all(re.search(r"[a-z] ?[a-z]", t) for t in texts):
            return texts
        return unknown

    def joined(self, parts: list[list[str]]) -> list[str]:
        """Return all that the parts make together, within reason."""
        count = 1
        for part in parts:
            count *= len(part)
        if count > MAX_TEXTS:
            parts = [part if len(part) == 1 else ["..."] for part in parts]
        return ["".join(words) for words in itertools.product(*parts)]

    def named(self, node: ast.Name, scope: Scope, depth: int) -> list[str]:
        """Return what a name can stand for."""
        at: Scope | None = scope
        while at is not None:
            values, added = assigned(at, node.id)
            if values:
                texts = self.alternatives(values, added, at, depth)
                return [text for text in texts if text]
            if node.id in at.args:
                return self.passed(at, node.id, depth)
            at = at.around
        for module in self.modules:
            if module is not scope.module:
                continue
            values, _ = assigned(module.scopes[0], node.id)
            constants = [v for v in values if isinstance(v, ast.Constant)]
            return [str(value.value) for value in constants]
        return []

    def alternatives(
        self, values: list[ast.AST], added: list[ast.AST], at: Scope, depth: int
    ) -> list[str]:
        """Return the texts of assignments to one name, with what is added to them."""
        if not added:
            return [
                text for value in values for text in self.texts(value, at, depth + 1)
            ]
        texts: list[str] = []
        for value in values:
            first = self.texts(value, at, depth + 1)
            later = [a for a in added if a.lineno > value.lineno]
            if value is not values[0] or not later:
                texts += first
                continue
            endings = [t for a in later for t in self.texts(a, at, depth + 1)]
            texts += self.joined([first, endings])
        return texts

    def passed(self, scope: Scope, name: str, depth: int) -> list[str]:
        """Return what callers in the same file give for an argument."""
        texts = [
            text
            for caller, call in scope.calls()
            for given in self.arguments(call, scope, name)
            for text in self.texts(given, caller, depth + 1)
        ]
        return [] if len(texts) > MAX_TEXTS * 2 else texts

    @staticmethod
    def arguments(call: ast.Call, scope: Scope, name: str) -> list[ast.AST]:
        """Return what a call gives for an argument of a function."""
        given = [keyword.value for keyword in call.keywords if keyword.arg == name]
        names = [arg for arg in scope.args if arg not in {"self", "cls"}]
        if not given and name in names and names.index(name) < len(call.args):
            given = [call.args[names.index(name)]]
        return list(given)

    def called(self, node: ast.Call, scope: Scope, depth: int) -> list[str]:
        """Return what a function of ours returns, if that is text."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in {
            "format",
            "strip",
        }:
            return self.texts(node.func.value, scope, depth + 1)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return []
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        scopes = [s for s in self.by_name.get(name, []) if s.module is scope.module]
        if len(scopes) != 1:
            scopes = self.by_name.get(name, [])
        if len(scopes) != 1 or scopes[0] is scope:
            return []
        returned = [n.value for n in scopes[0].statements if isinstance(n, ast.Return)]
        texts = [t for one in returned for t in self.texts(one, scopes[0], depth + 2)]
        return [text for text in texts if text not in {"", "None"}]


def sinks(scope: Scope, errors: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, expression of the message) of what a function raises or warns of."""
    for node in scope.statements:
        value = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, ast.Return):
            value = node.value
            if value is not None and scope.name.endswith("_warning"):
                yield "warning", value
        kind = label(value.func) if isinstance(value, ast.Call) else ""
        if kind in errors and value.args:
            yield kind, value.args[kind == "ArgumentError"]
        if not isinstance(node, ast.Call) or not node.args:
            continue
        kind = label(node.func)
        if kind in WARNINGS:
            yield "warning", node.args[0]
        elif kind == "reject":
            yield "AmpError", node.args[0]
        elif kind in FINDINGS and all(isinstance(a, TEXTS) for a in node.args):
            measured, advice = node.args
            stop = ast.BinOp(measured, ast.Add(), ast.Constant(". "))
            yield "warning", ast.BinOp(stop, ast.Add(), advice)
        elif kind in EXPECTED and (kind != "require" or len(node.args) > MIN_ARGS):
            yield kind, node


def exceptions(modules: list[Module]) -> set[str]:
    """Return the names of Python's exceptions, and of classes made of them."""
    names = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    } | {"ArgumentError", "ArgumentTypeError"}
    trees = [node for module in modules for node in ast.walk(module.scopes[0].node)]
    classes = [node for node in trees if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # of classes of classes
        names |= {
            c.name.strip("_") for c in classes if names & set(map(label, c.bases))
        }
    return names


def looped(words: list[str], scope: Scope) -> Iterator[list[ast.AST]]:
    """Yield the values of names that a loop takes from the rows of a literal table."""
    for loop in scope.statements:
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
            continue
        names = [label(each) for each in loop.target.elts]
        if not set(words) <= set(names):
            continue
        for table in (loop.iter, *assigned(scope, label(loop.iter))[0]):
            for row in getattr(table, "elts", []):
                cells = [
                    cell
                    for each in row.elts
                    for cell in getattr(getattr(each, "value", None), "elts", [each])
                ]
                yield [cells[names.index(word)] for word in words]


def pairs(
    name: ast.AST, expected: ast.AST, scope: Scope, reader: Reader
) -> Iterator[tuple[ast.AST, ast.AST, Scope]]:
    """Yield what a check of an argument is called with, from a table or by callers."""
    words = [label(name), label(expected)]
    rows = [(*row, scope) for row in looped(words, scope)]
    if not rows and set(words) <= set(scope.args):
        for caller, call in scope.calls():
            given = [reader.arguments(call, scope, word) for word in words]
            rows += [(given[0][0], given[1][0], caller)] if all(given) else []
    if isinstance(expected, ast.Subscript):  # of a table in the module
        for table in assigned(scope.module.scopes[0], label(expected))[0]:
            rows += [
                (*row, scope) for row in zip(table.keys, table.values, strict=True)
            ]
    yield from rows or [(name, expected, scope)]


def required(call: ast.Call, scope: Scope, reader: Reader) -> list[str]:
    """Return the texts of a check of an argument."""
    check = label(call.func)
    kinds = [keyword.value for keyword in call.keywords if keyword.arg == "expected"]
    last = kinds[0] if kinds else call.args[-1]
    between = "" if check == "require_type" else "="
    return [
        name + between + EXPECTED[check].replace("{expected}", word)
        for name_node, node, at in pairs(call.args[0], last, scope, reader)
        for name in reader.texts(name_node, at)
        for word in (
            reader.texts(node, at) if "{expected}" in EXPECTED[check] else [""]
        )
    ]


def is_text(words: str) -> bool:
    """Say whether a message has words of its own, and does not pass on another's."""
    return len(re.findall(r"[a-z]{2,}", re.sub(r"\{.*?\}", "", words))) >= MIN_WORDS


@functools.cache
def messages() -> dict[str, list[Message]]:
    """Return every message by group, in the order of the source."""
    modules = [read_module(path) for path in sorted(SOURCE.rglob("*.py"))]
    reader, errors = Reader(modules), exceptions(modules)
    groups: dict[str, list[Message]] = {}
    listed: set[str] = set()
    # What the checks in errors.py say is listed where they are called.
    callers = (m.scopes for m in modules if m.path != "errors")
    for scope in itertools.chain.from_iterable(callers):
        path = scope.module.path
        for kind, expression in sinks(scope, errors):
            shown = kind
            if isinstance(expression, ast.Call) and kind in EXPECTED:
                texts, shown = required(expression, scope, reader), "UserError"
            else:
                texts = reader.texts(expression, scope)
            texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
            texts = [t for t in texts if is_text(t) and t not in listed]
            if texts:
                listed.update(texts)
                name = GROUPS.get(path.partition(".")[0], OTHERS)
                message = Message(
                    texts, shown, path, scope.name or "import", scope.purpose
                )
                groups.setdefault(name, []).append(message)
    return groups


def heading(message: Message, taken: set[str]) -> str:
    """Return the first clause of a message, with `…` for the values in it."""
    text = re.sub(r"\{[^{}]*\}|\.\.\.", "…", message.texts[0]).replace("`", "")
    ends = [m.start() for m in re.finditer(r"[;:.](?= )|\.?$", text)]
    ends = [end for end in ends if re.search(r"(\S*[a-z]\S* .*){2}[a-z]", text[:end])]
    ends = [end for end in ends if not text[:end].endswith("of type …")] or [len(text)]
    for end in ends:
        title = text[:end]
        if len(title) > MAX_CHARS:
            title = title[: title.rindex(" ", 0, MAX_CHARS)] + " …"
        if title.lower() not in taken:
            break
    else:
        title += f" ({message.function})"
    taken.add(title.lower())
    return title


def purpose_of(message: Message) -> str:
    """Return what a function does, where a reader calls it or it checks something."""
    purpose = message.purpose.replace("\n", " ")
    check = re.match(r"(Refuse|Reject|Raise|Warn|Check)\b", purpose)
    if check is None:
        is_private = re.search(r"(^|\.)_[a-z]|(^|\.)_[A-Z]", message.function)
        return "" if is_private else purpose
    return re.sub(r"^Refuse\b|^Reject\b", "Rejects", purpose)


def page() -> str:
    """Return the page: what is above the mark, then all messages."""
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    lines = [head + MARK]
    taken: set[str] = set()
    for group, members in sorted(messages().items()):
        lines += ["", f"## {group}"]
        for message in members:
            kind = "Warning of" if message.kind == "warning" else f"`{message.kind}` of"
            purpose = purpose_of(message)
            lines += ["", f"### `{heading(message, taken)}`", "", "```text"]
            lines += [*message.texts, "```", ""]
            where = f"`{message.function}` in `halfstep.{message.module}`"
            lines += [f"{kind} {where}: {purpose}".rstrip(": ")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

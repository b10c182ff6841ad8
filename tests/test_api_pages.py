"""docs/api and docs/errors.md hold what the source holds."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from docs import errors

import halfstep
from halfstep import checkpoint, machine, policy, scaler, testing

API = Path(__file__).parents[1] / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)$", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    pages = sorted(API.glob("*.md"))
    return [m for page in pages for m in DIRECTIVE.findall(page.read_text("utf-8"))]


def resolve(name: str) -> object:
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_every_public_name_is_documented() -> None:
    """Law: each name of the package, and of its public modules, is on a page, once."""
    names = [name for _, name in documented()]
    assert len(names) == len(set(names))
    values = [resolve(name) for name in names]
    missing = [
        name
        for name in halfstep.__all__
        if not inspect.ismodule(getattr(halfstep, name))
        and not any(getattr(halfstep, name) is value for value in values)
    ]
    for module in (checkpoint, machine, policy, scaler, testing):
        public = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
        ]
        missing += [
            f"{module.__name__}.{name}"
            for name in public
            if not any(getattr(module, name) is value for value in values)
        ]
    assert missing == []


def test_index_lists_every_public_name() -> None:
    """Law: docs/api/index.md has a row for each name, with a link that leads there."""
    index = (API / "index.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[`([\w.]+)`\]\((\w+)\.md#([\w.-]*)\) \|", index, re.MULTILINE
    )
    assert set(halfstep.__all__) <= {
        name.removeprefix("halfstep.") for name, *_ in rows
    }
    for _, page, anchor in rows:
        heads = re.findall(
            r"^#+ (.*)$", (API / f"{page}.md").read_text("utf-8"), re.MULTILINE
        )
        slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}
        assert anchor in slugs, (page, anchor)


def test_errors_page_is_current() -> None:
    """Law: docs/errors.md is what `python docs/errors.py` writes."""
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(), (
        "run: python docs/errors.py"
    )


def test_errors_page_reads_the_source() -> None:
    """Law: a message is listed with its variants, its values by name, and its class."""
    found = {
        text: message
        for messages in errors.messages().values()
        for message in messages
        for text in message.texts
    }
    rule = found[
        "rule {word} is not KIND:PATTERN=CATEGORY; write for example "
        "'module:classifier=fp32' or 'type:LayerNorm=fp32'."
    ]
    assert (rule.kind, rule.module, rule.function) == (
        "UserError",
        "policy.rules",
        "Rule.parse",
    )
    loss = "loss is of type {type}; it must be a Tensor with its graph, as the loss "
    assert found[f"{loss}function returns it."].function == "Session.backward"
    assert any(message.kind == "warning" for message in found.values())


SPEAKERS = {"require", "require_type", "require_positive", "require_int"}
SPEAKERS |= {"warn", "warn_caller", "warning", "call_order_finding", "_find"}
WITHIN_OTHERS = {
    "Extra data after the value",
    "Extra data after the array",
    "Expecting [ and all entries; one entry a line is .jsonl",
    "a number is too long or the nesting too deep",
    "Give check the optimizer that will train.",
    "targets are not inside 0 to 1",
    "Expecting ',' or ']'",
    "a step of",
}
"""Printed inside of messages, which are listed with {fault} or {advice} there."""


def spoken(function: ast.FunctionDef) -> Iterator[str]:
    expressions: list[ast.expr] = []
    for node in ast.walk(function):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and (
            call is not node or ast.unparse(call.func).split(".")[-1] in SPEAKERS
        ):
            if any(isinstance(each, ast.Starred) for each in call.args):
                continue  # a finding of `diagnose`, which warns of nothing
            expressions += [*call.args, *(keyword.value for keyword in call.keywords)]
    names = {each.id for each in expressions if isinstance(each, ast.Name)}
    expressions += [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in names
    ]
    for constant in (node for each in expressions for node in ast.walk(each)):
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            words = constant.value.split()
            if len(words) > 2:
                yield " ".join(words)


def test_every_message_is_on_the_errors_page() -> None:
    """Law: what any function of the package raises or warns of is on the page."""
    page = " ".join(errors.PAGE.read_text(encoding="utf-8").split())
    texts = {
        text
        for path in errors.SOURCE.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for text in spoken(node)
    }
    assert len(texts) > 300
    assert {text for text in texts if text not in page} - WITHIN_OTHERS == set()

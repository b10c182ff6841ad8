"""docs/api holds what the source holds."""

import importlib
import inspect
import re
from pathlib import Path

import halfstep
from halfstep import checkpoint, fsdp, machine, policy, scaling, testing

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
    for module in (checkpoint, fsdp, machine, policy, scaling, testing):
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

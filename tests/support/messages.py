"""The wording of messages, kept in tests/messages.json, which a flag rewrites.

A test asserts the class of an error and the value it names; `worded` holds the rest:

    with pytest.raises(UserError, match="many") as caught:
        ...
    worded(caught.value)

`python -m pytest --update-messages FILE` writes what the tests of a file say now; its
diff is what a reviewer reads.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Worded = Callable[[object], None]
FILE = Path(__file__).parent.parent / "messages.json"
"""Test -> what it says, in order."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help=f"write {FILE}")


def read() -> dict[str, list[str]]:
    """Return the messages of each test."""
    messages: dict[str, list[str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return messages


def write(messages: dict[str, list[str]]) -> None:
    text = json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def worded(request: pytest.FixtureRequest) -> Worded:
    """Return what holds each message of a test against the next one on file."""
    test = request.node.nodeid.removeprefix("tests/")
    said: list[str] = []

    def check(message: object) -> None:
        said.append(str(message))
        if request.config.option.update_messages:
            write(read() | {test: said})
        assert read().get(test, [])[: len(said)] == said

    return check

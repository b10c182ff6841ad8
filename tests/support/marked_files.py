"""Files of entities, written to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import UserError
from halfstep.train.data.tagged_text import AnnotatedText, read

LONGEST_MESSAGE = 35


def texts_of(name: str, content: str | bytes) -> list[AnnotatedText]:
    """Write a file and read it."""
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read(path))


def refusal(name: str, content: str | bytes) -> str:
    """Return the message that refuses a file, checked for its form."""
    with pytest.raises(UserError) as caught:
        texts_of(name, content)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message.split()) <= LONGEST_MESSAGE
    return message


def brief(texts: list[AnnotatedText]) -> list[tuple[str, list[tuple[str, str]], int]]:
    """Return text, entities (letters and kind) and line of each."""
    return [
        (
            entry.text,
            [(entry.text[s.start : s.end], s.kind) for s in entry.spans],
            entry.line,
        )
        for entry in texts
    ]

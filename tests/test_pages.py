"""Pages of the documentation: what conftest.py at the root cannot run, it must know."""

import re
from pathlib import Path

import pytest
from sybil import Document

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for folder in ("benchmarks", "docs")
        for page in (ROOT / folder).rglob("*.md")
    ),
]
LANGUAGES = {"python", "output", "console", "diff", "toml", "json", "text"}
"""text is not run; conftest.py runs, parses or compares the others."""


def test_every_block_names_its_language() -> None:
    """Law: no block escapes the tests because its language is missing or unknown."""
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text("utf-8"), re.MULTILINE)
        assert {name for name in fences[::2] if name[:1] != "{"} <= LANGUAGES, page


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```console\nhalfstep env\n```", "begins with a line `\\$ command`"),
        ("```console\n```", "begins with a line `\\$ command`"),
        ("```console\n$ pip install halfstep\n```", "'pip' may not be run"),
        ("```console\n$ make tset\n```", "No rule to make target"),
        ("<!-- skip: next -->\n```console\n$ make\n```", 'line 1: skip: next "reason"'),
        ('<!-- skip: next "" -->\n```toml\n1\n```', 'line 1: skip: next "reason"'),
        ("<!-- skip: start -->\n```toml\n1\n```", 'line 1: skip: start "reason"'),
    ],
)
def test_block_that_would_not_be_tested_fails(
    block: str, complaint: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Law: a block without a command, and a skip without a reason, fail."""
    parsers = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py")).PARSERS
    page = tmp_path / "page.md"
    page.write_text(block, encoding="utf-8")
    with pytest.raises((ValueError, AssertionError), match=complaint):
        [e.evaluate() for e in Document.parse(str(page), *parsers).examples()]

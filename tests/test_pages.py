"""Pages of the documentation: what conftest.py at the root cannot run, it must know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]
LANGUAGES = {"python", "output", "console", "diff", "toml", "json", "text"}
"""text is not run; conftest.py runs, parses or compares the others."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page: Path) -> None:
    """Law: no block escapes the tests because its language is missing or unknown."""
    fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in fences[::2] if name[:1] != "{"} <= LANGUAGES

"""docs/reports.md is what the reports say."""

from __future__ import annotations

from tests.field.page import PAGE, link, page


def test_the_page_is_up_to_date() -> None:
    """Law: it is what `python -m tests.field.page` writes."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_source_is_a_link_to_its_thread() -> None:
    """Law: GitHub leads from issues to pull requests."""
    address = "https://github.com/pytorch/pytorch/issues/50941"
    assert link("pytorch/pytorch#50941") == f"[pytorch#50941]({address})"

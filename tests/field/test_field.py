"""What people report is explained or impossible, and what cures it is seen to work."""

from __future__ import annotations

import re

import pytest
from tests.field.healthy import HEALTHY
from tests.field.healthy import load as load_healthy
from tests.field.report import HALFSTEP, PAGE, REPORTS, TORCH, Report, load

load()
EACH = pytest.mark.parametrize("report", REPORTS.values(), ids=lambda each: each.name)


@EACH
def test_the_trouble_is_real(report: Report) -> None:
    """Law: the program is sick with torch's classes."""
    assert report.trouble(TORCH)


@EACH
def test_the_answer_names_the_cause(report: Report) -> None:
    """Law: the command names it; or the program is well with our classes."""
    if report.command == "impossible":
        explained = not report.trouble(HALFSTEP)
    else:
        explained = re.search(report.says, report.answer(), re.DOTALL) is not None
    assert explained == report.is_explained


@EACH
def test_the_cure_works(report: Report) -> None:
    """Law: with the cure the program is well, and no more accused of this."""
    assert not report.trouble(TORCH, cured=True)
    assert not report.trouble(HALFSTEP, cured=True)
    if report.says:
        assert not re.search(report.says, report.answer(cured=True), re.DOTALL)


def test_the_page_counts_its_rows() -> None:
    """Law: 95 in 100 are explained; the page says how many there are, and are not."""
    load_healthy()
    kinds = len(REPORTS)
    unexplained = sum(not each.is_explained for each in REPORTS.values())
    assert unexplained <= 0.05 * kinds
    page = PAGE.read_text(encoding="utf-8")
    assert f"{kinds} kinds of problems" in page
    assert f"{unexplained} of {kinds} |" in page
    assert f"in {len(HEALTHY)} programs without a" in page


def test_links_say_where_they_lead() -> None:
    """Law: the text of a link to a thread and its address name the same thread."""
    link = re.compile(
        r"\[([\w.-]+#\d+)\]\(https://github.com/[\w.-]+/([\w.-]+)/issues/(\d+)\)"
    )
    threads = link.findall(PAGE.read_text(encoding="utf-8"))
    assert len(threads) >= len(REPORTS)
    for text, repository, number in threads:
        assert text == f"{repository}#{number}"

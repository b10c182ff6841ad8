"""The doctor's page: one file that shows what the rules saw, whatever the names are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from sick_run import sick, step, write

from halfstep.diagnostics.doctor import examination, run_reader
from halfstep.diagnostics.doctor.html_report import page
from halfstep.diagnostics.doctor.run_record import RunFacts

if TYPE_CHECKING:
    from pathlib import Path


def shown(html: str) -> ET.Element:
    """Parse a page as XML, which fails where a tag is not closed."""
    return ET.fromstring(re.sub(r"<!doctype html>|<meta[^>]*>", "", html))  # noqa: S314


def headings(html: str) -> list[str]:
    """Return the names of a page's parts."""
    return ["".join(h2.itertext()) for h2 in shown(html).iter("h2")]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a run with many faults, and with markup in its names."""
    folder = sick(tmp_path_factory.mktemp("sick"), "<b onclick='x'>&amp;")
    facts = run_reader.read(folder)
    return page(facts, examination(facts))


def test_every_part_is_there(html: str) -> None:
    """Law: findings, exponents, skips and profile each have one."""
    assert headings(html) == [
        "Findings",
        "Exponents by layer",
        "Skipped steps",
        "Where the time of a step goes",
    ]
    captions = ["".join(c.itertext()) for c in shown(html).iter("figcaption")]
    assert "Outputs" in captions
    assert any(c.startswith("Gradients, at loss scale") for c in captions)


def test_every_part_of_a_step_has_a_name(html: str) -> None:
    """Law: no share of a step is left over as a rest that nobody explains."""
    words = " ".join("".join(shown(html).itertext()).split())
    assert "Other operations are all the rest of the table" in words
    for name in (
        "matrix products",
        "optimizer",
        "other operations",
        "outside operations",
    ):
        assert name in words
    labels = ["".join(text.itertext()).strip() for text in shown(html).iter("text")]
    assert "rest" not in labels


def test_names_are_text(html: str) -> None:
    """Law: no name of a run can add an element."""
    assert "<b " not in html
    assert "&lt;b onclick=" in html


def test_it_needs_no_network(html: str) -> None:
    """Law: nothing on the page loads, runs or points elsewhere."""
    loads = r"<(script|link|img|iframe)|@import| src=| href=|url\([^#]"
    loads += r'|xlink:href="(?!#|data:)'
    assert not re.search(loads, html)


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    """Law: a page without findings says so, and lists what was not looked at."""
    records = [step(n, scale=1.0) for n in range(1, 30)]
    facts = run_reader.read(write(tmp_path / "run", records))
    told = page(facts, examination(facts))
    assert "No problem found." in told
    assert "Not checked" in headings(told)
    assert "Exponents by layer" not in headings(told)


def test_nothing_known_is_a_page() -> None:
    """Law: a run of which nothing is known has a page, with what could not be read."""
    told = page(RunFacts(name="x", problems=("a < b",)), examination(RunFacts()))
    assert headings(told) == ["Findings", "Not checked", "Could not be read"]
    assert "a &lt; b" in told

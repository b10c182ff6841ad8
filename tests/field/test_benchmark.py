"""The script that asks other tools about the same programs."""

from __future__ import annotations

from benchmarks import field
from tests.field.report import REPORTS, load

load()


def test_torch_names_what_its_error_names() -> None:
    """Law: a tool is believed by its words; the cause is another matter."""
    answer = field.answer(REPORTS["bilinear"])
    assert answer.named == (True, True, True, True)
    assert answer.occurs
    assert answer.explained


def test_what_torch_does_silently_only_ours_names() -> None:
    """Law: nobody names what no tool but ours looks at."""
    answer = field.answer(REPORTS["statistics_after_overflow"])
    assert answer.named == (False, False, False, True)


def test_the_page_counts_answers_by_area() -> None:
    """Law: a row an area and one for all, with the command that made it."""
    answers = [field.answer(REPORTS[name]) for name in ("bilinear", "index_add")]
    page = field.page(answers, "the command")
    assert "| Dtype error | 2 | 2 | 2 | 2 | 2 | 0 | 2 |" in page
    assert "| all | 2 | 2 | 2 | 2 | 2 | 0 | 2 |" in page
    assert "the command" in page

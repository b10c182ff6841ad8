"""What people report is explained or impossible, and what cures it is seen to work.

Programs that are well are accused of nothing. The script that asks other tools about
the same programs counts right.
"""

import re
import warnings
from collections.abc import Iterable

import pytest
import torch
from benchmarks import field
from tests.field.healthy import HEALTHY
from tests.field.healthy import load as load_healthy
from tests.field.report import (
    HALFSTEP,
    PAGE,
    REPORTS,
    SPEED_RULES,
    TORCH,
    Amp,
    Program,
    Report,
    load,
)

import halfstep as hs
from halfstep.reporting.finding import Finding

load()
load_healthy()
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


MODELS = [
    name
    for name, build in HEALTHY.items()
    if "models" in getattr(build, "__module__", "")
]
"""Programs with what `hs.check` needs."""


def program(name: str, amp: Amp) -> Program:
    torch.manual_seed(0)
    return HEALTHY[name](amp)


def accusations(findings: Iterable[Finding]) -> list[str]:
    """Return what is said to be wrong; the speed of a small program is not asked."""
    return [
        f"{one.rule}: {one}"
        for one in findings
        if one.severity != "note" and one.rule not in SPEED_RULES
    ]


@pytest.mark.parametrize(
    ("name", "amp"),
    [
        *((name, TORCH) for name in HEALTHY),
        *((name, HALFSTEP) for name in HEALTHY if name not in MODELS),
    ],
)
def test_diagnose_accuses_no_healthy_program(name: str, amp: Amp) -> None:
    """Law: as it is, and loops with our classes, too."""
    healthy = program(name, amp)
    diagnosis = hs.diagnose(healthy.step, **healthy.given)
    assert accusations(diagnosis.findings) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_the_classes_warn_of_no_healthy_program(name: str) -> None:
    """Law: a warning would be an error here; and what it trains is well afterwards."""
    healthy = program(name, HALFSTEP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            healthy.step()
    tensors = healthy.model.parameters()
    assert all(bool(each.isfinite().all()) for each in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_check_accuses_no_healthy_model(name: str) -> None:
    """Law: before training, of models that are trained by torch's own loop."""
    healthy = program(name, TORCH)
    report = hs.check(healthy.model, **healthy.check)
    assert report.good
    # A dynamic scale that begins too high settles, so this is no accusation.
    serious = [one for one in report.findings if one.rule != "loss scale"]
    assert accusations(serious) == []


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

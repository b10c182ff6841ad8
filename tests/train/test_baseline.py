"""A simple model that a run compares its own with."""

from pathlib import Path
from typing import Any

import pytest
from small_training import small_settings

from halfstep.train.baseline import Baseline, entity_baseline
from halfstep.train.metrics import entity_metrics
from halfstep.train.run import run


class Texts(list[tuple[str, list[tuple[int, int, int]]]]):
    """Texts with their entities, as a split of a corpus has them."""

    def text(self, i: int) -> str:
        return self[i][0]

    def spans(self, i: int) -> list[tuple[int, int, int]]:
        return self[i][1]


def score(train: Any, test: Any, kinds: tuple[str, ...] = ("LOC", "PER")) -> Any:
    return entity_baseline(train, test, kinds).scores


def test_most_frequent_tag_of_each_word() -> None:
    """Law: a word has its most frequent tag, an unknown one is O; counted by hand."""
    train = Texts(
        [
            ("Ada saw New York.", [(0, 3, 1), (8, 16, 0)]),
            ("York beat Ada", [(0, 4, 0), (10, 13, 1)]),
            ("New shops in York", [(13, 17, 0)]),
        ]
    )
    # Ada: B-PER. New: B-LOC and O, once each; O is the lower tag. York: B-LOC twice.
    test = Texts(
        [
            ("York, Ada!", [(0, 4, 0), (6, 9, 1)]),  # both
            ("New York", [(0, 8, 0)]),  # York alone: missed and spurious
            ("Bob", [(0, 3, 1)]),  # missed
        ]
    )
    scores = score(train, test)
    assert scores["precision"] == pytest.approx(2 / 3)
    assert scores["recall"] == pytest.approx(2 / 4)
    # LOC: 1 of 2 predicted, 1 of 2 true. PER: 1 of 1, 1 of 2.
    assert scores["macro_f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert scores["f1"] == pytest.approx(2 * (2 / 3 * 1 / 2) / (2 / 3 + 1 / 2))


def test_only_valid_sequences_of_tags() -> None:
    """Law: an I tag that would follow no entity gives way to the next best."""
    train = Texts([("a b", [(0, 3, 0)])] * 2 + [("b c", [(0, 1, 0)])])
    # b is I twice and B once, so alone it is B; after a it is I.
    test = Texts([("b c", [(0, 1, 0)]), ("a b", [(0, 3, 0)])])
    assert score(train, test, ("LOC",))["f1"] == 1.0


def test_characters_where_words_have_no_blanks() -> None:
    """Law: each Han character is a word; of a text without them, each word."""
    train = Texts([("我在北京2024", [(2, 4, 0)]), ("北", [(0, 1, 0)])])
    test = Texts([("去北京", [(1, 3, 0)]), ("2024年", []), ("20", [])])
    assert score(train, test, ("LOC",))["accuracy"] == 1.0


def test_finding() -> None:
    """Law: a baseline better by a standard error is reported with both scores."""
    truth = [[(0, 1, 0)]] * 60
    half = entity_metrics(truth, [truth[0], []] * 30, ("PER",), 0.0)
    better = Baseline("simple model", {"f1": 0.75})
    line = better.finding(half, "test", "f1")
    assert "simple model" in line
    assert "0.7500 on test" in line
    assert "0.6667" in line
    assert better.finding(half, "test", "loss") == line
    for score in (0.5, 0.7):  # the standard error is 0.06
        assert not Baseline("simple model", {"f1": score}).finding(half, "test", "f1")


@pytest.mark.usefixtures("small_runs")
def test_in_a_run(tmp_path: Path) -> None:
    """Law: table, summary and report hold the baseline, and that it is the better."""
    words = [("anna", "B-PER"), ("paris", "B-LOC"), ("x", "O"), ("yy", "O")]
    lines = [f"{w} {t}\n{v} {u}\n\n" for w, t in words for v, u in words]
    source = tmp_path / "words.bio"
    source.write_text("".join(lines), encoding="utf-8")
    more: dict[str, Any] = {"task": "ner", "max_steps": 1, "level": "O0"}
    result = run(small_settings(tmp_path, source, **more) | {"dev_share": 0.4})
    baseline = result.summary["baseline"]
    assert baseline["split"] == "dev"
    assert baseline["f1"] == 1.0 > result.summary["dev"]["f1"]
    assert "F1 1.0000" in result.tables[0].notes[-1]
    assert "The baseline is better" in result.findings[0]

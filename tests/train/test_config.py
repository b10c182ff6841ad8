"""Settings: each refusal in full, and what resuming makes of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_files import refused
from small_training import small_and_measured, small_settings, write_letters
from train_settings import OTHERS, TOGETHER

from halfstep.checkpoint import single
from halfstep.errors import UserError
from halfstep.train.config import BEST_BY, SETTINGS, TrainConfig, flag_of, resume_config
from halfstep.train.output import html_report
from halfstep.train.run import run

COUNTS = ("epochs", "batch-size", "accumulate", "eval-every", "patience", "keep")
VAST = 99999999999999999999
COUNT = " must be from 1 to 2147483647."
LENGTH = " must be from 3 to 1048576."
UNIT = " must be at least 0 and below 1."
PLACE = " must be a {}: not blank, and without NUL."
NAMES = " must be {} with commas between them, none of them empty."
WEIGHTS = " must be balanced, or finite numbers above 0 with commas between them."
REFUSED = [
    *((name, value, COUNT) for name in COUNTS for value in (0, VAST)),
    ("max-length", 2**20 + 1, LENGTH),
    ("max-length", 2, LENGTH),
    ("workers", -1, " must be from 0 to 1024."),
    ("limit", 1, " must be from 2 to 2147483647."),
    ("out", " ", PLACE.format("folder")),
    ("out", "a\0b", PLACE.format("folder")),
    ("data", "", PLACE.format("file or a folder")),
    ("model", "", PLACE.format("name or a folder")),
    ("dropout", 1.0, UNIT),
    ("mask-tokens", -0.1, UNIT),
    ("warmup", float("nan"), UNIT),
    ("label-smoothing", 1.0, UNIT),
    ("dev-share", 1.0, " must be above 0 and below 1."),
    ("lr", 0.0, " must be above 0 and finite."),
    ("clip", float("inf"), " must be above 0 and finite."),
    ("weight-decay", -0.1, " must be at least 0 and finite."),
    ("seed", -1, " must be at least 0 and below 4294967296."),
    ("seed", 2**32, " must be at least 0 and below 4294967296."),
    ("compare-fp32", 1, " must be from 2 to 2147483647."),
    ("layer-decay", 1.1, " must be above 0 and at most 1."),
    ("master", "fp16", " must be one of fp32, split, kahan, stochastic, none."),
    ("device", "tpu", " must be one of auto, cpu, cuda."),
    ("task", "tag", " must be one of classify, ner."),
    ("parallel", "fsdp", " must be one of ddp, fsdp2."),
    ("freeze", "a.*,, b", NAMES.format("patterns")),
    ("labels", "no,", NAMES.format("names")),
    ("labels", "no", ": name 2 or more, each once."),
    ("labels", "no,yes,no", ": name 2 or more, each once."),
    *(
        ("class-weights", wrong, WEIGHTS)
        for wrong in ("even", "1,0", "1,nan", "1,,2", "1,balanced", "")
    ),
]
"""Flag, value, and how the message goes on after both."""


NOT_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": 33}, "--accumulate 33 is more than --batch-size 32: some micro-"),
    ({"best_by": "f1"}, "f1 is no score of --task classify; choose one of macro_f1, a"),
    ({"task": "ner", "text_column": "review"}, "--text-column and --label-column are"),
    ({"text_column": "Stars ", "label_column": "stars"}, " are both 'Stars '; name"),
    ({"task": "ner", "class_weights": "1,2"}, "--class-weights 1,2 is for --task cla"),
    ({"task": "ner", "best_by": "accuracy"}, "accuracy is no score of --task ner; ch"),
    *(
        ({"parallel": "fsdp2", "master": form}, f"--master {form} does not go with --")
        for form in ("split", "kahan", "stochastic", "none")
    ),
]


@pytest.mark.parametrize(("flag", "value", "tail"), REFUSED)
def test_refusals(flag: str, value: object, tail: str) -> None:
    """Law: a value out of its range is refused by flag, value and range."""
    message = refused(TrainConfig, **{flag.replace("-", "_"): value})
    shown = value if str(value).isprintable() else repr(value)
    assert message == f"--{flag} {shown}{tail}"


@pytest.mark.parametrize(("settings", "message"), NOT_TOGETHER)
def test_settings_that_exclude_each_other(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        TrainConfig(**settings)


def test_what_settings_come_to() -> None:
    """Law: lists are cut at commas, spaces dropped; a score fits its task."""
    assert TrainConfig(labels=" no, yes ").label_names == ("no", "yes")
    assert TrainConfig(freeze="a.*, *.b").frozen == ("a.*", "*.b")
    for given, weights, balanced in (
        (" 1,2.5 ", (1.0, 2.5), False),
        (" balanced ", None, True),
        (None, None, False),
    ):
        config = TrainConfig(class_weights=given)
        assert (config.weights, config.balanced) == (weights, balanced)
    assert (TrainConfig().label_names, TrainConfig().frozen) == (None, ())
    for task, scores in BEST_BY.items():
        assert TrainConfig(task=task).best_score == scores[0]
        for score in scores:
            assert TrainConfig(task=task, best_by=score).best_score == score


def test_edges_are_in_range() -> None:
    """Law: the least and the most that a message allows are taken."""
    TrainConfig(layer_decay=1.0, label_smoothing=0.0, workers=0, keep=1, patience=1)
    TrainConfig(dropout=0.0, warmup=0.0, mask_tokens=0.999, weight_decay=0.0)
    TrainConfig(epochs=1, batch_size=1, accumulate=1, eval_every=1, max_length=3)
    TrainConfig(limit=2, dev_share=0.001, accumulate=8, batch_size=8)
    TrainConfig(seed=2**32 - 1, limit=2**31 - 1, max_length=2**20, workers=1024)
    TrainConfig(**{name.replace("-", "_"): 2**31 - 1 for name in COUNTS})  # type: ignore[arg-type]


def test_each_setting_has_another_value() -> None:
    """Law: `OTHERS` holds each setting, away from its default, and all are tried."""
    assert list(OTHERS) == list(SETTINGS)
    for name, value in OTHERS.items():
        assert value != getattr(TrainConfig(), name), name
    assert TOGETHER[0].keys() | TOGETHER[1].keys() == OTHERS.keys()


@pytest.mark.parametrize("others", TOGETHER)
def test_round_trip(others: dict[str, Any]) -> None:
    """Law: every setting, away from its default, survives config.json."""
    config = TrainConfig(**others)
    saved = json.loads(json.dumps(config.data_dict()))
    assert resume_config(saved, {}) == config
    assert resume_config(saved, dict(others)) == config


MAY_CHANGE = {
    *("data", "out", "keep", "workers", "tensorboard", "probe", "parallel"),
    "compare_fp32",
}


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - MAY_CHANGE))
def test_resuming_with_other_words(name: str) -> None:
    """Law: no setting may change in mid-run; both values are named."""
    saved = TrainConfig().data_dict()
    kept = "default" if saved[name] is None else saved[name]
    assert refused(resume_config, saved, {name: OTHERS[name]}) == (
        f"{flag_of(SETTINGS[name])} {OTHERS[name]} differs from this run's {kept}; "
        "resume without it, or start anew with another --out."
    )


@pytest.mark.parametrize("name", sorted(MAY_CHANGE))
def test_a_run_may_move(name: str) -> None:
    """Law: what decides nothing that is learned may be told anew, or left as it was."""
    saved = TrainConfig(**{name: OTHERS[name]}).data_dict()
    other = SETTINGS[name].default
    assert getattr(resume_config(saved, {name: other}), name) == other
    assert getattr(resume_config(saved, {}), name) == OTHERS[name]


@pytest.mark.parametrize("name", OTHERS)
def test_settings_of_an_older_version(name: str) -> None:
    """Law: a setting that the saved run lacks has its default."""
    for others in TOGETHER:
        saved = TrainConfig(**others).data_dict()
        del saved[name]
        default = SETTINGS[name].default
        assert getattr(resume_config(saved, {}), name) == default
        assert getattr(resume_config(saved, {name: default}), name) == default


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epoch", 3, "config.json: 'epoch' is not a setting; nearest: epochs."),
        ("seed", None, "config.json: seed is None; it must be a whole number."),
        ("epochs", -1, f"--epochs -1{COUNT}"),
    ],
)
def test_damaged_settings(name: str, value: object, message: str) -> None:
    """Law: settings that were altered by hand are refused, not believed."""
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        resume_config(TrainConfig().data_dict() | {name: value}, {})


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return settings of a run of a few steps, whose report is its lead alone."""
    small_and_measured(monkeypatch)
    monkeypatch.setattr(html_report, "page", lambda told: told.lead)
    source = write_letters(tmp_path, 20, "de", "ab", lengths=(3, 9))
    more = {"dtype": "bf16", "epochs": 1, "batch_size": 9}
    return small_settings(tmp_path, source, **more)


@pytest.mark.parametrize(
    ("level", "master", "kept"),
    [("O2", "split", "split"), ("O2", "none", "none"), ("O1", "fp32", "none")],
)
def test_masters(
    short: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    level: str,
    master: str,
    kept: str,
) -> None:
    """Law: masters are of the form asked for, and all that is written says so.

    A level without master weights is said to keep none, whatever is set.
    """
    done = run(short | {"level": level, "master": master})
    newest = done.folder.checkpoint_path(done.folder.steps()[0])
    assert single.load(newest).state["masters"]["form"] == kept
    assert (done.summary["master"], done.folder.settings()["master"]) == (kept, master)
    form = f", master weights {master}" if level == "O2" else ""
    said = f"evel {level} bf16{form}: level {level} was asked for"
    out, err = capsys.readouterr()
    assert f"l{said}" in out + err
    assert (done.folder.path / "report.html").read_text().startswith(f"L{said}.")

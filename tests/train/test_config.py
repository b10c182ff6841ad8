"""Settings: each refusal, what resuming makes of them, and files of them."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from data_files import refused
from small_training import small_and_measured, small_settings, write_letters
from train_settings import OTHERS, TOGETHER, parse

from halfstep.checkpoint import single
from halfstep.errors import UserError
from halfstep.train.config import (
    BEST_BY,
    SETTINGS,
    TrainConfig,
    flag_of,
    read_file,
    resume_config,
    write_resolved,
)
from halfstep.train.output import html_report
from halfstep.train.run import run

COUNTS = ("epochs", "batch-size", "accumulate", "eval-every", "patience", "keep")
COUNT = " must be from 1 to 2147483647."
REFUSED = [
    *((name, 0, COUNT) for name in COUNTS),
    ("epochs", 99999999999999999999, COUNT),
    ("max-length", 2, " must be from 3 to 1048576."),
    ("workers", -1, " must be from 0 to 1024."),
    ("limit", 1, " must be from 2 to 2147483647."),
    ("out", "a\0b", " must be a folder: not blank, and without NUL."),
    ("data", "", " must be a file or a folder: not blank, and without NUL."),
    ("dropout", 1.0, " must be at least 0 and below 1."),
    ("warmup", float("nan"), " must be at least 0 and below 1."),
    ("dev-share", 1.0, " must be above 0 and below 1."),
    ("lr", 0.0, " must be above 0 and finite."),
    ("clip", float("inf"), " must be above 0 and finite."),
    ("weight-decay", -0.1, " must be at least 0 and finite."),
    ("seed", 2**32, " must be at least 0 and below 4294967296."),
    ("layer-decay", 1.1, " must be above 0 and at most 1."),
    ("master", "fp16", " must be one of fp32, split, kahan, stochastic, none."),
    ("freeze", "a.*,, b", " must be patterns with commas between them, none of them"),
    ("labels", "no,yes,no", ": name 2 or more, each once."),
    *(
        ("class-weights", wrong, " must be balanced, or finite numbers above 0 with")
        for wrong in ("even", "1,nan", "1,,2", "")
    ),
]
"""Flag, value, and how the message goes on after both."""


NOT_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": 33}, "--accumulate 33 is more than --batch-size 32: some micro-"),
    ({"best_by": "f1"}, "f1 is no score of --task classify; choose one of macro_f1, a"),
    ({"task": "ner", "text_column": "review"}, "--text-column and --label-column are"),
    ({"text_column": "Stars ", "label_column": "stars"}, " are both 'Stars '; name"),
    ({"task": "ner", "class_weights": "1,2"}, "--class-weights 1,2 is for --task cla"),
    ({"parallel": "fsdp2", "master": "split"}, "--master split does not go with --"),
]


@pytest.mark.parametrize(("flag", "value", "tail"), REFUSED)
def test_refusals(flag: str, value: object, tail: str) -> None:
    """Law: a value out of its range is refused by flag, value and range."""
    message = refused(TrainConfig, **{flag.replace("-", "_"): value})
    shown = value if str(value).isprintable() else repr(value)
    assert message.startswith(f"--{flag} {shown}{tail}")


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


@pytest.mark.parametrize("name", OTHERS)
def test_resuming_with_other_words(name: str) -> None:
    """Law: what decides what is learned may not change in mid-run; all else may.

    A setting that the saved run lacks, as of an older version, has its default.
    """
    setting, other = SETTINGS[name], OTHERS[name]
    saved = TrainConfig().data_dict()
    if name in MAY_CHANGE:
        assert getattr(resume_config(saved, {name: other}), name) == other
    else:
        kept = "default" if saved[name] is None else saved[name]
        assert refused(resume_config, saved, {name: other}).startswith(
            f"{flag_of(setting)} {other} differs from this run's {kept}; resume witho"
        )
    for others in TOGETHER:
        older = TrainConfig(**others).data_dict()
        del older[name]
        assert getattr(resume_config(older, {}), name) == setting.default


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


# Files of settings: read as they were written, and refused by line


ODD = {"data": 'a "b"\\c\n\u5929', "lr": 5e-324, "seed": 2**32 - 1}


@pytest.mark.parametrize("others", [*TOGETHER, ODD])
def test_other_settings_read_back(others: dict[str, Any], tmp_path: Path) -> None:
    """Law: each setting is written away from its default, as plain TOML, and read."""
    path, config = tmp_path / "resolved.toml", TrainConfig(**others)
    write_resolved(path, config.data_dict())
    assert TrainConfig(**parse("--config", str(path))) == config
    given = {n: v for n, v in config.data_dict().items() if v is not None}
    assert tomllib.loads(path.read_text("utf-8")) == given


def test_dashes_and_line_ends(tmp_path: Path) -> None:
    """Law: - is as good as _, CR LF as LF, a byte-order mark as none, 1 as 1.0."""
    path = tmp_path / "run.toml"
    path.write_bytes(
        b"\xef\xbb\xbf# mine\r\nbatch-size = 8\r\n\r\nclip = 1 # one\r\n"
        b"data = '\xe5\xa4\xa9.csv'\r\n"
    )
    found = read_file(path)
    assert found == {"batch_size": 8, "clip": 1.0, "data": "天.csv"}
    assert type(found["clip"]) is float


REFUSED_FILES = {
    "epoch = 3": ": 'epoch' is not a setting; nearest: epochs.",
    "dev-shares = 0.1": ": 'dev_shares' is not a setting; nearest: dev_share.",
    "[some]\nepochs = 3": ": 'some' is not a setting; see halfstep train --help.",
    "overwrite = true": ": 'overwrite' is no setting of a run; type --overwrite.",
    "max_steps = 3\nmax-steps = 3": ": 'max_steps' is set twice, with - and with _",
    "epochs = '3'": ": epochs is '3'; it must be a whole number.",
    "epochs = true": ": epochs is True; it must be a whole number.",
    "lr = false": ": lr is False; it must be a number.",
    "compile = 1": ": compile is 1; it must be true or false.",
    "labels = ['no', 'yes']": ": labels is ['no', 'yes']; it must be text in quotes.",
    "keep = 1\nkeep = 2\n": " is not TOML: Cannot overwrite a value (at line 2, column",
    "seed = 1" + "0" * 5000: " is not TOML: ",
}


@pytest.mark.parametrize("number", range(len(REFUSED_FILES)))
def test_refused_files(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what is no setting is refused by file and name, with what would be."""
    text, fault = [*REFUSED_FILES.items()][number]
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    assert refused(read_file, Path("run.toml")).startswith(f"run.toml{fault}")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """Law: what no file system or TOML takes is refused by name; nothing is left."""
    path = tmp_path / "run.toml"
    for place, reason in ((path, "No such file or directory"), (tmp_path, "Is a")):
        message = f"--config {place} cannot be read: {reason}"
        assert refused(read_file, place).startswith(message)
    path.write_bytes(b"keep = 1\ndata = 'caf\xe9'\n")
    assert refused(read_file, path).startswith(f"{path} is not TOML: 'utf-8' codec")
    path.unlink()
    bad = OTHERS | {"master": "fp32", "class_weights": "1,0"}
    message = "--class-weights 1,0 must be balanced, or"
    assert refused(write_resolved, path, bad).startswith(message)
    for place, data in ((path, "caf\udce9.csv"), (tmp_path / "no" / "x.toml", "a")):
        message = f"{place} cannot be written: "
        assert refused(write_resolved, place, {"data": data}).startswith(message)
    assert not list(tmp_path.iterdir())


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

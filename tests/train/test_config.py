"""Settings: each refusal, what resuming makes of them, and files of them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from data_files import refused
from small_training import small_and_measured, small_settings, write_letters
from train_settings import OTHERS, TOGETHER, parse

from halfstep.checkpoint import single
from halfstep.train.config import (
    BEST_BY,
    SETTINGS,
    TrainConfig,
    read_file,
    resume_config,
    write_resolved,
)
from halfstep.train.output import html_report
from halfstep.train.run import run

COUNTS = ("epochs", "batch_size", "accumulate", "eval_every", "patience", "keep")
INF, NAN = float("inf"), float("nan")
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(COUNTS, (0, -1, 2**31, 10**20)),
    "max_length": (2,),
    "workers": (-1, 1025),
    "limit": (1,),
    "out": ("", "a\0b"),
    "data": (" ", "a\0b"),
    "text_column": ("", "a,b,c", "a,"),
    "encoding": ("gb1803", "hex"),
    "delimiter": ("", ",,", '"', "\n"),
    "dropout": (1.0, -0.1, NAN),
    "dev_share": (0.0, 1.0),
    "lr": (0.0, INF),
    "clip": (INF, NAN),
    "weight_decay": (-0.1, INF),
    "seed": (2**32, -1),
    "layer_decay": (1.1, 0.0),
    "master_weights": ("fp16",),
    "device": ("tpu",),
    "freeze": ("a.*,, b",),
    "class_weights": ("even", "1,nan", "1,,2", ""),
}
OF_ANOTHER_TYPE = {"epochs": "3", "keep": True, "lr": False, "compile": 1, "seed": None}
OF_ANOTHER_TYPE |= {"labels": ["no", "yes"], "model": None, "clip": "1"}
NUMBERS: dict[str, Any] = {"regression": True, "data": "posts.csv"}
SETS: dict[str, Any] = {"multi_label": True, "data": "posts.csv"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "class": {},
    "multi_label": SETS,
    "regression": NUMBERS,
    "ner": {"task": "ner"},
}
NOT_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"labels": "no,yes,no"}, "--labels no,yes,no"),
    ({"task": "ner", "labels": "a,a"}, "--labels a,a"),
    ({"accumulate": 33}, "--accumulate 33 is more than --batch-size 32"),
    ({"best_by": "f1"}, "--best-by f1 is no score of one class per text"),
    (
        {"task": "ner", "text_column": "review"},
        "--text-column review is not for --task ner",
    ),
    (
        {"task": "ner", "class_weights": "1,2"},
        "--class-weights 1,2 is not for --task ner",
    ),
    (NUMBERS | {"class_weights": "1,2"}, "1,2 is not for --regression"),
    (NUMBERS | {"labels": "a,b"}, "--labels a,b is not for --regression"),
    (NUMBERS | {"best_by": "macro_f1"}, "is no score of --regression; choose one of s"),
    (NUMBERS | {"multi_label": True}, "--multi-label and --regression are different"),
    (NUMBERS | {"task": "ner"}, "--regression and --task ner are different"),
    (SETS | {"label_smoothing": 0.1}, "0.1 is not for --multi-label"),
    ({"label_separator": ";"}, "--label-separator ; is not for one class per text"),
    ({"multi_label": True}, "--multi-label is for labels of --data"),
    (
        {"data": "a", "text_column": "Stars ", "label_column": "stars"},
        "are both 'stars'",
    ),
    ({"parallel": "fsdp2", "master_weights": "split"}, "--master-weights split does "),
]


def test_refusals() -> None:
    """Law: a value of another type or out of range is refused by flag and value."""
    wrong = [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
    for name, value in [*wrong, *OF_ANOTHER_TYPE.items()]:
        message = refused(TrainConfig, **{name: value})
        assert message.startswith(f"{SETTINGS[name].flag} {value!r} must be ")


def test_settings_that_exclude_each_other() -> None:
    """Law: two settings that contradict each other are refused by both names."""
    for settings, message in NOT_TOGETHER:
        assert message in refused(TrainConfig, **settings)


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
    assert PROBLEMS.keys() == BEST_BY.keys()
    for problem, own in PROBLEMS.items():
        config = TrainConfig(**own)
        assert config.problem == problem
        assert config.target == ("class" if problem == "ner" else problem)
        assert config.best_score == BEST_BY[problem][0]
        for score in BEST_BY[problem]:
            assert TrainConfig(best_by=score, **own).best_score == score


def test_edges_are_in_range() -> None:
    """Law: the least and the most that a message allows are taken."""
    TrainConfig(layer_decay=1.0, label_smoothing=0.0, workers=0, keep=1, patience=1)
    TrainConfig(dropout=0.0, warmup=0.0, mask_tokens=0.999, weight_decay=0.0)
    TrainConfig(epochs=1, batch_size=1, accumulate=1, eval_every=1, max_length=3)
    TrainConfig(limit=2, dev_share=0.001, accumulate=8, batch_size=8)
    TrainConfig(seed=2**32 - 1, limit=2**31 - 1, max_length=2**20, workers=1024)
    TrainConfig(**dict.fromkeys(COUNTS, 2**31 - 1))  # type: ignore[arg-type]


def test_each_setting_has_another_value() -> None:
    """Law: `OTHERS` holds each setting, away from its default, and all are tried."""
    assert list(OTHERS) == list(SETTINGS)
    for name, value in OTHERS.items():
        assert value != getattr(TrainConfig(), name), name
    assert set().union(*TOGETHER) == OTHERS.keys()


@pytest.mark.parametrize("others", TOGETHER)
def test_round_trip(others: dict[str, Any]) -> None:
    """Law: every setting, away from its default, survives config.json."""
    config = TrainConfig(**others)
    saved = json.loads(json.dumps(config.data_dict()))
    assert resume_config(saved, {}) == config
    assert resume_config(saved, dict(others)) == config


MAY_CHANGE = {"data", "out", "keep", "workers", "tensorboard", "probe"}
MAY_CHANGE |= {"parallel", "compare_fp32"}


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
            f"{setting.flag} {other} differs from this run's {kept}; resume witho"
        )
    del saved[name]
    assert getattr(resume_config(saved, {}), name) == setting.default


def test_damaged_settings() -> None:
    """Law: settings that were altered by hand are refused, not believed."""
    for name, value, message in (("epoch", 3, "'epoch' is"), ("seed", None, "--seed ")):
        line = refused(resume_config, TrainConfig().data_dict() | {name: value}, {})
        assert line.startswith(f"config.json: {message}")


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
    "[some]\nepochs = 3": ": 'some' is not a setting; see halfstep train --help",
    "overwrite = true": ": 'overwrite' is no setting of a run; type --overwrite.",
    "max_steps = 3\nmax-steps = 3": ": 'max_steps' is set twice, with - and with _",
    "epochs = '3'": ": --epochs '3' must be a whole number.",
    "keep = true": ": --keep True must be a whole number.",
    "labels = ['no', 'yes']": ": --labels ['no', 'yes'] must be text in quotes.",
    "clip = 1" + "0" * 400: ": --clip inf must be above 0 and finite.",
    "keep = 1\nkeep = 2\n": " is not TOML: Cannot overwrite a value (at line 2, column",
    "seed = 1" + "0" * 5000: " is not TOML: ",
}


def test_refused_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is no setting is refused by file and name, with what would be."""
    monkeypatch.chdir(tmp_path)
    for text, fault in REFUSED_FILES.items():
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
    bad = {"class_weights": "1,0"}
    message = "--class-weights '1,0' must be balanced, or"
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
    ("level", "form", "kept"),
    [("O2", "split", "split"), ("O2", "none", "none"), ("O1", "fp32", "none")],
)
def test_masters(
    short: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    level: str,
    form: str,
    kept: str,
) -> None:
    """Law: masters are of the form asked for, and all that is written says so.

    A level without master weights is said to keep none, whatever is set.
    """
    done = run(short | {"level": level, "master_weights": form})
    newest = done.folder.checkpoint_path(done.folder.steps()[0])
    assert single.load(newest).state["masters"]["form"] == kept
    name = "master_weights"
    assert (done.summary[name], done.folder.settings()[name]) == (kept, form)
    masters = f", master weights {form}" if level == "O2" else ""
    said = f"evel {level} bf16{masters}: level {level} was asked for"
    out, err = capsys.readouterr()
    assert f"l{said}" in out + err
    lead = (done.folder.path / "report.html").read_text()
    assert lead.endswith(f" in 2 classes. L{said}.")

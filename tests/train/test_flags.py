"""Flags of `halfstep train`: one a setting, a help that a newcomer can read, modes."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import run as torch_run
from train_settings import OTHERS, TOGETHER, parse

from halfstep import cli
from halfstep.diagnostics.probe import MODES as MODES_OF_PROBES
from halfstep.errors import UserError
from halfstep.masters import encoding as forms
from halfstep.policy import Policy
from halfstep.reporting.table import Table
from halfstep.train import model, plan
from halfstep.train.config import (
    BEST_BY,
    MASTERS,
    MODES,
    PROBES,
    SETTINGS,
    TrainConfig,
    read_file,
    resume_config,
    write_resolved,
)
from halfstep.train.data.tables import SUFFIXES
from halfstep.train.flags import EPILOG

TEXTS = {name: setting.help for name, setting in SETTINGS.items()}
WIDTH = 80
MOST_LINES = 80
"""Of the short help, on 80 columns."""
SWITCHES = (
    "multi_label",
    "regression",
    "compile",
    "recompute",
    "tensorboard",
    "skip_bad_rows",
    "streaming",
)
OTHER_FLAGS = {"--help", "--help-all", "--config", *(f"--{mode}" for mode in MODES)}


def torchrun_flags() -> set[str]:
    parser = torch_run.get_args_parser()
    return {word for action in parser._actions for word in action.option_strings}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_a_flag(name: str) -> None:
    """Law: each setting has a flag of its name, and words become its type."""
    words = [] if name in SWITCHES else [str(OTHERS[name])]
    given = parse("--" + name.replace("_", "-"), *words)
    assert given == {name: OTHERS[name]}
    assert type(given[name]) is type(OTHERS[name])


def test_help_states_defaults() -> None:
    """Law: the help of a setting says its default, "off" where it is a switch."""
    for name, setting in SETTINGS.items():
        default, said = setting.default, TEXTS[name]
        count = len(BEST_BY) if name == "best_by" else 1
        assert len(re.findall(r"\(default\b", said)) == count, name
        if name in SWITCHES:
            assert default is False
            assert re.search(r"\(default off[:)]", said), name
        elif default is not None:
            assert re.search(rf"\(default {re.escape(str(default))}[:;,)]", said), name


def test_numbers_in_help_are_those_of_the_plan() -> None:
    """Law: help says what a default comes to with the numbers that the plan takes."""
    assert list(model.SIZES) == ["tiny", "small"]
    shapes = [
        size[key]
        for size in model.SIZES.values()
        for key in ("num_hidden_layers", "hidden_size")
    ]
    rates, masks = plan.LR_SCRATCH, plan.MASK_SCRATCH
    wanted: dict[str, list[float]] = {
        "model": shapes,
        "dropout": [model.DROPOUT],
        "mask_tokens": [masks["classify"], masks["ner"], 0],
        "epochs": [plan.FEW_EXAMPLES, *plan.EPOCHS_FEW.values(), plan.EPOCHS_MANY],
        "clip": [plan.CLIP_TUNE, *plan.CLIP_SCRATCH.values()],
        "lr": [rates["classify"], rates["ner"], plan.LR_TUNE],
        "workers": [plan.WORKERS_GPU, 0],
    }
    for name, numbers in wanted.items():
        said = re.findall(r"\d[\d.]*(?:e-?\d+)?", TEXTS[name])
        assert list(map(float, said)) == numbers, name


@pytest.mark.parametrize("task", SUFFIXES)
def test_formats_of_a_task_are_named(task: str) -> None:
    """Law: help names each suffix that a task reads, and no other."""
    of_texts, of_entities = TEXTS["data"].split("for ner")
    said = {"classify": of_texts, "ner": of_entities}[task]
    suffixes = set(re.findall(r"(?<= |\()\.[a-z0-9]+", said)) - {".gz"}
    assert suffixes == set(SUFFIXES[task])


def test_scores_are_named() -> None:
    """Law: help names the scores of each kind of label, the default marked as such."""
    parts = re.split(r"[:;] for ", TEXTS["best_by"])[1:]
    for scores, said in zip(BEST_BY.values(), parts, strict=True):
        assert all(re.search(rf"\b{score}\b", said) for score in scores)
        assert f"{scores[0]} (default" in said


def test_the_file_in_the_help_is_one(tmp_path: Path) -> None:
    """Law: the example of a file of settings can be read."""
    lines = re.findall(r"^  (\w+ = .*)$", EPILOG, re.MULTILINE)
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    assert list(parse("--config", str(file))) == ["data", "batch_size", "compile"]


@pytest.mark.parametrize("which", ["--help", "--help-all"])
def test_help_can_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Law: the short help has the everyday settings, the long one all of them.

    On 80 columns no line is cut.
    """
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit, match="0"):
        cli.run(["train", which])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    listed = re.findall(r"^  (?:-h, )?(--[\w-]+)", out, re.MULTILINE)
    settings = SETTINGS.values()
    named = [each.flag for each in settings if each.everyday or which != "--help"]
    assert sorted(listed) == sorted({*named, *OTHER_FLAGS})
    assert out.split()[-len(EPILOG.split()) :] == EPILOG.split()
    if which == "--help":
        assert out.count("\n") <= MOST_LINES < len(settings) * 2


def test_no_flag_is_torchruns() -> None:
    """Law: torchrun takes no flag of the program it starts for one of its own.

    It takes abbreviations, and rejects those of two of its flags wherever they stand.
    """
    flags = {setting.flag for setting in SETTINGS.values()} | OTHER_FLAGS - {"--help"}
    for flag in flags:
        assert not [word for word in torchrun_flags() if word.startswith(flag)]
        words = ["-m", "halfstep", "train", flag, "1"]
        assert torch_run.parse_args(words).training_script_args == words[2:]


@pytest.mark.parametrize("others", TOGETHER)
def test_flags_win_over_the_file(others: dict[str, Any], tmp_path: Path) -> None:
    """Law: what is typed stands; what is not stands as the file has it."""
    path = tmp_path / "run.toml"
    path.write_text("epochs = 9\nkeep = 5\n")
    words = [
        word
        for name, value in others.items()
        if name not in (*SWITCHES, "keep")
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    typed = parse(*words)
    assert parse("--config", str(path)) == {"epochs": 9, "keep": 5}
    assert typed["epochs"] == OTHERS["epochs"]
    for order in ([*words, "--config", str(path)], ["--config", str(path), *words]):
        assert parse(*order) == typed | {"keep": 5}


def test_a_policy_file_is_read_at_once(tmp_path: Path) -> None:
    """Law: a run keeps the rules, not the name of a file that may change."""
    path, file = tmp_path / "rules.toml", tmp_path / "run.toml"
    Policy.parse("lean + op:softmax=fp32").save(path)
    file.write_text(f"policy = '{path}'\n")
    for words in (("--policy", str(path)), ("--config", str(file))):
        given = parse(*words)
        assert given == {"policy": "lean + op:softmax=fp32"}
        assert resume_config(TrainConfig(**given).data_dict(), given)


def test_a_policy_file_that_is_not_wanted(tmp_path: Path) -> None:
    """Law: a policy's file that a flag has replaced need not exist; others must."""
    file = tmp_path / "run.toml"
    file.write_text('policy = "nowhere.toml"\n')
    assert parse("--config", str(file), "--policy", "torch") == {"policy": "torch"}
    with pytest.raises(UserError, match=r"^policy file 'nowhere\.toml' cannot be read"):
        parse("--config", str(file))


FILLED_IN = {"mask_tokens": 0.3, "epochs": 20, "lr": 5e-4, "dropout": 0.1}
FILLED_IN |= {"device": "cuda", "level": "O0", "loss_scale": "none"}


@pytest.mark.parametrize("name", FILLED_IN)
def test_resuming_with_what_defaults_came_to(name: str, tmp_path: Path) -> None:
    """Law: a run's own file of resolved settings is no contradiction of it.

    A value that the run did not come to, or not known to be so, is refused.
    """
    saved, file = TrainConfig().data_dict(), tmp_path / "resolved.toml"
    write_resolved(file, saved | FILLED_IN)
    full, given = read_file(file), {name: FILLED_IN[name]}
    assert resume_config(saved, parse("--config", str(file)), full) == TrainConfig()
    assert resume_config(saved, given, full) == TrainConfig()
    for known in (None, {}, full | {name: OTHERS[name]}):
        with pytest.raises(UserError, match=r" differs from this run's (default|auto)"):
            resume_config(saved, given, known)


def test_choices_are_those_of_their_packages() -> None:
    """Law: settings take the master encodings and probe modes that there are."""
    assert (*forms.ENCODINGS, forms.NONE) == MASTERS
    assert TrainConfig().master_weights == forms.FP32.name
    assert ("off", *MODES_OF_PROBES) == PROBES


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let `halfstep train` do nothing but note what it was called with."""
    from halfstep.train import run as room

    noted: list[dict[str, Any]] = []

    def run(given: dict[str, Any], **modes: bool) -> SimpleNamespace:
        noted.append({"given": given, **modes})
        table = Table("What a run would be", ("setting",), (("epochs",),))
        folder = SimpleNamespace(path=Path("run"))
        return SimpleNamespace(tables=[table], folder=folder, findings=("a", "b"))

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(room, "run", run)
    return noted


@pytest.mark.parametrize("mode", [None, *MODES])
def test_modes(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], mode: str | None
) -> None:
    """Law: a mode is handed on; only a run, not a check, has findings and a report."""
    assert cli.run(["train", "--epochs", "2", *([f"--{mode}"] if mode else [])]) == 0
    modes = {each: each == mode for each in MODES}
    assert calls == [{"given": {"epochs": 2}} | modes]
    out = capsys.readouterr().out
    assert out.startswith("\nWhat a run would be\n")
    assert out.endswith("epochs\n") == (mode == "check")
    assert out.endswith("\n\na\nb\n\nreport: run/report.html\n") == (mode != "check")

"""Settings: each one a flag, each refusal in full, and what resuming makes of them."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from small_training import letters, one_thread, same, small_and_measured

from halfstep import checkpoint
from halfstep.errors import UserError
from halfstep.policy import Policy
from halfstep.train import result
from halfstep.train.config import TrainConfig, add_flags, resumed, typed
from halfstep.train.loop import Trainer
from halfstep.train.run import run

# Away from its default, in range, and what stands for it on the command line.
OTHERS: dict[str, Any] = {
    "data": "posts.csv",
    "labels": "no,yes",
    "limit": 100,
    "dev_share": 0.25,
    "max_length": 64,
    "model": "small",
    "dropout": 0.5,
    "mask_tokens": 0.0,
    "level": "O1",
    "dtype": "fp16",
    "loss_scale": "1024",
    "master": "split",
    "policy": "torch + module:classifier=fp32",
    "epochs": 7,
    "batch_size": 8,
    "accumulate": 2,
    "lr": 0.001,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "clip": 0.5,
    "eval_every": 10,
    "seed": 3,
    "device": "cpu",
    "out": "runs/other",
}

REFUSED = [
    ("dropout", 1.0, "--dropout 1.0 must be at least 0 and below 1."),
    ("dropout", -0.1, "--dropout -0.1 must be at least 0 and below 1."),
    ("mask_tokens", 1.5, "--mask-tokens 1.5 must be at least 0 and below 1."),
    ("warmup", float("nan"), "--warmup nan must be at least 0 and below 1."),
    ("epochs", 0, "--epochs 0 must be at least 1."),
    ("batch_size", 0, "--batch-size 0 must be at least 1."),
    ("accumulate", -2, "--accumulate -2 must be at least 1."),
    ("eval_every", 0, "--eval-every 0 must be at least 1."),
    ("limit", 0, "--limit 0 must be at least 1."),
    ("lr", 0.0, "--lr 0.0 must be above 0 and finite."),
    ("lr", float("nan"), "--lr nan must be above 0 and finite."),
    ("clip", float("inf"), "--clip inf must be above 0 and finite."),
    ("weight_decay", -0.1, "--weight-decay -0.1 must be at least 0 and finite."),
    ("weight_decay", float("inf"), "--weight-decay inf must be at least 0 and finite."),
    ("max_length", 2, "--max-length 2 must be at least 3."),
    ("seed", -1, "--seed -1 must be at least 0 and below 4294967296."),
    ("seed", 2**32, "--seed 4294967296 must be at least 0 and below 4294967296."),
    (
        "master",
        "fp16",
        "--master fp16 must be one of fp32, split, kahan, stochastic, none.",
    ),
    ("device", "tpu", "--device tpu must be one of auto, cpu, cuda."),
]


def parse(*words: str) -> dict[str, Any]:
    """Return the settings that words on the command line stand for."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return typed(parser.parse_args(words))


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def test_every_setting_is_a_flag() -> None:
    """Law: each setting has a flag of its name, and words become its type."""
    assert OTHERS.keys() == {setting.name for setting in fields(TrainConfig)}
    for name, value in OTHERS.items():
        assert value != getattr(TrainConfig(), name), name
        given = parse(flag(name), str(value))
        assert given == {name: value}
        assert type(given[name]) is type(value)


def test_nothing_typed() -> None:
    """Law: a flag that is not typed leaves no trace."""
    assert parse() == {}


def test_help_states_defaults() -> None:
    """Law: the help of a flag whose default is a word or a number names it."""
    for setting in fields(TrainConfig):
        said = setting.metadata["help"]
        assert said
        if setting.default is not None and setting.default != "torch":
            pattern = rf"default {re.escape(str(setting.default))}\b"
            assert re.search(pattern, said), setting.name


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_refusals(name: str, value: object, message: str) -> None:
    """Law: a value out of its range is refused by flag, value and range."""
    with pytest.raises(UserError) as caught:
        TrainConfig(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_edges_are_in_range() -> None:
    """Law: the least and the most that a message allows are taken."""
    TrainConfig(dropout=0.0, warmup=0.0, mask_tokens=0.999, weight_decay=0.0)
    TrainConfig(epochs=1, batch_size=1, accumulate=1, eval_every=1, max_length=3)
    TrainConfig(seed=2**32 - 1, limit=1)


def test_round_trip() -> None:
    """Law: every setting, away from its default, survives config.json."""
    config = TrainConfig(**OTHERS)
    saved = json.loads(json.dumps(config.data_dict()))
    assert resumed(saved, {}) == config


def test_resuming_with_the_same_words() -> None:
    """Law: typing what the run was started with is no contradiction."""
    saved = TrainConfig(**OTHERS).data_dict()
    assert resumed(saved, dict(OTHERS)) == TrainConfig(**OTHERS)


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "out"])
def test_resuming_with_other_words(name: str) -> None:
    """Law: no setting may change in mid-run; both values are named."""
    saved = TrainConfig().data_dict()
    with pytest.raises(UserError) as caught:
        resumed(saved, {name: OTHERS[name]})
    assert str(caught.value) == (
        f"{flag(name)} {OTHERS[name]} differs from this run's {saved[name]}; resume "
        "without it, or start anew with another --out."
    )


def test_a_run_may_move() -> None:
    """Law: `out` alone may differ, since a folder can be moved."""
    saved = TrainConfig(out="runs/old").data_dict()
    assert resumed(saved, {"out": "runs/new"}).out == "runs/new"
    assert resumed(saved, {}).out == "runs/old"


def test_settings_of_an_older_version() -> None:
    """Law: a setting that the saved run lacks has its default."""
    saved = TrainConfig(**OTHERS).data_dict()
    del saved["clip"]
    assert resumed(saved, {}).clip == TrainConfig.clip
    assert resumed(saved, {"clip": 1.0}).clip == 1.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epoch", 3, "config.json holds 'epoch', not a setting; nearest: epochs."),
        ("zzz", 3, "config.json holds 'zzz', not a setting; nearest: none."),
        ("epochs", "3", "config.json: epochs is '3'; it must be of type int | None."),
        ("seed", None, "config.json: seed is None; it must be of type int."),
        ("lr", [1], "config.json: lr is [1]; it must be of type float | None."),
        ("data", 3, "config.json: data is 3; it must be of type str | None."),
        ("epochs", -1, "--epochs -1 must be at least 1."),
    ],
)
def test_damaged_settings(name: str, value: object, message: str) -> None:
    """Law: settings that were altered by hand are refused, not believed."""
    with pytest.raises(UserError) as caught:
        resumed(TrainConfig().data_dict() | {name: value}, {})
    assert str(caught.value) == message


def test_whole_numbers_are_numbers() -> None:
    """Law: JSON's 1 is as good as its 1.0 where a float is due."""
    assert resumed(TrainConfig().data_dict() | {"clip": 1, "lr": None}, {}).clip == 1


def test_a_policy_file_is_read_at_once(tmp_path: Path) -> None:
    """Law: a run keeps the rules, not the name of a file that may change."""
    path = tmp_path / "rules.toml"
    made = Policy.parse("lean + op:softmax=fp32")
    made.save(path)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = typed(parser.parse_args(["--policy", str(path)]))
    assert given["policy"] == "lean + op:softmax=fp32"
    assert resumed(TrainConfig(**given).data_dict(), given).policy == str(made)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return settings of a run of a few steps, whose report is its lead alone."""
    small_and_measured(monkeypatch)
    monkeypatch.setattr(result, "page", lambda _title, _sections, lead: lead)
    source = tmp_path / "letters.json"
    source.write_text(json.dumps(letters(20, "de", "ab", lengths=(3, 9))))
    return {
        "data": str(source),
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "epochs": 1,
        "batch_size": 9,
        "out": str(tmp_path / "run"),
    }


@pytest.mark.parametrize("master", ["fp32", "split", "kahan", "stochastic", "none"])
def test_masters(
    short: dict[str, Any], capsys: pytest.CaptureFixture[str], master: str
) -> None:
    """Law: masters are of the form asked for, and all that is written says so."""
    with one_thread():
        done = run(short | {"master": master})
    saved = checkpoint.load(done.folder.last())
    assert saved.state["masters"]["form"] == saved.notes["master"] == master
    assert done.summary["master"] == done.folder.settings()["master"] == master
    said = f"evel O2 bf16, master weights {master}: level O2 was asked for"
    out, err = capsys.readouterr()
    assert f"l{said}" in out + err
    assert (done.folder.path / "report.html").read_text().startswith(f"L{said}. ")


def test_no_masters_to_speak_of(short: dict[str, Any]) -> None:
    """Law: a level without master weights is said to keep none, whatever is set."""
    with one_thread():
        done = run(short | {"level": "O1"})
    assert done.summary["master"] == "none"
    assert checkpoint.load(done.folder.last()).notes["master"] == "none"
    lead = (done.folder.path / "report.html").read_text()
    assert lead.startswith("Level O1 bf16: level O1 was asked for. ")


NO_FIT = {
    "O1 bf16 split": (
        "master='split' at level O1, which has no master weights: use level='O2', or "
        "leave master out."
    ),
    "O2 fp16 kahan": (
        "master='kahan' needs bf16 weights, not torch.float16: only bf16 is the high "
        "half of fp32. Use dtype='bf16' or master='fp32'."
    ),
}


@pytest.mark.parametrize("words", NO_FIT)
def test_masters_that_do_not_fit(short: dict[str, Any], words: str) -> None:
    """Law: a form that level or dtype rule out is refused, and nothing written."""
    given = dict(zip(("level", "dtype", "master"), words.split(), strict=True))
    with one_thread(), pytest.raises(UserError) as caught:
        run(short | given)
    assert str(caught.value) == NO_FIT[words]
    assert not Path(short["out"]).exists()


@pytest.mark.parametrize("master", ["split", "kahan", "stochastic", "none"])
def test_resumed_masters(
    short: dict[str, Any], monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    """Law: a run of any form, stopped and resumed, is the run that was not, to the bit.

    What another form would make of its checkpoint is not tried: it is refused.
    """
    given = short | {"master": master, "epochs": 2, "eval_every": 1}
    clean = Trainer._train_step

    def stop(self: Trainer, number: int, *rest: Any) -> dict[str, Any]:
        if number == 3:
            raise KeyboardInterrupt
        return clean(self, number, *rest)

    with one_thread():
        straight = run(given | {"out": short["out"] + "-straight"}).folder
        monkeypatch.setattr(Trainer, "_train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            run(given)
        monkeypatch.setattr(Trainer, "_train_step", clean)
        other = "--master fp32 differs from this run's " + master
        with pytest.raises(UserError, match=other):
            run({"out": short["out"], "master": "fp32"}, resume=True)
        again = run({"out": short["out"]}, resume=True).folder
    one, two = (checkpoint.load(folder.last()) for folder in (straight, again))
    assert one.state["run"]["step"] == 4
    assert same(one.weights, two.weights)
    assert same(one.state, two.state)

"""Files of settings: read as they were written, and refused by line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_settings import OTHERS, TOGETHER, parse

from halfstep.errors import UserError
from halfstep.train.config import BEST_BY, SETTINGS, TrainConfig
from halfstep.train.config_file import MODES, read_file, write_resolved

MOST_WORDS = 35
OPEN = {"exclude_min": True}
SHARES = st.floats(0, 1, exclude_max=True)
RATES = st.floats(0, allow_infinity=False, **OPEN)
COUNTS = st.integers(1, 2**31 - 1)
TEXTS = st.text().filter(str.strip).filter(lambda text: "\0" not in text)
PARTS = st.lists(TEXTS.filter(lambda text: "," not in text), min_size=1).map(",".join)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "task": st.sampled_from(sorted(BEST_BY)),
    "data": TEXTS,
    "text_column": st.text("ab ", min_size=1).filter(str.strip),
    "label_column": st.text("cd ", min_size=1).filter(str.strip),
    "labels": PARTS,
    "limit": st.integers(2, 2**31 - 1),
    "dev_share": st.floats(0, 1, **OPEN, exclude_max=True),
    "max_length": st.integers(3, 2**20),
    "model": TEXTS,
    "dropout": SHARES,
    "mask_tokens": SHARES,
    "freeze": PARTS,
    "level": st.text(),
    "dtype": st.text(),
    "loss_scale": st.text(),
    "master": st.sampled_from(["fp32", "split", "kahan", "stochastic", "none"]),
    "policy": st.sampled_from(["lean", "torch + op:softmax=fp32"]),
    "epochs": COUNTS,
    "max_steps": COUNTS,
    "batch_size": COUNTS,
    "accumulate": COUNTS,
    "lr": RATES,
    "layer_decay": st.floats(0, 1, **OPEN),
    "weight_decay": st.floats(0, allow_infinity=False),
    "warmup": SHARES,
    "clip": RATES,
    "label_smoothing": SHARES,
    "class_weights": st.just("balanced")
    | st.lists(RATES, min_size=1).map(lambda them: ", ".join(map(repr, them))),
    "patience": COUNTS,
    "best_by": st.sampled_from(sorted({*BEST_BY["classify"], *BEST_BY["ner"]})),
    "eval_every": COUNTS,
    "seed": st.integers(0, 2**32 - 1),
    "device": st.sampled_from(["auto", "cpu", "cuda"]),
    "workers": st.integers(0, 1024),
    "compile": st.booleans(),
    "recompute": st.booleans(),
    "parallel": st.sampled_from(["ddp", "fsdp2"]),
    "out": TEXTS,
    "keep": COUNTS,
    "tensorboard": st.booleans(),
    "probe": st.sampled_from(["off", "flags", "sampled", "full"]),
}


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Draw settings that go with each other."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True))
    drawn = {name: draw(VALUES[name]) for name in names}
    task = drawn.get("task", "classify")
    if task == "ner":
        for name in ("class_weights", "text_column", "label_column"):
            drawn.pop(name, None)
    if drawn.get("best_by") not in BEST_BY[task]:
        drawn.pop("best_by", None)
    if drawn.get("parallel") == "fsdp2":
        drawn.pop("master", None)
    if drawn.get("accumulate", 1) > drawn.get("batch_size", 32):
        drawn["batch_size"] = drawn["accumulate"]
    return TrainConfig(**drawn)


def there_and_back(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Write settings, and read them as `halfstep train --config` does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.toml"
        write_resolved(path, config.data_dict())
        return TrainConfig(**parse("--config", str(path))), path.read_text("utf-8")


def test_all_are_drawn() -> None:
    """Law: the property below is one of every setting."""
    assert list(VALUES) == list(SETTINGS)


@given(config=configs())
def test_resolved_settings_read_back(config: TrainConfig) -> None:
    """Law: a file of settings reads back to the same, and begins with what it is."""
    again, text = there_and_back(config)
    assert again == config
    first, *_ = text.splitlines()
    assert first.startswith("# The settings of a run of `halfstep train`")


@pytest.mark.parametrize("others", TOGETHER)
def test_other_settings_read_back(others: dict[str, Any]) -> None:
    """Law: each setting is written away from its default, as plain TOML, and read."""
    again, text = there_and_back(TrainConfig(**others))
    assert again == TrainConfig(**others)
    whole = TrainConfig(**others).data_dict()
    assert tomllib.loads(text) == {n: v for n, v in whole.items() if v is not None}


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


REFUSED = {
    "epoch = 3": "line 1: 'epoch' is not a setting; nearest: epochs.",
    "\nkeep = 1\nbatchsize = 3": (
        "line 3: 'batchsize' is not a setting; nearest: batch_size."
    ),
    "dev-shares = 0.1": "line 1: 'dev-shares' is not a setting; nearest: dev_share.",
    "zzz = 3": "line 1: 'zzz' is not a setting; see halfstep train --help.",
    "[training]\nepochs = 3": (
        "line 1: 'training' is a table; write settings without tables, such as "
        'model = "tiny".'
    ),
    **{
        f"{mode} = true": (
            f"line 1: {mode!r} is no setting of a run; type --{mode} on the command "
            "line."
        )
        for mode in MODES
    },
    "batch_size = 3\nbatch-size = 3": (
        "line 2: 'batch-size' is set already, as 'batch_size' with - for _; keep one."
    ),
    "epochs = '3'": "line 1: epochs is text in quotes, '3'; it must be a whole number.",
    "epochs = 3.0": "line 1: epochs is a number, 3.0; it must be a whole number.",
    "epochs = true": (
        "line 1: epochs is true or false, True; it must be a whole number."
    ),
    "lr = '1e-3'": "line 1: lr is text in quotes, '1e-3'; it must be a number.",
    "lr = false": "line 1: lr is true or false, False; it must be a number.",
    "compile = 1": "line 1: compile is a whole number, 1; it must be true or false.",
    "loss-scale = 1024": (
        "line 1: loss-scale is a whole number, 1024; it must be text in quotes."
    ),
    "labels = [\n'no',\n'yes']": (
        "line 1: labels is an array, ['no', 'yes']; it must be text in quotes."
    ),
    "keep = 1\n\n# why\ndata = 2020-02-02": (
        "line 4: data is a date, datetime.date(2020, 2, 2); it must be text in quotes."
    ),
    "data.file = 'x'": (
        "line 1: data is a table, {'file': 'x'}; it must be text in quotes."
    ),
    "keep = 1\nepochs = 0": "line 2: --epochs 0 must be from 1 to 2147483647.",
    'keep = 1\nout = "a\\u0000b"': (
        "line 2: --out 'a\\x00b' must be a folder: not blank, and without NUL."
    ),
    "model = ' '": (
        "line 1: --model   must be a name or a folder: not blank, and without NUL."
    ),
    "lr = nan": "line 1: --lr nan must be above 0 and finite.",
    "lr = 1" + "0" * 400: "line 1: --lr inf must be above 0 and finite.",
    "keep = 1\nmodel = tiny": (
        "line 2 column 9: broken TOML: Invalid value; write a setting a line, such as "
        'model = "tiny".'
    ),
    "keep = 1\nkeep = 2\n": (
        "line 2 column 9: broken TOML: Cannot overwrite a value; write a setting a "
        'line, such as model = "tiny".'
    ),
    "keep = 1\nepochs =": (
        "line 2: broken TOML: Invalid value; write a setting a line, such as "
        'model = "tiny".'
    ),
}


def refusal(path: Path) -> str:
    """Return why a file is refused."""
    with pytest.raises(UserError) as caught:
        read_file(path)
    message = str(caught.value)
    assert len(message.split()) <= MOST_WORDS
    return message


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a line that is no setting is refused by file and line, with what is."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    assert refusal(Path("run.toml")) == f"run.toml {REFUSED[text]}"


@pytest.mark.parametrize(
    "text",
    ["keep = " + "[" * 5000, "seed = 1" + "0" * 5000],
    ids=["deep", "long"],
)
def test_too_much_for_the_parser(text: str, tmp_path: Path) -> None:
    """Law: a file that the parser gives up on is refused, not raised as it is."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert refusal(path).startswith(f"{path}: broken TOML: ")


def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a file that is not there, a folder, or not UTF-8 is refused by name."""
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("run.toml")) == (
        "--config run.toml cannot be read: No such file or directory; give a TOML "
        "file of settings."
    )
    assert refusal(tmp_path.relative_to(tmp_path)) == (
        "--config . cannot be read: Is a directory; give a TOML file of settings."
    )
    Path("run.toml").write_bytes(b"keep = 1\ndata = 'caf\xe9'\n")
    assert refusal(Path("run.toml")) == (
        "run.toml line 2 is not UTF-8: byte 0xe9 at offset 20; save it as UTF-8."
    )


LINES = (
    *("", "# epoch = 3", "keep = 1", 'data = """\nepoch = 2\n"""', "labels = 'epoch'"),
    *("model = '''a\n\n\nb'''", "dev-share = 0.5"),
)


@given(
    before=st.lists(st.sampled_from(LINES[2:]), unique=True).flatmap(
        lambda settings: st.permutations([*settings, "", "", "# epoch = 3"])
    ),
    after=st.lists(st.sampled_from(LINES[:2])),
    value=st.sampled_from(["3", "[\n1,\n2]", '"""\n\n"""', "{a = 1}", "'x' # epoch"]),
)
def test_the_line_is_found(before: list[str], after: list[str], value: str) -> None:
    """Law: the line named is the one where the key stands, not one that looks like it.

    The oracle counts the line ends that were written before it.
    """
    head = "".join(line + "\n" for line in before)
    text = head + f"  epoch = {value}\n" + "".join(line + "\n" for line in after)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text, encoding="utf-8", newline="")
        message = refusal(path)
    assert message.startswith(f"{path} line {head.count(chr(10)) + 1}: 'epoch' is ")


def test_settings_that_cannot_be_written(tmp_path: Path) -> None:
    """Law: what TOML cannot hold, or no disk takes, is refused; nothing is left."""
    path = tmp_path / "resolved.toml"
    with pytest.raises(UserError) as caught:
        write_resolved(path, OTHERS | {"master": "fp32", "class_weights": "1,0"})
    assert str(caught.value).startswith("--class-weights 1,0 must be balanced, or")
    with pytest.raises(UserError) as caught:
        write_resolved(path, {"data": "caf\udce9.csv"})
    assert str(caught.value) == (
        f"--data 'caf\\udce9.csv' cannot stand in {path}, which is UTF-8: give it a "
        "name without bytes of other encodings."
    )
    with pytest.raises(UserError) as caught:
        write_resolved(tmp_path / "nowhere" / "resolved.toml", {})
    assert str(caught.value) == (
        f"{tmp_path}/nowhere/resolved.toml cannot be written: No such file or "
        "directory."
    )
    assert not list(tmp_path.iterdir())

"""Files of settings: read as they were written, and refused by line."""

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from data_files import refused
from train_settings import OTHERS, TOGETHER, parse

from halfstep.train.config import MODES, TrainConfig, read_file, write_resolved


def there_and_back(config: TrainConfig) -> tuple[TrainConfig, str]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.toml"
        write_resolved(path, config.data_dict())
        return TrainConfig(**parse("--config", str(path))), path.read_text("utf-8")


ODD = {"data": 'a "b"\\c\n\u5929', "lr": 5e-324, "seed": 2**32 - 1}


@pytest.mark.parametrize("others", [*TOGETHER, ODD])
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


LINE = 'write a setting a line, such as model = "tiny".'
OVER = "Cannot overwrite a value (at line 2, column 9)"
REFUSED = {
    "epoch = 3": ": 'epoch' is not a setting; nearest: epochs.",
    "dev-shares = 0.1": ": 'dev_shares' is not a setting; nearest: dev_share.",
    "zzz = 3": ": 'zzz' is not a setting; see halfstep train --help.",
    "[some]\nepochs = 3": ": 'some' is not a setting; see halfstep train --help.",
    **{
        f"{mode} = true": f": {mode!r} is no setting of a run; type --{mode}."
        for mode in MODES
    },
    "max_steps = 3\nmax-steps = 3": (
        ": 'max_steps' is set twice, with - and with _; keep one."
    ),
    "epochs = '3'": ": epochs is '3'; it must be a whole number.",
    "epochs = 3.0": ": epochs is 3.0; it must be a whole number.",
    "epochs = true": ": epochs is True; it must be a whole number.",
    "lr = '1e-3'": ": lr is '1e-3'; it must be a number.",
    "lr = false": ": lr is False; it must be a number.",
    "compile = 1": ": compile is 1; it must be true or false.",
    "loss-scale = 1024": ": loss_scale is 1024; it must be text in quotes.",
    "labels = ['no', 'yes']": ": labels is ['no', 'yes']; it must be text in quotes.",
    "data.file = 'x'": ": data is {'file': 'x'}; it must be text in quotes.",
    "model = t": f" is not TOML: Invalid value (at line 1, column 9); {LINE}",
    "keep = 1\nkeep = 2\n": f" is not TOML: {OVER}; {LINE}",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is no setting is refused by file and name, with what would be."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    assert refused(read_file, Path("run.toml")) == f"run.toml{REFUSED[text]}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Law: what cannot be opened, or the parser gives up on, is refused by name."""
    path = tmp_path / "run.toml"
    missing = f"--config {path} cannot be read: No such file or directory"
    assert refused(read_file, path).startswith(missing)
    assert refused(read_file, tmp_path).startswith(
        f"--config {tmp_path} cannot be read: Is a"
    )
    for content, fault in (
        (b"keep = 1\ndata = 'caf\xe9'\n", "'utf-8' codec"),
        (b"keep = " + b"[" * 5000, ""),
        (b"seed = 1" + b"0" * 5000, ""),
    ):
        path.write_bytes(content)
        assert refused(read_file, path).startswith(f"{path} is not TOML: {fault}")


def test_settings_that_cannot_be_written(tmp_path: Path) -> None:
    """Law: what TOML cannot hold, or no disk takes, is refused; nothing is left."""
    path = tmp_path / "resolved.toml"
    assert refused(
        write_resolved, path, OTHERS | {"master": "fp32", "class_weights": "1,0"}
    ).startswith("--class-weights 1,0 must be balanced, or")
    for place, data in ((path, "caf\udce9.csv"), (tmp_path / "no" / "x.toml", "a")):
        assert refused(write_resolved, place, {"data": data}).startswith(
            f"{place} cannot be written: "
        )
    assert not list(tmp_path.iterdir())

"""What --resume refuses: one line, and the run left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halfstep import checkpoint, cli, machine
from halfstep.train import result, text
from halfstep.train.folder import RunFolder
from halfstep.train.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A small model gains nothing from a second thread, and waits for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a finished run; while it is asked for, its model can be built."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [["ab" * (1 + number % 4), number % 2] for number in range(40)]
    (folder / "letters.json").write_text(json.dumps(rows), encoding="utf-8")
    settings = {
        "data": str(folder / "letters.json"),
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "epochs": 1,
        "batch_size": 8,
        "out": str(folder / "run"),
    }
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(text.SIZES, "mini", shape | {"intermediate_size": 64})
        patch.setattr(machine, "gemm_rates", lambda *_, **__: rates)
        patch.setattr(result, "page", lambda *_: "<html></html>")
        run(settings)
        yield folder / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "run")


def cut(path: Path) -> None:
    """Cut the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut weights": ("weights.safetensors", cut, "is truncated or altered: "),
    "cut state": ("state.pt", cut, "is truncated or altered: "),
    "cut manifest": ("manifest.json", cut, "is damaged: it is not valid JSON."),
    "bit in weights": ("weights.safetensors", flip, "is damaged: its SHA-256 is not "),
    "bit in state": ("state.pt", flip, "is damaged: its SHA-256 is not "),
    "no state": ("state.pt", Path.unlink, "has no state.pt; it is not whole."),
    "no manifest": ("manifest.json", Path.unlink, "it has no manifest.json."),
    "cut pointer": ("../last.json", cut, "is damaged: it does not name a checkpoint."),
}


def tree(root: Path) -> dict[str, bytes | None]:
    """Return the name of everything below a folder, and the bytes of files."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def refused(place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Resume; return the one line that refuses to, all files left alone."""
    before = tree(place)
    capsys.readouterr()
    assert cli.run(["train", "--resume", "--out", str(place)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert tree(place) == before
    start = "halfstep: error: "
    assert err.startswith(start)
    assert err.count("\n") == 1
    return err.removeprefix(start)[:-1]


OTHER_DATA = (
    "--resume: the checkpoint was made from other data; resume with the data it was "
    "trained on."
)


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Law: a checkpoint that is not whole is refused in one line, and left alone."""
    file, damage, fault = DAMAGE[name]
    damage(RunFolder(copy).last() / file)
    line = refused(copy, capsys)
    assert fault in line
    assert str(copy) in line


def test_foreign_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a sound checkpoint of something else is refused."""
    last = RunFolder(copy).last()
    shutil.rmtree(last)
    checkpoint.save(last, {"w": torch.ones(2)}, {"epoch": 3}, {})
    assert refused(copy, capsys) == OTHER_DATA


def test_another_model(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a checkpoint does not fit a model of another shape."""
    monkeypatch.setitem(text.SIZES["mini"], "intermediate_size", 96)
    line = refused(copy, capsys)
    assert "the state holds shape (" in line
    assert line.endswith("; build the model that was saved.")


@pytest.mark.parametrize("change", ["text", "label", "order", "names"])
def test_other_data(
    copy: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Law: data that changed in any way since the checkpoint is refused."""
    config = copy / "config.json"
    saved = json.loads(config.read_text())
    rows: list[list[Any]] = json.loads(Path(saved["data"]).read_text())
    if change == "text":
        rows[7][0] += "a"
    elif change == "label":
        rows[7][1] = 1 - rows[7][1]
    elif change == "order":
        rows[6], rows[7] = rows[7], rows[6]
    else:
        rows = [[written, ("no", "yes")[label]] for written, label in rows]
    other = copy / "letters.json"
    other.write_text(json.dumps(rows))
    config.write_text(json.dumps(saved | {"data": str(other)}))
    assert refused(copy, capsys) == OTHER_DATA


def test_the_copy_is_sound(copy: Path) -> None:
    """Law: nothing but the damage makes the others fail."""
    assert cli.run(["train", "--resume", "--out", str(copy)]) == 0

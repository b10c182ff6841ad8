"""What the command line refuses: one line each, and nothing written."""

from pathlib import Path
from typing import Any

import pytest
from data_files import cells, refused_command, tree
from messages import Worded
from small_training import small_and_measured, write_letters

COMMANDS = (
    *("train", "predict", "doctor", "bench", "run"),
    *("plan", "compare", "env", "levels"),
)
TRAIN = ("train", "--data", "letters.json", "--model", "mini")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_letters(tmp_path, 40)
    small_and_measured(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def files() -> dict[str, bytes]:
        found = tree(here).items()
        return {k: v for k, v in found if v is not None and not k.endswith(".lock")}

    def run(*words: str) -> str:
        before = files()
        line = refused_command(capsys, *words)
        assert files() == before
        return line

    return run


def test_commands_are_all_tested(refused: Any, worded: Worded) -> None:
    """Law: the commands are those above, and no other word is taken."""
    listed = ", ".join(COMMANDS)
    for word, near in (("tain", "train"), ("Predict", "predict"), ("benhc", "bench")):
        line = refused(word)
        assert f"{word!r} is not one of {listed}; nearest: {near};" in line
        worded(line)
    assert "nearest" not in refused("xyzzy")
    assert "; nearest: recipe; see halfstep bench" in refused("bench", "receipe")


FLAGS = {
    "--epoch": "--epochs",
    "--batch_size": "--batch-size",
    "--leval=O2": "--level",
    "--best": "--best-by",
    "--overwrit": "--overwrite",
    "--text": "--text-column",
    "--learning-rate=1e-3": "--lr",
}


@pytest.mark.parametrize("typed", FLAGS)
def test_the_nearest_flag_is_named(refused: Any, typed: str) -> None:
    """Law: a flag is not abbreviated; the one that is meant is named, with its help."""
    expected = f"{typed}; nearest: {FLAGS[typed]}; see halfstep train --help"
    assert refused("train", typed).endswith(expected)


def test_flags_of_every_command(refused: Any) -> None:
    """Law: each command names its own flags."""
    for words, near in (
        ("levels --jsn -", "nearest: --json; see halfstep levels --help"),
        ("bench recipe --js x", "nearest: --json; see halfstep bench recipe"),
        ("--versoin levels", "nearest: --version; see halfstep --help"),
    ):
        assert near in refused(*words.split())


REFUSALS = """
 | COMMAND
bench | WHAT
bench train --candidates O0,O9 | 'O9'
TRAIN --lr fast | 'fast'
train posts.csv | --data
TRAIN --epoch-count 3 | --epoch
TRAIN --epochs many | 'many'
TRAIN --dtype int8 | 'int8'
TRAIN --level O2 --dtype fp32 | O2
TRAIN --policy apex | 'apex'
train --data letters.json --model no-such/model | no-such/model
train --data nothing.csv | nothing.csv
TRAIN --out letters.json/run | letters.json/run
train --resume --out nowhere | nowhere
predict nowhere text | nowhere/model
predict nowhere | --data
"""
"""Words after halfstep, and the value or the flag that the line names."""


@pytest.mark.parametrize(("words", "named"), cells(REFUSALS))
def test_refusals(words: str, named: str, refused: Any, worded: Worded) -> None:
    """Law: what cannot be used is refused in one line, and nothing is written."""
    line = refused(*words.replace("TRAIN", " ".join(TRAIN)).split())
    assert named in line
    worded(line)

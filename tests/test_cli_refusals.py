"""What the command line refuses: one line each, and nothing written."""

from pathlib import Path
from typing import Any

import pytest
from data_files import cells, refused_command, tree
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


def test_commands_are_all_tested(refused: Any) -> None:
    """Law: the commands are those above, and no other word is taken."""
    listed = ", ".join(COMMANDS)
    for word, near in (("tain", "train"), ("Predict", "predict"), ("benhc", "bench")):
        assert refused(word) == (
            f"argument COMMAND: {word!r} is not one of {listed}; nearest: {near}; see "
            "halfstep --help"
        )
    assert refused("xyzzy").endswith(f"is not one of {listed}; see halfstep --help")
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
    assert refused("train", typed) == (
        f"unrecognized arguments: {typed}; nearest: {FLAGS[typed]}; see halfstep train "
        "--help"
    )


def test_flags_of_every_command(refused: Any) -> None:
    """Law: each command names its own flags."""
    for words, near in (
        ("levels --jsn -", "nearest: --json; see halfstep levels --help"),
        ("bench recipe --js x", "nearest: --json; see halfstep bench recipe"),
        ("--versoin levels", "nearest: --version; see halfstep --help"),
    ):
        assert near in refused(*words.split())


REFUSALS = """
 | the following arguments are required: COMMAND; see halfstep
bench | the following arguments are required: WHAT; see halfstep
bench train --candidates O0,O9 | argument --candidates: 'O9' must be all or of plain-
TRAIN --lr fast | argument --lr: 'fast' is not a number, such as 0.001 or 1e-3; see
train posts.csv | unrecognized arguments: posts.csv; a file of texts is given as --da
TRAIN --epoch-count 3 | unrecognized arguments: --epoch
TRAIN --epochs many | argument --epochs: 'many' is not a whole number; see halfstep t
TRAIN --dtype int8 | dtype='int8' is not\x20
TRAIN --level O2 --dtype fp32 | level=O2 needs dtype bf16 or fp16; fp32 training is l
TRAIN --policy apex | policy='apex' is not known; the named
train --data letters.json --model no-such/model | --model no-such/model: no such folder
train --data nothing.csv | nothing.csv is not there; give a file or a directory that e
TRAIN --out letters.json/run | --out letters.json/run cannot be written: Not a directo
train --resume --out nowhere | nowhere holds no run; it has no config.json.
predict nowhere text | nowhere holds no run: there is no nowhere/model; train with --o
predict nowhere | the following arguments are required: TEXT;\x20
"""
"""Words after halfstep, and how the line begins: all of it is a law of its module."""


@pytest.mark.parametrize(("words", "start"), cells(REFUSALS))
def test_refusals(words: str, start: str, refused: Any) -> None:
    """Law: what cannot be used is refused in one line, and nothing is written."""
    assert refused(*words.replace("TRAIN", " ".join(TRAIN)).split()).startswith(start)

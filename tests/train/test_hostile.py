"""Files from strangers: no code of theirs runs, nothing hangs, no damage passes."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from small_training import (
    seal_again,
    write_letters,
)
from transformers import BertConfig, BertForSequenceClassification

from halfstep import cli
from halfstep.train import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_runs")

PROGRAM = """\
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
Path({trace!r}).touch()
class Config(BertConfig):
    model_type = "stranger"
class Model(BertForSequenceClassification):
    config_class = Config
class Tokens(BertTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "stranger.Config",
    "AutoModelForSequenceClassification": "stranger.Model",
}
REASON = (
    "asks for Python code of its own (auto_map), which is never run; choose a model "
    "that transformers has built in."
)


@pytest.fixture(autouse=True, scope="module")
def _no_network() -> Iterator[None]:
    """Reach no network, and be no process of torchrun's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.delenv("RANK", raising=False)
        yield


def bert(folder: Path) -> Path:
    """Write a tiny BERT and its tokenizer, as transformers writes them."""
    tokenizer = model.character_tokenizer(["abcdefxy"] * 2, 32)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, data, and a finished run that tuned the model."""
    place = tmp_path_factory.mktemp("hostile")
    bert(place / "bert")
    write_letters(place, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        words = ("--model", "bert", "--level", "O0", "--epochs", "1")
        assert cli.run(["train", "--data", "letters.json", "--out", "run", *words]) == 0
    return place


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a copy of that folder, answering yes to whatever is asked."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    give(monkeypatch, b"y\n" * 9)
    return tmp_path


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Let standard input hold these bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


def change(path: Path, **more: object) -> None:
    """Add to a file of JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | more), encoding="utf-8")


def plant_config(folder: Path, trace: Path) -> None:
    """Let a model's folder ask for code that leaves a trace when it is run."""
    change(folder / "config.json", model_type="stranger", auto_map=AUTO_MAP)
    program = PROGRAM.format(trace=str(trace))
    (folder / "stranger.py").write_text(program, encoding="utf-8")


def plant_tokenizer(folder: Path, trace: Path) -> None:
    """Let its tokenizer alone ask for it."""
    tokens = ["stranger.Tokens", "stranger.Tokens"]
    name = "Strangers"
    path = folder / "tokenizer_config.json"
    change(path, auto_map={"AutoTokenizer": tokens}, tokenizer_class=name)
    program = PROGRAM.format(trace=str(trace))
    (folder / "stranger.py").write_text(program, encoding="utf-8")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that is refused in one line; return the line."""
    capsys.readouterr()
    assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("halfstep: error: ")
    assert err.count("\n") == 1
    assert len(err.split()) <= 35 + 2
    return err.removeprefix("halfstep: error: ")[:-1]


@pytest.mark.parametrize(
    ("plant", "name"),
    [(plant_config, "config.json"), (plant_tokenizer, "tokenizer_config.json")],
)
@pytest.mark.parametrize("use", ["train", "predict", "resume"])
def test_code_of_a_model_is_not_run(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    use: str,
    plant: Callable[[Path, Path], None],
    name: str,
) -> None:
    """Law: a model that brings Python code is refused; nothing asks, nothing runs."""
    trace = here / "trace"
    if use == "predict":
        plant(here / "run" / "model", trace)
        seal_again(here / "run" / "model")
        line = refusal(capsys, "predict", "run", "-")
        assert line == f"run/model: its {name} {REASON}"
    else:
        plant(here / "bert", trace)
        words = {"train": ("--model", "bert", "--data", "letters.json", "--out", "new")}
        line = refusal(capsys, "train", *words.get(use, ("--resume", "--out", "run")))
        assert line.startswith(f"--model bert: its {name} {REASON}")
    assert not trace.exists()


class Reduced:
    """What leaves a trace when a pickle of it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.trace), "w")


def test_pickled_weights_are_not_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: weights in a pickle are loaded as tensors alone, or refused."""
    trace = here / "trace"
    (here / "bert" / "model.safetensors").unlink()
    torch.save({"weight": Reduced(trace)}, here / "bert" / "pytorch_model.bin")
    words = ("--model", "bert", "--data", "letters.json", "--out", "new")
    assert refusal(capsys, "train", *words) == (
        "--model bert: transformers cannot load that folder: its weights are a pickle "
        "of more than tensors; use safetensors. The models built from scratch are "
        "tiny, small, mini."
    )
    assert not trace.exists()


def test_a_damaged_model_is_written_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: --resume mends the model that `predict` refuses, as its message says."""
    weights = here / "run" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # in a weight: it loads without complaint
    weights.write_bytes(content)
    assert refusal(capsys, "predict", "run", "abc") == (
        "model file run/model/model.safetensors is damaged: its SHA-256 is not the one "
        "in manifest.json. Write it again with halfstep train --resume."
    )
    assert cli.run(["train", "--resume", "--out", "run"]) == 0
    assert cli.run(["predict", "run", "abc"]) == 0


def of_pipe(path: Path) -> None:
    """Put a pipe there, which nobody writes to."""
    os.mkfifo(path)


def of_device(path: Path) -> None:
    """Put a link to a device there that never ends."""
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes by name")
@pytest.mark.parametrize("put", [of_pipe, of_device])
def test_data_that_is_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], put: Callable[[Path], None]
) -> None:
    """Law: a pipe or a device is refused before it is read, which might not end."""
    name = "splits/train.jsonl"
    (here / "splits").mkdir()
    write_letters(here / "splits" / "dev.json", 4)
    put(here / name)
    line = refusal(capsys, "train", "--data", "splits", "--out", "new")
    assert line == (
        f"{name} is a pipe or a device, not a file; save its rows as .json, .jsonl, "
        ".ndjson, .csv or .tsv."
    )


def test_nul_in_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: NUL is refused however it is written, in texts, labels and entities."""
    odd = here / "odd.jsonl"
    for task, row in (
        ("classify", '["a\\u0000b", 1]'),
        ("classify", '["ab", "b\\u0000"]'),
        ("ner", '{"text": "a\\u0000b", "entities": []}'),
    ):
        odd.write_text(f"{row}\n", encoding="utf-8")
        words = ("train", "--task", task, "--data", "odd.jsonl", "--out", "new")
        assert refusal(capsys, *words) == (
            "odd.jsonl line 1: it holds a NUL character; remove it."
        )

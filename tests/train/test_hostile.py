"""Files from strangers: no code of theirs runs, nothing hangs, no damage passes."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from data_files import Trap, refused_command
from small_training import seal_again, write_letters
from transformers import BertConfig, BertForSequenceClassification

from halfstep import cli
from halfstep.train import model

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


REASON = "asks for Python code of its own (auto_map), which is never run; choose a mode"
NEW = ("--data", "letters.json", "--out", "new")


@pytest.fixture(autouse=True, scope="module")
def _no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.delenv("RANK", raising=False)
        yield


def bert(folder: Path) -> Path:
    """Write a tiny BERT and its tokenizer, as transformers writes them."""
    tokenizer = model.character_tokenizer(["abcdefxy"] * 2, 32)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 16, "max_position_embeddings": 32}
    config = BertConfig(vocab_size=len(tokenizer), **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    yes = io.TextIOWrapper(io.BytesIO(b"y\n" * 9), "utf-8")
    monkeypatch.setattr(sys, "stdin", yes)
    return tmp_path


def change(path: Path, **more: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | more), encoding="utf-8")


def plant(folder: Path, name: str, trace: Path) -> None:
    """Let a model's folder ask for code that leaves a trace when it is run."""
    if name == "config.json":
        change(folder / name, model_type="stranger", auto_map=AUTO_MAP)
    else:
        tokens = {"AutoTokenizer": ["stranger.Tokens", "stranger.Tokens"]}
        change(folder / name, auto_map=tokens, tokenizer_class="Strangers")
    program = PROGRAM.format(trace=str(trace))
    (folder / "stranger.py").write_text(program, encoding="utf-8")


@pytest.mark.parametrize(
    ("use", "name"),
    [
        *((use, "config.json") for use in ("train", "predict", "resume")),
        ("train", "tokenizer_config.json"),
    ],
)
def test_code_of_a_model_is_not_run(
    here: Path, capsys: pytest.CaptureFixture[str], use: str, name: str
) -> None:
    """Law: a model that brings Python code is refused; nothing asks, nothing runs."""
    trace, model = here / "trace", "run/model" if use == "predict" else "bert"
    words = {
        "train": ("train", "--model", "bert", *NEW),
        "predict": ("predict", "run", "-"),
        "resume": ("train", "--resume", "--out", "run"),
    }
    plant(here / model, name, trace)
    if use == "predict":
        seal_again(here / model)
    line = refused_command(capsys, *words[use])
    flag = "" if use == "predict" else "--model "
    assert line.startswith(f"{flag}{model}: its {name} {REASON}")
    assert not trace.exists()


def test_pickled_weights_are_not_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: weights in a pickle are loaded as tensors alone, or refused."""
    trace = here / "trace"
    (here / "bert" / "model.safetensors").unlink()
    torch.save({"weight": Trap(trace)}, here / "bert" / "pytorch_model.bin")
    assert refused_command(capsys, "train", "--model", "bert", *NEW).startswith(
        "--model bert: transformers cannot load that folder: its weights are a pickle "
        "of more than tensors; use safetensors."
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
    assert refused_command(capsys, "predict", "run", "abc") == (
        "model file run/model/model.safetensors is damaged: its SHA-256 is not the one "
        "in manifest.json. Write it again with halfstep train --resume."
    )
    assert cli.run(["train", "--resume", "--out", "run"]) == 0
    assert cli.run(["predict", "run", "abc"]) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes by name")
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "device"],
)
def test_data_that_is_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], put: Callable[[Path], None]
) -> None:
    """Law: a pipe or a device is refused before it is read, which might not end."""
    (here / "splits").mkdir()
    write_letters(here / "splits" / "dev.json", 4)
    put(here / "splits" / "train.jsonl")
    line = refused_command(capsys, "train", "--data", "splits", "--out", "new")
    start = "splits/train.jsonl is a pipe or a device, not a file; save its rows as "
    assert line.startswith(start)

"""`halfstep plan`: what it shows, writes, reads and refuses."""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig

from halfstep import cli

MODULE = """
import torch
from torch import nn
def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1))
    return model, (torch.randn(6, 8),)
def wrong():
    return nn.Linear(2, 2)
class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x
def branch():
    return Branch(2, 2), (torch.ones(2, 2),)
def shape():
    return nn.Linear(2, 2), (torch.ones(2, 3),)
"""


_numbers = itertools.count()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"planned_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:make"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["plan", *words]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return out.out


def test_tables(capsys: Any, model: str) -> None:
    """Law: counts, casts beside torch.autocast's, times, each op and module."""
    text = shown(capsys, model, "--method", "painting", "--measure")
    assert "operations" in text
    assert "3 of 4 in bf16" in text
    assert "torch.autocast: 5" in text  # an input, two weights, two biases
    for name in ("this plan", "torch.autocast", "fp32"):
        assert f"measured, {name}" in text
    assert "softmax.int" in text


def test_low_weights(capsys: Any, model: str) -> None:
    """Law: weights stored in 16 bits are not cast, only the input and the result."""
    text = shown(capsys, model, "--level", "O2", "--method", "painting", "--measure")
    assert "2; torch.autocast: 5" in text
    assert "measured, this plan" in text


def test_data_is_complete(capsys: Any, model: str) -> None:
    """Law: as data there is a row for each operation, too."""
    tables = json.loads(shown(capsys, model, "--json", "-"))
    titles = ["Plan by min-cut", "By operation", "By module", "plan"]
    assert [table["title"] for table in tables] == titles
    ops = ["linear", "gelu", "linear", "softmax.int"]
    assert [row["op"] for row in tables[-1]["rows"]] == ops


def test_kinds_and_explain(capsys: Any, model: str) -> None:
    """Law: flags move operations; one is explained with its inputs and users."""
    words = (model, "--method", "painting", "--deny", "gelu,softmax")
    text = shown(capsys, *words, "--explain", "gelu")
    assert "the caller chose this kind" in text
    assert "linear, made in bf16, cast in" in text
    assert "linear_1 in bf16" in text


def test_files(capsys: Any, model: str, tmp_path: Path) -> None:
    """Law: a plan is written, edited and read; the page draws each operation."""
    words = (model, "--method", "painting")
    shown(capsys, *words, "--save", "plan.toml", "--html", "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<rect ") == 4
    text = (tmp_path / "plan.toml").read_text()
    wide = text.replace('runs_in = "bf16"', 'runs_in = "fp32"')
    (tmp_path / "plan.toml").write_text(wide)
    assert "0 of 4 in bf16" in shown(capsys, model, "--load", "plan.toml")


def test_folders(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Law: a transformers folder, and a run that holds one; weights are not needed."""
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 32}
    architectures = ["BertForSequenceClassification"]
    config = BertConfig(**shape, architectures=architectures)
    config.save_pretrained(tmp_path / "run" / "model")
    for name in ("run", "run/model"):
        text = shown(capsys, name, "--batch", "2", "--length", "64")
        assert "bert.encoder.layer.0.attention" in text

    file = tmp_path / "run" / "model" / "config.json"
    foreign = {"auto_map": {"AutoConfig": "evil.Config"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | foreign))
    for name in ("run", "run/model"):
        assert cli.run(["plan", name]) == 2
        assert "auto_map" in capsys.readouterr().err


def test_a_saved_program(capsys: Any, model: str, tmp_path: Path) -> None:
    """Law: it is planned as the model it was captured from, with its own inputs."""
    module = importlib.import_module(model.partition(":")[0])
    original, inputs = module.make()
    torch.export.save(torch.export.export(original, inputs), tmp_path / "net.pt2")
    words = ("net.pt2", "--trust-file", "--method", "painting", "--measure")
    text = shown(capsys, *words, "--level", "O2")
    assert "3 of 4 in bf16" in text
    assert "measured, this plan" in text

    named = torch.export.export(original, (), {"input": inputs[0]})
    torch.export.save(named, tmp_path / "named.pt2")
    assert cli.run(["plan", "named.pt2", "--trust-file"]) == 2
    assert "inputs given by name (input)" in capsys.readouterr().err


REFUSED = {
    "no.such:make": "there is no module named no.such.",
    "nothing": "nothing is no folder; give module:function",
    "a.pt2": "there is no file a.pt2.",
    "broken.pt2": "broken.pt2: a saved program can run any code when it is loaded.",
    "broken.pt2 --trust-file": "broken.pt2 is no program of torch.export.save.",
    "{module}.py:make": "give the module's name, planned_",
    "{module}:torch": "is of type module; it must be a function",
    "{module}:make --allow exp --deny exp": "exp is given to both --allow and --deny.",
    "{module}:none": "has no none.",
    "{module}:branch": "compiles it in parts, with breaks at planned_",
    "{module}:shape": "a and b must have same reduction dim, but got [2, 3] X [2, 2].",
    "{module}:wrong": "must return a model and a tuple of its inputs.",
    "{module}:make --deny lineal": "'lineal' must be a name in torch.ops.aten.",
    "{module}:make --explain linea": "no such node; is it linear?",
    "{module}:make --dtype fp8": "dtype",
    "{module}:make --load plan.toml --deny gelu": "--deny has no effect on the plan in "
    "plan.toml: leave it out, edit runs_in in the file, or plan anew without --load.",
    "{module}:make --load none.toml": "none.toml cannot be read as a plan",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(capsys: Any, model: str, words: str) -> None:
    """Law: one line, and status 2."""
    module = model.partition(":")[0]
    Path("broken.pt2").write_text("no archive")
    assert cli.run(["plan", *words.format(module=module).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[words] in line


def test_grad_is_not_needed(capsys: Any, model: str, monkeypatch: Any) -> None:
    """Law: a model that does not learn is timed by its forward pass alone."""
    module = importlib.import_module(model.partition(":")[0])
    made = module.make()
    made[0].requires_grad_(requires_grad=False)
    monkeypatch.setattr(module, "make", lambda: made)
    assert "measured, fp32" in shown(capsys, model, "--measure")
    assert torch.is_grad_enabled()

"""Entities from marked texts to a finished model, and what that model finds."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_training import marked_text, small_settings, steps_of, write_marked

from halfstep.train.predict import Predictor
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")


def text_in_context(draw: random.Random) -> dict[str, Any]:
    text, spans = "", []
    for _ in range(draw.randint(2, 3)):
        text += "".join(draw.choices("xyz", k=draw.randint(1, 3)))
        before = draw.choice("vwx")
        text += before
        word = "".join(draw.choices("abcd", k=2))
        if before != "x":
            kind = {"v": "PER", "w": "LOC"}[before]
            spans.append((len(text), len(text) + 2, kind))
        text += word
    return {"text": text + "z", "entities": spans}


def settings(
    folder: Path,
    kind: str,
    make: Callable[[random.Random], dict[str, Any]] = marked_text,
    count: int = 250,
) -> dict[str, Any]:
    source = write_marked(folder, count, make)
    level, dtype = kind.split()
    more = {"task": "ner", "dev_share": 0.2, "level": level, "dtype": dtype}
    return small_settings(folder, source, lr=1e-2, epochs=8, **more)


@pytest.fixture(scope="module", params=["O1 fp16", "O2 bf16"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return run(settings(tmp_path_factory.mktemp("ner"), request.param))


def test_it_learns(trained: Any) -> None:
    """Law: entities whose characters tell their tags are found, nearly all."""
    steps = steps_of(trained.folder.records())
    assert steps[-1]["loss"] < steps[0]["loss"] / 4
    assert trained.summary["task"] == "ner"
    assert trained.summary["best_by"] == "f1"
    # Nothing but the tokens themselves is to be learned.
    assert trained.summary["dev"]["f1"] > 0.95
    evals = [r for r in trained.folder.records() if r.get("event") == "eval"]
    best = max(evals, key=lambda record: float(record["dev_f1"]))
    assert trained.summary["best_step"] == best["step"]
    assert trained.summary["dev"]["f1"] == best["dev_f1"]


def test_it_learns_from_context(tmp_path: Path) -> None:
    """Law: a word that is an entity by what stands before it is found by that."""
    given = settings(tmp_path, "O2 bf16", text_in_context, 600)
    result = run(given | {"epochs": 12, "mask_tokens": 0.0, "dropout": 0.0})
    # By the words alone nothing can be known: each is as often none, PER and LOC.
    assert result.summary["dev"]["f1"] > 0.9


def test_what_transformers_loads(trained: Any) -> None:
    """Law: the model is a token classifier in fp32 that names its tags."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    place = trained.folder.model
    model = AutoModelForTokenClassification.from_pretrained(place)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    names = [model.config.id2label[i] for i in range(5)]
    assert names == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    made = AutoTokenizer.from_pretrained(place)("uvaccw", return_tensors="pt")
    best = model(**made).logits[0].argmax(-1).tolist()
    # Between the tokens that begin and end a text.
    assert [names[i] for i in best[1:-1]] == ["O", "O", "B-PER", "I-PER", "I-PER", "O"]


def test_predict_finds_entities(trained: Any) -> None:
    """Law: what is found are spans of the text as it was given."""
    texts = ["uuACcw xpry", "uvw"]
    first, second = Predictor(trained.folder.path).predict(texts)
    assert first["entities"] == [
        {"start": 2, "end": 5, "label": "PER", "text": "ACc"},
        {"start": 8, "end": 10, "label": "LOC", "text": "pr"},
    ]
    assert second == {"entities": []}


def write_names(path: Path, count: int, draw: random.Random) -> None:
    """Write sentences with names of letters drawn at random."""

    def name() -> str:
        return "".join(draw.choices("aeioulmnrst", k=draw.randint(3, 7))).capitalize()

    forms = ("{P} lives in {L} .", "{P} left", "In {L} it rained", "Nothing about {L}")
    lines = []
    for _ in range(count):
        for word in draw.choice(forms).split():
            kind = {"{P}": "PER", "{L}": "LOC"}.get(word)
            lines.append(f"{name()} B-{kind}" if kind else f"{word} O")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def test_unseen_names(tmp_path: Path) -> None:
    """Law: names that train lacks are found; the baseline knows its words alone."""
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    for split, count in (("train", 300), ("dev", 100)):
        write_names(tmp_path / f"{split}.bio", count, draw)
    more = {"task": "ner", "level": "O2", "dtype": "bf16", "lr": 1e-2, "epochs": 4}
    summary = run(small_settings(tmp_path, tmp_path, **more)).summary
    assert summary["baseline"]["f1"] < 0.2
    assert summary["dev"]["f1"] > 0.9

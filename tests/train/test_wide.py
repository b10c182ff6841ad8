"""The linear model of n-grams: its features, its fit, and its place in a run."""

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from halfstep.train import model, run, wide
from halfstep.train.data.tokenized import encode_texts
from halfstep.train.text_model import TextConfig, TextForSequenceClassification

SIZES = {"train": 400, "dev": 100, "test": 300}
ALPHABET = "abcdxyz ABC 1 2 好的不, !"


def network() -> model.Network:
    return model.build(
        "tiny",
        [ALPHABET] * 2,
        ("no", "yes", "none"),
        head="SequenceClassification",
        max_length=64,
        dropout=None,
    )


NETWORK = network()
NGRAMS = NETWORK.model.wide
FEATURES = NETWORK.model.features


def ids_of(texts: list[str]) -> torch.Tensor:
    encoded = encode_texts(NETWORK.tokenizer, texts)
    return encoded.collate(np.arange(len(texts)), pad_id=0)["input_ids"]


def row_counts(ids: torch.Tensor) -> list[list[dict[int, int]]]:
    """Return row -> count for each group and text."""
    return [
        [
            {int(r): int(c) for r, c in zip(*pair, strict=True) if c}
            for pair in zip(rows, counts, strict=True)
        ]
        for rows, counts in NGRAMS.ngrams(ids, FEATURES)
    ]


WORDS = st.lists(st.sampled_from(["ab", "a", "xyz", "Ab", "12", "dc"]), min_size=1)


@settings(max_examples=25, deadline=None)
@given(WORDS)
def test_counts_are_those_of_a_dictionary(words: list[str]) -> None:
    """Law: the counts of words and pairs are those that Python counts in a text."""
    words = words[:12]
    _, (of_text,) = row_counts(ids_of([" ".join(words)]))
    lower = [word.lower() for word in words]
    expected = Counter(lower) + Counter(itertools.pairwise(lower))
    assert sorted(of_text.values()) == sorted(expected.values())
    characters, _ = row_counts(ids_of([" ".join(words)]))
    length = 2 + sum(map(len, words))  # with the special tokens at both ends
    assert sum(characters[0].values()) == sum(
        max(0, length + 1 - n) for n in range(1, 5)
    )


def test_padding_and_masks() -> None:
    """Law: padding changes no n-gram; one with a masked character does not count."""
    alone, padded = (
        row_counts(ids_of(["ab cd"])),
        row_counts(ids_of(["ab cd", "a" * 40])),
    )
    assert [each[0] for each in alone] == [each[0] for each in padded]
    ids = ids_of(["ab cd"])
    ids[0, 1] = NETWORK.tokenizer.mask_token_id
    masked = row_counts(ids)
    for before, after in zip(alone, masked, strict=True):
        assert after[0].keys() < before[0].keys()
    assert len(masked[1][0]) == 1  # "cd" alone


def test_logits_are_sums_over_a_dictionary() -> None:
    """Law: logits are TF-IDF times weights, as float64 computes them, in fp32."""
    ids = ids_of(["ab ab cd, 好的不好", "xyz Ab"])
    draw = torch.Generator().manual_seed(1)
    size = len(NGRAMS.texts_with)
    NGRAMS.weight.copy_(torch.randn(NGRAMS.weight.shape, generator=draw))
    NGRAMS.texts.fill_(9)
    NGRAMS.texts_with.copy_(torch.randint(0, 9, (size,), generator=draw))
    logits = NGRAMS(ids, FEATURES)
    assert logits.dtype == torch.float32
    expected = torch.zeros(2, 3, dtype=torch.float64)
    terms = 0
    for group in row_counts(ids):
        for text, counts in enumerate(group):
            values = {}
            for row, count in counts.items():
                texts_with = int(NGRAMS.texts_with[row])
                if texts_with >= (1 if row & 3 == 1 else 2):
                    idf = 1 + math.log(10 / (1 + texts_with))
                    values[row] = (1 + math.log(count)) * idf
            length = math.sqrt(sum(value**2 for value in values.values()))
            terms = max(terms, len(values))
            for row, value in values.items():
                expected[text] += NGRAMS.weight[row].double() * value / length
    bound = 2 * terms * 2**-23 * float(NGRAMS.weight.abs().max())
    assert (logits - expected).abs().max() < bound


def posts(count: int, seed: int) -> list[tuple[str, str]]:
    """Return posts whose class one of two words decides; classes 70, 22 and 8 %."""
    draw = random.Random(seed)  # noqa: S311
    names = random.Random(0)  # noqa: S311
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(names.choices(letters, k=names.randint(3, 8))) for _ in range(206)]
    keys, filler = words[:6], words[6:]
    rows = []
    for _ in range(count):
        kind = draw.choices(range(3), [0.7, 0.22, 0.08])[0]
        text = draw.choices(filler, k=draw.randint(6, 16))
        text.insert(draw.randrange(len(text)), keys[2 * kind + draw.randrange(2)])
        rows.append((" ".join(text), "abc"[kind]))
    return rows


@pytest.fixture(scope="module")
def keyword_run(tmp_path_factory: pytest.TempPathFactory) -> run.RunResult:
    """Return a short run on 400 posts, at the level that rounds all weights."""
    folder = tmp_path_factory.mktemp("keywords")
    for seed, (split, count) in enumerate(SIZES.items()):
        rows = [{"text": text, "label": word} for text, word in posts(count, seed)]
        lines = "\n".join(map(json.dumps, rows))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    settings_ = {"data": str(folder), "out": str(folder / "run"), "max_steps": 4}
    return run.run({**settings_, "level": "O3", "dtype": "bf16"})


def test_as_good_as_the_baseline(keyword_run: run.RunResult) -> None:
    """Law: on words that decide, a model from scratch is as good as the baseline."""
    scores, baseline = keyword_run.summary["test"], keyword_run.summary["baseline"]
    assert baseline["split"] == "test"
    assert scores["macro_f1"] >= baseline["macro_f1"] > 0.8
    assert scores["accuracy"] > 0.95
    assert not any("baseline" in line for line in keyword_run.findings)


def test_a_model_folder_is_the_same_to_the_bit(
    keyword_run: run.RunResult, tmp_path: Path
) -> None:
    """Law: a saved classifier loads with the same logits, and saves the same again."""
    folder = keyword_run.folder.model
    tokenizer, first, missing = model.load(folder, "SequenceClassification")
    assert not missing
    assert (first.wide.weight != 0).any()
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, second, _ = model.load(tmp_path, "SequenceClassification")
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        both = [each.eval()(ids).logits for each in (first, second)]
    assert torch.equal(*both)


def test_classes_without_a_text_are_not_predicted() -> None:
    """Law: of classes that train lacks, the logit is below all others."""
    made = network()
    texts = ["ab cd", "cd xyz", "ab a", "xyz 12"] * 4
    encoded = replace(
        encode_texts(made.tokenizer, texts), labels=np.array([0, 2, 0, 2] * 4)
    )
    wide.fit(made.model, encoded, encoded, None)
    inputs = encoded.collate(np.arange(4), pad_id=0)["input_ids"]
    logits = made.model.wide(inputs, made.model.features)
    assert logits.argmin(-1).tolist() == [1] * 4
    assert logits.argmax(-1).tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_without_exclusive_classes_there_is_no_linear_model(kind: str) -> None:
    """Law: what nothing is fitted for takes no memory and no time in evaluation."""
    config = NETWORK.model.config.to_dict() | {"problem_type": kind}
    made = TextForSequenceClassification(TextConfig.from_dict(config)).eval()
    assert not wide.is_part_of(made)
    assert not [name for name in made.state_dict() if name.startswith("wide")]
    assert made(torch.tensor([[2, 7, 3]])).logits.shape == (1, 3)


def test_memory_is_bounded_for_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of many classes, the most frequent n-grams have weights, and less is tried.

    A saved model that is tuned to more classes gets a smaller table, too.
    """
    made = network()
    config = NETWORK.model.config.to_dict()
    config["id2label"] = {index: f"class {index}" for index in range(1000)}
    more = TextForSequenceClassification(TextConfig.from_dict(config))
    assert more.wide is not None
    assert more.wide.weight.shape[1] == 1000
    assert more.wide.weight.numel() <= 2**23
    monkeypatch.setattr(wide, "MAX_WEIGHTS", 24)
    monkeypatch.setattr(wide, "_MAX_SEARCHED", 10)
    fits = Mock(side_effect=wide.logistic_regression)
    monkeypatch.setattr(wide, "logistic_regression", fits)
    encoded = replace(
        encode_texts(made.tokenizer, ["ab cd", "xyz 12", "a dc"] * 4),
        labels=np.arange(12) % 3,
    )
    wide.fit(made.model, encoded, encoded, None)
    assert fits.call_count == 1
    rows = made.model.wide.weight.any(1).sum()
    assert 3 <= rows <= 24 // 3


def test_share_has_the_lowest_loss() -> None:
    """Law: an encoder that is always wrong is left out, one that is right is used."""
    targets = torch.arange(3)
    right, linear = 9 * torch.eye(3), torch.zeros(3, 3)
    for encoder, share in ((right, 1.0), (-right, 0.0)):
        sums = wide.choose_share(NETWORK.model, linear, encoder, targets, None)
        assert NETWORK.model.share == share
        assert torch.equal(sums, share * encoder)


def test_transformers_alone_names_the_model(keyword_run: run.RunResult) -> None:
    """Law: the configuration holds a model type with this package's name."""
    config = AutoConfig.from_pretrained(keyword_run.folder.model)
    assert config.model_type.startswith("halfstep")


def test_fine_tuning_a_saved_classifier(
    keyword_run: run.RunResult, tmp_path: Path
) -> None:
    """Law: --model takes the folder of a run, for other labels and levels too."""
    rows = [{"text": text, "label": word * 2} for text, word in posts(60, 7)]
    rows += [{"text": f"another {index}", "label": "dd"} for index in range(20)]
    path = tmp_path / "posts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = {"data": str(path), "model": str(keyword_run.folder.model)}
    given |= {"out": str(tmp_path / "run"), "level": "O2", "dtype": "bf16"}
    result = run.run(given | {"max_steps": 2})
    assert result.summary["dev"]["accuracy"] > 0.5

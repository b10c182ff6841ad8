"""Scores a simple model on the examples of a run, to compare the trained model with."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfstep.train import metrics
from halfstep.train.data import entity_tags
from halfstep.train.task_progress import announce, track
from halfstep.train.token_features import UNSPACED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from halfstep.train.data.corpus import Split
    from halfstep.train.metrics import EvalMetrics

MAX_TEXTS = 100_000
"""A baseline learns from at most so many training texts, evenly spaced: it takes a few
seconds."""

MAX_CLASSIFIED = 20_000
"""A logistic regression learns from this many texts: under a minute."""

MAX_WEIGHTS = 2**21
"""A logistic regression has at most so many, of the most frequent n-grams: its solver
takes about 300 bytes for each."""

_INVERSE_PENALTIES = 16, 4  # scikit-learn's C; the first wins a tie
_MAX_ITERATIONS = 200
_FEW_TEXTS = 100
_HAS_WORD = re.compile(r"\w").search

_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|\S")
"""A word, a punctuation mark, or a character of a script written without blanks."""

_CHUNK = 64  # texts decoded at a time


@dataclass(frozen=True)
class Baseline:
    """The scores of a simple model that learned from the same training examples."""

    name: str
    scores: Mapping[str, float]
    """Name -> value on the final split, as in `EvalMetrics.scores`."""

    def line(self) -> str:
        """Return name and scores as a line."""
        words = [
            f"{metrics.score_title(name)} {score:.4f}"
            for name, score in self.scores.items()
        ]
        return f"baseline, {self.name}: {', '.join(words)}"

    def finding(self, model: EvalMetrics, split: str, best_by: str) -> str:
        """Return that the baseline is better than a model, and what would help; or "".

        Better by more than a standard error.

        Args:
            model: The model's metrics on the same split.
            split: Its name.
            best_by: The score to compare; the first one if the baseline lacks it.
        """
        name = best_by if best_by in self.scores else next(iter(self.scores))
        score, reached = self.scores[name], model.scores[name]
        num_labels = max(1, sum(row[-1] for row in model.per_class))
        # Any score is about as uncertain as a share of the labels.
        if score <= reached + math.sqrt(max(0.0, reached * (1 - reached)) / num_labels):
            return ""
        return (
            f"The baseline is better than the model: the {self.name} has "
            f"{metrics.score_title(name)} {score:.4f} on {split}, the model "
            f"{reached:.4f}; more examples, more --epochs, or --model with a "
            "pretrained encoder would help."
        )


def text_baseline(
    train: Split, dev: Split, split: Split, labels: Sequence[str]
) -> Baseline:
    """Score a logistic regression on the TF-IDF of word and character n-grams.

    Args:
        train: Texts to learn from.
        dev: Texts that choose the penalty, by accuracy.
        split: Texts to score.
        labels: The classes, by id.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    targets = train.labels()
    indices = representative(targets, MAX_CLASSIFIED)
    # Of few texts, even n-grams of characters that occur once help.
    fewest = 1 if len(indices) < _FEW_TEXTS else 2
    characters: dict[str, Any] = {
        "analyzer": "char",
        "ngram_range": (1, 4),
        "min_df": fewest,
    }
    words: dict[str, Any] = {"token_pattern": r"\w+", "ngram_range": (1, 2)}
    texts = [train.text(int(i)) for i in indices]
    # Without a word, there are no n-grams of words to learn.
    kinds = [words, characters] if any(map(_HAS_WORD, texts)) else [characters]
    shared: dict[str, Any] = {
        "sublinear_tf": True,
        "max_features": MAX_WEIGHTS // (2 * len(labels)),
    }
    vectors = make_union(*(TfidfVectorizer(**shared, **each) for each in kinds))
    announce("fitting the baseline", len(texts))
    features = vectors.fit_transform(texts)
    models = [
        logistic_regression(features, targets[indices], penalty)
        for penalty in _INVERSE_PENALTIES
    ]
    dev_features = vectors.transform([*dev.texts()])
    best = max(models, key=lambda each: each.score(dev_features, dev.labels()))
    predicted = best.predict(vectors.transform([*split.texts()]))
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(predicted), len(labels))
    true = torch.from_numpy(split.labels())
    scores = metrics.class_metrics(one_hot.float(), true, labels).scores
    name = "logistic regression on TF-IDF of n-grams"
    if len(indices) < len(train):
        name += f" of {len(indices):,} texts"
    return Baseline(name, scores)


def logistic_regression(
    features: Any,  # noqa: ANN401 -- a sparse matrix
    targets: np.ndarray,
    inverse_penalty: float,
    class_weights: Mapping[int, float] | None = None,
) -> Any:  # noqa: ANN401 -- scikit-learn has no types
    """Return a scikit-learn logistic regression of features, shape (texts, rows)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    regression = LogisticRegression(
        C=inverse_penalty, class_weight=class_weights, max_iter=_MAX_ITERATIONS
    )
    with warnings.catch_warnings():
        # A solution that is not exact competes on dev as any other does.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return regression.fit(features, targets)


def representative(targets: np.ndarray, count: int) -> np.ndarray:
    """Return about `count` evenly spaced indices, and the first of each class."""
    spaced = np.arange(0, len(targets), -(-len(targets) // count))
    return np.union1d(spaced, np.unique(targets, return_index=True)[1])


def entity_baseline(train: Split, split: Split, kinds: Sequence[str]) -> Baseline:
    """Score the most frequent tag of each word.

    Of the valid tag sequences, the one with the most frequent tags in sum is chosen;
    words that train lacks are O.

    Args:
        train: Examples to count tags in.
        split: Examples to score.
        kinds: Entity types, by id.
    """
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    sample = range(0, len(train), -(-len(train) // MAX_TEXTS))
    for chunk in track(_chunks(sample), "counting tags", "texts", len(sample)):
        for i in chunk:
            text = train.text(i)
            offsets = _word_offsets(text)
            tags, _ = entity_tags.tag_tokens(offsets, train.spans(i))
            for (start, end), tag in zip(offsets, tags, strict=True):
                counts[text[start:end]][tag] += 1
    predicted: list[list[metrics.Entity]] = []
    every = range(len(split))
    for chunk in track(_chunks(every), "scoring the baseline", "texts", len(every)):
        texts = [split.text(i) for i in chunk]
        predicted += _most_frequent(texts, counts, 1 + 2 * len(kinds))
    true = [split.spans(i) for i in every]
    scores = metrics.entity_metrics(true, predicted, kinds, loss=0.0).scores
    return Baseline("most frequent tag of each word", scores)


def _chunks(indices: range) -> Iterator[range]:
    starts = range(0, len(indices), _CHUNK)
    return (indices[start : start + _CHUNK] for start in starts)


def _word_offsets(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in _WORD.finditer(text)]


def _most_frequent(
    texts: Sequence[str], counts: Mapping[str, Counter[int]], num_tags: int
) -> Iterator[list[metrics.Entity]]:
    """Yield the entities of each text by the most frequent valid tags of its words."""
    places = [_word_offsets(text) for text in texts]
    scores = np.zeros((len(texts), max(map(len, places), default=0), num_tags), "f4")
    real = np.zeros(scores.shape[:2], bool)
    for row, (text, offsets) in enumerate(zip(texts, places, strict=True)):
        real[row, : len(offsets)] = True
        for at, (start, end) in enumerate(offsets):
            of_word = counts.get(text[start:end]) or {0: 1}
            scores[row, at, [*of_word]] = [*of_word.values()]
    scores /= np.maximum(scores.sum(-1, keepdims=True), 1)
    for tags, offsets in zip(entity_tags.decode(scores, real), places, strict=True):
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        yield entity_tags.spans_of(tags[: len(offsets)], pairs)

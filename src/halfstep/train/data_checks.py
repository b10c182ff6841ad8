"""Checks a run's data and says what to do about each finding."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from halfstep.reporting.table import format_count

if TYPE_CHECKING:
    from halfstep.train.config import TrainConfig
    from halfstep.train.data.corpus import Corpus
    from halfstep.train.loop import Trainer
    from halfstep.train.metrics import EvalMetrics

_MAX_LABELS = 5  # labels listed in a finding
_MIN_DEV, _MIN_DEV_OF_LABEL = 100, 10  # examples for a useful score
_Z = 1.96  # standard deviations of a 95% confidence interval
_MAX_TEXTS = 2_000_000  # limit for comparing texts: about 10 seconds
_COUNTED = {
    "class": ("distinct text", "distinct texts", "accuracy"),
    "multi_label": ("label", "labels", "recall"),
    "ner": ("entity", "entities", "recall"),
}
"""`TrainConfig.problem` -> what counts as an example of dev, and its score."""
_REPEATED, _LEAKED = 0.02, 0.005  # shares of texts beyond which they are reported


def data_findings(trainer: Trainer) -> tuple[str, ...]:
    """Return findings about the examples, before any step."""
    corpus = trainer.job.corpus
    findings = [*corpus.notes, *_repeat_findings(corpus)]
    problem = "ner" if corpus.task == "ner" else corpus.target
    if problem in _COUNTED:
        findings += _label_word_findings(corpus)
        findings += _absent_label_findings(corpus)
        findings += _small_dev_findings(corpus, problem)
    if corpus.task == "ner" and len(corpus.test) and not corpus.test.words():
        findings.append(
            "The test texts hold no entity: whatever the model finds there, its F1 is "
            "0; annotate some, or evaluate on other texts."
        )
    for split, encoded in trainer.job.encoded.items():
        cut = int(np.count_nonzero(encoded.lengths >= trainer.job.longest))
        if cut:
            reach = "reaches" if cut == 1 else "reach"
            findings.append(
                f"{cut} of {len(encoded)} {split} texts {reach} {trainer.job.longest} "
                "tokens, where texts are cut: raise --max-length, if the model takes "
                "more."
            )
    inexact = trainer.job.encoded["train"].inexact
    if inexact:
        number = format_count(inexact, "entity", "entities")
        findings.append(
            f"{number} of the training file cannot be shown exactly by tokens: an edge "
            "is inside a token, or beyond --max-length."
        )
    return tuple(findings)


def constant_finding(
    split: str, metrics: EvalMetrics, config: TrainConfig
) -> tuple[str, ...]:
    """Return a finding if a trained model predicts the same for every text."""
    if not metrics.constant:
        return ()
    cures = [
        "train longer (--epochs)",
        f"try another --lr than {config.lr:g}",
        "fine-tune a pretrained encoder (--model)",
        "check that the texts tell their labels",
    ]
    if config.class_weights is not None:
        cures.insert(0, f"leave out --class-weights {config.class_weights}")
    finding = (
        f"WARNING: the model is useless: it predicts {metrics.constant} for every text "
        f"of {split}, although their labels differ; {'; or '.join(cures)}."
    )
    return (finding,)


def _label_word_findings(corpus: Corpus) -> list[str]:
    """Return findings about labels that are perhaps one, or several in one word."""
    alike: dict[str, list[str]] = defaultdict(list)
    for label in corpus.labels:
        alike[" ".join(label.casefold().split())].append(label)
    findings = [
        f"{', '.join(map(repr, labels))} differ in case or blanks only, and are "
        f"{len(labels)} labels: write them alike, unless they are meant to differ."
        for labels in alike.values()
        if len(labels) > 1
    ]
    uses = corpus.train.source.use_rows
    if corpus.target == "multi_label" and len(np.unique(uses)) == len(uses):
        findings.append(
            "No text has two labels: if they are joined by another sign than a comma, "
            "give --label-separator; otherwise leave out --multi-label."
        )
    return findings


def _absent_label_findings(corpus: Corpus) -> list[str]:
    """Return findings about labels without an example, such as names in --labels."""
    findings, listed = [], set()
    noun = "text" if corpus.task == "classify" else "entity"
    for name, split, cure in (
        ("train", corpus.train, "name fewer in --labels"),
        ("dev", corpus.dev, "evaluate on more"),
    ):
        counts = split.label_counts()
        pairs = zip(corpus.labels, counts, strict=True)
        absent = [label for label, n in pairs if not n and label not in listed]
        listed.update(absent)
        if absent:
            names = ", ".join(map(repr, absent[:_MAX_LABELS]))
            more = ", ..." * (len(absent) > _MAX_LABELS)
            findings.append(
                f"{name} has no {noun} of {names}{more}: macro averages count such "
                f"labels as 0; {cure}."
            )
    return findings


def _small_dev_findings(corpus: Corpus, problem: str) -> list[str]:
    """Return a finding with the confidence interval of a score on few examples."""
    counts = corpus.dev.distinct().label_counts()
    total = int(counts.sum())
    count, what = total, ""
    *nouns, score = _COUNTED[problem]
    if total >= _MIN_DEV:
        rarest = min(np.flatnonzero(counts), key=counts.__getitem__)
        count, what = int(counts[rarest]), f" of {corpus.labels[rarest]!r}"
        score = "its recall"
        if count >= _MIN_DEV_OF_LABEL:
            return []
    # Wilson's interval, of a share of one half: of other shares it is narrower.
    width = _Z / math.sqrt(count + _Z**2)
    few = f"dev has {format_count(count, *nouns)}{what}"
    interval = f"the 95% confidence interval of {score}"
    return [f"{few}: {interval} is up to {width:.2f} wide; evaluate on more."]


def _repeat_findings(corpus: Corpus) -> list[str]:
    """Return findings about equal texts in train, and about dev or test texts in train.

    Texts are compared by 64-bit hashes, which take 16 MB per million texts.
    """
    if corpus.repeats:
        equal = format_count(corpus.repeats, "text equals", "texts equal")
        return [f"{equal} an earlier one: equal texts are in the same split."]
    if len(corpus.train) + len(corpus.dev) + len(corpus.test) > _MAX_TEXTS:
        return []
    train, findings = corpus.train.text_hashes(), []
    repeated = len(train) - len(np.unique(train))
    if repeated > _REPEATED * len(train):
        findings.append(
            f"{repeated:,} of {len(train):,} train texts equal an earlier one: drop "
            "them, unless they are meant to count more often."
        )
    for name, split in (("dev", corpus.dev), ("test", corpus.test)):
        leaked = int(np.isin(split.text_hashes(), train).sum())
        if leaked > _LEAKED * len(split):
            findings.append(
                f"{leaked:,} of {len(split):,} {name} texts are in train too: scores "
                f"on {name} are too good; take them out of train or {name}."
            )
    return findings

"""What somebody should know about a run, and what to do about it.

In: a trainer that has come to its end. Out: sentences for the report, none where
there is nothing to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halfstep import formats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.train.data import Corpus
    from halfstep.train.encode import Encoded
    from halfstep.train.loop import Trainer

_MUCH_PADDING = 0.25
_MUCH_SKIPPED = 0.05  # growth of the scale alone skips one step in some thousand
_MUCH_WAITING = 0.1
_SHOWN = 20  # sentences left out that are named


def findings(trainer: Trainer, faults: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what is worth knowing.

    Args:
        trainer: After its last step.
        faults: Lines about checkpoints that could not be used.
    """
    told = [*faults, *data_findings(trainer)]
    attempted = trainer.session.steps_applied + trainer.session.steps_skipped
    skipped = trainer.session.steps_skipped / max(1, attempted)
    if skipped > _MUCH_SKIPPED:
        cure = "lower --lr"
        if trainer.session.choice.format == formats.FP16:
            cure = f"train in bf16, or {cure}"
        told.append(f"{skipped:.0%} of the steps were skipped for inf or NaN: {cure}.")
    spent = trainer.seconds["train"]
    waited = trainer.seconds["input"] / spent if spent else 0.0
    if waited > _MUCH_WAITING:
        told.append(
            f"{waited:.0%} of the time in training steps was spent on waiting for "
            "batches: give more --workers."
        )
    padding = 1 - trainer.tokens / trainer.places if trainer.places else 0.0
    if padding > _MUCH_PADDING:
        told.append(
            f"{padding:.0%} of what was computed was padding: the texts of a batch "
            "differ much in length; --max-length cuts the longest."
        )
    return tuple(told)


def data_findings(trainer: Trainer) -> list[str]:
    """Return what is worth knowing about the examples, before any step."""
    corpus = trainer.job.corpus
    told = left_out(corpus)
    if corpus.task == "ner" and len(corpus.test) and not corpus.test.words():
        told.append(
            "The test texts hold no entity: whatever the model finds there, its F1 is "
            "0; mark some, or judge on other texts."
        )
    for split, encoded in trainer.job.encoded.items():
        cut = cut_texts(encoded, trainer.job.longest)
        if cut:
            reach = "reaches" if cut == 1 else "reach"
            told.append(
                f"{cut} of {len(encoded)} {split} texts {reach} {trainer.job.longest} "
                "tokens, where texts are cut: raise --max-length, if the model takes "
                "more."
            )
    inexact = trainer.job.encoded["train"].inexact
    if inexact:
        things, they = "entities", "they begin or end inside one, or lie"
        if inexact == 1:
            things, they = "entity", "it begins or ends inside one, or lies"
        told.append(
            f"{inexact} {things} of the training file cannot be shown exactly by "
            f"tokens: {they} beyond --max-length."
        )
    return told


def left_out(corpus: Corpus) -> list[str]:
    """Return what to say of sentences whose tags were invalid."""
    faults = corpus.left_out
    if not faults:
        return []
    shown = " ".join(faults[:_SHOWN])
    more = f" And {len(faults) - _SHOWN} more." if len(faults) > _SHOWN else ""
    are = "sentence is" if len(faults) == 1 else "sentences are"
    return [f"{len(faults)} {are} left out for invalid tags: {shown}{more}"]


def cut_texts(encoded: Encoded, longest: int) -> int:
    """Return how many texts fill all the tokens that a text may have."""
    return int(np.count_nonzero(encoded.lengths >= longest))

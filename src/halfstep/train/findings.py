"""What somebody should know about a run, and what to do about it.

In: a trainer that has come to its end. Out: sentences for the report, none where
there is nothing to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
        told.append(
            f"{skipped:.0%} of the steps were skipped for inf or NaN: train in bf16, "
            "or lower --lr."
        )
    spent = trainer.seconds["train"]
    waited = trainer.seconds["input"] / spent if spent else 0.0
    if waited > _MUCH_WAITING:
        told.append(
            f"{waited:.0%} of the time in training steps was spent on waiting for "
            "batches: give --workers."
        )
    padding = 1 - trainer.tokens / trainer.places if trainer.places else 0.0
    if padding > _MUCH_PADDING:
        told.append(
            f"{padding:.0%} of what was computed was padding: the texts of a batch "
            "differ much in length; a larger --batch-size with --accumulate does not "
            "help, cutting with --max-length does."
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
            told.append(
                f"{cut} of {len(encoded)} {split} texts reach {trainer.job.longest} "
                "tokens, where texts are cut: raise --max-length to see all of them."
            )
    inexact = trainer.job.encoded["train"].inexact
    if inexact:
        told.append(
            f"{inexact} entities of the training file cannot be shown exactly by "
            "tokens: they begin or end inside one, or lie beyond --max-length."
        )
    return told


def left_out(corpus: Corpus) -> list[str]:
    """Return what to say of sentences whose tags were invalid."""
    faults = corpus.left_out
    if not faults:
        return []
    shown = " ".join(faults[:_SHOWN])
    more = f" And {len(faults) - _SHOWN} more." if len(faults) > _SHOWN else ""
    return [f"{len(faults)} sentences are left out for invalid tags: {shown}{more}"]


def cut_texts(encoded: Encoded, longest: int) -> int:
    """Return how many texts fill all the tokens that a text may have."""
    return int(np.count_nonzero(encoded.lengths >= longest))

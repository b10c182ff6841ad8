"""What is trained, from what, and how far that has come.

In: what was made ready for a run. Out: two values, for the loop and for checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfstep.train.data.corpus import Corpus
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.plan import Plan
    from halfstep.train.step_dataset import StepDataset
    from halfstep.train.tasks import Objective, Task


@dataclass(frozen=True)
class TrainJob:
    """What is trained, from what, and how."""

    task: Task
    corpus: Corpus
    encoded: Mapping[str, EncodedTexts]
    """The splits "train", "dev" and "test"."""
    objective: Objective
    steps: StepDataset
    plan: Plan
    pad_id: int
    multiple: int
    """Of tokens, to which a batch is padded."""
    longest: int
    """Tokens after which a text is cut."""


@dataclass
class TrainState:
    """How far a run has come; saved in every checkpoint."""

    step: int = 0
    best_step: int = 0
    """The step of the best checkpoint; 0 where there is none, or it is damaged."""
    best_score: float | None = None
    """Its score; a loss counts as its negative. None before the first evaluation."""
    waited: int = 0
    """Evaluations since then."""

"""The training job, its progress, and timers for the parts of a step."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from halfstep.train.data.corpus import Corpus
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.plan import Plan
    from halfstep.train.step_dataset import StepDataset
    from halfstep.train.tasks import Objective, Task


@dataclass(frozen=True)
class TrainJob:
    """The inputs of the training loop."""

    task: Task
    corpus: Corpus
    encoded: Mapping[str, EncodedTexts]
    """The splits "train", "dev" and "test"."""
    objective: Objective
    steps: StepDataset
    plan: Plan
    pad_id: int
    multiple: int
    longest: int


@dataclass
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    best_step: int = 0
    """Step of the best checkpoint; 0 if there is none or it is damaged."""
    best_score: float | None = None
    """Its score, negated for a loss. None before the first evaluation."""
    waited: int = 0


@dataclass
class Timers:
    """Seconds spent in each part of a step.

    These are host times. On a GPU, work continues after the part that launched it, and
    the next part that synchronizes is charged for it.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the duration of the context to a part."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.seconds[part] = self.seconds.get(part, 0.0) + spent

"""What is trained, from what, how far that has come, and where the time went."""

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


@dataclass
class Timers:
    """Seconds by what they went to.

    On a GPU these are the host's: work goes on after the part that began it, and the
    part that waits for it is charged.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time that the context lasts to a part."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.seconds[part] = self.seconds.get(part, 0.0) + spent

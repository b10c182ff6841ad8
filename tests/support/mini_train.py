"""A program: `halfstep` with the size "mini", which trains in a moment.

In: --pause SECONDS that each step takes longer; --signal NUMBER@STEP, which it sends to
itself there; --fail RANK@STEP, where that process raises what --error names, in step 0
while it reads data; --kill RANK@STEP, where it
kills itself, if torchrun did not start it again; --block RANK@STEP, where that process
alone waits for a message, and all get SIGTERM; then the words of a command line. Out:
what `halfstep` does with these.
"""

import argparse
import builtins
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_training import small_and_measured, without_figures

from halfstep import cli
from halfstep.train import run as training
from halfstep.train import signals
from halfstep.train.config import TrainConfig
from halfstep.train.data.corpus import Corpus
from halfstep.train.loop import Trainer
from halfstep.train.step_dataset import StepBatch

REASON = "a planted fault"


def _blow(text: str) -> tuple[int, int]:
    rank, step = text.split("@")
    return int(rank), int(step)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--signal", type=_blow, default=(0, 0))
    parser.add_argument("--fail", type=_blow)
    parser.add_argument("--error", default="RuntimeError")
    parser.add_argument("--kill", type=_blow)
    parser.add_argument("--block", type=_blow)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def _disturb(patch: pytest.MonkeyPatch, told: argparse.Namespace) -> None:
    step = Trainer.train_step
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def disturbed(self: Trainer, work: StepBatch, *rest: Any) -> dict[str, Any]:
        time.sleep(told.pause)
        if told.signal[1] == work.number:
            os.kill(os.getpid(), told.signal[0])
        here = (self.world.rank, work.number)
        if told.kill == here and first_start:
            os.kill(os.getpid(), signal.SIGKILL)
        if told.fail == here:
            raise getattr(builtins, told.error)(REASON)
        if told.block and told.block[1] == work.number:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if told.block == here:
            dist.recv(torch.zeros(1), 1 - self.world.rank)
        return step(self, work, *rest)

    patch.setattr(Trainer, "train_step", disturbed)
    read = training.load_corpus

    def disturbed_read(config: TrainConfig) -> Corpus:
        if told.fail == (int(os.environ.get("RANK", "0")), 0):
            raise getattr(builtins, told.error)(REASON)
        return read(config)

    patch.setattr(training, "load_corpus", disturbed_read)


def main(words: Sequence[str]) -> int:
    told = _parsed(words)
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        without_figures(patch)
        _disturb(patch, told)
        patch.setattr(signals, "GRACE_SECONDS", 2.0)
        return cli.run(told.words)


if __name__ == "__main__":
    # A shell's background has it ignored, and then no handler is put there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))

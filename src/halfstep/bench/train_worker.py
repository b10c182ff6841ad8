"""One contender of `halfstep bench train`, in a process of its own.

In: a task as JSON, the only argument. Out: one line of JSON with what it measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.bench.measure import EVAL_ONLY_AT_END
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Run one task; return time, memory, losses and accuracy."""
    kind, amp = task.pop("loop"), task.pop("amp", False)
    if kind == "plain":
        from halfstep.bench.plain_loop import plain_loop

        measured = plain_loop(**task, amp=amp)
    else:
        measured = _halfstep(task)
    return measured | {
        "peak_memory_bytes": hardware.peak_memory(hardware.capabilities().device)
    }


def _halfstep(task: dict[str, Any]) -> dict[str, Any]:
    """Run `halfstep train` with the settings of the plain loop.

    It hides no tokens, and is judged by its last weights: no dev text has chosen them.
    """
    from halfstep.train.run import run

    more = {"mask_tokens": 0.0, "eval_every": EVAL_ONLY_AT_END}
    with tempfile.TemporaryDirectory() as folder:
        # Tokens kept from another run would be time not counted.
        os.environ["HALFSTEP_CACHE"] = str(Path(folder) / "cache")
        with contextlib.redirect_stdout(sys.stderr):
            result = run(task | more | {"out": str(Path(folder) / "run")})
        records = [r for r in result.folder.records() if "event" not in r]
    losses = [record["loss"] for record in records]
    last = losses[-max(1, len(losses) // 10) :]
    summary = result.summary
    seconds = summary["tokenise_seconds"] + summary["train_seconds"]
    return {
        "seconds": seconds,
        "examples_per_s": result.examples / seconds,
        "train_loss": sum(last) / len(last),
        "dev_loss": summary["dev"]["loss"],
        "dev_accuracy": summary["dev"]["accuracy"],
        "skipped": summary["skipped"],
        "steps": summary["steps"],
        "parts": _parts(records) | {"tokenise": summary["tokenise_seconds"]},
    }


def _parts(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds that all steps took, by what they went to."""
    summed: dict[str, float] = {}
    for record in records:
        for part, seconds in record["seconds"].items():
            summed[part] = summed.get(part, 0.0) + seconds
    return summed


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))

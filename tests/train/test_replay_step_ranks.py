"""Steps that fail under FSDP2 are run again by all processes, and told once.

Started by `run_ranks`, this file is the program of one of two processes.
"""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_ranks
from small_training import (
    small_and_measured,
    small_settings,
    without_figures,
    write_letters,
)
from tests.train.test_replay_step import spoil

from halfstep.distributed import process_group
from halfstep.train import model, replay_step
from halfstep.train.run import run

BAD = (4, 5, 7)
"""Steps that fail; the second follows the first, and is not run again."""
CASES: dict[str, dict[str, Any]] = {
    "O1 fp16": {"level": "O1", "dtype": "fp16"},
    "O2 bf16": {"level": "O2", "dtype": "bf16", "accumulate": 2},
}


def process(folder: Path) -> None:
    source = folder / "letters.json"
    with pytest.MonkeyPatch.context() as patch, process_group.join("cpu") as world:
        small_and_measured(patch)
        without_figures(patch)
        # Two layers: blocks are split apart from what is around them.
        shape = model.SIZES["mini"] | {"num_hidden_layers": 2}  # type: ignore[operator]
        patch.setitem(model.SIZES, "duo", shape)
        patch.setattr(process_group, "join", lambda _: contextlib.nullcontext(world))
        spoil(patch, *(BAD if world.rank else ()), factor=math.inf)
        for watched in (True, False):
            if not watched:
                patch.setattr(
                    replay_step.SkipWatcher, "should_replay", lambda *_, **__: False
                )
            for case, settings in CASES.items():
                out = folder / f"{case}{'' if watched else ' unwatched'}"
                more = {"parallel": "fsdp2", "model": "duo", "epochs": 1}
                run(small_settings(out, source, **more, **settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_letters(folder, 140, "abcx", "defx")
    run_ranks(__file__, str(folder), timeout=300)
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [*map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_failed_in_shards_is_told(folder: Path, case: str) -> None:
    """Law: the module on the process with the fault is named, once for all of them.

    The run goes on as if nobody had looked: its steps are the same.
    """
    told = [r for r in records(folder / case) if r.get("event") == "bad_op"]
    assert [event["step"] for event in told] == [4, 7]
    for event in told:
        assert event["module"].endswith("layer.0.attention.output.dense")
        assert (event["op"], event["reproduced"]) == ("mul", True)
        assert ("of 2)" in event["evidence"]) == ("accumulate" in CASES[case])
    keep = ("step", "loss", "scale", "skipped", "grad_norm")
    watched, alone = (
        [{k: r[k] for k in keep} for r in records(folder / name) if "event" not in r]
        for name in (case, f"{case} unwatched")
    )
    assert json.dumps(watched) == json.dumps(alone)
    assert [r["step"] for r in watched if r["skipped"]] == [*BAD]


if __name__ == "__main__":
    process(Path(sys.argv[1]))

"""`halfstep bench comm`: bytes by hand, beside what collectives are called with."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_runs import flags, rows, tables
from processes import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.bench import comm
from halfstep.errors import UserError

WIDTH, LAYERS = 16, 2
NUMBERS = LAYERS * (WIDTH * WIDTH + WIDTH)
FLAGS = 2 * LAYERS
"""Behind gradients that we average ourselves: for each parameter, is it there?"""
SIZES = {"O0": 4, "O1": 4, "O2": 2, "O2-split": 2, "torch.amp": 4, "torch.amp-hook": 2}
"""Contender -> bytes of a gradient's number on the wire."""
CELLS = ("bytes", "x O0", "calls", "ranks equal")
SMALL = f"--layers {LAYERS} --width {WIDTH} --batch 2 --steps 2"


def test_bytes_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a step sends each gradient once, in 4 bytes at O0 and O1 and in 2 at O2.

    If a rank fails, the run ends with its last line of errors.
    """
    with comm.start(0, tmp_path / "s") as one, comm.start(1, tmp_path / "s") as other:
        stores: list[Path] = []

        def started(at: int, store: Path) -> Any:
            assert store.parent.is_dir()
            stores.append(store)
            return nullcontext([one, other][at])

        monkeypatch.setattr(comm, "start", started)
        for dtype in ("bf16", "fp16"):
            (table,) = tables("comm", f"{SMALL} --accumulate 1,2 --dtype {dtype}")
            keys = [(row[0], row[1]) for row in table.rows]
            assert sorted(keys) == sorted((name, n) for name in SIZES for n in (1, 2))
            for row in rows(table):
                name, micros = str(row["candidate"]), row["micro-batches"]
                cells = [
                    row[each] for each in ("bytes", "x O0", "calls", "ranks equal")
                ]
                if name == "O2-split" and dtype == "fp16":
                    assert cells == [None] * 4
                    assert any("O2-split rejected: " in note for note in table.notes)
                    continue
                ours = name.startswith("O2") and micros == 2
                expected = SIZES[name] * (NUMBERS + (FLAGS if ours else 0))
                share = expected / (4 * NUMBERS)
                assert cells == [expected, share, 1, True], (name, micros, dtype)
        assert len(stores) == 4  # two ranks meet in one, in each of two runs
        assert len({*stores}) == 2
        work = vars(flags("comm", SMALL)) | {"accumulate": 1}
        with pytest.raises(UserError, match=r"candidate rank .* ended with status 1"):
            comm.request_all([one, other], {"name": "none", "work": work})


def test_collectives_are_counted() -> None:
    """Law: calls of ours and of DDP count with the size of their tensors."""
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(3, 2))
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        with comm.Collectives() as seen:
            dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
            model(torch.ones(1, 3)).sum().backward()
    assert (seen.calls, seen.bytes) == (2, 5 * 2 + (3 * 2 + 2) * 4)


def test_ranks_that_differ() -> None:
    """Law: ranks with other bits are not equal; no baseline, no ratio."""
    one, other = ({"bytes": 10.0, "calls": 1.0, "checksum": each} for each in "ab")
    row = comm.table_row("O2", 1, [one, other], [{"bytes": 20.0}])
    assert (*row.values(),) == ("O2", 1, 10, 0.5, 1, False)
    assert comm.table_row("O2", 1, [one, one], None)["x O0"] is None

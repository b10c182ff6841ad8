"""`halfstep bench wire`: bytes by hand, beside what sockets and collectives tell."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
import torch
import torch.distributed as dist
from bench_runs import flags
from processes import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.bench import comm_bytes
from halfstep.errors import UserError

if TYPE_CHECKING:
    from halfstep.reporting.table import Table

LINUX = Path("/proc/self/fd").exists()
WIDTH, LAYERS = 16, 2
NUMBERS = LAYERS * (WIDTH * WIDTH + WIDTH)
FLAGS = 2 * LAYERS
"""Behind gradients that we average ourselves: for each parameter, is it there?"""
SIZES = {"O0": 4, "O1": 4, "O2": 2, "O2-split": 2, "torch.amp": 4, "torch.amp-hook": 2}
"""Contender -> bytes of a gradient's number on the wire."""


SMALL = f"--layers {LAYERS} --width {WIDTH} --batch 2 --steps 2"


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def table(request: pytest.FixtureRequest) -> Table:
    """Return the table of a small run."""
    words = f"{SMALL} --accumulate 1,2 --dtype {request.param}"
    (table,) = comm_bytes.tables(flags("wire", words))
    return table


def test_payload_by_hand(table: Table) -> None:
    """Law: a step sends each gradient once, in 4 bytes at O0 and O1 and in 2 at O2."""
    assert table.columns[2:6] == (
        "bytes sent",
        "sent x O0",
        "in collectives",
        "collectives x O0",
    )
    rows = {(row[0], row[1]): row for row in table.rows}
    assert set(rows) == {(name, micros) for name in SIZES for micros in (1, 2)}
    for (name, micros), row in rows.items():
        if name == "O2-split" and any("--dtype fp16" in note for note in table.notes):
            assert row[2:] == (None,) * 6
            assert any("O2-split rejected: " in note for note in table.notes)
            continue
        ours = str(name).startswith("O2") and micros == 2
        expected = SIZES[str(name)] * (NUMBERS + (FLAGS if ours else 0))
        assert row[4] == expected, (name, micros)
        assert row[5] == expected / (4 * NUMBERS)
        assert row[6] == 1
        assert row[7] is True


@pytest.mark.skipif(not LINUX, reason="Linux tells what a socket sent")
def test_sockets_sent_the_payload(table: Table) -> None:
    """Law: with two ranks each sends the payload once, and gloo's own words."""
    base: dict[object, int] = {}
    for name, micros, sent, ratio, payload, *_ in table.rows:
        if payload is None:
            continue  # who refused has sent nothing
        assert isinstance(sent, int)
        assert isinstance(payload, int)
        assert payload < sent < payload + 1024
        base.setdefault(micros, sent)
        assert ratio == pytest.approx(sent / base[micros], rel=1e-3), name


@pytest.mark.skipif(not LINUX, reason="Linux tells what a socket sent")
def test_what_sockets_sent() -> None:
    """Law: bytes count once, on the side that sent them, in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with caller, other:
            before = comm_bytes.bytes_sent()
            assert before is not None
            caller.sendall(bytes(100_000))
            other.sendall(bytes(7))
            left = 100_000
            while left:
                left -= len(other.recv(left))
            assert len(caller.recv(7)) == 7
            after = comm_bytes.bytes_sent()
            assert after == before + 100_007


@pytest.mark.skipif(not LINUX, reason="Linux tells what a socket sent")
def test_bytes_sent_again_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what the kernel had to send twice counts once; an old one tells nothing."""
    info = bytes(200) + struct.pack("=QQ", 1000, 300) + bytes(40)

    class Known:
        type, family = socket.SOCK_STREAM, socket.AF_INET

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Stay as it is."""

        def getsockopt(self, *_: object) -> bytes:
            return info

    files = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(comm_bytes, "duplicate_socket", lambda _: Known())
    counted = comm_bytes.bytes_sent()
    assert counted is not None
    assert counted % 700 == 0
    assert abs(counted // 700 - files) <= 2
    info = bytes(104)
    assert comm_bytes.bytes_sent() is None


def test_collectives_are_counted() -> None:
    """Law: calls of ours and of DDP count with the size of their tensors."""
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(3, 2))
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        with comm_bytes.Collectives() as seen:
            dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
            model(torch.ones(1, 3)).sum().backward()
    assert (seen.calls, seen.payload) == (2, 5 * 2 + (3 * 2 + 2) * 4)


def test_digest() -> None:
    """Law: a hash sees every bit, and takes any dtype and shape."""
    zero = torch.zeros(3)
    assert comm_bytes.digest([zero]) == comm_bytes.digest([torch.zeros(3)])
    assert comm_bytes.digest([zero]) != comm_bytes.digest([-zero])
    kinds = [torch.ones((), dtype=torch.bfloat16), torch.ones(2, 3).t()]
    assert comm_bytes.digest(kinds) != comm_bytes.digest(kinds[:1])


def test_a_system_that_tells_nothing() -> None:
    """Law: without figures of sockets cells are empty; payloads are there."""
    silent = comm_bytes.RankResult(None, 10.0, 1.0, "a")
    other = comm_bytes.RankResult(None, 5.0, 1.0, "b")
    row = comm_bytes.table_row("O2", 1, [other, silent], [silent, silent])
    assert (*row.values(),) == ("O2", 1, None, None, 5, 0.5, 1, False)
    alone = comm_bytes.table_row("O2", 1, [other, other], None)
    assert alone["collectives x O0"] is None
    refused = comm_bytes.table_row("O2", 1, [], [silent])
    assert (*refused.values(),) == ("O2", 1, *[None] * 6)


def test_a_rank_that_fails(tmp_path: Path) -> None:
    """Law: if one rank fails, the run ends with its last line of errors."""
    work = {"device": "cpu", "dtype": "bf16", "layers": 1, "width": 4, "batch": 1}
    task = {"name": "nobody", "steps": 1, "work": work | {"accumulate": 1}}

    def ask() -> None:
        store = tmp_path / "store"
        with comm_bytes.start(0, store) as one, comm_bytes.start(1, store) as other:
            comm_bytes.request_all([one, other], task)

    with pytest.raises(UserError, match=r"contender rank .* ended with status 1"):
        ask()

"""Processes that cannot meet, or lose one another: told in one line."""

import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import group_of_one

from halfstep.distributed import process_group
from halfstep.distributed.process_group import PeerLost, join
from halfstep.errors import UserError

STARTED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
LOST = "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


def refusal_to_join(
    patch: pytest.MonkeyPatch, device: str = "cpu", **environment: str
) -> str:
    for name, value in (STARTED | environment).items():
        patch.setenv(name, value)
    brief = functools.partial(process_group.rendezvous, timeout=timedelta(seconds=1))
    patch.setattr(process_group, "rendezvous", brief)
    with pytest.raises(UserError) as caught, join(device):
        pass
    assert not dist.is_initialized()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line.split()) <= 35
    return line


@pytest.mark.parametrize("told", ["-1", "", "\u0664", "\u00b2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_local_rank(monkeypatch: pytest.MonkeyPatch, device: str, told: str) -> None:
    """Law: a local rank that is no number is refused, on every device."""
    line = refusal_to_join(monkeypatch, device, LOCAL_RANK=told)
    assert line.startswith(f"LOCAL_RANK={told!r} is not the number of a process: ")


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a process without a GPU of its own is told both numbers."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    line = refusal_to_join(monkeypatch, "cuda", LOCAL_RANK="1")
    assert line.startswith("LOCAL_RANK=1: each process needs a GPU of its own, ")
    assert "torch sees 1 here; " in line


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "127.0.0.1:1 (The client socket has timed out after 1000ms"),
        ({"RANK": "0", "MASTER_PORT": "0"}, "127.0.0.1:0 (Timed out after "),
    ],
    ids=["nobody there", "nobody comes"],
)
def test_nobody_to_meet(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    """Law: a wrong address, or a machine that never started, is told in one line."""
    line = refusal_to_join(monkeypatch, **environment)
    assert line.startswith(f"the 2 processes did not meet at {said}")
    assert line.endswith(
        "); start them all, with MASTER_ADDR and MASTER_PORT of the first."
    )


def test_a_group_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of what torch says, only the first line is shown."""
    message = "nccl:  no way.\nException raised from: frame #0"

    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(message)

    monkeypatch.setattr(dist, "init_process_group", fail)
    line = refusal_to_join(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    assert "did not meet at 127.0.0.1:0 (nccl: no way); start" in line


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_no_environment_of_torchruns(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Law: numbers that are none are refused."""
    line = refusal_to_join(monkeypatch, **{name: "x"})
    assert line.startswith("RANK is set, but the environment is not torchrun's: ")


def test_a_peer_lost_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: who is killed while all leave is told of in one line, as before."""

    def lost() -> None:
        raise RuntimeError(LOST)

    monkeypatch.setattr(process_group, "_REASON_TIMEOUT_S", 0.0)
    monkeypatch.setattr(dist, "barrier", lost)
    with pytest.raises(PeerLost, match="stopped, because another"), group_of_one():
        pass
    assert not dist.is_initialized()


@pytest.fixture
def store() -> dist.Store:
    alone = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.PrefixStore("name", alone)


def fail_and_tell(store: dist.Store, rank: int, error: Exception) -> None:
    """Fail as a process does; its error must come through."""
    with (
        pytest.raises(type(error)) as caught,
        process_group._share_failure(store, rank),
    ):
        raise error
    assert caught.value is error


def test_the_first_reason(store: dist.Store) -> None:
    """Law: of several processes that fail, the first says why to those that wait."""
    fail_and_tell(store, 2, KeyError("first"))
    fail_and_tell(store, 1, UserError("second"))
    with pytest.raises(PeerLost) as caught, process_group._share_failure(store, 0):
        raise RuntimeError(LOST)
    assert str(caught.value) == (
        "stopped, because another process did: process 2: KeyError: 'first'."
    )


def test_a_store_that_is_gone() -> None:
    """Law: where nobody can be told, the error is raised as it is."""
    host = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    guest = dist.TCPStore("127.0.0.1", host.port, 1, is_master=False)
    del host
    with pytest.raises(dist.DistNetworkError):
        guest.check(["a"])
    fail_and_tell(guest, 1, KeyError("mine"))

"""Sharded checkpoints to spoil.

In: nothing. Out: sessions that are not alike, and how a directory is refused.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import mesh
from session_cases import network
from small_training import same
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep.checkpoint import sharded
from halfstep.checkpoint.atomic_directory import MANIFEST, CheckpointError, digest, seal
from halfstep.session import fsdp_checkpoint
from halfstep.session.fsdp import fsdp_policy
from halfstep.session.session import Session

PART, INDEX = "__0_0.distcp", sharded.INDEX


def trained(seed: int = 0, *, shard: bool = False) -> Session:
    model = network()
    if shard:
        policy = fsdp_policy("O2", "bf16")
        for module in (model[0], model):
            fully_shard(module, mesh=mesh(), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    session = hs.prepare(model, optimizer, "O2", dtype="bf16")
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    with session.autocast():
        loss = session.model(inputs).float().square().mean()
    session.backward(loss)
    session.step()
    return session


@pytest.fixture(scope="module", name="original")
def original_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "c"
    fsdp_checkpoint.save(trained(), path, {"step": 1})
    return path


@pytest.fixture(name="kept")
def kept_checkpoint(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "c")


def refusal(directory: Path) -> str:
    session = trained(1)
    before = copy.deepcopy(session.state_dict())
    with pytest.raises(CheckpointError) as caught:
        fsdp_checkpoint.load(session, directory)
    assert same(session.state_dict(), before)
    return str(caught.value)


def reseal(directory: Path, **change: Any) -> None:
    said = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    files = [path for path in directory.iterdir() if path.name != MANIFEST]
    said |= {"files": {path.name: digest(path) for path in files}} | change
    said["seal"] = seal(said)
    (directory / MANIFEST).write_text(json.dumps(said), encoding="utf-8")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

"""States that ranks save and load together, whatever their number and their sharding.

Two processes train and save; two others, four, and one without shards go on. Under
torchrun, `ranks` runs the cases of this file. Gradients are exact in bf16, and ranks
of the same parity see the same data, so any number of ranks must go on to the bit.
"""

import copy
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from master_cases import masters_of
from ranks import agreed, mesh, shared, start
from sharded_files import (  # noqa: F401 -- fixtures among them
    INDEX,
    PART,
    cut,
    kept_checkpoint,
    original_checkpoint,
    refusal,
    trained,
)
from small_training import same
from tests.scaling.test_scaler_sharded import OPTIMIZERS, ROWS, batch, sides
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep.checkpoint import atomic_directory, single
from halfstep.checkpoint.atomic_directory import MANIFEST, CheckpointError
from halfstep.session import fsdp_checkpoint
from halfstep.session.fsdp import fsdp_policy
from halfstep.session.fsdp_checkpoint import full_tensors
from halfstep.session.session import Session

FILES = ("tests.session.test_fsdp_checkpoint",)
KINDS = ("O1 bf16", "O2 bf16")
NAMES = ("sgd", "adamw")
SHARDED = list(itertools.product(KINDS, NAMES))
FORMS = ("fp32", "split", "kahan")
UNSHARDED = list(itertools.product(FORMS, NAMES))
BEFORE, AFTER = (0, 1, 2), (3, 4)


def build(
    kind: str, name: str, *, parts: bool, seed: int = 0, form: str = "fp32"
) -> Session:
    level, dtype = kind.split()
    model = sides()
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), seed)
    if parts:
        fully_shard(model, mesh=mesh(), mp_policy=fsdp_policy(level, dtype))
    outside = torch.nn.Parameter(torch.full((3,), 1.0 + seed))
    optimizer = OPTIMIZERS[name]([*model.parameters(), outside])
    return hs.prepare(model, optimizer, level, dtype=dtype, master=form)


def train(session: Session, steps: tuple[int, ...], share: int | None) -> None:
    masters_of(session).kernel = None  # torch's own arithmetic, as on shards
    for step in steps:
        with session.autocast():
            halves = (0, 1) if share is None else (share % 2,)
            losses = [session.model(batch(step, half)) / ROWS for half in halves]
            outside = session.optimizer.param_groups[0]["params"][-1]
            loss = sum(losses, torch.zeros(())) / len(losses)
        session.backward(loss + outside.sum())
        session.step()


def content(session: Session) -> dict[str, Any]:
    state = session.state_dict()
    groups = state["optimizer"]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    moments = {
        name: full_tensors(state["optimizer"]["state"].get(number, {}))
        for name, number in zip(state["parameters"], numbers, strict=True)
    }
    words = ("steps", "scaler", "parameters", "moments")
    return {
        "weights": full_tensors(state["weights"] | state["outside"]),
        "states": moments,
        **{word: state[word] for word in words},
        "clock": [state["masters"]["seed"], state["masters"]["step"]],
    }


def saves(kind: str, name: str) -> dict[str, Any]:
    session = build(kind, name, parts=True)
    train(session, BEFORE, dist.get_rank())
    fsdp_checkpoint.save(session, shared() / f"{kind} {name}")
    at = copy.deepcopy(content(session))
    train(session, AFTER, dist.get_rank())
    return {"at": at, "end": content(session)}


def loads(kind: str, name: str, source: str) -> dict[str, Any]:
    session = build(kind, name, parts=True, seed=1)
    train(session, (7,), dist.get_rank())
    fsdp_checkpoint.load(session, shared() / source)
    at = copy.deepcopy(content(session))
    train(session, AFTER, dist.get_rank())
    return {"at": at, "end": content(session)}


def hands_over(kind: str, name: str) -> dict[str, Any]:
    first, last = build("O2 bf16", name, parts=False), build(kind, name, parts=False)
    train(first, BEFORE, None)
    session = build(kind, name, parts=True, seed=1)
    session.load_state_dict(first.state_dict())
    at = copy.deepcopy(content(session))
    last.load_state_dict(session.state_dict())
    return {"first": content(first), "at": at, "last": content(last)}


def refused(word: str) -> dict[str, Any]:
    session = build("O2 bf16", "adamw", parts=True, seed=1)
    load: Callable[[], object] = partial(
        dcp.load, {"app": session}, checkpoint_id=shared() / "stateful"
    )
    if word == "as a Stateful":
        trained_one = build("O2 bf16", "adamw", parts=True)
        train(trained_one, (7,), dist.get_rank())
        dcp.save({"app": trained_one}, checkpoint_id=shared() / "stateful")
    else:
        other = torch.nn.Linear(3, 3)
        fully_shard(other, mesh=mesh(), mp_policy=fsdp_policy())
        session = hs.prepare(other, torch.optim.SGD(other.parameters()), "O2")
        load = partial(fsdp_checkpoint.load, session, shared() / "O2 bf16 adamw")
    before = copy.deepcopy(content(session))
    try:
        load()
    except hs.UserError as error:
        return {"said": str(error), "untouched": same(content(session), before)}
    return {"said": "nothing"}


WORDS = {
    "another model": "weight 'bias': the state holds nothing, the session "
    "torch.float32 (3,); build model and optimizer as they were saved.",
    "as a Stateful": "the state was saved with moments of 7 parameters, and holds "
    "those of 0. With torch.distributed.checkpoint, save and load "
    "halfstep.fsdp.Stateful(session).",
}
_two: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"saves {run}": partial(saves, *run) for run in SHARDED},
    **{f"hands over {run}": partial(hands_over, *run) for run in SHARDED},
    **{f"refused {word}": partial(refused, word) for word in WORDS},
}
_any: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"loads {(kind, name)}": partial(loads, kind, name, f"{kind} {name}")
        for kind, name in SHARDED
    },
    **{
        f"loads whole {(form, name)}": partial(
            loads, "O2 bf16", name, f"whole {form} {name}"
        )
        for form, name in UNSHARDED
    },
}


def _with(
    ranks: tuple[int, ...], case: Callable[[], dict[str, Any]], _: object
) -> dict[str, Any]:
    return case() if dist.get_world_size() in ranks else {}


CASES = {name: partial(_with, (2,), case) for name, case in _two.items()}
CASES |= {name: partial(_with, (2, 4), case) for name, case in _any.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    common = tmp_path_factory.mktemp("states")
    for form, name in UNSHARDED:
        session = build("O2 bf16", name, parts=False, form=form)
        train(session, BEFORE, None)
        fsdp_checkpoint.save(session, common / f"whole {form} {name}")
    return common


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return start(2, FILES, str(folder))


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, folder: Path, two: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what each of some processes saw; the two have saved before."""
    if request.param == 2:
        return two
    return start(request.param, FILES, str(folder))


@pytest.mark.parametrize("run", SHARDED, ids=" ".join)
def test_saved_by_two(
    ranks: list[dict[str, Any]], two: list[dict[str, Any]], run: tuple[str, str]
) -> None:
    """Law: what two ranks saved, two or four others load, and go on with to the bit."""
    saved, loaded = agreed(two, f"saves {run}"), agreed(ranks, f"loads {run}")
    assert same(loaded["at"], saved["at"])
    assert same(loaded["end"], saved["end"])
    assert not same(saved["at"]["weights"], saved["end"]["weights"])


@pytest.mark.parametrize("run", UNSHARDED, ids=" ".join)
def test_saved_whole(ranks: list[dict[str, Any]], run: tuple[str, str]) -> None:
    """Law: what one process saved, of any form, ranks load in parts."""
    form, name = run
    session = build("O2 bf16", name, parts=False, form=form)
    train(session, BEFORE, None)
    loaded = agreed(ranks, f"loads whole {run}")
    mine = copy.deepcopy(content(session))
    for states in mine["states"].values():
        wide = {key: value.float() for key, value in states.items()}
        states.update(wide)
    assert same(loaded["at"], mine)
    if form != "kahan":
        train(session, AFTER, None)
        assert same(loaded["end"], content(session))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", SHARDED, ids=" ".join)
def test_loaded_whole(
    two: list[dict[str, Any]], folder: Path, run: tuple[str, str], form: str
) -> None:
    """Law: what two ranks saved, one process without shards goes on with."""
    saved = agreed(two, f"saves {run}")
    session = build("O2 bf16", run[1], parts=False, seed=1, form=form)
    fsdp_checkpoint.load(session, folder / " ".join(run))
    found = content(session)
    if form == "kahan":
        # 16 bits of significand, rounded to nearest: 2**-17 of each weight.
        for name, right in saved["at"]["weights"].items():
            torch.testing.assert_close(
                found["weights"][name], right, rtol=2**-17, atol=0
            )
        return
    assert same(found["weights"], saved["at"]["weights"])
    assert same(found["states"], saved["at"]["states"])
    assert (found["steps"], found["clock"]) == (saved["at"]["steps"], [0, 3])
    train(session, AFTER, None)
    assert same(content(session)["weights"], saved["end"]["weights"])
    assert same(content(session)["states"], saved["end"]["states"])


@pytest.mark.parametrize("run", SHARDED, ids=" ".join)
def test_handed_over(two: list[dict[str, Any]], run: tuple[str, str]) -> None:
    """Law: a state dict of whole tensors loads into parts, and back."""
    seen = agreed(two, f"hands over {run}")
    for word in ("weights", "states", "steps", "clock"):
        assert same(seen["at"][word], seen["first"][word])
        assert same(seen["last"][word], seen["first"][word])


@pytest.mark.parametrize("word", WORDS)
def test_refused(two: list[dict[str, Any]], word: str) -> None:
    """Law: what cannot be loaded is refused on every rank, and leaves all alone.

    But for weights that torch.distributed.checkpoint has written into before it asks.
    """
    seen = agreed(two, f"refused {word}")
    assert seen["said"] == WORDS[word]
    assert seen["untouched"] or word == "as a Stateful"


def test_round_trip(kept: Path, original: Path) -> None:
    """Law: what was saved comes back, sealed, with its notes, wherever it is moved."""
    moved = kept.rename(kept.with_name("moved"))
    session, expected = trained(1), trained()
    fsdp_checkpoint.load(session, moved)
    assert same(session.state_dict(), expected.state_dict())
    assert atomic_directory.read(moved)["notes"] == {"step": 1}
    files = {path.name for path in moved.iterdir()}
    assert atomic_directory.read(moved)["files"].keys() == files - {MANIFEST}
    assert [path.name for path in original.parent.iterdir()] == ["c"]


# Damage of directories


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut part": (PART, cut, "is truncated or altered: "),
    "no index": (INDEX, Path.unlink, "has no index.json; it is incomplete."),
    "a plain one": (
        "",
        lambda path: (shutil.rmtree(path), single.save(path, {}, {}, {})),
        "is not a halfstep sharded checkpoint: manifest.json says it is a halfstep ",
    ),
    "an empty directory": (
        "",
        lambda path: (shutil.rmtree(path), path.mkdir()),
        "or only in part: it has no file manifest.json.",
    ),
}


@pytest.mark.parametrize("word", DAMAGE)
def test_damage(word: str, kept: Path) -> None:
    """Law: what is not whole is refused in one line that names it."""
    name, damage, fault = DAMAGE[word]
    damage(kept / name)
    line = refusal(kept)
    assert fault in line
    assert str(kept) in line
    assert len(line.split()) <= 35
    assert "\n" not in line


def test_read_as_a_plain_one(kept: Path) -> None:
    """Law: a sharded checkpoint is not taken for a plain one."""
    with pytest.raises(CheckpointError) as caught:
        single.load(kept)
    assert str(caught.value) == (
        f"{kept} is not a halfstep checkpoint: manifest.json says it is a halfstep "
        "sharded checkpoint."
    )


def test_replaced(kept: Path) -> None:
    """Law: what exists is replaced where that is asked for, and only there."""
    with pytest.raises(CheckpointError, match="a checkpoint is never written over"):
        fsdp_checkpoint.save(trained(2), kept)
    fsdp_checkpoint.save(trained(2), kept, replace=True)
    session = trained(1)
    fsdp_checkpoint.load(session, kept)
    assert same(session.state_dict(), trained(2).state_dict())
    assert [path.name for path in kept.parent.iterdir()] == ["c"]


# Several ranks


def _fail(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def fails(moment: str, rank: int) -> dict[str, Any]:
    folder = shared() / f"{moment} {rank}"
    session = trained(dist.get_rank(), shard=True)
    fsdp_checkpoint.save(session, folder / "before")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            owner, name = MOMENTS[moment]
            patch.setattr(owner, name, _fail)
        try:
            fsdp_checkpoint.save(session, folder / "c")
        except CheckpointError as error:
            said = str(error).replace(str(folder), "FOLDER")
        else:
            said = "nothing"
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    fsdp_checkpoint.load(session, folder / "before")
    fsdp_checkpoint.save(session, folder / "c")
    fsdp_checkpoint.load(session, folder / "c")
    return {"said": said, "left": left}


def damaged(name: str) -> dict[str, Any]:
    session, folder = trained(dist.get_rank(), shard=True), shared() / f"cut {name}"
    fsdp_checkpoint.save(session, folder)
    if dist.get_rank() == 0:
        cut(folder / name)
    dist.barrier()
    before = copy.deepcopy(fsdp_checkpoint.full_tensors(session.weights()))
    try:
        fsdp_checkpoint.load(session, folder)
    except CheckpointError as error:
        said = str(error).replace(str(folder), "FOLDER")
        after = fsdp_checkpoint.full_tensors(session.weights())
        return {"said": said, "untouched": same(before, after)}
    return {"said": "nothing"}


MOMENTS: dict[str, tuple[Any, str]] = {
    "torch": (FileSystemWriter, "write_data"),
    "digest": (atomic_directory, "digest"),
    "make_temporary": (atomic_directory, "make_temporary"),
    "commit": (atomic_directory, "commit"),
}
FAILS = [
    ("torch", 0),
    ("torch", 1),
    ("digest", 1),
    ("make_temporary", 0),
    ("commit", 0),
]
PARTS = (INDEX, PART, "__1_0.distcp")
CASES |= {
    **{f"fails {x}": partial(_with, (2,), partial(fails, *x)) for x in FAILS},
    **{f"damaged {x}": partial(_with, (2,), partial(damaged, x)) for x in PARTS},
}


@pytest.mark.parametrize("fail", FAILS, ids=str)
def test_one_rank_fails(two: list[dict[str, Any]], fail: tuple[str, int]) -> None:
    """Law: where one rank cannot write, all raise at once, and nothing is left."""
    found = [rank[f"fails {fail}"] for rank in two]
    assert all(isinstance(each, dict) for each in found), found
    start_, end = "checkpoint FOLDER/c could not be written: ", ". Fix that, or choose"
    for rank, each in enumerate(found):
        assert "No space left on device" in each["said"]
        assert ("rank 1: " in each["said"]) == (fail[1] == 1 and rank == 0)
        assert start_ in each["said"]
        assert end in each["said"]
        assert each["left"] == ["before"]


@pytest.mark.parametrize("name", PARTS)
def test_damage_is_seen_by_all(two: list[dict[str, Any]], name: str) -> None:
    """Law: a damaged file is refused on every rank, whichever has read it."""
    found = [rank[f"damaged {name}"] for rank in two]
    assert all(isinstance(each, dict) for each in found), found
    for each in found:
        assert f"FOLDER/{name} is truncated or altered: " in each["said"]
        assert each["untouched"]

"""FSDP2 with one set of fp32 weights: the shards are the masters, in 16 bits they run.

Under torchrun, `ranks` runs the cases of this file in each of several processes. The
layers of `test_scaler_sharded` give gradients that bf16 holds exactly, summed over
ranks in whatever order, so whole fp32 weights in one process are an oracle to the bit.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import STEPS, Plant, agreed, cases, mesh, plants, scales, start
from tests.scaling.test_scaler_sharded import (
    OPTIMIZERS,
    ROWS,
    RULE,
    batch,
    held,
    sides,
    without,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfstep as hs
from halfstep.session.fsdp import fsdp_policy

DTYPES = ("bf16", "fp16")
RUNS = list(itertools.product(DTYPES, ("sgd", "adamw"), (None, 0.5)))


def train(_: object, dtype: str, name: str, clip: float | None) -> dict[str, Any]:
    plan = plants(29)
    model = sides()
    fully_shard(model, mesh=mesh(), mp_policy=fsdp_policy("O2", dtype))
    optimizer = OPTIMIZERS[name](model.parameters())
    before = [param.data_ptr() for param in optimizer.param_groups[0]["params"]]
    session = hs.prepare(
        model, optimizer, "O2", dtype=dtype, loss_scale=RULE, clip_grad_norm=clip
    )
    norms, skipped, kinds = [], [], set()
    for step in range(STEPS):
        with session.autocast():
            loss = session.model(batch(step, dist.get_rank())) / ROWS
        session.backward(loss)
        kinds |= {(p.dtype, p.grad.dtype) for p in model.parameters()}
        plant: Plant | None = plan.get(step)
        if plant is not None and plant.here():
            part: Any = list(model.parameters())[plant.param].grad
            part.to_local().view(-1)[-1] = plant.value
        report = session.step()
        norms.append(report.grad_norm if step not in plan else None)
        skipped.append(report.skipped)
    same_memory = before == [p.data_ptr() for p in model.parameters()]
    return held(model, optimizer) | {
        "norms": norms,
        "skipped": skipped,
        "bad": list(plan),
        "kinds": [*kinds],
        "scale": session.scaler.state.scale.item(),
        "kept": same_memory and session.optimizer is optimizer,
        "memory": session.memory(),
        "numel": sum(p.to_local().numel() for p in model.parameters()),
        "notes": session.explain().notes,
        "plain": without(plan, name, clip, dist.get_world_size()),
        # No gradient depends on a weight: these norms are those before clipping.
        "plain norms": without(plan, name, None, dist.get_world_size())["norms"],
    }


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.batch(self.norm(self.body(inputs)))))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def attempt(
    _: object,
    level: str = "O2",
    dtype: str = "bf16",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    stored: torch.dtype = torch.float32,
    batch_apart: bool = True,
    optimizer_first: bool = False,
    sharded_after: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train a step; `sharded_after` is sharded once the session is there."""
    low = fsdp_policy("O2", "bf16")
    model: Any = Normed().to(stored)
    early = _adamw(model)
    if batch_apart:
        fully_shard(model.batch, mesh=mesh())
    if sharded_after is None:
        fully_shard(model, mesh=mesh(), mp_policy=mp_policy or low)
    optimizer = early if optimizer_first else _adamw(model)
    try:
        session = hs.prepare(model, optimizer, level, dtype=dtype, **more)
        if sharded_after is not None:
            module = model.get_submodule(sharded_after)
            fully_shard(module, mesh=mesh(), mp_policy=low)
        with session.autocast():
            loss = session.model(torch.ones(4, 6)).sum()
        session.backward(loss)
        session.step()
    except hs.UserError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def apart(_: object) -> dict[str, Any]:
    model = Normed()
    for module in (model.batch, model.norm, model.head):
        fully_shard(module, mesh=mesh())
    fully_shard(model, mesh=mesh(), mp_policy=fsdp_policy("O2", "bf16"))
    optimizer = _adamw(model)
    rules = "lean + module:head=fp32"
    session = hs.prepare(model, optimizer, "O2", dtype="bf16", policy=rules)
    seen: dict[str, Any] = {}
    for name in ("body", "norm", "head"):
        hook = functools.partial(_note, seen, name)
        model.get_submodule(name).register_forward_hook(hook)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        with session.autocast():
            loss = session.model(inputs).square().mean()
        session.backward(loss)
        losses.append(loss.item())
        session.step()
    notes = session.explain().notes
    return {"seen": seen, "losses": losses, "notes": [n for n in notes if "FSDP" in n]}


def _note(seen: dict[str, Any], name: str, module: Any, _: Any, out: Tensor) -> None:
    seen[name] = [out.dtype, module.weight.dtype]


def all_low(_: object) -> dict[str, Any]:
    model = sides().to(torch.bfloat16)
    fully_shard(model, mesh=mesh(), mp_policy=fsdp_policy("O3", "bf16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    session = hs.prepare(model, optimizer, "O3", dtype="bf16")
    for step in range(2):
        with session.autocast():
            loss = session.model(batch(step, dist.get_rank())) / ROWS
        session.backward(loss)
        session.step()
    numbers = sum(p.to_local().numel() for p in model.parameters())
    return {"memory": session.memory(), "numel": numbers, "steps": [2]}


LATE: dict[str, Any] = {"sharded_after": "body", "batch_apart": False}
TRIED: list[tuple[str, dict[str, Any]]] = [
    ("nothing", {}),
    ("fully_shard got nothing for 'body'", {"mp_policy": MixedPrecisionPolicy()}),
    ("computes in fp16, and fully_shard got torch.bfloat16 for", {"dtype": "fp16"}),
    ("master='split' with FSDP2", {"master": "split"}),
    ("master='none' with FSDP2", {"master": "none"}),
    ("optimizer_in_backward=True leaves out", {"optimizer_in_backward": True}),
    ("a rule keeps 'head' in fp32", {"policy": "lean + module:head=fp32"}),
    ("'body.weight' is sharded in fp32", {"level": "O3"}),
    ("'body.weight' is sharded in torch.bfloat16", {"stored": torch.bfloat16}),
    *(
        ("'body.weight' was sharded after the optimizer was made", options)
        for options in (
            {"optimizer_first": True},
            *(LATE, LATE | {"sharded_after": ""}, LATE | {"level": "O1"}),
        )
    ),
    ("'batch' has fp32 running statistics", {"batch_apart": False}),
]
"""What is reported, and what is tried."""


CASES: dict[str, Callable[[object], dict[str, Any]]] = {
    **cases(train, *RUNS),
    **{
        f"refused {number}": functools.partial(attempt, **options)
        for number, (_, options) in enumerate(TRIED)
    },
    "apart": apart,
    "all low": all_low,
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return start(2, ("tests.session.test_fsdp",))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_shards_are_the_masters(
    ranks: list[dict[str, Any]], run: tuple[str, str, float | None]
) -> None:
    """Law: shards train as whole fp32 weights do, and skip together.

    A rank holds 4 bytes a number of its own, and moments; no second copy.
    """
    own = ("memory", "numel")
    words = [word for word in ranks[0][f"train {run}"] if word not in own]
    seen = agreed(ranks, f"train {run}", *words)
    plain = seen["plain"]
    exact = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    # Norms are rounded.
    check = exact if run[2] is None else torch.testing.assert_close
    check(seen["weights"], plain["weights"])
    check(seen["state"], plain["state"])
    places = [step for step, bad in enumerate(seen["skipped"]) if bad]
    assert places == seen["bad"]
    assert seen["scale"] == scales(seen["bad"], RULE.init_scale)[-1]
    assert seen["kinds"] == [(torch.float32, torch.float32)]
    assert seen["kept"]
    for step, norm in enumerate(seen["plain norms"] if run[2] else ()):
        if step not in seen["bad"]:
            assert seen["norms"][step] == pytest.approx(norm, rel=1e-6)
    for rank in ranks:
        numel, memory = rank[f"train {run}"]["numel"], rank[f"train {run}"]["memory"]
        # Shards are padded to equal length: of 6 tensors each by a row at most.
        assert 4 * numel <= memory["weights"] <= 4 * numel + 128
        assert memory["masters"] == memory["gradients"] == 0
        moments = {"sgd": 4 * numel, "adamw": 8 * numel + 6 * 4}
        assert memory["moments"] == moments[run[1]]
    assert seen["notes"][2] == (
        "master weights: FSDP2's fp32 shards of 149 parameters, cast to "
        f"{run[0]} for each pass"
    )


@pytest.mark.parametrize("number", range(len(TRIED)))
def test_refused(ranks: list[dict[str, Any]], number: int) -> None:
    """Law: what would not train as asked is refused, with the call that would."""
    said = agreed(ranks, f"refused {number}")["said"]
    assert TRIED[number][0] in said


def test_norms_apart(ranks: list[dict[str, Any]]) -> None:
    """Law: what is sharded without a policy runs on fp32 weights, rules and norms."""
    seen = agreed(ranks, "apart")
    low, wide = torch.bfloat16, torch.float32
    assert seen["seen"] == {"body": [low, low], "norm": [low, wide], "head": [wide] * 2}
    assert seen["losses"][-1] < seen["losses"][0]
    (note,) = seen["notes"]
    assert note.endswith("cast to bf16 for each pass")


def test_all_low(ranks: list[dict[str, Any]]) -> None:
    """Law: at O3 a rank holds 2 bytes for each number of its own."""
    agreed(ranks, "all low", "steps")
    for rank in ranks:
        seen = rank["all low"]
        numbers = 2 * seen["numel"]
        assert numbers <= seen["memory"]["weights"] <= numbers + 64
        assert seen["memory"]["moments"] == numbers
        assert seen["memory"]["masters"] == 0


def test_policy() -> None:
    """Law: only O2 has FSDP2 cast; a level without 16 bits takes no format."""
    assert fsdp_policy("O2", "fp16") == MixedPrecisionPolicy(
        torch.float16, torch.float16, cast_forward_inputs=False
    )
    wide = fsdp_policy("O2", torch.bfloat16, reduce_dtype=torch.float32)
    assert (wide.param_dtype, wide.reduce_dtype) == (torch.bfloat16, torch.float32)
    for level in ("O0", "O1", "O3"):
        none = fsdp_policy(level)
        assert (none.param_dtype, none.reduce_dtype) == (None, None)
    with pytest.raises(hs.UserError, match="level=O2 needs dtype bf16 or fp16"):
        fsdp_policy("O2", "fp32")

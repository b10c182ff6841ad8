"""A session at O0 and O1 beside a plain loop of torch: its bits, fewer casts.

Under torchrun, `ranks` trains both under DDP, in each of two processes.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from late_scalars import slow_device  # noqa: F401
from ranks import cases, saw, start
from session_cases import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.casting import weight_cache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05)
FUSED = functools.partial(ADAMW, fused=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.02)
RMSPROP = functools.partial(torch.optim.RMSprop, lr=0.01)
STEPS, MICRO = 4, 4


class Net(nn.Module):
    """Weights used once, twice, tied, frozen, of a norm; computed again, if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.once, self.twice = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.once.weight
        self.reentrant: bool | None = None

    def block(self, x: Tensor) -> Tensor:
        x = self.twice(self.norm(self.twice(x)).float().tanh())
        return self.frozen(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(x)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.tied(x)


LEARNING = 6
"""Casts of weights and biases that learn under torch's table: once's two, twice's two;
frozen's two do not learn, and are cast likewise."""


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator)
    return x, x.flip(1) * 0.5


class Ours:
    def __init__(self, program: "Program", accumulate: int) -> None:
        self.net = Net()
        params = [param for param in self.net.parameters() if param.requires_grad]
        self.optimizer = program.make(params)
        self.session: hs.Session = hs.prepare(
            *(self.net, self.optimizer, "O0" if program.dtype == FP32 else "O1"),
            dtype=program.dtype,
            accumulate=accumulate,
            policy="torch",
            clip_grad_norm=program.clip,
        )
        self.region = self.session.autocast
        self.backward = self.session.backward
        self.log: list[float] = []

    @property
    def model(self) -> nn.Module:
        return self.session.model

    def step(self) -> None:
        report = self.session.step()
        if report.complete:
            norm = report.grad_norm if report.applied else None
            self.log += [norm or 0.0, self.session.scaler.state.scale.item()]

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        self.session.model = wrapper(self.net)


class Torchs:
    def __init__(self, program: "Program", accumulate: int) -> None:
        self.net = Net()
        self.model: nn.Module = self.net
        self.params = [param for param in self.net.parameters() if param.requires_grad]
        self.optimizer = program.make(self.params)
        self.scaler = torch.amp.GradScaler("cpu", enabled=program.dtype == FP16)
        self.dtype, self.accumulate = program.dtype, accumulate
        self.clip = program.clip
        self.micro = 0
        self.log: list[float] = []

    def region(self) -> Any:
        """Open a region; gradients stay at home until the last of a step."""
        regions = contextlib.ExitStack()
        ddp = isinstance(self.model, nn.parallel.DistributedDataParallel)
        if ddp and self.micro + 1 < self.accumulate:
            regions.enter_context(self.model.no_sync())  # type: ignore[operator]
        if self.dtype != FP32:
            regions.enter_context(torch.autocast("cpu", self.dtype))
        return regions

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss / self.accumulate).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.micro = (self.micro + 1) % self.accumulate
        if self.micro:
            return
        self.scaler.unscale_(self.optimizer)
        norm = 0.0
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.params, self.clip).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.log += [norm if math.isfinite(norm) else 0.0, self.scaler.get_scale()]

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        self.model = wrapper(self.net)


Loop = Any
"""One of the two."""


def loss_of(loop: Loop, seed: int) -> Tensor:
    x, target = batch(seed)
    return nn.functional.mse_loss(loop.model(x), target)


def one_loss(loop: Loop, seed: int) -> Tensor:
    with loop.region():
        loss = loss_of(loop, seed)
    loop.backward(loss)
    loop.step()
    return loss


def several_losses(loop: Loop, seed: int) -> Tensor:
    with loop.region():
        losses = [loss_of(loop, seed + n) for n in range(4)]
    loop.backward(losses[0] + losses[1] * 2 - losses[2] / 2)
    loop.backward(losses[3])
    loop.step()
    return losses[3]


def two_regions(loop: Loop, seed: int) -> Tensor:
    with loop.region():
        first = loss_of(loop, seed)
    with loop.region():
        second = loss_of(loop, seed + 1)
    loop.backward(first + second)
    loop.step()
    return first


def evaluating(loop: Loop, seed: int) -> Tensor:
    with torch.no_grad(), loop.region():
        loop.net(batch(seed)[0])
    with loop.region():
        with torch.no_grad():
            loop.net(batch(seed)[0])
        loss = loss_of(loop, seed)
    with torch.inference_mode(), loop.region():
        seen = loop.net(batch(seed)[0]).sum()
    loop.backward(loss)
    loop.step()
    return loss + seen.item()


def averaging(loop: Loop, seed: int, *, inside: bool) -> Tensor:
    loss = one_loss(loop, seed)
    params = list(loop.net.parameters())
    kept = [param.detach().clone() for param in params]
    for param in params:
        param.data.mul_(0.5)
    if inside:
        with loop.region(), torch.no_grad():
            averaged = loss_of(loop, seed)
    else:
        with torch.no_grad(), loop.region():
            averaged = loss_of(loop, seed)
    for param, value in zip(params, kept, strict=True):
        param.data.copy_(value)
    return loss + averaged


def perturbing(loop: Loop, seed: int) -> Tensor:
    for sign in (1, -1):
        with loop.region():
            loss = loss_of(loop, seed)
        loop.backward(loss)
        for param in loop.net.parameters():
            param.data.add_(0.125 * sign)
    loop.step()
    return loss


def recomputing(loop: Loop, seed: int, *, reentrant: bool) -> Tensor:
    loop.net.reentrant = reentrant
    return one_loss(loop, seed)


def observing(loop: Loop, seed: int) -> Tensor:
    """Run a hook between two uses of a weight, which writes nothing."""

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        with torch.no_grad():
            output.abs().max()

    handle = loop.net.norm.register_forward_hook(look)
    loss = one_loss(loop, seed)
    handle.remove()
    return loss


def overflowing(loop: Loop, seed: int) -> Tensor:
    with loop.region():
        loss = loss_of(loop, seed) * (float("inf") if seed // 10 % 3 == 1 else 1.0)
    loop.backward(loss)
    loop.step()
    return loss


def halved(loop: Loop) -> None:
    for param in loop.net.parameters():
        param.data.mul_(0.5)


def replaced(loop: Loop) -> None:
    for param in loop.net.parameters():
        param.data = param.data.clone() * 0.5


def loaded(loop: Loop) -> None:
    state = loop.net.state_dict()
    loop.net.load_state_dict({name: value * 0.5 for name, value in state.items()})


def nothing(_: Loop) -> None:
    """Leave the weights alone."""


class Program(NamedTuple):
    micro: Any = one_loss
    between: Any = nothing
    make: Any = SGD
    dtype: torch.dtype = BF16
    clip: float | None = None


PROGRAMS = {
    "plain": Program(),
    "fp16 clipped": Program(make=ADAMW, dtype=FP16, clip=0.1),
    "skipped": Program(overflowing, dtype=FP16, clip=1.0),
    "losses": Program(several_losses),
    "losses fp16": Program(several_losses, dtype=FP16),
    "regions": Program(two_regions),
    "evaluation": Program(evaluating, make=FUSED),
    "averages": Program(functools.partial(averaging, inside=False)),
    "averages inside": Program(functools.partial(averaging, inside=True)),
    "sharpness": Program(perturbing),
    "observed": Program(observing),
    "reentrant": Program(functools.partial(recomputing, reentrant=True)),
    "recomputed": Program(functools.partial(recomputing, reentrant=False), dtype=FP16),
    "halved": Program(between=halved),
    "replaced": Program(between=replaced),
    "loaded": Program(between=loaded, make=FUSED),
    "fp32 clipped": Program(make=ADAMW, dtype=FP32, clip=0.1),
    "fp32 fused": Program(make=FUSED, dtype=FP32),
    "fused clipped": Program(make=FUSED, dtype=FP16, clip=0.1),
    "adam": Program(make=ADAM, dtype=FP16),
    "rmsprop": Program(make=RMSPROP, clip=0.1),
}
PLACES = ("", "large weights", "on a device")


def train(loop: Loop, program: Program, accumulate: int) -> list[Tensor]:
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses += [
            program.micro(loop, 10 * step + n).detach() for n in range(accumulate)
        ]
        program.between(loop)
    states = loop.optimizer.state_dict()["state"].values()
    state = [v for values in states for v in values.values() if torch.is_tensor(v)]
    weights = loop.net.state_dict().values()
    return [torch.stack(losses), *weights, *state, torch.tensor(loop.log)]


def forgets_gradients() -> bool:
    layer = nn.Linear(1, 1)
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            layer(torch.ones(1))
        return not layer(torch.ones(1)).requires_grad


exact = functools.partial(same, equal_nan=True)


@pytest.mark.filterwarnings("ignore:evaluation with")  # between micro-batches
@pytest.mark.parametrize(
    ("name", "accumulate", "where"),
    [
        *((name, MICRO, "") for name in PROGRAMS),
        *((name, 1, PLACES[n % 3]) for n, name in enumerate(PROGRAMS)),
    ],
)
def test_torchs_bits(
    name: str, accumulate: int, where: str, request: pytest.FixtureRequest
) -> None:
    """Law: losses, norms, scales, weights and states are torch's, to the bit."""
    if where == "large weights":
        request.getfixturevalue("monkeypatch").setattr(weight_cache, "LARGE", 0)
    elif where == "on a device":
        request.getfixturevalue("slow")
    if name == "evaluation" and forgets_gradients():
        pytest.skip(f"torch.autocast of {torch.__version__} loses gradients there")
    program = PROGRAMS[name]
    found, expected = (
        train(kind(program, accumulate), program, accumulate) for kind in (Ours, Torchs)
    )
    exact(found, expected)
    start = Net().state_dict()
    assert not torch.equal(found[1], start["once.weight"])


UNDER_DDP = ["plain", "fp16 clipped", "skipped", "recomputed", "evaluation"]
RUNS = [
    *((name, 1) for name in UNDER_DDP[:3]),
    *((name, 4) for name in (UNDER_DDP[:-1] if forgets_gradients() else UNDER_DDP)),
]


def both(_: object, name: str, accumulate: int) -> dict[str, Any]:
    """Train both under DDP; its two ways to store gradients take turns."""
    program, ends = PROGRAMS[name], []
    views = bool(RUNS.index((name, accumulate)) % 3)

    def micro(loop: Loop, seed: int) -> Any:
        return program.micro(loop, seed + 1000 * dist.get_rank())

    for kind in (Ours, Torchs):
        loop = kind(program, accumulate)
        ddp = nn.parallel.DistributedDataParallel
        loop.wrap(functools.partial(ddp, gradient_as_bucket_view=views))
        ends.append(train(loop, program._replace(micro=micro), accumulate))
    return {"ends": ends}


CASES = cases(both, *RUNS)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_torchs_bits_under_ddp(run: tuple[str, int]) -> None:
    """Law: on each of two processes losses and weights are torch's, and ranks agree."""
    ranks = saw(start(2, ("tests.session.test_autocast_contexts",)), f"both {run}")
    for rank in ranks:
        exact(*rank["ends"])
    (ours, _), (other, _) = (rank["ends"] for rank in ranks)
    exact(ours[1:], other[1:])
    assert not torch.equal(ours[0], other[0])


@pytest.mark.parametrize("name", ["plain", "losses fp16", "recomputed"])
def test_cast_once_a_step(name: str) -> None:
    """Law: each weight is cast once for a step, however many micro-batches it has.

    torch's loop casts those that learn in each, and the frozen one at each use.
    """
    program = PROGRAMS[name]
    loop = Ours(program._replace(make=SGD), MICRO)
    cache, misses = loop.session._contexts.cache, []
    for step in range(STEPS):
        for number in range(MICRO):
            program.micro(loop, 10 * step + number)
        misses.append(cache.misses)
    assert misses == [LEARNING * (step + 1) for step in range(STEPS)]
    assert len(cache) == LEARNING
    # 4 matrices of 36 numbers, of which one is tied, and 3 biases of 6.
    assert cache.bytes == 2 * (3 * 36 + 3 * 6)
    assert cache.bytes_cast == STEPS * cache.bytes


def test_unmatched_rules_are_told_of_once() -> None:
    """Law: at the end of the first step, with their words; those implied are not."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.RMSNorm(4))
    rules = "torch + op:softmax=fp32 + module:1=fp32 + op:linear=low + op:exp=fp32"
    session = hs.prepare(
        net, SGD(net.parameters()), "O2", dtype="bf16", policy=rules, accumulate=2
    )
    assert str(session.policy).endswith(" + type:RMSNorm=fp32")
    told = []
    for _ in range(6):
        with session.autocast():
            loss = net[1](net[0](torch.ones(2, 4))).float().sum()
        session.backward(loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session.step()
        told.append([(str(w.message), w.filename) for w in caught])
    text = (
        "policy rule 'op:softmax=fp32', 'op:exp=fp32' matched nothing: no such "
        "operation or module ran in the context. An operation inside another, as addmm "
        "in linear, follows the outer."
    )
    assert told == [[], [(text, __file__)], [], [], [], []]


def test_a_region_is_left_by_an_error() -> None:
    """Law: an error in a region leaves no region open, and the session goes on."""
    loop = Ours(PROGRAMS["plain"], 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"), loop.region():
            loop.net(torch.ones(2, 5))
        assert not torch.is_autocast_enabled("cpu")
        one_loss(loop, 0)

"""The drop-in scaler beside torch's own, over random call sequences: seven thousand.

An eighth of them is tried each time, the rest on demand (`-m slow`).

In: a kind of optimizers, a seed. Out: calls in and out of order, run on two worlds that
differ in nothing but the scaler; after each call all they hold is compared to the bit.

Where halfstep deviates on purpose, and what becomes of it here:

| torch                                      | halfstep               | here          |
|--------------------------------------------|------------------------|---------------|
| update(7): AttributeError                  | sets 7                 | not drawn     |
| complex gradients: NotImplementedError     | work                   | not drawn     |
| closures: refused, or misunderstood        | supported              | not drawn     |
| getters of a disabled one: AttributeError  | work                   | not called    |
| factors and scales out of range: accepted  | UserError              | not drawn     |
| interval set below the tracker: never ends | ends                   | not set       |
| scale below 1: unscaling's own inf missed  | seen                   | none so large |
| scale falls to 0                           | 2**-24, then raises    | ends before   |
| found_inf of several devices: added        | the largest            | one device    |
| overflowed fused step: gradients scaled    | unscaled at 2**n       | cleared       |
| fused SGD, first step skipped: junk state  | zeros                  | a step before |
| fused, gradients after unscale_: crashes   | AssertionError         | not called    |
"""

import copy
import functools
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import OptState

import halfstep as hs

Make = Callable[[Any], optim.Optimizer]
Line = tuple[str, tuple[Any, ...]]

SEQUENCES = 320
"""Random sequences for each kind."""
OFTEN = SEQUENCES // 8
X = [torch.randn(17, generator=torch.Generator().manual_seed(n)) for n in range(16)]
INF, NAN = math.inf, math.nan
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FIVE = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)


class Tells(optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        super().step()
        return args, kwargs


class Legacy(optim.SGD):
    """An optimizer of torch's first protocol: its step is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler: Any) -> Any:
        """Unscale if nobody did, and step unless the flag is set."""
        states = grad_scaler._per_optimizer_states
        if states[id(self)]["stage"] is OptState.READY:
            grad_scaler.unscale_(self)
        if not sum(grad_scaler._found_inf_per_device(self).values()):
            super().step()
        return "legacy"


class Outside(optim.Optimizer):
    """Somebody's own optimizer that skips inside; its state begins at 1, not at 0."""

    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found_inf, scale = self.found_inf, self.grad_scale
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                energy = self.state[param].setdefault("energy", torch.ones_like(param))
                if not found_inf:
                    param.grad.div_(1 if scale is None else scale)
                    param.sub_(0.1 * param.grad / energy)
                    energy.add_(param.grad.square())
        return closure


@dataclass(frozen=True)
class Kind:
    """What a batch of sequences runs on: three parameters, and their optimizers."""

    makes: Sequence[Make]
    shares: Sequence[Sequence[int]] = ((0, 1, 2),)
    dtypes: Sequence[torch.dtype] = (FP32, FP32, FP32)
    sparse: bool = False
    enabled: bool = True


def _two(*makes: Make, **more: Any) -> Kind:
    return Kind(makes, ((0, 1), (2,)), **more)


def _of(make: Any, **more: Any) -> Make:
    return functools.partial(make, lr=0.05, **more)


SGD, ADAM = _of(optim.SGD), _of(optim.Adam, foreach=False)
HEAVY = _of(optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=True)
FUSED_SGD = _of(optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True)
FUSED_ADAM = _of(optim.Adam, fused=True)
FUSED_ADAMW = _of(optim.AdamW, amsgrad=True, fused=True)
FUSED_ADAGRAD = _of(optim.Adagrad, fused=True, initial_accumulator_value=0.1)
RMSPROP = _of(optim.RMSprop, centered=True, momentum=0.5, foreach=False)
OVERLAP = (0, 1), (1, 2)

KINDS = {
    "sgd": Kind([SGD]),
    "sgd fused momentum": Kind([FUSED_SGD]),
    "adamw fused": Kind([FUSED_ADAMW]),
    "adagrad fused": Kind([FUSED_ADAGRAD]),
    "two plain": _two(ADAM, HEAVY),
    "two mixed": _two(SGD, FUSED_ADAMW),
    "two fused": _two(FUSED_ADAM, FUSED_SGD),
    "three": Kind((RMSPROP, FUSED_ADAGRAD, SGD), ((0,), (1,), (2,))),
    "shared": Kind((SGD, ADAM), OVERLAP),
    "shared fused": Kind((HEAVY, FUSED_ADAM), OVERLAP),
    "fp64": Kind([SGD], dtypes=(FP64, FP32, FP64)),
    "fp64 fused": Kind([FUSED_ADAM], dtypes=(FP64, FP64, FP64)),
    "bf16": Kind([SGD], dtypes=(BF16, FP32, BF16)),
    "bf16 fused": Kind([FUSED_ADAMW], dtypes=(BF16, BF16, BF16)),
    "fp16": _two(SGD, HEAVY, dtypes=(FP32, FP16, FP32)),
    "fp16 fused": _two(FUSED_ADAM, SGD, dtypes=(FP16, FP16, FP32)),
    "sparse": Kind([SGD], sparse=True),
    "sparse fp16": _two(SGD, SGD, sparse=True, dtypes=(FP32, FP32, FP16)),
    "arguments": Kind([_of(Tells)]),
    "legacy": _two(_of(Legacy), FUSED_ADAM),
    "outside": _two(Outside, SGD),
    "disabled": _two(_of(Tells), FUSED_ADAM, enabled=False),
}
"""22 kinds, 7,040 sequences. What does not skip inside is all one to a scaler."""


class _World:
    """One side of the twin.

    Its methods without an underscore are what a sequence calls, up to `preset`.
    """

    def __init__(self, kind: Kind, scaler: Any, numbers: Sequence[Any]) -> None:
        self._make = functools.partial(scaler, "cpu", enabled=kind.enabled)
        self._kind = kind
        self._params = [
            X[n][:size].to(dtype, copy=True)
            for n, (size, dtype) in enumerate(zip((3, 17, 8), kind.dtypes, strict=True))
        ]
        if kind.sparse:
            self._params[2] = self._params[2].view(4, 2)
        for param in self._params:
            param.requires_grad_()
        self._optimizers = [
            make([self._params[n] for n in share])
            for make, share in zip(kind.makes, kind.shares, strict=True)
        ]
        for optimizer in self._optimizers:
            if isinstance(optimizer, optim.SGD) and optimizer.defaults["fused"]:
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()
        self.scaler = self._make(*numbers)
        self._saved = self.scaler.state_dict()

    def backward(
        self, which: int, draw: int, dtype: torch.dtype, form: Any, factor: float
    ) -> Any:
        """Scale a loss of some parameters, or none, in some form; run its backward."""
        terms = [self._term(n, draw) for n in range(3) if which >> n & 1]
        losses = [(term * factor).to(dtype) for term in terms or [torch.ones(())]]
        scaled = self.scaler.scale(form(losses))
        scaled = list(scaled) if form is iter else scaled
        for loss in _tensors(scaled):
            if loss.requires_grad:
                loss.backward(torch.ones_like(loss))
        return scaled

    def _term(self, number: int, draw: int) -> Tensor:
        param = self._params[number]
        if param.dim() == 1:
            return param.float().dot(X[draw][: param.numel()])
        rows = torch.tensor([draw % 4, draw % 3, draw % 4])
        looked_up = nn.functional.embedding(rows, param, sparse=True)
        return looked_up.float().flatten().dot(X[draw][:6])

    def scale(self, thing: Any) -> Any:
        return self.scaler.scale(thing)

    def plant(self, which: int, value: float) -> None:
        grad = self._params[which % 3].grad
        if grad is not None:
            grad = grad._values() if grad.is_sparse else grad
            grad.view(-1)[which % grad.numel()] = value

    def clip(self, by: Callable[..., Any], limit: float) -> Any:
        """Clip all gradients, scaled or not; torch clips no sparse ones."""
        return by(self._params[: 2 if self._kind.sparse else 3], limit)

    def unscale(self, which: int) -> Any:
        self._use_loaded_scale(self._pick(which))
        return self.scaler.unscale_(self._pick(which))

    def _use_loaded_scale(self, optimizer: optim.Optimizer) -> None:
        """Do for torch what ours does: a loaded scale is used before any loss."""
        scaler, loaded = self.scaler, getattr(self.scaler, "was_loaded", False)
        if loaded and scaler._scale is None and any(_gradients(optimizer)):
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def step(self, which: int, argument: Any = None) -> Any:
        optimizer = self._pick(which)
        stage, flags = self.flags(optimizer)
        skips_inside = getattr(optimizer, "_step_supports_amp_scaling", False)
        unscaled = stage is OptState.UNSCALED
        if skips_inside and unscaled and not flags and any(_gradients(optimizer)):
            return "not called"
        given = (argument,) if isinstance(optimizer, Tells) else ()
        self._use_loaded_scale(optimizer)
        result = self.scaler.step(optimizer, *given)
        if skips_inside and not unscaled and any(self.flags(optimizer)[1]):
            optimizer.zero_grad()
        return result

    def update(self, new_scale: Any) -> Any:
        return self.scaler.update(*(() if new_scale is None else (new_scale,)))

    def clear(self, which: int, to_none: bool) -> None:
        # torch adds to a sparse gradient that was set to zero in place, and crashes.
        self._pick(which).zero_grad(set_to_none=to_none or self._kind.sparse)

    def change(self, what: tuple[str, float]) -> None:
        name, number = what
        if "factor" in name or self.scaler._get_growth_tracker() < number:
            getattr(self.scaler, name)(number)

    def state(self) -> Any:
        self._saved = self.scaler.state_dict()
        return self._saved

    def load(self, keys: Sequence[str], now: bool, fresh: bool) -> None:
        """Load parts of that state, or of the present one, here or elsewhere."""
        if now:
            self.state()
        if fresh:
            self.scaler = self._make()
        self.scaler.load_state_dict({k: v for k, v in self._saved.items() if k in keys})
        self.scaler.was_loaded = self._kind.enabled

    def move(self, how: Callable[[Any], Any]) -> None:
        self.scaler = how(self.scaler)

    def look(self, which: int) -> Any:
        if self._kind.enabled:
            return dict(self.scaler._check_inf_per_device(self._pick(which)))
        return None

    def preset(self, which: int, factor: float) -> None:
        self._pick(which).grad_scale = torch.tensor(factor)

    def _pick(self, which: int) -> optim.Optimizer:
        return self._optimizers[which % len(self._optimizers)]

    def flags(self, optimizer: optim.Optimizer) -> tuple[Any, list[Tensor]]:
        states = self.scaler._per_optimizer_states if self._kind.enabled else {}
        state = states.get(id(optimizer), {})
        return state.get("stage"), [*state.get("found_inf_per_device", {}).values()]

    def overflowed(self) -> bool:
        return any(flag for each in self._optimizers for flag in self.flags(each)[1])

    def bits(self) -> list[Any]:
        found = [_plain([param, param.grad]) for param in self._params]
        for optimizer in self._optimizers:
            params = optimizer.param_groups[0]["params"]
            found += [_plain(optimizer.state.get(param)) for param in params]
            found += (hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf"))
            found.append(_plain(self.flags(optimizer)))
        scaler = self.scaler
        found += (scaler.is_enabled(), scaler.get_scale(), scaler._get_growth_tracker())
        if self._kind.enabled:
            found += (scaler.get_growth_factor(), scaler.get_backoff_factor())
            found.append(scaler.get_growth_interval())
            found.append(_plain([scaler._scale, scaler._growth_tracker]))
        return found


def _gradients(optimizer: optim.Optimizer) -> list[bool]:
    return [p.grad is not None for p in optimizer.param_groups[0]["params"]]


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    else:
        for part in thing:
            yield from _tensors(part)


def _plain(value: Any) -> Any:
    """Return a value in which NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, Tensor):
        stored = value.detach()
        if stored.is_sparse:
            return _plain([stored._indices(), stored._values()])
        stored = stored.view(torch.int16) if stored.dtype == BF16 else stored
        return stored.dtype, stored.shape, stored.numpy().tobytes()
    if isinstance(value, list | tuple):
        return type(value), [_plain(part) for part in value]
    if isinstance(value, dict):
        return [(k, _plain(v)) for k, v in value.items() if k != "_halfstep"]
    return value.hex() if isinstance(value, float) else value


def _outcome(world: _World, line: Line) -> tuple[Any, str]:
    try:
        return _plain(getattr(world, line[0])(*line[1])), ""
    except Exception as error:  # noqa: BLE001 -- any error is part of the contract
        return type(error), str(error)


def _nested(losses: list[Tensor]) -> Any:
    return losses[0], [losses[1:], ()]


def _pickled(scaler: Any) -> Any:
    return pickle.loads(pickle.dumps(scaler))  # noqa: S301


WHICH, YES = range(6), (True, True, True, False)
SCALES = (
    *(8.0, 1024.0, 3.0, 1e4, 0.7),
    *(torch.tensor(16.0), torch.tensor([3.0]), torch.tensor(5.0, dtype=FP64)),
    *(torch.tensor(7), torch.tensor(2.0, requires_grad=True), torch.ones(2)),
)
"""What `update` is given, right and wrong."""
CHANGES = (
    *(("set_growth_factor", factor) for factor in (1.0, 1.5, 4.0)),
    *(("set_backoff_factor", factor) for factor in (0.1, 0.7, 1.0)),
    *(("set_growth_interval", interval) for interval in (1, 2, 3)),
)
SAVED = FIVE, FIVE | {"_halfstep"}, FIVE - {"scale"}, FIVE - {"growth_interval"}, ()
"""What is loaded of a saved state: as torch saves it, as halfstep does, or parts."""
CALLS: dict[str, tuple[int, *tuple[Sequence[Any], ...]]] = {
    "backward": (
        8,
        (7, 7, 7, 7, 3, 4, 1, 2, 0),
        range(16),
        (FP32, FP32, FP32, FP16, BF16, FP64),
        (sum, sum, sum, torch.stack, list, _nested, iter),
        (*(1.0,) * 9, 1e4, INF, NAN),
    ),
    "scale": (1, (3, [], [3], None, (), [[], 2.0])),
    "plant": (3, WHICH, (INF, -INF, NAN, 1e30)),
    "unscale": (6, WHICH),
    "clip": (2, (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_), (0.1, 1.0, INF)),
    "step": (10, WHICH, (3, [4])),
    "update": (9, (*(None,) * 12, *SCALES)),
    "clear": (3, WHICH, YES),
    "change": (2, CHANGES),
    "state": (2,),
    "load": (3, SAVED, YES, YES),
    "move": (3, (copy.deepcopy, _pickled)),
    "look": (1, WHICH),
    "preset": (1, WHICH, (2.0, 3.0)),
}
"""Calls: how often one is drawn where anything may come; choices of arguments."""


def _draw(rng: random.Random, name: str = "") -> Line:
    name = name or rng.choices([*CALLS], [weight for weight, *_ in CALLS.values()])[0]
    return name, tuple(rng.choice(choices) for choices in CALLS[name][1:])


def _iteration(rng: random.Random, count: int) -> Iterator[Line]:
    odds: list[tuple[float, str, *tuple[Any, ...]]] = [
        (1.0, "backward"),
        (0.2, "backward"),
        (0.3, "plant"),
        *((0.4, "unscale", n) for n in range(count)),
        (0.2, "clip"),
        (0.05, "plant"),
        *((1.0, "step", n) for n in rng.sample(range(count), count)),
        (0.9, "update", None),
        (0.1, "update"),
        *((0.8, "clear", n, True) for n in range(count)),
    ]
    for chance, name, *args in odds:
        if rng.random() < chance:
            yield (name, tuple(args)) if args else _draw(rng, name)


def _sequence(rng: random.Random, count: int) -> list[Line]:
    """Return up to 25 calls: a loop, a loop gone astray, or anything at all."""
    length = min(rng.randint(3, 25), rng.randint(3, 25))
    if rng.random() < 0.15:
        return [_draw(rng, "" if n else "backward") for n in range(length)]
    lines: list[Line] = []
    while len(lines) < length:
        lines += _iteration(rng, count)
    del lines[length:]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        here = rng.randrange(len(lines))
        lines[here : here + rng.randrange(2)] = [_draw(rng)] * rng.randrange(2)
    return lines


def _numbers(rng: random.Random) -> tuple[Any, ...]:
    scales = (2.0**16, 2.0**16, 8.0, 1.0, 3.0, 1000.0, 0.75, 65504.0, 2.0**127, 3e38)
    growth, backoff = rng.choice((2.0, 2.0, 1.5, 4.0)), rng.choice((0.5, 0.5, 0.1, 0.7))
    return rng.choice(scales), growth, backoff, rng.choice((1, 1, 2, 3, 2000))


def _compare(kind: Kind, rng: random.Random, tally: Counter[str]) -> None:
    numbers, lines = _numbers(rng), _sequence(rng, len(kind.makes))
    theirs = _World(kind, torch.amp.GradScaler, numbers)
    ours = _World(kind, hs.GradScaler, numbers)
    for count, line in enumerate(lines, 1):
        here, overflowed = f"{numbers} {lines[:count]}", theirs.overflowed()
        expected, words = _outcome(theirs, line)
        value, message = _outcome(ours, line)
        assert (value, message[: len(words)]) == (expected, words), (here, message)
        assert ours.bits() == theirs.bits(), here
        tally[words] += 1
        if line == ("update", (None,)) and not words:
            tally["skipped" if overflowed else "applied"] += 1
            assert ours.scaler.last_step.skipped == overflowed or not kind.enabled
        lowest = 1.0 if numbers[0] > 1e30 else 2.0**-8
        if theirs.scaler.get_scale() < lowest:
            break
    assert _plain(ours.scaler.state_dict()) == _plain(theirs.scaler.state_dict())


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.filterwarnings(  # calls come in any order
    "ignore:(gradients|weights changed|no gradient|this optimizer|scaler.up|a backward)"
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "seeds",
    [range(OFTEN), pytest.param(range(OFTEN, SEQUENCES), marks=pytest.mark.slow)],
    ids=["often", "the rest"],
)
def test_same_as_torch(name: str, seeds: range) -> None:
    """Law: values, errors, weights, gradients, states, scale, tracker are torch's."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        _compare(KINDS[name], random.Random(f"{name} {seed}"), tally)  # noqa: S311
    if KINDS[name].enabled:
        # The sequences would be worth little if they were all refused, or all clean.
        assert min(tally["skipped"], tally["applied"]) > len(seeds) // 8
        assert len(tally) > 8

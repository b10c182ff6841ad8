"""`GradScaler` beside torch's own, over any sequence of calls, in and out of order.

Two worlds differ in nothing but the scaler. After each call all they hold is compared
to the bit: results and errors, weights, gradients, optimizer states, scale, tracker.

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
| fused SGD, first step skipped: junk state  | zeros                  | a step before |
| fused, gradients after unscale_: crashes   | AssertionError         | not called    |
"""

import copy
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import OptState

import halfstep as hs

X = [torch.randn(17, generator=torch.Generator().manual_seed(n)) for n in range(16)]
INF, NAN = math.inf, math.nan
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Tells(optim.SGD):
    """Returns what its step was given."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        super().step()
        return args, kwargs


class Legacy(optim.SGD):
    """An optimizer of torch's first protocol: its step is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler: Any) -> Any:
        states = grad_scaler._per_optimizer_states
        if states[id(self)]["stage"] is OptState.READY:
            grad_scaler.unscale_(self)
        if not sum(grad_scaler._found_inf_per_device(self).values()):
            super().step()
        return "legacy"


class Outside(optim.Optimizer):
    """An optimizer of somebody's that skips inside, by torch's second protocol."""

    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                energy = self.state[param].setdefault("energy", torch.ones_like(param))
                if not self.found_inf:
                    param.grad.div_(1 if self.grad_scale is None else self.grad_scale)
                    param.sub_(0.1 * param.grad / energy)
                    energy.add_(param.grad.square())
        return closure


@dataclass(frozen=True)
class Kind:
    """Three parameters, and the optimizers that share them."""

    makes: Sequence[Callable[..., optim.Optimizer]]
    shares: Sequence[Sequence[int]] = ((0, 1, 2),)
    dtypes: Sequence[torch.dtype] = (FP32, FP32, FP32)
    sparse: bool = False
    enabled: bool = True


FUSED_SGD = functools.partial(optim.SGD, momentum=0.9, nesterov=True, fused=True)
FUSED_ADAM = functools.partial(optim.AdamW, amsgrad=True, fused=True)
FUSED_ADAGRAD = functools.partial(optim.Adagrad, fused=True)
HEAVY = functools.partial(optim.SGD, momentum=0.9, weight_decay=0.1)
TWO = (0, 1), (2,)

KINDS = {
    "sgd": Kind([optim.SGD]),
    "three": Kind((optim.RMSprop, FUSED_ADAGRAD, HEAVY), ((0,), (1,), (2,))),
    "two fused": Kind((FUSED_ADAM, FUSED_SGD), TWO),
    "shared": Kind((HEAVY, FUSED_ADAM), ((0, 1), (1, 2))),
    "fp64": Kind([FUSED_ADAM], dtypes=(FP64, FP64, FP64)),
    "bf16": Kind([FUSED_ADAM], dtypes=(BF16, BF16, BF16)),
    "fp16": Kind((FUSED_ADAM, HEAVY), TWO, dtypes=(FP16, FP32, FP16)),
    "sparse": Kind([optim.SGD], sparse=True),
    "sparse fp16": Kind((optim.SGD, optim.SGD), TWO, (FP32, FP32, FP16), sparse=True),
    "arguments": Kind([Tells]),
    "legacy": Kind((Legacy, FUSED_ADAM), TWO),
    "outside": Kind((Outside, optim.SGD), TWO),
    "disabled": Kind((Tells, FUSED_ADAM), TWO, enabled=False),
}


class World:
    """One side of the twin; methods without an underscore are called on both."""

    def __init__(self, kind: Kind, scaler: Any, numbers: dict[str, Any]) -> None:
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
            make([self._params[n] for n in share], lr=0.05)
            for make, share in zip(kind.makes, kind.shares, strict=True)
        ]
        for optimizer in self._optimizers:
            if optimizer.defaults.get("fused") and isinstance(optimizer, optim.SGD):
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()
        self.scaler = self._make(**numbers)
        self._saved = self.scaler.state_dict()
        self._was_loaded = False

    def backward(
        self, numbers: Sequence[int], draw: int, dtype: torch.dtype, form: Any, by: Any
    ) -> Any:
        losses = [(self._term(n, draw) * by).to(dtype) for n in numbers]
        scaled = self.scaler.scale(form(losses))
        scaled = list(scaled) if form is iter else scaled
        for loss in [scaled] if isinstance(scaled, Tensor) else scaled:
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

    def plant(self, number: int, value: float) -> None:
        grad = self._params[number].grad
        if grad is not None:
            grad = grad._values() if grad.is_sparse else grad
            grad.view(-1)[number % grad.numel()] = value

    def clip(self, by: Callable[..., Any], limit: float) -> Any:
        """Clip all gradients, scaled or not; torch clips no sparse ones."""
        return by(self._params[: 2 if self._kind.sparse else 3], limit)

    def unscale(self, which: int) -> Any:
        self._use_loaded_scale(self._pick(which))
        return self.scaler.unscale_(self._pick(which))

    def _use_loaded_scale(self, optimizer: optim.Optimizer) -> None:
        """Do for torch what ours does: a loaded scale is used before any loss."""
        scaler = self.scaler
        if self._was_loaded and scaler._scale is None and any(_gradients(optimizer)):
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def step(self, which: int, argument: Any = None) -> Any:
        optimizer = self._pick(which)
        stage, flags = self._flags(optimizer)
        skips_inside = getattr(optimizer, "_step_supports_amp_scaling", False)
        unscaled = stage is OptState.UNSCALED and not flags
        if skips_inside and unscaled and any(_gradients(optimizer)):
            return "not called"
        given = (argument,) if isinstance(optimizer, Tells) else ()
        self._use_loaded_scale(optimizer)
        return self.scaler.step(optimizer, *given)

    def update(self, new_scale: Any = None) -> Any:
        return self.scaler.update(*(() if new_scale is None else (new_scale,)))

    def clear(self, which: int, to_none: bool) -> None:
        # torch adds to a sparse gradient that was set to zero in place, and crashes.
        self._pick(which).zero_grad(set_to_none=to_none or self._kind.sparse)

    def change(self, name: str, number: float) -> None:
        if "factor" in name or self.scaler._get_growth_tracker() < number:
            getattr(self.scaler, name)(number)

    def save(self) -> Any:
        self._saved = self.scaler.state_dict()
        return self._saved

    def load(self, without: str, fresh: bool) -> None:
        """Load the state last saved, but for one entry, here or elsewhere."""
        if fresh:
            self.scaler = self._make()
        self.scaler.load_state_dict(
            {k: v for k, v in self._saved.items() if without not in {k, "all"}}
        )
        self._was_loaded = self._kind.enabled

    def move(self, how: Callable[[Any], Any]) -> None:
        self.scaler = how(self.scaler)

    def look(self, which: int) -> Any:
        if self._kind.enabled:
            return dict(self.scaler._check_inf_per_device(self._pick(which)))
        return None

    def preset(self, which: int, factor: float) -> None:
        self._pick(which).grad_scale = torch.tensor(factor)

    def _pick(self, which: int) -> Any:
        return self._optimizers[which % len(self._optimizers)]

    def _flags(self, optimizer: optim.Optimizer) -> tuple[Any, list[Tensor]]:
        states = self.scaler._per_optimizer_states if self._kind.enabled else {}
        state = states.get(id(optimizer), {})
        return state.get("stage"), [*state.get("found_inf_per_device", {}).values()]

    def _overflowed(self) -> bool:
        return any(flag for each in self._optimizers for flag in self._flags(each)[1])

    def _bits(self) -> Any:
        held: list[Any] = [[param, param.grad] for param in self._params]
        for optimizer in self._optimizers:
            params = optimizer.param_groups[0]["params"]
            held += [optimizer.state.get(param) for param in params]
            held += (hasattr(optimizer, "grad_scale"), self._flags(optimizer))
        scaler = self.scaler
        held += (scaler.is_enabled(), scaler.get_scale(), scaler._get_growth_tracker())
        if self._kind.enabled:
            held += (scaler.get_growth_factor(), scaler.get_backoff_factor())
            held += (scaler.get_growth_interval(), scaler._scale, scaler.state_dict())
        return _plain(held)


def _gradients(optimizer: optim.Optimizer) -> list[bool]:
    return [p.grad is not None for p in optimizer.param_groups[0]["params"]]


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


def _outcome(world: World, name: str, args: Any) -> tuple[Any, str]:
    try:
        return _plain(getattr(world, name)(*args)), ""
    except Exception as error:  # noqa: BLE001 -- any error is part of the contract
        return type(error), str(error)


def _pickled(scaler: Any) -> Any:
    return pickle.loads(pickle.dumps(scaler))  # noqa: S301 -- our own


some = st.sampled_from
which = st.integers(0, 2)
terms = some([(0, 1, 2), (0, 1, 2), (0,), (1, 2)])
losses = st.tuples(
    terms,
    st.integers(0, 15),
    some([FP32, FP32, FP32, FP16, BF16, FP64]),
    some([sum, sum, torch.stack, list, iter]),
    some([*(1.0,) * 10, 1e4, INF]),
)
clips = st.tuples(
    some([nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_]), some([0.1, 1.0, INF])
)
SCALES = (
    *(8.0, 1024.0, 3.0, 1e4, 0.7, torch.tensor(16.0), torch.tensor([3.0])),
    *(torch.tensor(7), torch.tensor(2.0, requires_grad=True), torch.ones(2)),
)
"""What `update` is given, right and wrong."""
CHANGES = (
    *(("set_growth_factor", factor) for factor in (1.0, 1.5, 4.0)),
    *(("set_backoff_factor", factor) for factor in (0.1, 0.7, 1.0)),
    *(("set_growth_interval", interval) for interval in (1, 2, 3)),
)


def _call(name: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), *args)


calls = st.one_of(
    losses.map(lambda loss: ("backward", *loss)),
    _call("plant", which, some([INF, -INF, NAN, 1e30])),
    clips.map(lambda clip: ("clip", *clip)),
    _call("unscale", which),
    _call("step", which, some([3, [4]])),
    _call("update"),
    _call("clear", which, st.booleans()),
)
rare_calls = st.one_of(
    _call("scale", some([3, [], [3], None, (), [[], 2.0], torch.ones(())])),
    _call("look", which),
    _call("update", some(SCALES)),
    some(CHANGES).map(lambda change: ("change", *change)),
)


class GradScalers(RuleBasedStateMachine):
    """Two worlds of one kind, and what may be called in them."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    @initialize(
        init_scale=some([8.0, 2.0**16, 3.0, 0.75, 1.0, 65504.0, 2.0**127]),
        growth_factor=some([2.0, 1.5, 4.0]),
        backoff_factor=some([0.5, 0.1, 0.7]),
        growth_interval=some([1, 2, 3, 2000]),
    )
    def begin(self, **numbers: float) -> None:
        self.theirs = World(self.kind, torch.amp.GradScaler, numbers)
        self.ours = World(self.kind, hs.GradScaler, numbers)
        self.lowest = 1.0 if numbers["init_scale"] > 1e30 else 2.0**-8
        self.check("backward", (0, 1, 2), 0, FP32, sum, 1.0)

    def check(self, name: str, *args: Any) -> None:
        if self.theirs.scaler.get_scale() < self.lowest:
            return
        overflowed = self.theirs._overflowed()
        expected, words = _outcome(self.theirs, name, args)
        value, message = _outcome(self.ours, name, args)
        assert (value, message[: len(words)]) == (expected, words), message
        assert self.ours._bits() == self.theirs._bits()
        if (name, args, words) == ("update", (), "") and self.kind.enabled:
            assert self.ours.scaler.last_step.skipped == overflowed

    @rule(
        losses=st.lists(losses, min_size=1, max_size=2),
        plant=some([None, None, None, (0, INF), (2, NAN), (1, 1e30)]),
        unscaled=st.sets(which),
        clip=st.none() | clips,
        preset=some([None, None, None, 2.0]),
        order=st.permutations(range(3)),
        clears=st.booleans(),
    )
    def iterate(self, **drawn: Any) -> None:
        """Make the calls of one iteration of a loop, in their order."""
        order = [n for n in drawn["order"] if n < len(self.kind.makes)]
        for loss in drawn["losses"]:
            self.check("backward", *loss)
        if drawn["plant"]:
            self.check("plant", *drawn["plant"])
        for number in drawn["unscaled"] & {*order}:
            self.check("unscale", number)
        if drawn["clip"]:
            self.check("clip", *drawn["clip"])
        if drawn["preset"]:
            self.check("preset", order[0], drawn["preset"])
        for number in order:
            self.check("step", number)
        self.check("update")
        for number in order if drawn["clears"] else ():
            self.check("clear", number, drawn["clears"])

    @rule(calls=st.lists(calls, min_size=1, max_size=3))
    def call(self, calls: Any) -> None:
        """Make any calls; most come too early or too late."""
        for call in calls:
            self.check(*call)

    @rule(call=rare_calls)
    def call_rarely(self, call: Any) -> None:
        self.check(*call)

    @rule(
        without=some(["", "_halfstep", "scale", "all"]),
        saves=st.booleans(),
        fresh=st.booleans(),
    )
    def load(self, without: str, saves: bool, fresh: bool) -> None:
        if saves:
            self.check("save")
        self.check("load", without, fresh)

    @rule(how=some([copy.deepcopy, _pickled]))
    def move(self, how: Any) -> None:
        self.check("move", how)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.filterwarnings(  # calls come in any order
    "ignore:(gradients|weights changed|no gradient|this optimizer|scaler.up|a backward)"
)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_torch(kind: str) -> None:
    """Law: whatever is called, in whichever order, all bits and errors are torch's."""
    run_state_machine_as_test(
        functools.partial(GradScalers, KINDS[kind]),
        settings=settings(max_examples=25, stateful_step_count=12),
    )

"""Rules on modules, however modules are called: again, in threads, copied, compiled."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import patched
from units import Seen, Unit

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = pytest.mark.parametrize("reentrant", [True, False])
X = torch.linspace(-1, 1, 8).view(2, 4)


def build(inner: str = "a.b") -> tuple[Any, Seen]:
    """Return a tree of units, and what they take down: a, a.b, e."""
    seen: Seen = []
    outer = Unit("a", seen, b=Unit(inner, seen))
    return Unit("", seen, a=outer, e=Unit("e", seen)), seen


def test_exceptions() -> None:
    """Law: an error inside, at whatever depth, leaves the region as it was."""
    model, seen = build("fails")
    for word in ("module:a=fp32", "module:a.b=low + module:a=promote"):
        with autocast("cpu", policy=f"torch + {word}", model=model):
            frame = active_context.active("cpu")
            for _ in range(3):
                with pytest.raises(ValueError, match="inside"):
                    model(X)
                assert active_context.active("cpu") is frame
                assert torch.is_autocast_enabled("cpu")
            model.e(X)
            assert seen[-1] == ("e", BF16, FP32)
        assert active_context.active("cpu") is None


def test_a_hook_that_raises() -> None:
    """Law: where somebody's hook raises, the scope is closed all the same."""

    def fail(*_: object) -> None:
        message = "hooked"
        raise ValueError(message)

    for register in ("register_forward_pre_hook", "register_forward_hook"):
        model, seen = build()
        getattr(model.e, register)(fail)
        with autocast("cpu", policy="torch + module:e=promote", model=model):
            frame = active_context.active("cpu")
            with pytest.raises(ValueError, match="hooked"):
                model.e(X)
            assert active_context.active("cpu") is frame
            model.a(X)
            assert seen[-1] == ("a.b", BF16, FP32)


@pytest.mark.parametrize("category", ["fp32", "low", "promote", "keep"])
def test_recursion(category: str) -> None:
    """Law: a module that calls itself is in its scope at every depth, and leaves it."""
    model, seen = build()
    with autocast("cpu", policy=f"torch + module:e={category}", model=model):
        model.e(X, depth=3)
        model.a(X)
    assert len(set(seen[:4])) == 1
    assert seen[4] == ("a", BF16, FP32)


def copied(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 -- our own bytes


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("twin", [copy.deepcopy, copied])
def test_copies_obey(twin: Callable[[nn.Module], Any]) -> None:
    """Law: copies made in a region and outside obey the rule, in regions alone."""
    words = "torch + module:a.b=low + module:a=fp32"
    expected = [("", BF16, FP32), ("a", FP32, FP32), ("a.b", BF16, BF16)]
    expected.append(("e", BF16, FP32))
    model, _ = build()
    region = autocast("cpu", policy=words, model=model)
    with region:
        inside = twin(model)
    for other in (twin(model), inside):
        with region:
            other(X)
        assert other.seen == expected
        # To attach it once more changes nothing.
        other.seen.clear()
        with autocast("cpu", policy=words, model=other):
            other(X)
        assert other.seen == expected
        other(X)
        assert other.seen[-1] == ("e", FP32, FP32)


def test_threads_share_a_module() -> None:
    """Law: threads in the same module at once, one in a region, do not meddle."""
    barrier = threading.Barrier(2, timeout=30)

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> torch.dtype:
            barrier.wait()
            found = torch.mm(x, x.T).dtype
            barrier.wait()
            return found

    for category, inside in {"fp32": FP32, "promote": FP32, "low": BF16}.items():
        model = nn.Sequential(Wait())
        own = autocast("cpu", policy=f"torch + module:0={category}", model=model)
        plain = autocast("cpu", FP16)

        def work(region: Any, module: nn.Module = model) -> Any:
            with region:
                return module(X)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(work, (own, plain))) == [inside, FP16]


def test_a_given_cache_serves_modules() -> None:
    """Law: a cache of one's own has the casts inside a scope too."""
    model, cache = build()[0], CastCache()
    for _ in range(2):
        with autocast("cpu", policy="torch + module:e=low", model=model, cache=cache):
            model(X)
    assert (cache.hits, cache.misses) == (4, 4)


# torch.compile


@pytest.fixture
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Linear):
    """A layer whose code torch.compile does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(4, 4), Layer(4, 4), Layer(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in (self.a, self.b, self.c, self.a)]


COMPILED = {
    "module:b=fp32": [BF16, FP32, BF16, BF16],
    "module:b=promote": [BF16, FP32, BF16, BF16],
    "module:a=promote + module:b=low": [FP32, BF16, BF16, FP32],
    "module:a=low + module:b=promote": [BF16, FP32, BF16, BF16],
    "module:a=keep + module:c=promote": [FP32, BF16, FP32, FP32],
    "op:linear=fp32 + module:b=low": [FP32] * 4,
}


@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore:policy rule", "ignore:Dynamo")
@pytest.mark.parametrize("whole", [True, False])
def test_around_compiled_code(whole: bool) -> None:
    """Law: a compiled model obeys rules on its modules, policy after policy.

    The like layers share compiled code: it must not be one scope's in another.
    """
    model = Small()
    if whole:
        compiled: Any = torch.compile(model, backend="aot_eager")
    else:
        compiled = model
        for layer in model.children():
            layer.compile(backend="aot_eager")
    for rules, expected in COMPILED.items():
        for _ in range(2):
            with autocast("cpu", policy=f"torch + {rules}", model=model):
                assert [out.dtype for out in compiled(X)] == expected, rules
    assert [out.dtype for out in compiled(X)] == [FP32] * 4


@pytest.mark.usefixtures("_compiler")
def test_a_whole_graph_is_refused() -> None:
    """Law: where a graph must be whole, the hook is named; no rule is left out."""
    model = Small()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"RuleHook\.pre_forward"),
        autocast("cpu", policy="torch + module:b=fp32", model=model),
    ):
        compiled(X)


def test_a_hook_that_raises_in_another_thread() -> None:
    """Law: a call that ended before the rule was in force leaves other calls alone."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(30)
            return super().forward(x)

    model = nn.Sequential(Waits(2, 2))
    fails = threading.local()

    def raises(*_: object) -> None:
        if getattr(fails, "here", False):
            message = "on purpose"
            raise ValueError(message)

    def work(*, failing: bool) -> torch.dtype:
        fails.here = failing
        with autocast("cpu", policy="torch + module:0=fp32", model=model):
            return model(torch.ones(1, 2)).dtype

    # The rule's own hooks must come after the one that raises.
    autocast("cpu", policy="torch + module:0=fp32", model=model)
    model[0].register_forward_pre_hook(raises, prepend=True)
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
        warnings.filterwarnings("ignore", "policy rule", UserWarning)
        first = pool.submit(work, failing=False)
        assert inside.wait(30)
        with pytest.raises(ValueError, match="on purpose"):
            work(failing=True)
        go_on.set()
        assert first.result() == torch.float32


@pytest.mark.parametrize("category", ["fp32", "low"])
def test_an_interrupt(category: str) -> None:
    """Law: what no hook of torch's sees, Ctrl-C among it, leaves nothing behind."""

    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt(x)

    model = nn.Sequential(nn.Sequential(Interrupted(4, 4)))
    policy = f"torch + type:Interrupted={category} + module:0=fp32"
    for _ in range(2):
        context = autocast("cpu", policy=policy, model=model)
        with pytest.raises(KeyboardInterrupt), context:
            model(X)
        assert active_context.active("cpu") is None
        assert not patched()
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0

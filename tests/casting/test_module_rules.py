"""Rules on modules: what runs inside them runs as the rule says, and nowhere else."""

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
from halfstep.policy import Policy, decide

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 8).view(2, 4)


class Special(Unit):
    """A class of its own."""


def build() -> tuple[Any, Seen]:
    """Return a tree of units, and what they take down: a, a.b, a.b.c, a.d, e."""
    seen: Seen = []
    leaf = Special("a.b.c", seen)
    inner = Unit("a.b", seen, c=leaf)
    outer = Unit("a", seen, b=inner, d=Unit("a.d", seen))
    return Unit("", seen, a=outer, e=Unit("e", seen)), seen


TYPES = {"a.b.c": ("Special", "Unit"), "": ("Unit",)}


def run(policy: str, low: torch.dtype = BF16) -> Seen:
    """Run the tree under a policy; return what it took down."""
    model, seen = build()
    with autocast("cpu", low, policy=policy, model=model):
        model(X)
    assert not torch.is_autocast_enabled("cpu")
    assert active_context.active("cpu") is None
    return seen


PLACES = ("", "a", "a.b", "a.b.c", "a.d", "e")


def planned(policy: str, low: torch.dtype = BF16) -> Seen:
    """Return what `decide` says of the tree."""
    parsed = Policy.parse(policy)
    found: Seen = []
    for place in PLACES:
        types = [
            name
            for outer in PLACES
            if (place + ".").startswith(outer + ".") or not outer
            for name in TYPES.get(outer, ("Unit",))
        ]
        dtypes: list[torch.dtype] = []
        given = FP32
        inside = parsed.rules and decide(
            None, (FP32,), "cpu", policy=parsed, low=low, module=place, types=types
        )
        if inside and inside.category == "low":
            given = low
        for op in ("mm", "mse_loss"):
            decision = decide(
                op,
                (given, FP32) if op == "mm" else (dtypes[0],) * 2,
                "cpu",
                policy=parsed,
                low=low,
                module=place,
                types=types,
            )
            as_called = dtypes[0] if dtypes else given
            dtypes.append(decision.dtype or as_called)
        found.append((place, dtypes[0], dtypes[1]))
    return found


POLICIES = [
    "module:a=fp32",
    "module:a.b=fp32",
    "module:a.b=promote",
    "module:a=keep",
    "module:a.?=fp32",
    "module:/a\\.[bd]/=fp32",
    "module:/.*c/=low",
    "type:Special=fp32",
    "type:Unit=fp32",
    "module:/.*/=fp32",
    # The first that matches decides, module by module and operation by operation.
    "module:a=fp32 + module:a.b=low",
    "module:a.b.c=fp32 + module:a.b=low + module:a=keep",
    "module:a.d=promote + module:*=fp32",
    "module:a.b=keep + module:a=low",
    "op:mm=fp32 + module:a=low",
    "op:mse_loss=keep + module:a.b=low + op:mm=promote",
    "module:a.b=fp32 + op:mm=fp32 + module:a=low",
]


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("base", ["torch", "lean"])
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("rules", POLICIES)
def test_rules_decide(rules: str, low: torch.dtype, base: str) -> None:
    """Law: each operation in each module runs as `decide` says; first match wins."""
    policy = f"{base} + {rules}"
    assert run(policy, low) == planned(policy, low)


def test_banned() -> None:
    """Law: a module that is banned raises when it is called, and leaves all as it was.

    Another one does not.
    """
    model, seen = build()
    region = autocast("cpu", policy="torch + module:a.d=banned", model=model)
    for _ in range(2):
        with region, pytest.raises(RuntimeError, match=r"'module:a\.d=banned'"):
            model(X)
    assert [name for name, *_ in seen] == ["", "a", "a.b", "a.b.c"] * 2
    with region:
        model.e(X)
        assert seen[-1] == ("e", BF16, FP32)
    model(X)


def test_attached_once() -> None:
    """Law: regions without end, with equal policies, hook a module once.

    A module inside has a hook where another rule decides than around it, and only then.
    """
    model, _ = build()
    for word in ("torch + module:a=fp32", "lean + type:Special=low + type:Unit=fp32"):
        for _ in range(3):
            autocast("cpu", policy=word, model=model)
    hooks = {module.name: len(module._forward_pre_hooks) for module in model.modules()}
    assert hooks == {"": 1, "a": 1, "a.b": 0, "a.b.c": 1, "a.d": 0, "e": 0}


@pytest.mark.filterwarnings("ignore:policy rule")
def test_inactive_elsewhere() -> None:
    """Law: outside regions, in torch's, under another policy, with autocast off: none.

    Twin: under its own policy it acts.
    """
    model, seen = build()
    own = autocast("cpu", policy="torch + module:e=fp32", model=model)
    others: list[Any] = [
        autocast("cpu"),
        torch.autocast("cpu"),
        autocast("cpu", policy="lean"),
        autocast("cpu", policy="torch + op:erfinv=low"),
    ]
    for region in others:
        with region:
            model.e(X)
    model.e(X)
    low = autocast("cpu", policy="torch + module:e=low", model=model)
    with low, torch.autocast("cpu", enabled=False):
        model.e(X)
    assert [item[1] for item in seen] == [BF16] * 4 + [FP32] * 2
    seen.clear()
    with own:
        model.e(X)
        with autocast("cpu", policy="torch + op:erfinv=low"):
            model.e(X)
        with autocast("cpu"):
            model.e(X)
        with autocast("cpu", policy="torch"):
            model.e(X)
    assert [item[1] for item in seen] == [FP32, BF16, FP32, BF16]


def test_arguments_are_cast() -> None:
    """Law: fp32 and low cast what goes in, nested and by name; others leave it."""
    seen: dict[str, list[torch.dtype]] = {}

    class Take(nn.Module):
        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]]) -> Tensor:
            found = x, more["a"][0], more["a"][1]
            seen[self.word] = [tensor.dtype for tensor in found]  # type: ignore[index]
            return x

    given = {"a": [torch.ones(1, dtype=BF16), torch.ones(1, dtype=torch.int32)]}
    for word in ("fp32", "low", "keep", "promote"):
        model = nn.Sequential(Take())
        model[0].word = word  # type: ignore[assignment]
        with autocast("cpu", policy=f"torch + module:0={word}", model=model):
            model[0](X, more=given)
    assert seen == {
        "fp32": [FP32, FP32, torch.int32],
        "low": [BF16, BF16, torch.int32],
        "keep": [FP32, BF16, torch.int32],
        "promote": [FP32, BF16, torch.int32],
    }


def test_a_module_without_tensors() -> None:
    """Law: a rule acts on a module that has no weight and is given no tensor."""

    class Make(nn.Module):
        def forward(self) -> Tensor:
            return torch.mm(X, X.T)

    model = nn.Sequential(Make())
    with autocast("cpu", policy="torch + module:0=fp32", model=model):
        assert model[0]().dtype == FP32


# However modules are called: again, in threads, copied, compiled


KINDS = pytest.mark.parametrize("reentrant", [True, False])


def small(inner: str = "a.b") -> tuple[Any, Seen]:
    """Return a tree of units, and what they take down: a, a.b, e."""
    seen: Seen = []
    outer = Unit("a", seen, b=Unit(inner, seen))
    return Unit("", seen, a=outer, e=Unit("e", seen)), seen


def test_exceptions() -> None:
    """Law: an error inside, at whatever depth, leaves the region as it was."""
    model, seen = small("fails")
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
        model, seen = small()
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
    model, seen = small()
    with autocast("cpu", policy=f"torch + module:e={category}", model=model):
        model.e(X, depth=3)
        model.a(X)
    assert len(set(seen[:4])) == 1
    assert seen[4] == ("a", BF16, FP32)


def copied(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 -- our own bytes


def num_hooks(model: nn.Module) -> list[int]:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks")
    options = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    modules = [*model.modules()]
    return [sum(len(getattr(m, each)) for m in modules) for each in tables + options]


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("twin", [copy.deepcopy, copied])
def test_copies_obey(twin: Callable[[nn.Module], Any]) -> None:
    """Law: copies, and copies of copies, made in a region and outside, obey the rule.

    They do so in regions alone; to attach it once more adds no hook.
    """
    words = "torch + module:a.b=low + module:a=fp32"
    expected = [("", BF16, FP32), ("a", FP32, FP32), ("a.b", BF16, BF16)]
    expected.append(("e", BF16, FP32))
    model, _ = small()
    region = autocast("cpu", policy=words, model=model)
    with region:
        inside = twin(model)
    hooks = num_hooks(model)
    for other in (twin(model), inside, twin(inside)):
        for context in (region, autocast("cpu", policy=words, model=other)):
            other.seen.clear()
            with context:
                other(X)
            assert (other.seen, num_hooks(other)) == (expected, hooks)
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
    model, cache = small()[0], CastCache()
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


class OwnLayer(nn.Linear):
    """A layer whose code torch.compile does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = OwnLayer(4, 4), OwnLayer(4, 4), OwnLayer(4, 4)

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

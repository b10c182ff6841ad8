"""Regions and `torch.compile`: inside what is compiled, around it, and both.

The oracle is the same program, uncompiled. Started as a program, this file is a process
that may find in torch's cache on disk what another has compiled.
"""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.nn import functional as F  # noqa: N812 -- its usual name
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# torch's own import of it warns.
QUIET = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`", "ignore:Skipping serialization"
)
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, QUIET])

torch.manual_seed(0)
M, W, V = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
TORCHS = "same_as_forward"
MM = "torch + op:mm=fp32 + op:mv=low"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert active_context.active("cpu") is None


def ran(m: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Run one of each kind: all tables cast the first, some the others."""
    product = m.mm(w)
    return (
        product,
        m.mv(v),
        F.softmax(product, -1),
        F.layer_norm(product, (8,)),
        product.exp(),
        F.mse_loss(product, m),
    )


def close(left: Any, right: Any, backend: str = "eager") -> None:
    """Compare compiled and eager results: dtypes exactly, values to the format."""
    for ours, theirs in zip(
        _pytree.tree_leaves(left), _pytree.tree_leaves(right), strict=True
    ):
        # Inductor leaves out the rounding between two operations that it fuses.
        coarsest = BF16 if backend == "inductor" else theirs.dtype
        room = 4 * torch.finfo(coarsest).eps
        torch.testing.assert_close(ours, theirs, rtol=room, atol=4 * room)


PARSED = Policy.parse(MM)
HALF_RAN: Any = autocast("cpu", torch.float16)(ran)
LEAN_RAN: Any = autocast("cpu", policy="lean")(ran)


def one_after_the_other(m: Tensor, w: Tensor, v: Tensor) -> Any:
    """Regions, islands and decorated functions."""
    with autocast("cpu"):
        seen = [ran(m, w, v)]
    with autocast("cpu", torch.float16, cache_enabled=False, policy="torch"):
        seen.append(ran(m, w, v))
    with autocast("cpu", policy=MM):
        seen.append(ran(m, w, v))
    with autocast("cpu", policy=PARSED):
        seen.append(ran(m, w, v))
    return [*seen, HALF_RAN(m, w, v), LEAN_RAN(m, w, v), ran(m, w, v)]


def nested(m: Tensor, w: Tensor, v: Tensor) -> Any:
    with autocast("cpu", torch.bfloat16, policy="lean"):
        with autocast("cpu", torch.float16):
            seen = [ran(m, w, v)]
            with autocast("cpu", policy="torch"):
                with autocast("cpu", torch.bfloat16, policy=MM):
                    seen.append(ran(m, w, v))
                seen.append(ran(m, w, v))
            with torch.autocast("cpu", torch.bfloat16):
                seen.append(ran(m, w, v))
        with autocast("cpu", enabled=False):
            seen.append(ran(m, w, v))
        with torch.autocast("cpu", enabled=False):
            seen.append(ran(m, w, v))
        seen.append(ran(m, w, v))
    return seen


@pytest.mark.parametrize("program", [one_after_the_other, nested])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_a_region_inside(program: Callable[..., Any], backend: str) -> None:
    """Law: compiled regions compute what eager ones do, in the same dtypes, twice."""
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    expected = program(M, W, V)
    for _ in range(2):
        close(compiled(M, W, V), expected, backend)
        assert not torch.is_autocast_enabled("cpu")


AROUND: dict[str, dict[str, Any]] = {
    "stock": {},
    "fp16": {"dtype": FP16},
    "lean": {"policy": "lean"},
    "lean fp16": {"policy": "lean", "dtype": FP16},
    "rules": {"policy": MM},
    "off": {"policy": "lean", "enabled": False},
    "torch": {"policy": "torch"},
}


def test_a_region_around() -> None:
    """Law: one compiled function obeys whatever region it is called in, and none.

    What was compiled under one policy must not run under another.
    """
    compiled = torch.compile(ran, backend="aot_eager", fullgraph=True)
    for kind in (*AROUND, *reversed(AROUND)):
        with autocast("cpu", **AROUND[kind]):
            close(compiled(M, W, V), ran(M, W, V))
        close(compiled(M, W, V), ran(M, W, V))
        with torch.autocast("cpu"):
            close(compiled(M, W, V), ran(M, W, V))


def test_around_and_inside() -> None:
    """Law: compiled regions without a policy take that of the region around.

    So does a decorated function.
    """
    decorated: Any = autocast("cpu", FP16, cache=CastCache())(ran)

    def inherits(m: Tensor, w: Tensor, v: Tensor) -> Any:
        with autocast("cpu", torch.float16):
            seen = ran(m, w, v)
        with autocast("cpu"):
            seen += ran(m, w, v)
        with autocast("cpu", policy=MM):
            seen += ran(m, w, v)
        return seen, decorated(m, w, v), ran(m, w, v)

    compiled = torch.compile(inherits, backend="aot_eager", fullgraph=True)
    for policy in (None, "lean", MM, "torch", "lean"):
        with autocast("cpu", policy=policy):
            expected = inherits(M, W, V)
            close(compiled(M, W, V), expected)
            close(ran(M, W, V), expected[-1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))


def loss_and_gradients(net: Callable[..., Any], params: list[nn.Parameter]) -> Any:
    loss = net(M)
    return loss, torch.autograd.grad(loss, params)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("policy", [None, "lean", "torch + op:linear=fp32"])
def test_backward(policy: str | None, backend: str) -> None:
    """Law: gradients of compiled regions, inside and around, are those of eager."""
    net = model()
    params = list(net.parameters())

    def inside(x: Tensor) -> Tensor:
        with autocast("cpu", policy=policy):
            return F.mse_loss(net(x), x)

    def around(run: Callable[..., Any], x: Tensor) -> Tensor:
        with autocast("cpu", policy=policy):
            return F.mse_loss(run(x), x)

    expected = loss_and_gradients(inside, params)
    compiled = torch.compile(inside, backend=backend, fullgraph=True)
    close(loss_and_gradients(compiled, params), expected, backend)
    whole: Any = torch.compile(net, backend=backend, fullgraph=True)
    for run in (net, whole, whole):
        found = loss_and_gradients(functools.partial(around, run), params)
        close(found, expected, backend)


# What cannot be traced


def test_an_instance_from_outside() -> None:
    """Law: a steered one is refused where a graph must be whole, else left to eager."""
    region = autocast("cpu", policy="lean")

    def opens(m: Tensor, w: Tensor, v: Tensor) -> Any:
        with region:
            return ran(m, w, v)

    whole = torch.compile(opens, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="PolicyAutocast"):
        whole(M, W, V)
    parts = torch.compile(opens, backend="aot_eager")
    close(parts(M, W, V), opens(M, W, V))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("more", [{"record": True}, {"model": nn.Sequential()}])
def test_what_a_traced_region_cannot(more: dict[str, Any], decorated: bool) -> None:
    """Law: recording and rules on modules are refused, with what to do instead."""
    policy = "torch + type:Sequential=fp32" if "model" in more else None

    def opens(m: Tensor) -> Tensor:
        with autocast("cpu", policy=policy, **more):
            return m.mm(m)

    program: Any = opens
    if decorated:
        region: Any = autocast("cpu", policy=policy, **more)
        program = region(lambda m: m.mm(m))
    compiled: Any = torch.compile(program, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported) as caught:
        compiled(M)
    assert (
        "autocast(record=True) and autocast(model=...) cannot be traced by "
        "torch.compile; enter such a context around the compiled function."
    ) in str(caught.value)


def test_the_setting_of_backward_is_restored() -> None:
    """Law: torch's setting for compiled backward passes is lent while regions are open.

    One that the user has chosen stays.
    """
    config: Any = torch._functorch.config
    assert config.backward_pass_autocast == TORCHS
    with suppress(KeyError), autocast("cpu", policy="lean"):
        assert config.backward_pass_autocast == "off"  # noqa: S105 -- no password
        with autocast("cpu", policy="torch"), autocast("cpu", cache=CastCache()):
            assert config.backward_pass_autocast == "off"  # noqa: S105
        raise KeyError
    assert config.backward_pass_autocast == TORCHS
    with config.patch(backward_pass_autocast=[]), autocast("cpu", policy="lean"):
        assert config.backward_pass_autocast == []


def test_wrong_words_are_refused() -> None:
    """Law: a policy that eager code would refuse is refused with the same text."""

    def opens(m: Tensor) -> Tensor:
        with autocast("cpu", policy="lean + op:sofmax=fp32"):
            return m.mm(m)

    # Some versions of torch show the text with quotes escaped.
    with pytest.raises(Exception, match=r"did you mean \\*'op:softmax=fp32"):
        torch.compile(opens, backend="eager", fullgraph=True)(M)
    assert not torch.is_autocast_enabled("cpu")


class Exported(nn.Module):
    def __init__(self, policy: str | None) -> None:
        super().__init__()
        self.inner, self.policy = model(), policy

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with autocast("cpu", torch.bfloat16, policy=self.policy):
            low = self.inner(x)
            with autocast("cpu", enabled=False):
                return low, x.mm(x), *ran(x, x, x[0])


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec")
@pytest.mark.parametrize(
    ("policy", "strict"), [(None, True), ("torch", False), ("lean", True), (MM, False)]
)
def test_export(policy: str | None, strict: bool) -> None:
    """Law: a model whose forward opens regions is exported with them."""
    net = Exported(policy)
    exported = torch.export.export(net, (M,), strict=strict)
    for run in (exported.module(), exported.run_decompositions().module()):
        close(run(M), net(M))
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_inside_a_checkpoint(reentrant: bool) -> None:
    """Law: compiled code runs again under the policy of its forward pass."""
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def grads(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager")
        layer.zero_grad()
        with autocast("cpu", policy="torch + op:linear=fp32"):
            out = checkpoint(compiled, x, use_reentrant=reentrant)
        out.float().sum().backward()
        plain = layer.weight.grad
        layer.zero_grad()
        with autocast("cpu", policy="torch + op:linear=fp32"):
            out = checkpoint(run, x, use_reentrant=reentrant)
        out.float().sum().backward()
        return [grad for grad in (plain, layer.weight.grad) if grad is not None]

    compiled, eager = grads(lambda x: layer(x).sin())
    assert torch.equal(compiled, eager)


# Blocks that cannot be traced to their end

BF16_SOFTMAX = "torch + op:softmax=low"


def broken(x: Tensor) -> Tensor:
    """Break the graph in a context."""
    with autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX):
        y = x @ x
        torch._dynamo.graph_break()
        return (y @ x).softmax(-1)


def broken_in_two(x: Tensor) -> Tensor:
    """Break the graph in a context inside another."""
    with autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX):
        with autocast("cpu", torch.bfloat16, policy="lean"):
            torch._dynamo.graph_break()
            y = x @ x
        return y.softmax(-1)


@autocast("cpu", torch.bfloat16, policy=BF16_SOFTMAX)
def decorated(x: Tensor) -> Tensor:
    """Break the graph in a function that a context decorates."""
    torch._dynamo.graph_break()
    return (x @ x).softmax(-1)


@pytest.mark.parametrize("program", [broken, broken_in_two, decorated])
def test_graph_break(program: Callable[[Tensor], Tensor]) -> None:
    """Law: the block runs as in eager mode, and leaves no context behind."""
    x = torch.randn(4, 4)
    expected = program(x)
    assert expected.dtype == torch.bfloat16
    compiled = torch.compile(program, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert active_context.active("cpu") is None
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    assert active_context.active("cpu") is None
    assert not torch.is_autocast_enabled("cpu")


POLICIES = ["torch", "lean", "torch + op:exp=fp32"]
ALIKE = (
    "torch + op:exp=fp32 + op:log=low + op:tan=keep",
    "torch + op:log=fp32 + op:cosh=low + op:rsqrt=keep",
)
"""Policies whose hashes are equal modulo 28560."""


def compared(m: Tensor) -> tuple[Tensor, ...]:
    """Run one operation that each policy treats in its own way."""
    return m.mm(m), m.mv(m[0]), m.bfloat16().exp()


def dtypes(policy: str, function: Any) -> list[str]:
    with autocast("cpu", policy=policy):
        return [str(result.dtype) for result in function(torch.ones(4, 4))]


def sign(policy: str) -> list[str]:
    """Return what is part of the key of torch's caches on disk in a context."""
    with autocast("cpu", policy=policy, cache=CastCache()):
        return [torch.compiler.config.cache_key_tag]


def process(what: str, policies: list[str], cache: Path) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, what, *policies],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="no cache of traces there")
def test_a_policy_looks_the_same_in_every_process(tmp_path: Path) -> None:
    """Law: the key of torch's caches on disk names the policy, whatever its number.

    The user's own tag comes back.
    """
    torch.compiler.config.cache_key_tag = "own"
    here = [sign(policy) for policy in POLICIES]
    assert torch.compiler.config.cache_key_tag == "own"
    torch.compiler.config.cache_key_tag = ""
    assert process("sign", POLICIES[::-1], tmp_path) == here[::-1]
    here += map(sign, ALIKE)
    assert len(set(map(str, here))) == len(POLICIES) + len(ALIKE)


@pytest.mark.filterwarnings("ignore:policy rule")
def test_policies_beyond_the_numbers() -> None:
    """Law: however many policies there are, none runs what another compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(compared, backend="eager", fullgraph=True)
    expected = [dtypes(policy, compared) for policy in POLICIES]
    ops = ("exp", "log", "sinh", "cosh", "tan", "acos", "asin", "erfinv", "expm1")
    for number, (one, other) in enumerate(permutations(ops, 2)):
        with autocast("cpu", policy=f"torch + op:{one}=fp32 + op:{other}=low"):
            pass
        if number % 20 == 0:
            assert [dtypes(policy, compiled) for policy in POLICIES] == expected


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("policy", ["torch", "lean", MM])
def test_other_devices_are_not_in_autocast(policy: str) -> None:
    """Law: a context says of no device but its own that autocast is on."""
    others = ("cuda", "xpu", "mps", "ipu", "maia", "mtia", "hpu", "xla")
    devices = list(filter(torch.amp.is_autocast_available, others))
    before = [torch.get_autocast_dtype(device) for device in devices]
    with autocast("cpu", policy=policy, cache=CastCache()):
        assert not any(map(torch.is_autocast_enabled, devices))
        assert [torch.get_autocast_dtype(device) for device in devices] == before


def test_contexts_that_overlap_share_the_settings() -> None:
    """Law: the compiler's settings last until the last of the contexts has ended."""
    config: Any = torch._functorch.config
    first, second = (autocast("cpu", policy=policy) for policy in ("lean", MM))
    first.__enter__()
    second.__enter__()
    tag = torch.compiler.config.cache_key_tag
    first.__exit__(None, None, None)
    assert config.backward_pass_autocast == "off"  # noqa: S105 -- no password
    assert torch.compiler.config.cache_key_tag == tag
    second.__exit__(None, None, None)
    assert config.backward_pass_autocast == TORCHS
    assert not torch.compiler.config.cache_key_tag


@pytest.mark.slow
def test_compiled_code_is_found_under_its_own_policy(tmp_path: Path) -> None:
    """Law: a process never runs what another compiled under another policy."""
    eager = [dtypes(policy, compared) for policy in POLICIES]
    assert len(set(map(str, eager))) == len(POLICIES)
    for policy, expected in zip(POLICIES, eager, strict=True):
        assert process("compile", [policy], tmp_path) == [expected]


if __name__ == "__main__":
    for_one: Any = sign
    if sys.argv[1] == "compile":
        compiled = torch.compile(compared, fullgraph=True)

        def for_one(policy: str) -> list[str]:
            return dtypes(policy, compiled)

    sys.stdout.write(str([for_one(policy) for policy in sys.argv[2:]]))

"""Under torch's table our regions give what torch.autocast gives, to the bit.

Started as a program, this file takes down what torch alone gives, in a process in which
no kernel of ours was ever installed.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import op_arguments
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from versions import torch_has_lstm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Outcome = tuple[str, list[Any]]
"""Operation; what came out, and gradients. Or the text of an error."""

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "LSTM": (lambda: nn.LSTM(8, 8), (3, 2, 8)),
    "GRU": (lambda: nn.GRU(8, 8), (3, 2, 8)),
    "RNN": (lambda: nn.RNN(8, 8), (3, 2, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 8), (2, 8)),
    "Encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0), (3, 2, 8)),
    "Conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU()),
        (2, 2, 6, 6),
    ),
    "Norms": (
        lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.LogSoftmax(1)),
        (4, 8),
    ),
}
"""What users call: operations inside C++ composites, and weights."""


def calls(device: str) -> list[tuple[str, Callable[[], tuple[Any, list[Tensor]]]]]:
    """Return calls by name; each gives what comes out, and what it came from."""
    made: list[tuple[str, Callable[[], tuple[Any, list[Tensor]]]]] = []

    def listed(
        run: Callable[..., Any], given: Any, keywords: dict[str, Any]
    ) -> Callable[[], tuple[Any, list[Tensor]]]:
        def call() -> tuple[Any, list[Tensor]]:
            leaves: list[Tensor] = []

            def leaf(value: Any) -> Any:
                if isinstance(value, Tensor) and value.is_floating_point():
                    leaves.append(value.detach().clone().requires_grad_())
                    return leaves[-1]
                return value

            arguments = _pytree.tree_map(leaf, given)
            return run(*arguments, **keywords), leaves

        return call

    def module(
        build: Callable[[], nn.Module], shape: tuple[int, ...]
    ) -> Callable[[], tuple[Any, list[Tensor]]]:
        def call() -> tuple[Any, list[Tensor]]:
            torch.manual_seed(0)
            model = build().to(device)
            x = torch.randn(shape).to(device).requires_grad_()
            return (model(x), model(x)), [x, *model.parameters()]

        return call

    for kind, entries in vars(op_arguments.torch_lists(device)).items():
        for operation, *rest in entries:
            keywords = next((item for item in rest if isinstance(item, dict)), {})
            for given in (item for item in rest if isinstance(item, tuple)):
                run = op_arguments.function(kind, operation)
                made.append((f"{kind}.{operation}", listed(run, given, keywords)))
    made += [(name, module(*both)) for name, both in MODULES.items()]
    return made


def outcomes(device: str, make: Callable[[], Any]) -> list[Outcome]:
    """Return what each call gives in a region of its own, with gradients."""
    seen: list[Outcome] = []
    for name, call in calls(device):
        torch.manual_seed(1)
        try:
            with make():
                out, leaves = call()
            results = _pytree.tree_leaves(out)
            ends = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
            grads: list[Any] = []
            if ends:
                total = torch.stack([end.float().sum() for end in ends]).sum()
                grads += torch.autograd.grad(total, leaves, allow_unused=True)
            seen.append((name, [*results, *grads]))
        except (RuntimeError, TypeError) as error:
            seen.append((name, [str(error).splitlines()[0]]))
    return seen


def alone(device: str, low: str) -> list[Outcome]:
    return outcomes(device, lambda: torch.autocast(device, DTYPES[low]))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, list[Outcome]]]:
    """Return a device, and what torch alone gives on it, by dtype."""
    file = tmp_path_factory.mktemp("alone") / "seen.pt"
    command = [sys.executable, __file__, request.param, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, list[Outcome]] = torch.load(file, weights_only=False)
    return request.param, seen


@pytest.fixture(scope="module")
def _everything_installed() -> None:
    """Put our kernels in front of torch's for every operation that has a row."""
    from halfstep.casting import dispatch_kernels
    from halfstep.policy import op_tables

    for device in ("cpu", "cuda"):
        for table in (op_tables.TABLES, op_tables.LEAN):
            dispatch_kernels.install(list(table[device]))


WAYS: dict[str, dict[str, Any]] = {
    "torch's own": {},
    "default": {},
    "torch": {"policy": "torch"},
    "a rule on something else": {"policy": "torch + op:lgamma=fp32"},
    "a cache": {"cache": ...},
    "recorded": {"record": True},
    "reset inside another policy": {"policy": "torch"},
}


def same(left: Any, right: Any) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return bool(type(left) is type(right) and left == right)
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and torch.equal(
        *(
            t.detach()
            .clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.uint8)
            for t in (left, right)
        )
    )


def different(ours: list[Outcome], theirs: list[Outcome]) -> list[str]:
    """Return the operations whose results are not the same."""
    pairs = zip(ours, theirs, strict=True)
    return [
        name
        for (name, left), (_, right) in pairs
        if len(left) != len(right) or not all(map(same, left, right))
    ]


@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.usefixtures("_everything_installed")
@pytest.mark.parametrize(
    ("way", "low"), [*((way, "bf16") for way in WAYS), ("default", "fp16")]
)
def test_the_same_bits(
    oracle: tuple[str, dict[str, list[Outcome]]], way: str, low: str
) -> None:
    """Law: values, dtypes, gradients and errors are torch's, kernels installed too."""
    from halfstep.casting.autocast_mode import autocast
    from halfstep.casting.weight_cache import CastCache

    device, seen = oracle
    more: Any = {k: CastCache() if v is ... else v for k, v in WAYS[way].items()}

    @contextlib.contextmanager
    def make() -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            if way == "torch's own":
                contexts.enter_context(torch.autocast(device, DTYPES[low]))
                yield
                return
            if "reset" in way:
                contexts.enter_context(autocast(device, policy="lean"))
            contexts.enter_context(autocast(device, DTYPES[low], **more))
            yield

    assert different(outcomes(device, make), seen[low]) == []


def test_what_torch_refuses(oracle: tuple[str, dict[str, list[Outcome]]]) -> None:
    """Law: all other calls give values."""
    device, seen = oracle
    if device == "cpu":
        refused = {name for name, found in seen["bf16"] if isinstance(found[0], str)}
        unknown = set() if torch_has_lstm(torch.bfloat16) else {"LSTM"}
        assert refused == unknown | {
            # Its list holds a mix of fp16 and fp32, which a bf16 region refuses.
            "torch_need_autocast_promote.cat",
            "torch_need_autocast_promote.stack",
            # They have no backward pass.
            "torch_16._addmm_activation",
            "torch_16._native_multi_head_attention",
        }


if __name__ == "__main__":
    where, path = sys.argv[1:]
    torch.save({low: alone(where, low) for low in DTYPES}, Path(path))
    assert "halfstep.casting.dispatch_kernels" not in sys.modules

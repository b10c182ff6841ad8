"""The script that adds other libraries to the workloads of `halfstep bench`."""

from importlib import import_module
from typing import Any

import pytest
import torch
from bench_runs import flags, planted_rates

from halfstep.bench import recipe, results

libraries = pytest.importorskip("benchmarks.libraries")

WORDS = "--layers 2 --width 64 --batch 4 --accumulate 3 --optimizer adamw --device cpu"
GIVEN: dict[str, Any] = {
    "accelerate": {"cpu": True, "gradient_accumulation_steps": 3}
    | {"mixed_precision": "bf16"},
    "fabric-mixed": {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed"},
    "fabric-true": {"accelerator": "cpu", "devices": 1, "precision": "bf16-true"},
}
MADE = {"accelerate": ("accelerate", "Accelerator")}


@pytest.mark.parametrize("name", libraries.CANDIDATES)
def test_library_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a library gets dtype, device and micro-batches, and learns as fp32 does.

    After as many steps of warm-up, or losses would not compare.
    """
    if name.endswith("bit") and torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("Inductor's AVX2 code of torchao's optimizers reads out of bounds")
    planted_rates(monkeypatch)
    monkeypatch.setitem(recipe.BENCHES, "recipe", recipe.BENCHES["recipe"])
    given: list[Any] = []
    if name in GIVEN:
        package, kind = MADE.get(name, ("lightning_fabric", "Fabric"))
        make = getattr(import_module(package), kind)

        def noting(**settings: Any) -> Any:
            given.append(settings)
            return make(**settings)

        monkeypatch.setattr(f"{package}.{kind}", noting)
    settings = vars(flags("recipe", WORDS))
    losses = {}
    for each in ("fp32", name):
        server = libraries.worker("recipe", each, settings)
        assert server({"seed": 1})["absent"] is None
        losses[each] = server({"steps": 2})["losses"]
    assert losses[name] == pytest.approx(losses["fp32"], rel=2**-6)
    assert given == ([GIVEN[name]] * 2 if name in GIVEN else [])


def test_the_command_names_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the printed command is the script, as `halfstep bench` lacks libraries."""
    monkeypatch.setitem(recipe.BENCHES, "recipe", recipe.BENCHES["recipe"])
    libraries.add("recipe")
    command = results.command(flags("recipe", "--candidates torch.amp,accelerate"))
    assert command.startswith("python -m benchmarks.libraries recipe --layers ")

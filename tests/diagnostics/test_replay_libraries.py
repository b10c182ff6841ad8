"""First bad operation in models and functions that others wrote.

The detector was not made on these: they were run once it was done.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.nonfinite.origin import BadOp

Plant = Callable[[Any], None]


X = torch.linspace(-2, 2, 160).sin().view(2, 5, 16)
IDS = torch.tensor([[3, 7, 1, 9, 4, 2], [5, 6, 8, 2, 1, 3]])
KEEP = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
CLASSES = torch.tensor([0, 2])


_BERT = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0}
_GPT = {"n_positions": 8, "n_embd": 16, "bos_token_id": 0, "eos_token_id": 0}
HUB: dict[str, tuple[str, str, dict[str, int]]] = {
    "bert": (
        *("BertConfig", "BertForSequenceClassification"),
        _BERT | {"hidden_size": 16, "intermediate_size": 32, "num_labels": 3},
    ),
    "t5": (
        *("T5Config", "T5ForConditionalGeneration"),
        _T5 | {"num_layers": 2, "num_heads": 2},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT | {"n_layer": 2, "n_head": 2}),
}
"""Class of the configuration and of the model, and sizes."""


def hub(name: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config_name, model_name, sizes = HUB[name]
    attention = more.get("attention", "eager")
    config = getattr(transformers, config_name)(
        vocab_size=20, attn_implementation=attention, **sizes
    )
    model: nn.Module = getattr(transformers, model_name)(config)
    if more.get("recompute"):
        config.use_cache = False
        # The older name is going, the newer one not yet everywhere.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    return model.train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hub("bert"),
    "bert sdpa": lambda: hub("bert", attention="sdpa"),
    "t5": lambda: hub("t5"),
    "t5 recomputed": lambda: hub("t5", recompute=True),
    "gpt2": lambda: hub("gpt2"),
}


def loss_of(name: str, model: nn.Module, labels: Tensor = CLASSES) -> Tensor:
    """Return the loss that a model of this name is trained with."""
    given = {"input_ids": IDS, "labels": labels if "bert" in name else IDS}
    if name != "gpt2":
        given["attention_mask"] = KEEP
    return model(**given).loss


def told(name: str, plant: Plant | None = None, **more: Any) -> BadOp | None:
    """Return what is said of a model, perhaps with a fault in it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if plant is not None:
        with torch.no_grad():
            plant(model)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(name, model, **more)

    return hs.find_nonfinite(model, step, scale=2.0**6) or None


def weight(path: str, value: float, *, some: bool = False) -> Plant:
    """Return what fills a parameter; `some`: not what all sums to 0 behind a norm."""

    def plant(model: nn.Module) -> None:
        filled = model.get_parameter(path)
        (filled[::2, ::2] if some else filled.view(-1)[:1]).fill_(value)

    return plant


def scores(model: nn.Module) -> None:
    """Make scores leave float16, from queries and keys that fit."""
    attention = model.get_submodule("bert.encoder.layer.0.attention.self")
    for part in ("query", "key"):
        attention.get_submodule(part).weight.mul_(3e4)


RANGE, WEIGHT = ("forward range", "forward"), ("weight", "weight")
BERT, T5 = "bert.encoder.layer", "decoder.block.1.layer"
FAULTS: list[tuple[str, Plant, str, str, tuple[str, str]]] = [
    ("bert", scores, f"{BERT}.0.attention.self", "matmul", RANGE),
    # GPT-2's layers call addmm.
    *(
        (name, weight(f"{path}.weight", 6e4, some=True), path, "linear addmm", RANGE)
        for name, path in (
            ("bert sdpa", f"{BERT}.0.attention.self.value"),
            ("t5 recomputed", f"{T5}.2.DenseReluDense.wi"),
            ("gpt2", "transformer.h.1.mlp.c_fc"),
        )
    ),
    *(
        (name, weight(path, math.nan), path.rpartition(".")[0], "", WEIGHT)
        for name, path in (
            ("bert", "classifier.weight"),
            ("t5 recomputed", "decoder.final_layer_norm.weight"),
        )
    ),
]
"""Model, plant, and the module, operations, cause and phase that are expected."""


@pytest.mark.parametrize(("name", "plant", "module", "ops", "verdict"), FAULTS)
def test_a_fault_is_told(
    name: str, plant: Plant, module: str, ops: str, verdict: tuple[str, str]
) -> None:
    """Law: module, operation and cause are right in models of other people's."""
    bad = required(told(name, plant))
    assert bad.module == module, str(bad)
    assert not ops or bad.op in ops.split(), str(bad)
    assert (bad.cause, bad.phase) == verdict, str(bad)


def test_a_label_is_told() -> None:
    """Law: a label without a class is told where the model takes it."""
    bad = required(told("bert", labels=torch.tensor([0, 3])))
    assert bad.cause == "label"
    assert str(bad).startswith("model (cross_entropy): index 3 at 1 of 2 places, yet ")
    assert "classes are 0 to 2" in str(bad)


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_raises_no_alarm(name: str) -> None:
    """Law: masks, dropout and checkpoints of others' are no faults."""
    assert told(name) is None


def plain(function: Callable[[nn.Linear], Tensor]) -> BadOp | None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    return hs.find_nonfinite(model, lambda: function(model)) or None


HEALTHY: dict[str, Callable[[nn.Linear], Tensor]] = {
    "normalised zeros": lambda m: functional.normalize(m(X) * 0, dim=-1).sum(),
    "norm of zeros": lambda m: (m(X) * 0).norm(dim=-1).sum(),
    "distance to itself": lambda m: torch.cdist(m(X), m(X)).sum(),
    "x log y": lambda m: torch.xlogy(torch.zeros(2, 5, 4), m(X).softmax(-1)).sum(),
    "saturated": lambda m: functional.binary_cross_entropy(
        torch.sigmoid(m(X) * 1e4), torch.ones(2, 5, 4)
    ),
    "deviation of equals": lambda m: (m(X) * 0).std(-1).sum(),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_torch_keeps_finite_is_no_fault(name: str) -> None:
    """Law: infinities that torch makes and masks inside a slope are not named."""
    assert plain(HEALTHY[name]) is None

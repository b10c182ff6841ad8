"""`find_nonfinite` in models and functions that other libraries wrote."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from required import required
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs

X = torch.linspace(-2, 2, 160).sin().view(2, 5, 16)
IDS = torch.tensor([[3, 7, 1, 9, 4, 2], [5, 6, 8, 2, 1, 3]])
KEEP = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])

_BERT = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0}
_GPT = {"n_positions": 8, "n_embd": 16, "bos_token_id": 0, "eos_token_id": 0}
HUB: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (
        *("BertConfig", "BertForSequenceClassification"),
        _BERT | {"hidden_size": 16, "intermediate_size": 32, "num_labels": 3},
    ),
    "t5": (
        *("T5Config", "T5ForConditionalGeneration"),
        _T5 | {"num_layers": 2, "num_heads": 2, "use_cache": False},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT | {"n_layer": 2, "n_head": 2}),
}
"""Class of the configuration and of the model, and sizes. T5 is recomputed."""


def hub(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config_name, model_name, sizes = HUB[name]
    config = getattr(transformers, config_name)(
        vocab_size=20, attn_implementation="eager", **sizes
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, model_name)(config)
    if name == "t5":
        # The older name is going, the newer one not yet everywhere.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    return model.train()


def scores(model: nn.Module) -> None:
    """Make scores leave float16, from queries and keys that fit."""
    attention = model.get_submodule("bert.encoder.layer.0.attention.self")
    for part in ("query", "key"):
        attention.get_submodule(part).weight.mul_(3e4)


def wide(path: str) -> Callable[[nn.Module], None]:
    """Return what makes a product leave float16, not summing to 0 behind a norm."""
    return lambda model: model.get_parameter(f"{path}.weight")[::2, ::2].fill_(6e4)


FEED_FORWARD = "decoder.block.1.layer.2.DenseReluDense.wi"
FAULTS: list[tuple[str, Callable[[nn.Module], None], str, str]] = [
    ("bert", scores, "bert.encoder.layer.0.attention.self", "matmul"),
    ("t5", wide(FEED_FORWARD), FEED_FORWARD, "linear"),
    # GPT-2's layers call addmm.
    ("gpt2", wide("transformer.h.1.mlp.c_fc"), "transformer.h.1.mlp.c_fc", "addmm"),
]


@pytest.mark.parametrize(("name", "plant", "module", "op"), FAULTS)
def test_a_fault_is_named(
    name: str, plant: Callable[[nn.Module], None], module: str, op: str
) -> None:
    """Law: module, operation and cause are right; the healthy model is not accused."""
    model = hub(name)
    batch = {"input_ids": IDS, "labels": torch.tensor([0, 2])}
    if name != "bert":
        batch["labels"] = IDS
    if name != "gpt2":
        batch["attention_mask"] = KEEP

    def step() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(**batch).loss

    assert not hs.find_nonfinite(model, step, scale=2.0**6)
    with torch.no_grad():
        plant(model)
    bad = required(hs.find_nonfinite(model, step, scale=2.0**6))
    assert (bad.module, bad.op) == (module, op), str(bad)
    assert (bad.cause, bad.phase) == ("forward range", "forward")


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
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    assert not hs.find_nonfinite(model, lambda: HEALTHY[name](model))

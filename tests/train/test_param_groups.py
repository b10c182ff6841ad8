"""Groups of an optimizer: what learns, how fast, and what decays."""

from typing import Any

import pytest
from data_files import refused
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from halfstep.errors import UserError
from halfstep.train.config import TrainConfig
from halfstep.train.param_groups import freeze, layer_depth, make_optimizer

LR = 0.125


@pytest.fixture
def bert() -> nn.Module:
    """Return a BERT of two blocks, small enough to count by hand."""
    shape = {"vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 1, "intermediate_size": 8, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(max_position_embeddings=6, **shape))


def place_of(model: nn.Module, layer_decay: float = 1.0) -> dict[str, dict[str, Any]]:
    config = TrainConfig(weight_decay=0.25, layer_decay=layer_decay)
    made = make_optimizer(model, config, LR).param_groups
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in made:
        for param in group["params"]:
            name = names[id(param)]
            assert name not in found
            found[name] = group
    return found


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_layer_decay_by_hand(bert: nn.Module, layer_decay: float) -> None:
    """Law: each block learns at its share of the rate above, embeddings slowest.

    Matrices decay; biases and the scales of norms do not; each is in once.
    """
    found = place_of(bert, layer_decay)
    assert found.keys() == dict(bert.named_parameters()).keys()
    by_hand = {"bert.embeddings.": 3, "bert.encoder.layer.0.": 2, "bert.pooler.": 0}
    by_hand |= {"bert.encoder.layer.1.": 1, "classifier.": 0}
    for name, group in found.items():
        (below,) = (n for start, n in by_hand.items() if name.startswith(start))
        assert group["lr"] == LR * layer_decay**below, name
        is_matrix = not name.endswith("bias") and "LayerNorm" not in name
        assert group["weight_decay"] == (0.25 if is_matrix else 0.0), name


DEPTHS = {
    "model.layers.3.self_attn.q_proj.weight": 4,
    "transformer.h.0.attn.c_attn.weight": 1,
    "transformer.wte.weight": 0,
    "model.embed_tokens.weight": 0,
    "roberta.embeddings.position_embeddings.weight": 0,
    "score.weight": 7,
    "model.norm.weight": 7,
}


def test_depth_of_other_models() -> None:
    """Law: blocks and embeddings are known by the names that models have for them."""
    assert {name: layer_depth(name, 6) for name in DEPTHS} == DEPTHS


def test_no_blocks() -> None:
    """Law: a decay of layers is refused where there are none; one rate is not."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    message = r"^--layer-decay 0.9: Sequential has no blocks"
    with pytest.raises(UserError, match=message):
        place_of(model, 0.9)
    assert len(place_of(model)) == 4


def test_freeze_by_hand(bert: nn.Module) -> None:
    """Law: a pattern takes the module that it names and all in it."""
    freeze(bert, ("bert.embeddings", "bert.encoder.layer.1", "bert.emb*"))
    for name, param in bert.named_parameters():
        frozen = name.startswith(("bert.embeddings.", "bert.encoder.layer.1."))
        assert param.requires_grad == (not frozen), name
    # What does not learn is in no group, and brings those below no nearer the head.
    found = place_of(bert, 0.5)
    assert not any(".embeddings." in name or ".layer.1." in name for name in found)
    assert found["bert.encoder.layer.0.output.dense.weight"]["lr"] == LR * 0.5**2


LAYER = "bert.encoder.layer.{}.output.dense"
NEAREST = f"{LAYER.format(2)} matches no parameter; nearest module: {LAYER.format(1)}."


def test_freeze_refused(bert: nn.Module) -> None:
    """Law: a pattern without a match is refused with the nearest; so are all."""
    for patterns, fault in (
        (["bert.pooler", LAYER.format(2)], NEAREST),
        (["bert", "classifier"], "bert,classifier leaves no parameter to learn."),
    ):
        assert refused(freeze, bert, patterns) == f"--freeze {fault}"

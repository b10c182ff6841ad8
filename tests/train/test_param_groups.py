"""Groups of an optimizer: what learns, and what decays."""

from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from halfstep.errors import UserError
from halfstep.train.config import TrainConfig
from halfstep.train.param_groups import freeze, make_optimizer


@pytest.fixture
def bert() -> nn.Module:
    """Return a BERT of two blocks, small enough to count by hand."""
    shape = {"vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 1, "intermediate_size": 8, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(max_position_embeddings=6, **shape))


def place_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    made = make_optimizer(model, TrainConfig(weight_decay=0.25), 1e-3).param_groups
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in made:
        for param in group["params"]:
            name = names[id(param)]
            assert name not in found
            found[name] = group
    return found


def test_weight_decay(bert: nn.Module) -> None:
    """Law: matrices decay; biases and the scales of norms do not; each is in once."""
    found = place_of(bert)
    assert found.keys() == dict(bert.named_parameters()).keys()
    for name, group in found.items():
        is_matrix = not name.endswith("bias") and "LayerNorm" not in name
        assert group["weight_decay"] == (0.25 if is_matrix else 0.0), name


def test_freeze_by_hand(bert: nn.Module) -> None:
    """Law: a pattern takes the module that it names and all in it."""
    freeze(bert, ("bert.embeddings", "bert.encoder.layer.1", "bert.emb*"))
    for name, param in bert.named_parameters():
        frozen = name.startswith(("bert.embeddings.", "bert.encoder.layer.1."))
        assert param.requires_grad == (not frozen), name
    # What does not learn is in no group.
    found = place_of(bert)
    assert not any(".embeddings." in name or ".layer.1." in name for name in found)


LAYER = "bert.encoder.layer.{}.output.dense"
NEAREST = f"{LAYER.format(2)} matches no parameter; nearest module: {LAYER.format(1)}."


def test_freeze_refused(bert: nn.Module) -> None:
    """Law: a pattern without a match is refused with the nearest; so are all."""
    for patterns, fault in (
        (["bert.pooler", LAYER.format(2)], NEAREST),
        (["bert", "classifier"], "bert,classifier leaves no parameter to learn."),
    ):
        with pytest.raises(UserError) as caught:
            freeze(bert, patterns)
        assert str(caught.value) == f"--freeze {fault}"

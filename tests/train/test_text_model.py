"""The models from scratch, apart from training them."""

from pathlib import Path

import torch

from halfstep.train import model
from halfstep.train.text_model import TextConfig, TextForTokenClassification

SHAPE = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}


def test_many_outputs_share_rows() -> None:
    """Law: the table of the linear model stays under 2**24 weights."""
    config = TextConfig(**SHAPE, vocab_size=9, num_labels=2001)
    assert 2**22 < TextForTokenClassification(config).linear.weight.numel() < 2**24


def test_saved_and_loaded(tmp_path: Path) -> None:
    """Law: a folder loads as the same model, with the features of its vocabulary."""
    outputs = ("O", "B-PER", "I-PER")
    head = "TokenClassification"
    made = model.build(
        "tiny", ["Ada, 北京"] * 2, outputs, head=head, max_length=16, dropout=None
    )
    tagger = made.model.eval()
    assert isinstance(tagger, TextForTokenClassification)
    torch.nn.init.normal_(tagger.linear.weight)
    tagger.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    tokenizer, loaded, missing = model.load(tmp_path, head)
    assert not missing
    assert type(loaded) is TextForTokenClassification
    inputs = tokenizer("ADA 北京", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, tagger(**inputs).logits)

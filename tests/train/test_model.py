"""From texts to token ids and models: characters, sizes, and models from elsewhere."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from data_files import refused
from transformers import (
    BertConfig,
    BertModel,
    PerceiverConfig,
    PerceiverForSequenceClassification,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetModel,
)

from halfstep.train import model
from halfstep.train.data.tokenized import EncodedTexts, encode_texts

PAD, UNKNOWN, START, END, MASK = range(5)
LABELS = ("no", "yes")
HEAD = "SequenceClassification"
OWN_DROPOUT = 0.25


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no folder must not reach the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Return the folder of a BERT without a classifier, and its WordPiece tokenizer."""
    folder = tmp_path / "bert"
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 20}
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    more = shape | dict.fromkeys(names, OWN_DROPOUT)
    # A narrow model needs more to begin with.
    config = BertConfig(vocab_size=12, initializer_range=0.2, **more)
    BertModel(config).save_pretrained(folder)
    word_pieces().save_pretrained(folder)
    return folder


def scratch(name: str, texts: Sequence[str], **words: Any) -> model.Network:
    given = {"head": HEAD, "max_length": 8, "dropout": None} | words
    return model.build(name, texts, LABELS, **given)


def fetched(name: str | Path, **words: Any) -> model.Network:
    given = {"head": HEAD, "max_length": 128, "dropout": None} | words
    return model.build(str(name), [], LABELS, **given)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    encoded = encode_texts(tokenizer, texts)
    values, starts = encoded.columns["input_ids"]
    pairs = zip(starts, encoded.lengths, strict=True)
    return [values[start : start + length].tolist() for start, length in pairs]


def word_pieces() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    own = ("play", "##ing", "##ed", "good", "bad", "un", "##good")
    pieces = [*model.SPECIAL_TOKENS, *own]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token=pieces[UNKNOWN]))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", START), ("[SEP]", END)]
    )
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(roles, model.SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)  # type: ignore[no-untyped-call]


def refusal(name: str | Path) -> str:
    message = refused(fetched, name)
    assert message.endswith("The models built from scratch are tiny, small.")
    return message


def test_a_character_is_a_token() -> None:
    """Law: ids count from the special tokens on; the start of a word is marked."""
    tokenizer = model.character_tokenizer(["b ca", "a bc"], 16)
    assert tokenizer.convert_ids_to_tokens(range(5, 12)) == [*"ABCabc", "\u2581"]
    tokens = ["[CLS]", "c", "\u2581a", "B", "[SEP]"]
    assert encode(tokenizer, ["c aB"]) == [tokenizer.convert_tokens_to_ids(tokens)]
    assert encode(tokenizer, []) == []
    names = ("pad", "unk", "cls", "sep", "mask")
    ids = [getattr(tokenizer, f"{name}_token_id") for name in names]
    assert ids == [PAD, UNKNOWN, START, END, MASK]


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("ＡＢＣ１", "ABC1"),  # full width
        ("a b\tc\u3000\n1 ", "a b c 1"),
        ("①ﬁ", "1fi"),
        ("今天 天气", "今天天气"),
        ("用 PyTorch 的", "用PyTorch的"),
        ("e\u0301", "\xe9"),
    ],
)
def test_normal_form(written: str, plain: str) -> None:
    """Law: compatibility forms and white space beside Chinese make no difference."""
    tokenizer = model.character_tokenizer([plain, plain], 16)
    first, second = encode(tokenizer, [written, plain])
    assert first == second
    assert UNKNOWN not in first
    # In the texts that make the vocabulary, too.
    other = model.character_tokenizer([written] * 2, 16)
    assert other.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner"),
    [("tiny", 4, 256, 1024), ("small", 6, 384, 1536)],
)
def test_sizes(name: str, layers: int, width: int, inner: int) -> None:
    """Law: a size has the shape that its flag's help states, and fits its texts."""
    made = scratch(name, ["abab"], max_length=24)
    assert made.from_scratch
    assert made.model.training
    config: Any = made.model.config
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.label2id == {"no": 0, "yes": 1}
    assert config.hidden_dropout_prob == 0.1
    assert config.attention_probs_dropout_prob == 0.1
    # By hand: two embeddings of tables and their norm, layers, classifier; the
    # vocabulary holds A, B, a and b, each as the start of a word too, and a blank.
    tables = (14 + 24 + 4) * width + 2 * width
    attention = 4 * (width * width + width) + 2 * width
    feed = 2 * width * inner + inner + width + 2 * width
    held = sum(param.numel() for param in made.model.parameters())
    assert held == tables + layers * (attention + feed) + 2 * width + 2


def test_dropout_is_taken() -> None:
    """Law: --dropout is the dropout everywhere in a model from scratch."""
    made = scratch("tiny", ["aa"], dropout=0.0)
    found = {m.p for m in made.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert found == {0.0}
    made.model.eval()
    inputs = torch.tensor([[START, 5, END]])
    quiet = made.model(inputs).logits
    assert torch.equal(made.model.train()(inputs).logits, quiet)


@pytest.mark.parametrize("length", [3, 8, 13])
def test_padding_has_positions(length: int) -> None:
    """Law: a batch may be padded beyond --max-length up to the next multiple of 8."""
    made = scratch("tiny", ["ab" * 20], max_length=length)
    encoded = EncodedTexts.build(encode(made.tokenizer, ["ab" * 20, "a"]), [0, 1])
    assert max(encoded.lengths) == length
    multiple = model.PAD_MULTIPLE
    inputs = encoded.collate(np.arange(2), made.tokenizer.pad_token_id, multiple)
    inputs.pop("labels")
    assert made.model(**inputs).logits.shape == (2, 2)


def test_a_model_from_a_folder(
    bert: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a saved model keeps weights, vocabulary and dropout; the head is new.

    transformers' own table of what is new is not printed.
    """
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    made = fetched(bert)
    assert not caplog.messages
    assert made.new_weights == ("classifier.bias", "classifier.weight")
    assert made.new_weights_line() == (
        "not in the pretrained model, so drawn at random: classifier"
    )
    assert not made.from_scratch
    ids = [START, 5, 6, 10, 11, END]
    assert encode(made.tokenizer, ["playing ungood"]) == [ids]
    config: Any = made.model.config
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.hidden_dropout_prob == OWN_DROPOUT
    saved = safetensors.torch.load_file(bert / "model.safetensors")
    held = made.model.state_dict()
    assert all(torch.equal(held[f"bert.{name}"], saved[name]) for name in saved)
    assert held["classifier.weight"].shape == (2, 32)
    assert {param.dtype for param in made.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("asked", "length"), [(128, 16), (16, 16), (9, 9)])
def test_no_longer_than_the_positions(bert: Path, asked: int, length: int) -> None:
    """Law: texts are cut to what the model has positions for, padding included.

    Of 20 positions 16 can be filled: a longer row would be padded to 24.
    """
    made = fetched(bert, max_length=asked)
    encoded = EncodedTexts.build(encode(made.tokenizer, ["good bad " * 40]), [0])
    assert encoded.lengths.tolist() == [length]
    multiple = model.PAD_MULTIPLE
    inputs = encoded.collate(np.arange(1), made.tokenizer.pad_token_id, multiple)
    inputs.pop("labels")
    assert made.model(**inputs).logits.shape == (1, 2)


def test_heads(bert: Path) -> None:
    """Law: a head of tokens answers for each token, one of a text for the text."""
    inputs = torch.tensor([[START, 5, 6, END]])
    head = "TokenClassification"
    for made in (scratch("tiny", ["ab" * 4], head=head), fetched(bert, head=head)):
        assert type(made.model).__name__.endswith(f"For{head}")
        assert made.model(inputs).logits.shape == (1, 4, 2)
    assert fetched(bert).model(inputs).logits.shape == (1, 2)


def test_unknown_name(
    bert: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Law: a path that is not there is no hub name; a name may be either.

    What is named almost alike is named.
    """
    monkeypatch.chdir(tmp_path)
    end = "The models built from scratch are tiny, small."
    for name in ("/no-such", "./no-such", "../no/such", "a/b/c", "two words", "~/such"):
        assert refusal(name) == f"--model {name}: that folder does not exist. {end}"
    assert refusal("./brt") == (
        f"--model ./brt: that folder does not exist; nearest: {bert.name}. {end}"
    )
    for name, near in (("no-such/model", ""), ("brt", "; nearest: bert")):
        assert refusal(name) == (
            f"--model {name}: no such folder{near}; as a hub name: not in the cache, "
            f"and the hub cannot be reached (HF_HUB_OFFLINE is set). {end}"
        )


def test_a_folder_that_is_no_model(bert: Path, tmp_path: Path) -> None:
    """Law: an empty folder, lost or damaged weights are refused, not raised as is."""
    empty = tmp_path / "run"
    empty.mkdir()
    message = f"--model {empty}: that folder has no config.json; give one that "
    assert refusal(empty).startswith(message)
    (empty / "model").mkdir()
    assert f"written. A run's model is in {empty / 'model'}. The" in refusal(empty)
    assert refusal(bert / "config.json").startswith(
        f"--model {bert / 'config.json'}: that is a file; give the folder of a model: "
        f"{bert}. The"
    )
    start = "--model {}: transformers cannot load that folder: "
    for name, data in (("config.json", b"{"), ("model.safetensors", b"xx" * 99)):
        broken = tmp_path / name.replace(".", "-")
        shutil.copytree(bert, broken)
        (broken / name).write_bytes(data)
        assert refusal(broken).startswith(start.format(broken))
    (bert / "model.safetensors").unlink()
    assert refusal(bert).startswith(start.format(bert))


def test_no_padding_token(bert: Path) -> None:
    """Law: a tokenizer that cannot pad is refused before it fails in a batch."""
    tokenizer = word_pieces()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(bert)
    told = refused(fetched, bert)
    assert told.startswith(f"--model {bert}: its tokenizer has no padding token; set")


def test_a_vocabulary_that_does_not_fit(bert: Path) -> None:
    """Law: a folder without a tokenizer is refused, and ids beyond the embedding."""
    folder = bert.rename(bert.with_name("lost"))
    tokenizer = word_pieces()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder)
    wide = f"--model {folder}: its tokenizer has ids up to 12, its embedding 12 rows; "
    assert refused(fetched, folder).startswith(wide)
    for file in folder.glob("*token*"):
        file.unlink()
    lost = f"--model {folder}: its tokenizer knows no words; save the tokenizer that "
    assert refused(fetched, folder).startswith(lost)


def test_a_model_without_an_embedding_of_tokens(tmp_path: Path) -> None:
    """Law: Perceiver is taken, whose input embeddings are a bare parameter."""
    heads = {"num_self_attends_per_block": 1, "num_self_attention_heads": 1}
    sizes = {"num_latents": 4, "d_latents": 8, "d_model": 8, "vocab_size": 12}
    config = PerceiverConfig(**sizes, **heads, num_cross_attention_heads=1)
    PerceiverForSequenceClassification(config).save_pretrained(tmp_path)
    word_pieces().save_pretrained(tmp_path)
    assert fetched(tmp_path).model.config.model_type == "perceiver"


def test_a_model_of_any_length(tmp_path: Path) -> None:
    """Law: -1 positions, as XLNet has, are no limit."""
    shape = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}
    XLNetModel(XLNetConfig(vocab_size=12, **shape)).save_pretrained(tmp_path)
    word_pieces().save_pretrained(tmp_path)
    assert fetched(tmp_path).tokenizer.model_max_length == 128

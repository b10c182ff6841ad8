"""From texts to token ids and models: built from scratch, or loaded with transformers.

In: a model name and the training texts. Out: a tokenizer and a classifier.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError
from halfstep.train.batches import WIDTH_MULTIPLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "small": {
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    },
}
"""Name -> shape of the BERT models that are built from scratch."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
)
_LEAST_COUNT = 2  # so that characters seen once train the embedding of unknown ones
_INIT_STD = 0.05  # BERT's 0.02 leaves few steps' worth of signal in a narrow model


@dataclass(frozen=True)
class Classifier:
    """A tokenizer and a model that fit each other."""

    tokenizer: Any
    model: nn.Module
    from_scratch: bool


def build(
    name: str,
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    max_length: int,
    dropout: float | None,
) -> Classifier:
    """Return the classifier that a name stands for.

    Args:
        name: "tiny", "small", or what transformers' `from_pretrained` takes.
        texts: Training texts, whose characters become the vocabulary.
        labels: Names of the classes.
        max_length: Tokens after which a text is cut.
        dropout: None: 0.1 from scratch, otherwise the model's own.

    Raises:
        UserError: If transformers cannot load the name.
    """
    words: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if name not in SIZES:
        return _pretrained(name, words, max_length, dropout)
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = character_tokenizer(texts, max_length)
    rate = 0.1 if dropout is None else dropout
    config = BertConfig(
        **SIZES[name],
        **words,
        vocab_size=len(tokenizer),
        max_position_embeddings=-(-max_length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
        initializer_range=_INIT_STD,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForSequenceClassification(config)
    return Classifier(tokenizer, model, from_scratch=True)


def _pretrained(
    name: str, words: dict[str, Any], max_length: int, dropout: float | None
) -> Classifier:
    try:
        config = _config(name, words)
        rates = [key for key in _DROPOUTS if hasattr(config, key)]
        if dropout is not None:
            config.update(dict.fromkeys(rates, dropout))
        tokenizer, model, _ = load(
            name, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
        )
    except UserError as error:
        nested = Path(name) / "model"
        hint = f" A run's model is in {nested}." if nested.is_dir() else ""
        message = (
            f"--model {name}: {error}{hint} The models built from scratch are "
            f"{', '.join(SIZES)}."
        )
        raise UserError(message) from error
    if dropout is not None and not rates:
        message = f"--dropout {dropout}: {name} has none of {', '.join(_DROPOUTS)}."
        raise UserError(message)
    if tokenizer.pad_token_id is None:
        message = f"--model {name}: its tokenizer has no padding token."
        raise UserError(message)
    # Decoders find the last token of a text by it.
    model.config.pad_token_id = tokenizer.pad_token_id
    lengths = [tokenizer.model_max_length, max_length]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        # Padding may fill a row up to the multiple; it needs positions too.
        lengths.append(positions - positions % WIDTH_MULTIPLE)
    tokenizer.model_max_length = min(lengths)
    return Classifier(tokenizer, model, from_scratch=False)


def _config(name: str, words: dict[str, Any]) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    with _as_user_error(name):
        return AutoConfig.from_pretrained(name, **words)


def load(name: str | Path, **words: Any) -> tuple[Any, Any, list[str]]:  # noqa: ANN401
    """Return the tokenizer and the classifier that transformers finds under a name.

    Args:
        name: What transformers' `from_pretrained` takes.
        words: Passed on to the model's `from_pretrained`.

    Returns:
        The tokenizer, the model, and the names of weights that were not found there
        and begin at random.

    Raises:
        UserError: If transformers cannot load them.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    local = Path(name).exists()
    bars = without_bars() if local else contextlib.nullcontext()
    with _as_user_error(name), bars:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, output_loading_info=True, **words
        )
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return tokenizer, model, sorted({*info["missing_keys"], *mismatched})


@contextlib.contextmanager
def _as_user_error(name: str | Path) -> Iterator[None]:
    """Say in one line what transformers could not load."""
    try:
        yield
    except Exception as error:  # a damaged folder can raise anything in there
        where = "that folder" if Path(name).exists() else "that folder or hub name"
        first = str(error).strip().partition("\n")[0].rstrip(" .:")
        message = f"transformers cannot load {where}: {first}."
        raise UserError(message) from error


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over work that takes no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def character_tokenizer(texts: Iterable[str], max_length: int) -> Any:  # noqa: ANN401
    """Return a tokenizer whose tokens are the characters of some texts.

    Text is normalised (NFKC, lower case) and loses its white space, so that the same
    sentence reads the same with and without word boundaries.
    """
    from tokenizers import (
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\s+"), ""),
        ]
    )
    counts = Counter(char for text in texts for char in normalizer.normalize_str(text))
    kept = sorted(char for char, count in counts.items() if count >= _LEAST_COUNT)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *kept])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    pad, unknown, start, end, mask = SPECIAL
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
        model_max_length=max_length,
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:  # noqa: ANN401
    """Return the token ids of each text, cut to the tokenizer's length."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), truncation=True)["input_ids"]
    return ids

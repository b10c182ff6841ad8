"""Tokenizers and models: built from scratch, or loaded with transformers."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    CharacterCounter = Callable[[Callable[[str], str]], Counter[str]]
    """Counts the characters of the training texts, each text cleaned first."""

DROPOUT = 0.1
"""Share of activations dropped in a network from scratch, as in BERT."""

PAD_MULTIPLE = 8
"""Tokens to whose multiple a batch is padded on a GPU: what its matrix units need to
run at full speed. A CPU's do not ask for it, and rounding up costs time."""

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

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
)
_LEAST_COUNT = 2  # so that characters seen once train the embedding of unknown ones
_INIT_STD = 0.05  # BERT's 0.02 leaves few steps' worth of signal in a narrow model


@dataclass(frozen=True)
class Network:
    """A tokenizer and a model that fit each other."""

    tokenizer: Any
    model: nn.Module
    from_scratch: bool


def build(
    name: str,
    count: CharacterCounter,
    outputs: Sequence[str],
    *,
    head: str,
    max_length: int,
    dropout: float | None,
) -> Network:
    """Return the network that a name stands for.

    Args:
        name: "tiny", "small", or what transformers' `from_pretrained` takes.
        count: Counts the characters of the training texts, which become the
            vocabulary of a network from scratch; not called for any other.
        outputs: Names of the model's outputs: classes, or tags.
        head: End of the model's class name in transformers:
            "SequenceClassification" or "TokenClassification".
        max_length: Tokens after which a text is cut.
        dropout: None: 0.1 from scratch, otherwise the model's own.

    Raises:
        UserError: If transformers cannot load the name.
    """
    words: dict[str, Any] = {
        "id2label": dict(enumerate(outputs)),
        "label2id": {word: index for index, word in enumerate(outputs)},
    }
    if name not in SIZES:
        return _pretrained(name, words, head, max_length, dropout)
    import transformers

    tokenizer = character_tokenizer(count, max_length)
    rate = DROPOUT if dropout is None else dropout
    config = transformers.BertConfig(
        **SIZES[name],
        **words,
        vocab_size=len(tokenizer),
        max_position_embeddings=-(-max_length // PAD_MULTIPLE) * PAD_MULTIPLE,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
        initializer_range=_INIT_STD,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = getattr(transformers, f"BertFor{head}")(config)
    return Network(tokenizer, model, from_scratch=True)


def _pretrained(
    name: str,
    words: dict[str, Any],
    head: str,
    max_length: int,
    dropout: float | None,
) -> Network:
    try:
        config = load_config(name, **words)
        rates = [key for key in _DROPOUTS if hasattr(config, key)]
        if dropout is not None:
            config.update(dict.fromkeys(rates, dropout))
        tokenizer, model, _ = load(
            name, head, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
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
    positions = _positions(model)
    if positions:
        # Padding may fill a row up to the multiple; it needs positions too.
        lengths.append(positions - positions % PAD_MULTIPLE)
    tokenizer.model_max_length = min(lengths)
    return Network(tokenizer, model, from_scratch=False)


def _positions(model: Any) -> int | None:  # noqa: ANN401
    """Return how many tokens a model has positions for, None for any number.

    RoBERTa and its kin count them from behind the one that padding has.
    """
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        first = getattr(module, "padding_idx", None)
        if positions and name.endswith("position_embeddings") and first is not None:
            return int(positions - int(first) - 1)
    return positions


def load_config(name: str | Path, **words: Any) -> Any:  # noqa: ANN401
    """Return the configuration that transformers finds under a name."""
    from transformers import AutoConfig

    with _as_user_error(name):
        _refuse_code(name)
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **words)


class CodeError(UserError):
    """A model that cannot be loaded without running Python code that it brings."""


def _refuse_code(name: str | Path) -> None:
    """Refuse a model or a tokenizer that brings Python code of its own.

    Why: left to itself, transformers asks on standard input whether to run it, which
    takes the first line of what `predict RUN -` is to read. And where it has a class
    of the same type it takes that instead, which need not compute the same.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    for file, content in (
        ("config.json", PretrainedConfig.get_config_dict(name)[0]),
        ("tokenizer_config.json", get_tokenizer_config(name)),
    ):
        if content.get("auto_map"):
            message = (
                f"its {file} asks for Python code of its own (auto_map), which is "
                "never run; choose a model that transformers has built in."
            )
            raise CodeError(message)


def load(
    name: str | Path,
    head: str,
    **words: Any,  # noqa: ANN401
) -> tuple[Any, Any, list[str]]:
    """Return the tokenizer and the model that transformers finds under a name.

    Args:
        name: What transformers' `from_pretrained` takes.
        head: End of the model's class name, as in `build`.
        words: Passed on to the model's `from_pretrained`.

    Returns:
        The tokenizer, the model, and the names of weights that were not found there
        and begin at random.

    Raises:
        UserError: If transformers cannot load them, or not without running code of
            theirs.
    """
    import transformers

    local = Path(name).exists()
    progress_bars = without_progress_bars() if local else contextlib.nullcontext()
    with _as_user_error(name), progress_bars:
        _refuse_code(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=False
        )
        kind = getattr(transformers, f"AutoModelFor{head}")
        model, info = kind.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False, **words
        )
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return tokenizer, model, sorted({*info["missing_keys"], *mismatched})


@contextlib.contextmanager
def _as_user_error(name: str | Path) -> Iterator[None]:
    """Say in one line what transformers could not load."""
    try:
        yield
    except CodeError:
        raise
    except Exception as error:  # a damaged folder can raise anything in there
        where = "that folder" if Path(name).exists() else "that folder or hub name"
        first = str(error).strip().partition("\n")[0].rstrip(" .:")
        if isinstance(error, pickle.UnpicklingError):  # torch tells how to run it
            first = "its weights are a pickle of more than tensors; use safetensors"
        message = f"transformers cannot load {where}: {first}."
        raise UserError(message) from error


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over work that takes no time."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def character_tokenizer(count: CharacterCounter, max_length: int) -> Any:  # noqa: ANN401
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
    counts = count(normalizer.normalize_str)
    characters = sorted(char for char, seen in counts.items() if seen >= _LEAST_COUNT)
    vocabulary = {
        token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    pad, unknown, start, end, mask = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
        model_max_length=max_length,
    )

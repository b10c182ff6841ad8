"""Builds a tokenizer and model from scratch, or loads them with transformers."""

from __future__ import annotations

import contextlib
import difflib
import logging
import pickle
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import UserError
from halfstep.train import wide
from halfstep.train.task_progress import track
from halfstep.train.token_features import UNSPACED, WORD_START, is_unspaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

DROPOUT = 0.1
"""Dropout probability of a model from scratch, as in BERT."""

PAD_MULTIPLE = 8
"""A batch is padded to a multiple of this many tokens on a GPU, whose tensor cores need
it for full speed. CPUs do not, and padding further costs time."""

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

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_MAX_LISTED = 5  # modules with new weights that a line lists
_LEAST_COUNT = 2  # characters seen once become [UNK], which trains its embedding
_INIT_STD = 0.05  # with BERT's 0.02, a narrow model barely learns in few steps


@dataclass(frozen=True)
class Network:
    """A tokenizer and a model that belong together."""

    tokenizer: Any
    model: nn.Module
    from_scratch: bool
    new_weights: tuple[str, ...] = ()
    """Weights that the pretrained model lacks, by name: they are drawn at random."""

    def new_weights_line(self) -> str:
        """Return a line about the modules of new weights; "" if there are none."""
        modules = [*dict.fromkeys(name.rpartition(".")[0] for name in self.new_weights)]
        more = len(modules) - _MAX_LISTED
        listed = ", ".join(modules[:_MAX_LISTED]) + f" and {more} more" * (more > 0)
        return listed and f"not in the pretrained model, so drawn at random: {listed}"


def build(
    name: str,
    texts: Iterable[str],
    outputs: Sequence[str],
    *,
    head: str,
    config_entries: Mapping[str, Any] | None = None,
    max_length: int,
    dropout: float | None,
) -> Network:
    """Build a network from scratch, or load a pretrained one.

    Args:
        name: "tiny", "small", or an argument of transformers' `from_pretrained`.
        texts: The training texts; their characters are the vocabulary from scratch.
        outputs: Names of the model's outputs: classes, or tags.
        head: Suffix of the model's class name in transformers.
        config_entries: Further entries of the model's config.
        max_length: Texts are truncated to this many tokens.
        dropout: Dropout probability. None: 0.1 from scratch, otherwise the model's.

    Raises:
        UserError: If transformers cannot load the model.
    """
    words: dict[str, Any] = {
        "id2label": dict(enumerate(outputs)),
        "label2id": {word: index for index, word in enumerate(outputs)},
        **(config_entries or {}),
    }
    if name not in SIZES:
        return _pretrained(name, words, head, max_length, dropout)
    from halfstep.train import text_model

    tokenizer = character_tokenizer(texts, max_length)
    rate = DROPOUT if dropout is None else dropout
    words |= SIZES[name] | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": -(-max_length // PAD_MULTIPLE) * PAD_MULTIPLE,
        "hidden_dropout_prob": rate,
        "attention_probs_dropout_prob": rate,
        "initializer_range": _INIT_STD,
        "pad_token_id": tokenizer.pad_token_id,
        # The first transformers 5 takes no default of a subclass.
        "type_vocab_size": text_model.TextConfig.type_vocab_size,
    }
    kind = getattr(text_model, f"TextFor{head}")
    if kind is text_model.TextForSequenceClassification:
        words["hash_bits"] = wide.hash_bits(len(outputs))
    network = kind(text_model.TextConfig(**words))
    tokens = sorted(vocabulary := tokenizer.get_vocab(), key=vocabulary.__getitem__)
    network.features.set_vocabulary(tokens, len(SPECIAL_TOKENS))
    return Network(tokenizer, network, from_scratch=True)


def _pretrained(
    name: str, words: dict[str, Any], head: str, max_length: int, dropout: float | None
) -> Network:
    try:
        _check_folder(name)
        config = load_config(name, **words)
        config.update(words)  # transformers ignores those it does not know
        rates = [key for key in _DROPOUTS if hasattr(config, key)]
        if dropout is not None:
            config.update(dict.fromkeys(rates, dropout))
        tokenizer, model, new_weights = load(
            name, head, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
        )
    except UserError as error:
        raise UserError(
            f"--model {name}: {error} The models built from scratch are "
            f"{', '.join(SIZES)}."
        ) from error
    if dropout is not None and not rates:
        message = f"--dropout {dropout}: {name} has none of {', '.join(_DROPOUTS)}."
        raise UserError(message)
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"--model {name}: its tokenizer has no padding token; set it, as in "
            "tokenizer.pad_token = tokenizer.eos_token, and save it there."
        )
    _check_vocabulary(name, tokenizer, model)
    # Decoder classifiers locate the last token of a text by pad_token_id.
    model.config.pad_token_id = tokenizer.pad_token_id
    lengths = [tokenizer.model_max_length, max_length]
    positions = _positions(model)
    if positions:
        # Padding may fill a row up to the multiple, and padding needs positions too.
        lengths.append(positions - positions % PAD_MULTIPLE)
    tokenizer.model_max_length = min(lengths)
    return Network(tokenizer, model, from_scratch=False, new_weights=new_weights)


def _check_folder(name: str) -> None:
    """Raise if a name can be neither the folder of a model nor on the hub."""
    folder = Path(name)
    if folder.is_dir():
        nested = folder / "model"
        hint = f" A run's model is in {nested}." if nested.is_dir() else ""
        if not (folder / "config.json").exists():
            raise UserError(
                "that folder has no config.json; give one that save_pretrained has "
                f"written.{hint}"
            )
    elif folder.exists():
        parent = folder.absolute().parent
        raise UserError(f"that is a file; give the folder of a model: {parent}.")
    elif not _HUB_NAME.fullmatch(name):
        raise UserError(f"that folder does not exist{_nearest_folder(folder)}.")


def _nearest_folder(folder: Path) -> str:
    """Return a suggestion with the folder beside it of the most similar name."""
    with contextlib.suppress(OSError):
        names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
        for name in difflib.get_close_matches(folder.name, names, 1):
            return f"; nearest: {folder.with_name(name)}"
    return ""


def _check_vocabulary(name: str, tokenizer: Any, model: Any) -> None:  # noqa: ANN401
    """Raise if all texts would be the same tokens, or a token has no embedding.

    From a folder without a tokenizer, transformers makes one of special tokens alone.
    """
    ids = set(tokenizer.get_vocab().values())
    if len(ids - set(tokenizer.all_special_ids)) <= 1:  # T5 has a token for a blank
        raise UserError(
            f"--model {name}: its tokenizer knows no words; save the tokenizer that "
            "the model was trained with there too, by its save_pretrained."
        )
    with contextlib.suppress(NotImplementedError):  # CANINE has no embedding by token
        # Perceiver's are no embedding of tokens, and have no weight.
        table = getattr(model.get_input_embeddings(), "weight", None)
        if table is not None and max(ids) >= len(table):
            raise UserError(
                f"--model {name}: its tokenizer has ids up to {max(ids)}, its "
                f"embedding {len(table)} rows; choose the tokenizer that belongs to "
                "it, or call resize_token_embeddings of the model, and save it."
            )


def _positions(model: Any) -> int | None:  # noqa: ANN401
    """Return how many positions the model has; RoBERTa's begin after padding_idx."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions == -1:  # XLNet's: any number
        return None
    for name, module in model.named_modules():
        first = getattr(module, "padding_idx", None)
        if positions and name.endswith("position_embeddings") and first is not None:
            return int(positions - int(first) - 1)
    return positions


def load_config(name: str | Path, **words: Any) -> Any:  # noqa: ANN401
    """Load a model's configuration with transformers."""
    from transformers import AutoConfig

    from halfstep.train import text_model  # noqa: F401 -- registers its classes

    with _as_user_error(name):
        _refuse_code(name)
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **words)


class CodeError(UserError):
    """A model cannot be loaded without running Python code from its repository."""


def _refuse_code(name: str | Path) -> None:
    """Reject a model or a tokenizer that comes with its own Python code.

    Without this check, transformers asks on standard input whether to run the code and
    reads the answer from the first line meant for `predict RUN -`. If it has a built-in
    class for the model type it uses that instead, which may compute something else.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    for file, content in (
        ("config.json", PretrainedConfig.get_config_dict(name)[0]),
        ("tokenizer_config.json", get_tokenizer_config(name)),
    ):
        if content.get("auto_map"):
            raise CodeError(
                f"its {file} asks for Python code of its own (auto_map), which is "
                "never run; choose a model that transformers has built in."
            )


def load(
    name: str | Path,
    head: str,
    **words: Any,  # noqa: ANN401
) -> tuple[Any, Any, tuple[str, ...]]:
    """Load a tokenizer and a model; return them, and the weights that it lacks by name.

    Args:
        name: An argument of transformers' `from_pretrained`.
        head: End of the model's class name, as in `build`.
        words: Passed on to the model's `from_pretrained`.

    Raises:
        UserError: If transformers cannot load them, or only by running their code.
    """
    import transformers

    from halfstep.train import text_model  # noqa: F401 -- registers its classes

    local = Path(name).exists()
    progress_bars = without_progress_bars() if local else contextlib.nullcontext()
    with _as_user_error(name), progress_bars:
        _refuse_code(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=False
        )
        kind = getattr(transformers, f"AutoModelFor{head}")
        with _without_load_report():
            model, info = kind.from_pretrained(
                name, output_loading_info=True, trust_remote_code=False, **words
            )
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return tokenizer, model, tuple(sorted({*info["missing_keys"], *mismatched}))


@contextlib.contextmanager
def _as_user_error(name: str | Path) -> Iterator[None]:
    """Turn any error of transformers into a one-line UserError."""
    try:
        yield
    except CodeError:
        raise
    except Exception as error:  # a damaged folder can raise any exception
        from huggingface_hub import constants
        from huggingface_hub.errors import LocalEntryNotFoundError

        where = "transformers cannot load that folder"
        first = str(error).strip().partition("\n")[0].rstrip(" .:")
        if isinstance(error, pickle.UnpicklingError):  # torch says how to run it
            first = "its weights are a pickle of more than tensors; use safetensors"
        elif not Path(name).exists():
            where = f"no such folder{_nearest_folder(Path(name))}; as a hub name"
            if isinstance(error.__cause__, LocalEntryNotFoundError):
                first = "not in the cache, and the hub cannot be reached"
                first += " (HF_HUB_OFFLINE is set)" * constants.HF_HUB_OFFLINE
        raise UserError(f"{where}: {first}.") from error


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, for work that takes no time."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' table of weights that a model lacks: `load` returns them.

    With a higher level instead of a filter, it would log what tensor parallelism lacks.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return record.module != "loading_report"

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def character_tokenizer(texts: Iterable[str], max_length: int) -> Any:  # noqa: ANN401
    """Return a tokenizer with one token per character.

    Text is normalized (NFKC). A token is a character with its case, and the first one
    of a word begins with `WORD_START`; white space beside characters of scripts that
    are written without it is dropped. So a sentence of these has the same tokens with
    and without word boundaries.
    """
    import tokenizers
    from tokenizers import models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    blank, around = (
        tokenizers.Regex(r"\s+"),
        tokenizers.Regex(rf"(?<=[{UNSPACED}])\s+|\s+(?=[{UNSPACED}])"),
    )
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Strip(),
            normalizers.Replace(around, ""),
            normalizers.Replace(blank, WORD_START),
        ]
    )
    counts: Counter[str] = Counter()
    ascii_counts: Counter[str] = Counter()
    for text in track(texts, "collecting characters", "characters"):
        if text.isascii():  # each of its characters is normalized by itself, below
            ascii_counts.update(text)
        else:
            counts.update(normalizer.normalize_str(text))
    for character, count in ascii_counts.items():
        for normal in normalizer.normalize_str(character):
            counts[normal] += count
    characters = {char for char, seen in counts.items() if seen >= _LEAST_COUNT}
    # Both cases, so that a word is known however a later text writes it.
    cases = {case for char in characters for case in (char.lower(), char.upper())}
    characters |= {WORD_START, *(case for case in cases if len(case) == 1)}
    spaced = sorted(char for char in characters if not is_unspaced(char))
    merges = [(WORD_START, char) for char in spaced if char != WORD_START]
    tokens = [*SPECIAL_TOKENS, *sorted(characters), *map("".join, merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # BPE almost without merges: half the time of splitting a text into words of one
    # character.
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))  # noqa: S106
    core.normalizer = normalizer
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
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
        # Those of BERT, which tells the sentences of a pair apart by their type.
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )

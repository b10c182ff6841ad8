"""Splits of a few examples, and a tokenizer whose tokens can be told by hand.

In: texts with labels or entities, as a test has them. Out: a `Split` of these rows; and
a tokenizer that notes what it is asked.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from halfstep.train import model
from halfstep.train.data.corpus import LabelledSource, Split
from halfstep.train.data.source import Examples

Spans = Sequence[tuple[int, int, str]]

TEXT, NUMBER = datasets.Value("string"), datasets.Value("int32")
COLUMNS = {
    **dict.fromkeys(("text", "text_pair", "class"), TEXT),
    "multi_label": datasets.List(TEXT),
    "regression": datasets.Value("float64"),
    "spans": datasets.List({"start": NUMBER, "end": NUMBER, "kind": TEXT}),
}
"""Types of the columns of `Examples.rows`, those of labels by their target."""


def split_of(
    columns: dict[str, list[Any]],
    labels: Sequence[str],
    task: str = "classify",
    target: str = "class",
    chosen: Sequence[int] | None = None,
) -> Split:
    """Return rows as a split.

    Args:
        columns: Those of `Examples.rows` but `line`.
        labels: The classes, or types of entities, in the order of their ids.
        task: "classify" or "ner".
        target: "class", "multi_label" or "regression".
        chosen: Rows, in the order of the examples; None for all.
    """
    types = COLUMNS | {"label": COLUMNS[target]}
    features = datasets.Features({name: types[name] for name in columns})
    table = datasets.Dataset.from_dict(columns, features)
    source = LabelledSource(Examples(table, "a.jsonl"), task, target)
    rows = np.arange(len(source)) if chosen is None else np.array(chosen, np.int64)
    ids = [labels.index(word) if word in labels else -1 for word in source.words]
    return Split(source, rows, np.array(ids, np.int64), len(labels))


def classified(
    rows: Sequence[tuple[str, str]],
    labels: Sequence[str],
    chosen: Sequence[int] | None = None,
) -> Split:
    texts, words = map(list, zip(*rows, strict=True))
    return split_of({"text": texts, "label": words}, labels, chosen=chosen)


def marked(
    texts: Sequence[tuple[str, Spans]],
    types: Sequence[str],
    chosen: Sequence[int] | None = None,
) -> Split:
    """Return texts and their entities as a split.

    Args:
        texts: Each with its entities: first character, the one after the last, type.
        types: In the order of their ids.
        chosen: As in `split_of`.
    """
    names = ("start", "end", "kind")
    spans = [
        [dict(zip(names, span, strict=True)) for span in each] for _, each in texts
    ]
    columns = {"text": [text for text, _ in texts], "spans": spans}
    return split_of(columns, types, "ner", chosen=chosen)


def letters_tokenizer(letters: str, longest: int) -> Any:
    """Return a tokenizer of single characters: those given follow five special ones.

    [PAD] is 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; the letters, sorted, go from 5.
    Case and white space make no difference.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*model.SPECIAL_TOKENS, *sorted(letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))  # noqa: S106
    core.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), "")]
    )
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {
        f"{name}_token": token
        for name, token in zip(names, model.SPECIAL_TOKENS, strict=True)
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, model_max_length=longest, **special
    )


def counting(tokenizer: Any) -> tuple[Any, list[int]]:
    calls: list[int] = []

    class Counted(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: Any, *args: Any, **words: Any) -> Any:
            calls.append(len(texts))
            return super().__call__(texts, *args, **words)

    # Named as what it stands for: the name is part of what tells tokenizers apart.
    Counted.__name__ = type(tokenizer).__name__
    tokenizer.__class__ = Counted
    return tokenizer, calls

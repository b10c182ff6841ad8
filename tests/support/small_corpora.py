"""Splits of a few examples, and a tokenizer whose tokens can be told by hand.

In: texts with labels or entities, as a test has them. Out: the file that holds them,
read as a `Split`; and a tokenizer that notes what it is asked.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.train import model
from halfstep.train.data.corpus import Split
from halfstep.train.data.example_store import open_store


def split_of(
    path: Path, task: str, labels: Sequence[str], chosen: Sequence[int] | None = None
) -> Split:
    """Return the rows of a file as a split.

    Args:
        path: The file.
        task: "classify" or "ner".
        labels: The classes, or kinds of entities, in the order of their ids.
        chosen: Rows of the file, in the order of the examples; None for all.
    """
    store = open_store(path, task, None)
    rows = np.arange(len(store)) if chosen is None else np.array(chosen, np.int64)
    ids = [labels.index(word) if word in labels else -1 for word in store.words]
    return Split(store, rows, np.array(ids, np.int64))


def classified(
    path: Path,
    rows: Sequence[tuple[str, str]],
    labels: Sequence[str],
    chosen: Sequence[int] | None = None,
) -> Split:
    objects = [{"text": words, "label": label} for words, label in rows]
    _write(path, objects)
    return split_of(path, "classify", labels, chosen)


def marked(
    path: Path,
    texts: Sequence[tuple[str, Sequence[tuple[int, int, str]]]],
    kinds: Sequence[str],
    chosen: Sequence[int] | None = None,
) -> Split:
    """Write texts and their entities, one JSON object a line; return them as a split.

    Args:
        path: Where, ending in .jsonl.
        texts: Each with its entities: first character, the one after the last, kind.
        kinds: In the order of their ids.
        chosen: As in `split_of`.
    """
    objects = [{"text": words, "entities": spans} for words, spans in texts]
    _write(path, objects)
    return split_of(path, "ner", kinds, chosen)


def _write(path: Path, objects: Sequence[dict[str, Any]]) -> None:
    lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in objects]
    path.write_text("".join(lines), encoding="utf-8")


def letters_tokenizer(letters: str, longest: int) -> Any:
    """Return a tokenizer of single characters: those given follow five special ones.

    [PAD] is 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; the letters, sorted, go from 5.
    """
    return model.character_tokenizer([letters] * 2, longest)


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

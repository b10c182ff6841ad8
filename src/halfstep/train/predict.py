"""Labels for new texts, from a finished run.

In: the folder of a run and texts. Out: the label and the probability of each class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfstep.errors import UserError
from halfstep.train import text
from halfstep.train.batches import Encoded, ordered_batches
from halfstep.train.evaluate import EVAL_BATCH
from halfstep.train.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one text."""

    text: str
    label: str
    probabilities: dict[str, float]
    """Label -> probability; they add up to 1."""


@torch.inference_mode()
def predict(run: Path, texts: Sequence[str]) -> list[Prediction]:
    """Return a prediction for each text, in order.

    Args:
        run: Folder of a finished run.
        texts: Any number; each at least one character beside white space.

    Raises:
        UserError: If the run is not finished, or a text is blank or no text.
    """
    folder = RunFolder(run)
    if not folder.model.is_dir():
        state, flags = "holds no run", f"--out {run}"
        if folder.has_checkpoint():
            state, flags = "is not finished", f"--resume --out {run}"
        message = f"{run} {state}: there is no {folder.model}; train with {flags}."
        raise UserError(message)
    for number, item in enumerate(texts, 1):
        if not item.strip():
            message = f"text {number} is blank; give at least one character."
            raise UserError(message)
        try:
            item.encode()
        except UnicodeEncodeError as error:
            message = f"text {number} is not UTF-8 at character {error.start}."
            raise UserError(message) from error
    try:
        tokenizer, model, missing = text.load(folder.model)
    except UserError as error:
        message = f"{folder.model} is damaged: {error} Train again, or --resume."
        raise UserError(message) from error
    vocabulary = [*folder.model.glob("tokenizer.json"), *folder.model.glob("vocab*")]
    if missing or not vocabulary:
        lost = f"weights {', '.join(missing[:3])}" if missing else "tokenizer.json"
        message = f"{folder.model} is damaged: it lacks {lost}. Train again."
        raise UserError(message)
    model.eval()
    ids = text.encode(tokenizer, texts)
    encoded = Encoded.build(ids, [0] * len(ids))
    shares = torch.zeros(len(ids), model.config.num_labels)
    for batch in ordered_batches(encoded.lengths, EVAL_BATCH):
        inputs = encoded.collate(batch, tokenizer.pad_token_id)
        inputs.pop("labels")
        shares[batch] = model(**inputs).logits.float().softmax(-1)
    names = [model.config.id2label[index] for index in range(model.config.num_labels)]
    return [
        Prediction(
            item,
            names[int(row.argmax())],
            dict(zip(names, row.tolist(), strict=True)),
        )
        for item, row in zip(texts, shares, strict=True)
    ]

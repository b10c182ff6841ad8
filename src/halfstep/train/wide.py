"""A linear model of hashed word and character n-grams, computed from token ids.

N-grams of up to four characters and of up to two words are weighted by TF-IDF, and each
has a row of weights: those of a logistic regression, which is what a model of texts has
to be better than. The encoder beside it adds what depends on order and context.

Shapes: B texts, T tokens, K outputs, H = 2**bits rows of weights, G n-grams of a text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding_bag, pad

from halfstep.distributed import process_group
from halfstep.train.baseline import (
    MAX_WEIGHTS,
    logistic_regression,
    representative,
)
from halfstep.train.data.length_batches import ordered
from halfstep.train.task_progress import announce, track
from halfstep.train.token_features import STARTS, chain, mix, starts_of_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    import scipy.sparse

    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.token_features import TokenFeatures

MAX_TEXTS = 50_000
"""The linear model learns from this many training texts, evenly spaced: a minute."""

SHARES = 0.0, 0.25, 0.5, 0.75, 1.0
"""Factors of the encoder's logits; at 0 the linear model decides alone."""

_CHARACTERS, _WORDS = 4, 2  # the longest n-grams
_FEWEST_TEXTS = 2
"""Training texts that an n-gram must occur in, single words excepted.

Nearly all long n-grams occur once, and would take most of a text's length of 1.
"""
_WORD, _TWO_WORDS = 1, 3
"""The lowest bits of their rows; n-grams of characters have the even rows."""
_BITS, _LEAST_BITS = 18, 10  # log2 of H for few outputs, and for very many
_BITS_OF_WEIGHTS = 23  # log2 of H * K, at most
_INVERSE_PENALTIES = 4, 16, 64, 256  # scikit-learn's C
_SCALES = 1.0, 0.3
"""Factors of the n-grams of characters: at the second, words count more."""
_MAX_SEARCHED = 2**19
"""Texts times classes for which penalties and scales are compared on dev."""
_USUAL = 16, 1.0
"""Inverse penalty and scale beyond: each fit then takes minutes."""
_NEVER = 20.0  # nats that a class without a training text is below the others
_BATCH = 256


def hash_bits(num_outputs: int) -> int:
    """Return log2 of the rows of weights for K outputs: memory is H * K numbers."""
    bits = _BITS_OF_WEIGHTS - (num_outputs - 1).bit_length()
    return max(_LEAST_BITS, min(_BITS, bits))


class HashedNgrams(nn.Module):
    """TF-IDF of hashed n-grams, and a linear model of it.

    `fit` sets the weights, which are buffers: they are the optimum already. Document
    counts are integers, which no level rounds, and sums are at least in fp32.

    Args:
        num_outputs: K.
        bits: log2 of H.
    """

    def __init__(self, num_outputs: int, bits: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2**bits, num_outputs))
        self.register_buffer("bias", torch.zeros(num_outputs))
        self.register_buffer("texts", torch.zeros((), dtype=torch.long))
        self.register_buffer("texts_with", torch.zeros(2**bits, dtype=torch.int32))
        self.weight: Tensor
        self.bias: Tensor
        self.texts: Tensor
        """Number of texts that it has learned from."""
        self.texts_with: Tensor
        """Number of them with an n-gram of each row; shape (H,)."""

    # A compiled graph may not wrap integers around as the hashes do.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Tensor, features: TokenFeatures) -> Tensor:
        """Return logits, fp32 of shape (B, K), for ids of shape (B, T)."""
        logits = self.bias.float()
        for rows, counts in self.ngrams(ids, features):
            values = self.tf_idf(rows, counts).to(self.weight)
            # No product of shape (B, G, K), which is a gigabyte for many outputs.
            summed = embedding_bag(
                rows, self.weight, mode="sum", per_sample_weights=values
            )
            logits = logits + summed.float()
        return logits

    def tf_idf(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the weight of each n-gram in its text, fp32 of shape (B, G).

        (1 + ln count) * (1 + ln((1 + texts) / (1 + texts with it))), divided by the
        length of the text's vector.
        """
        texts_with = self.texts_with[rows].float()
        idf = 1 + ((1 + self.texts.float()) / (1 + texts_with)).log()
        tf = 1 + counts.clamp(min=1).float().log()
        is_word = ((rows & 3) == _WORD).int()
        values = tf * idf * ((counts > 0) & (texts_with >= _FEWEST_TEXTS - is_word))
        return values / values.square().sum(1, keepdim=True).sqrt().clamp(min=1e-6)

    def ngrams(
        self, ids: Tensor, features: TokenFeatures
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the n-grams of characters, and of words.

        An n-gram with a masked or an unknown character does not count. The special
        tokens at both ends of a text do: they show where it begins.

        Returns:
            For each of the two, the row of each n-gram and how often it occurs in its
            text, both int64 of shape (B, G). The count is 0 for what is no n-gram, and
            for all but the first of equal ones.
        """
        usable = features.is_usable[ids]
        starts = features.flags[ids] >= STARTS
        letters = 1 + 2 * features.characters[ids] + starts
        groups = (
            _sequences(letters, usable, _CHARACTERS),
            _sequences(*_words(ids, usable, features), _WORDS),
        )
        return [self._counted(pairs, words=at == 1) for at, pairs in enumerate(groups)]

    def _counted(
        self, pairs: list[tuple[Tensor, Tensor]], *, words: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of (hashes, valid) of each length, and their counts."""
        size = len(self.texts_with)
        valid = torch.cat([valid for _, valid in pairs], 1)
        rows = torch.cat([mix(hashes) & (size - 2) for hashes, _ in pairs], 1)
        if words:
            rows = rows & (size - 4) | _TWO_WORDS
            rows[:, : rows.shape[1] // _WORDS] += _WORD - _TWO_WORDS
        in_order = torch.where(valid, rows, size).sort(1).values
        is_first = in_order != pad(in_order, (1, 0), value=-1)[:, :-1]
        index = is_first.long().cumsum(1) - 1
        counts = torch.zeros_like(rows).scatter_add(1, index, torch.ones_like(rows))
        is_ngram = is_first & (in_order < size)
        return in_order * is_ngram, counts.gather(1, index) * is_ngram


def _sequences(
    items: Tensor, usable: Tensor, longest: int
) -> list[tuple[Tensor, Tensor]]:
    """Return hashes of the n-grams that end at each item, and whether they are usable.

    A pair for each n from 1 to `longest`; each tensor has the shape of `items`.
    """
    pairs = [(mix(items), usable)]
    for n in range(1, longest):
        hashes, valid = (pad(each, (1, 0))[:, :-1] for each in pairs[-1])
        pairs.append((chain(hashes, items + n), valid & usable))
    return pairs


def _words(
    ids: Tensor, usable: Tensor, features: TokenFeatures
) -> tuple[Tensor, Tensor]:
    """Return a hash of each word, and which are usable; both (B, T), words in front."""
    starts, is_word = starts_of_words(ids, features)
    word_of = starts.long().cumsum(1) - 1
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    index = place - torch.where(starts, place, 0).cummax(1).values

    def by_word(values: Tensor) -> Tensor:
        return torch.zeros_like(ids).scatter_add(1, word_of, values)

    hashes = by_word(mix(1 + features.characters[ids] * 64 + index.clamp(max=63)))
    lengths = by_word(torch.ones_like(ids))
    usable_lengths = by_word((is_word & usable).long())
    return hashes, (lengths > 0) & (usable_lengths == lengths)


def is_part_of(model: Any) -> bool:  # noqa: ANN401 -- any model, sharded or not
    """Return whether a model has a linear part, as classifiers from scratch do."""
    return isinstance(getattr(model, "wide", None), HashedNgrams)


def is_used(model: Any, encoded: EncodedTexts) -> bool:  # noqa: ANN401
    """Return whether a model's linear part learns these targets: one class a text."""
    is_class = (
        isinstance(encoded.labels, np.ndarray) and encoded.labels.dtype.kind == "i"
    )
    return is_class and is_part_of(model)


@torch.no_grad()
def fit(
    model: Any,  # noqa: ANN401 -- a TextForSequenceClassification
    train: EncodedTexts,
    dev: EncodedTexts,
    class_weights: Tensor | None,
) -> None:
    """Set the linear model of a classifier to a logistic regression; collective.

    Its penalty is the one with the lowest loss on dev. The first rank computes it.

    Args:
        model: A `TextForSequenceClassification`, unwrapped.
        train: Texts to learn from, at most `MAX_TEXTS` of them.
        dev: Texts to choose the penalty by.
        class_weights: Weight of each class, shape (K,), or None.
    """
    wide: HashedNgrams = model.wide
    state = None
    if process_group.rank() == 0:
        _fit(model, train, dev, class_weights)
        state = {name: buffer.cpu() for name, buffer in wide.named_buffers()}
    state = process_group.broadcast_object(state)
    assert state is not None  # noqa: S101 - the first rank has it
    wide.load_state_dict(state)


def _fit(
    model: Any,  # noqa: ANN401
    train: EncodedTexts,
    dev: EncodedTexts,
    class_weights: Tensor | None,
) -> None:
    import scipy.sparse

    wide: HashedNgrams = model.wide
    classes: Any = train.labels
    texts = representative(classes, MAX_TEXTS)
    wide.texts.fill_(len(texts))
    wide.texts_with.zero_()
    for _, groups in _ngrams(model, train, texts, "counting n-grams"):
        for rows, counts in groups:
            found = rows[counts > 0]
            ones = torch.ones_like(found, dtype=torch.int32)
            wide.texts_with.index_add_(0, found, ones)
    matrices = _matrices(model, train, texts)
    num_outputs = wide.weight.shape[1]
    used = [
        _most_frequent(group, MAX_WEIGHTS // (2 * num_outputs)) for group in matrices
    ]
    matrices = [group[:, rows] for group, rows in zip(matrices, used, strict=True)]
    dev_groups = _matrices(model, dev, np.arange(len(dev)))
    dev_groups = [group[:, rows] for group, rows in zip(dev_groups, used, strict=True)]
    rows = torch.from_numpy(np.concatenate(used))
    targets, dev_targets = classes[texts], torch.from_numpy(dev.labels)
    weights = None if class_weights is None else class_weights.cpu().double()
    by_class = None if weights is None else dict(enumerate(weights.tolist()))
    announce("fitting the linear model", len(texts))
    is_searched = len(texts) * num_outputs <= _MAX_SEARCHED
    penalties: tuple[float, ...] = _INVERSE_PENALTIES
    scales: tuple[float, ...] = _SCALES
    if not is_searched:
        penalties, scales = _USUAL[:1], _USUAL[1:]
    best = np.inf
    for scale in scales:
        factors = np.repeat([scale, 1.0], list(map(len, used)))[:, None]
        features = scipy.sparse.hstack([scale * matrices[0], matrices[1]], "csr")
        dev_features = scipy.sparse.hstack(dev_groups, "csr")
        before = np.inf
        for penalty in penalties:
            regression = logistic_regression(features, targets, penalty, by_class)
            weight, bias = _coefficients(regression, num_outputs)
            weight *= factors
            logits = torch.from_numpy(dev_features @ weight + bias)
            loss = float(cross_entropy(logits, dev_targets, weight=weights))
            if loss < best:
                best = loss
                wide.weight.zero_()
                # As the model folder and a checkpoint have them.
                wide.weight[rows] = torch.from_numpy(weight).float().to(wide.weight)
                wide.bias.copy_(torch.from_numpy(bias).float())
            if loss >= before:
                break
            before = loss


def _most_frequent(matrix: scipy.sparse.csr_array, most: int) -> np.ndarray:
    """Return the columns that most texts have, in order."""
    texts_with = np.bincount(matrix.indices)
    used = np.flatnonzero(texts_with)
    order = np.argsort(-texts_with[used], kind="stable")
    return np.sort(used[order[:most]])


def _coefficients(regression: Any, num_outputs: int) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """Return weights, float64 of shape (rows, K), and biases, shape (K,)."""
    coefficients, intercepts = regression.coef_, regression.intercept_
    if len(intercepts) == 1:  # of two classes, those of the second
        coefficients = np.concatenate([-coefficients, coefficients]) / 2
        intercepts = np.concatenate([-intercepts, intercepts]) / 2
    weight = np.zeros((coefficients.shape[1], num_outputs))
    bias = np.full(num_outputs, -_NEVER)
    weight[:, regression.classes_] = coefficients.T
    bias[regression.classes_] = intercepts
    return weight, bias


def _ngrams(
    model: Any,  # noqa: ANN401
    encoded: EncodedTexts,
    texts: np.ndarray,
    name: str,
) -> Iterator[tuple[np.ndarray, list[tuple[Tensor, Tensor]]]]:
    """Yield positions in `texts`, and the n-grams there as `HashedNgrams.ngrams`."""
    wide, features = model.wide, model.features
    batches = ordered(encoded.lengths[texts], _BATCH)
    for places in track(batches, name, "texts", len(texts)):
        ids = encoded.collate(texts[places], features.pad_id)["input_ids"]
        yield places, wide.ngrams(ids.to(wide.weight.device), features)


def _matrices(
    model: Any,  # noqa: ANN401
    encoded: EncodedTexts,
    texts: np.ndarray,
) -> list[scipy.sparse.csr_array]:
    """Return the TF-IDF of some texts, float32 of shape (texts, H).

    One matrix for the n-grams of characters, and one for those of words.
    """
    import scipy.sparse

    wide: HashedNgrams = model.wide
    parts: list[list[list[np.ndarray]]] = [[], []]
    for places, groups in _ngrams(model, encoded, texts, "weighting n-grams"):
        for group, (rows, counts) in zip(parts, groups, strict=True):
            values = wide.tf_idf(rows, counts).cpu()
            of_text = torch.from_numpy(places)[:, None].expand_as(rows)
            is_used = values > 0
            three = values, of_text, rows.cpu()
            group.append([each[is_used].numpy() for each in three])
    shape = len(texts), len(wide.texts_with)
    matrices = []
    for group in parts:
        data, of_texts, columns = map(np.concatenate, zip(*group, strict=True))
        cells = data, (of_texts, columns)
        matrices.append(scipy.sparse.csr_array(cells, shape=shape))
    return matrices


@torch.no_grad()
def choose_share(
    model: Any,  # noqa: ANN401 -- a TextForSequenceClassification
    linear: Tensor,
    encoder: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
) -> Tensor:
    """Set the factor of the encoder's logits with the lowest loss; return the sums.

    An encoder that has learned nothing yet, or too much by heart, then does no harm.

    Args:
        model: The classifier.
        linear: Logits of the linear model, fp32 of shape (N, K).
        encoder: Those of the encoder.
        targets: The classes, int64 of shape (N,).
        class_weights: Weight of each class, shape (K,), or None.
    """
    losses = {
        share: float(cross_entropy(linear + share * encoder, targets, class_weights))
        for share in SHARES
    }
    # Sums may differ in the last digit between CPU types, so rank 0 decides.
    share = process_group.broadcast_object(min(losses, key=losses.__getitem__))
    model.share.fill_(share)
    return linear + share * encoder

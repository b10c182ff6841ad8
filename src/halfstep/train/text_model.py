"""The models from scratch: a BERT of characters, and a linear model beside it.

The encoder generalizes from what surrounds a token; the linear model remembers words
and recognizes endings, letter case and neighbors after few steps. Their logits are
summed (Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016). For tags
both are trained together; for classes each is trained alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from halfstep.train.token_features import NUM_FLAGS, TokenFeatures
from halfstep.train.wide import HashedNgrams, hash_bits

if TYPE_CHECKING:
    from transformers.modeling_outputs import TokenClassifierOutput

_SCALE = 10.0
"""Factor of the linear model's weights: Adam changes each by the learning rate in a
step, however often its feature occurs, and a rare one occurs in few steps."""

_MAX_BITS = 24
"""log2 of the most weights of the linear model: hundreds of entity types get a smaller
table, in which more features share a row."""


_EXCLUSIVE = None, "single_label_classification"
"""Problem types, as of transformers, where a text has one class."""


class TextConfig(BertConfig):  # type: ignore[no-untyped-call]
    """Configuration of a model from scratch."""

    model_type = "halfstep_text"

    type_vocab_size: int = NUM_FLAGS
    hash_bits: int = 16
    """log2 of the rows of the linear model's table."""


class TextForTokenClassification(  # type: ignore[no-untyped-call]
    BertForTokenClassification
):
    """Tags each token by an encoder and by hashed features of its surroundings."""

    config_class = TextConfig

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self.features = TokenFeatures(config.vocab_size, config.pad_token_id or 0)
        outputs = self.classifier.out_features
        bits = min(config.hash_bits, _MAX_BITS - (outputs - 1).bit_length())
        self.linear = nn.Embedding(2**bits, outputs)
        nn.init.zeros_(self.linear.weight)
        # What no training text has, such as upper case, then changes nothing.
        nn.init.zeros_(self.bert.embeddings.token_type_embeddings.weight)
        _keep_buffers_local(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,  # noqa: ANN401 -- what tokenizers add, such as token_type_ids
    ) -> TokenClassifierOutput:
        """Return logits, fp32 of shape (B, T, K), for ids of shape (B, T)."""
        features = self.features
        output: TokenClassifierOutput = super().forward(
            features.characters[input_ids],
            attention_mask=attention_mask,
            token_type_ids=features.flags[input_ids],
        )
        rows = features(input_ids) & (self.linear.num_embeddings - 1)
        linear = self.dropout(self.linear(rows)).sum(2, dtype=torch.float32)
        logits: Any = output.logits
        output.logits = logits.float() + _SCALE * linear
        return output


class TextForSequenceClassification(BertPreTrainedModel):  # type: ignore[no-untyped-call]
    """Classifies texts by an encoder and by a linear model of n-grams, `wide`.

    Of several labels a text and of regression, the encoder is alone: `wide` is None.

    The encoder is trained as if it were alone, so in training the logits are its own:
    trained on the sum, it would learn from the few texts that the linear model has not
    learned by heart, and that is little. In evaluation, its logits are added, times
    `share`, which `wide.choose_share` sets.
    """

    config_class = TextConfig

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        num_labels = config.num_labels or 0
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self.features = TokenFeatures(config.vocab_size, config.pad_token_id or 0)
        self.wide: HashedNgrams | None = None
        if config.problem_type in _EXCLUSIVE:
            # A saved configuration may be of fewer classes.
            bits = min(config.hash_bits, hash_bits(num_labels))
            self.wide = HashedNgrams(num_labels, bits)
            self.register_buffer("share", torch.ones(()))
            self.share: Tensor
        self.post_init()  # type: ignore[no-untyped-call]
        # What no training text has, such as upper case, then changes nothing.
        nn.init.zeros_(self.bert.embeddings.token_type_embeddings.weight)
        _keep_buffers_local(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,  # noqa: ANN401 -- what tokenizers add, such as token_type_ids
    ) -> SequenceClassifierOutput:
        """Return logits, fp32 of shape (B, K), for ids of shape (B, T)."""
        features = self.features
        if attention_mask is None:
            attention_mask = input_ids != features.pad_id
        hidden = self.bert(
            features.characters[input_ids],
            attention_mask=attention_mask,
            token_type_ids=features.flags[input_ids],
        ).last_hidden_state
        # The mean learns far faster than the state of [CLS]; its sum is in fp32.
        real = attention_mask[..., None].float()
        mean = (hidden.float() * real).sum(1) / real.sum(1)
        logits = self.classifier(self.dropout(mean.to(hidden.dtype))).float()
        if self.wide is not None and not self.training:
            logits = self.wide(input_ids, features) + self.share.float() * logits
        return SequenceClassifierOutput(logits=logits)


def _keep_buffers_local(model: Any) -> None:  # noqa: ANN401 -- torch types no list
    """Tell DDP that buffers are equal on all ranks: it would send them in each step."""
    names = [name for name, _ in model.named_buffers()]
    model._ddp_params_and_buffers_to_ignore = names  # noqa: SLF001 -- as DDP reads it


AutoConfig.register(TextConfig.model_type, TextConfig)
AutoModelForTokenClassification.register(TextConfig, TextForTokenClassification)
AutoModelForSequenceClassification.register(TextConfig, TextForSequenceClassification)

"""Extra values of documents that follow from their tokens: weights of a pair's answers, and tokens that are scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn

# Names of extras: weights of answers' tokens, fp32 [b, s]; whether a document's score is that of a token, bool [b, s];
# by how much a chosen answer is to be ahead, fp32 [documents], in both documents of a pair.
ANSWER_TOKEN_WEIGHTS, SCORED, MARGIN = "answer_token_weights", "scored_tokens", "margin"


def answer_token_weights(documents: Sequence[Document], alpha: float) -> ExtraColumn:
    """Return fp32 [tokens]: alpha for trained tokens beyond as many as the shorter answer has, and 1 for all others.

    LD-DPO (arXiv:2409.06411): a model learns less from the length of an answer. A token's weight lies at the token
    before it, which predicts it.

    Args:
        documents: chosen, rejected, chosen, rejected ...
    """
    parts = [np.empty(0, dtype=np.float32)]
    for pair in zip(documents[::2], documents[1::2], strict=True):
        trained = [document.labels[1:] != IGNORE_INDEX for document in pair]
        shorter = min(int(each.sum()) for each in trained)
        for each in trained:
            beyond = each & (each.cumsum() > shorter)
            parts.append(np.append(np.where(beyond, alpha, 1.0), 1.0).astype(np.float32))
    return ExtraColumn("token", np.concatenate(parts))


def scored_tokens(documents: Sequence[Document], pad_token_id: int) -> ExtraColumn:
    """Return bool [tokens]: True for the token of each document at which a reward model's score is read.

    It is the last one that pads no row, as in Transformers; where a tokenizer pads with the token that ends answers,
    the one before the end.
    """
    parts = [np.empty(0, dtype=np.bool_)]
    for document in documents:
        (others,) = np.nonzero(document.input_ids != pad_token_id)
        is_scored = np.zeros(len(document.input_ids), dtype=np.bool_)
        is_scored[others[-1] if len(others) else 0] = True  # Transformers takes the first of none
        parts.append(is_scored)
    return ExtraColumn("token", np.concatenate(parts))

"""LD-DPO: what the tokens of a preference pair's answers weigh (arXiv:2409.06411).

The longer of two answers has tokens that the other one has no counterpart of. Their log-probabilities weigh alpha, so
that a model learns less from an answer's being long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn

ANSWER_TOKEN_WEIGHTS = "answer_token_weights"  # the name of the extra


def answer_token_weights(documents: Sequence[Document], alpha: float) -> ExtraColumn:
    """Return fp32 [tokens]: alpha for trained tokens beyond as many as the shorter answer has, and 1 for all others.

    A token's weight lies at the token before it, which predicts it.

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

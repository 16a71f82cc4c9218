"""Where a reward model's score of a document is read: at its last token that pads no row, as Transformers reads it.

Where a tokenizer pads with the token that ends answers, that is the token before the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatune.data.rows import Document, ExtraColumn

# Names of extras: whether a document's score is that of a token, bool [b, s]; by how much a chosen answer is to be
# ahead, fp32 [documents], in both documents of a pair.
SCORED, MARGIN = "scored_tokens", "margin"


def scored_tokens(documents: Sequence[Document], pad_token_id: int) -> ExtraColumn:
    """Return bool [tokens]: True for one token of each document."""
    parts = [np.empty(0, dtype=np.bool_)]
    for document in documents:
        (others,) = np.nonzero(document.input_ids != pad_token_id)
        is_scored = np.zeros(len(document.input_ids), dtype=np.bool_)
        is_scored[others[-1] if len(others) else 0] = True  # Transformers takes the first of none
        parts.append(is_scored)
    return ExtraColumn("token", np.concatenate(parts))

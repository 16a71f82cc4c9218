"""Rows as JSON, one object a line, for other tools to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatune.data.preview.rows import Preview, PreviewRow, RowDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def json_lines(preview: Preview, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Write each row: ids, labels, text and place of its sample; of a pair, those of chosen and rejected; of a packed
    row, the list of its sequences."""
    for row in preview.rows:
        yield json.dumps(_of_row(row, preview.arrangement, tokenizer), ensure_ascii=False)


def _of_row(row: PreviewRow, arrangement: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    written = [_of_document(each, tokenizer) for each in row.documents]
    if "pairs" in arrangement:
        pairs = zip(row.pairs, written[::2], written[1::2], strict=True)
        written = [
            {"place": first.where or None, "chosen": chosen, "rejected": rejected}
            for (first, _), chosen, rejected in pairs
        ]
    named = {"dataset": row.name or None, "row": row.number}
    return named | ({"sequences": written} if arrangement.startswith("packed") else written[0])


def _of_document(each: RowDocument, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Write the tokens of a document, whose place is its file and line, or its row in a data set; null where only
    prepared rows are left of it."""
    ids = each.document.input_ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"place": each.where or None, "ids": ids, "labels": each.document.labels.tolist(), "text": text}

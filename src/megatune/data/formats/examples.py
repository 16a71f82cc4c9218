"""One row as the stage trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import UnsupportedRow
from megatune.data.conversation import Example
from megatune.data.formats import alpaca, chat, query_response
from megatune.data.formats.fields import refuse_media
from megatune.data.formats.pairs import pair
from megatune.data.formats.text import text
from megatune.data.sources import DatasetSource


def to_example(row: Mapping[str, Any], source: DatasetSource, stage: str) -> Example:
    """One row as the stage trains it.

    Args:
        stage: "pt" makes a text, "sft" a conversation, "dpo" a pair.

    Raises:
        RowError: the row is not what its data set's form says.
        UnsupportedRow: the row has images, videos or audio, or its form has nothing for this stage.
    """
    columns = source.columns
    refuse_media(row, columns)
    if stage == "pt":
        return text(row, source)
    formatting = source.formatting
    if formatting == "text":
        what = f"its rows are texts, which stage pt trains; stage {stage} trains conversations"
        raise UnsupportedRow(what, "write stage: pt")
    if stage == "dpo":
        return pair(row, source)
    if formatting == "alpaca":
        return alpaca.conversation(row, columns)
    if formatting == "query_response":
        return query_response.conversation(row, columns)
    return chat.conversation(row, source)

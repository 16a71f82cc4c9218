"""Rows of every supported form to examples: a text, a conversation or a preference pair.

The forms: alpaca, query_response and text (`strings`), sharegpt and openai (`messages`), and preference pairs of all
but text (`pairs`). `detect` tells them apart. docs/data-formats.md lists what can be wrong with a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.data.bad_rows import UnsupportedRow
from megatune.data.conversation import Example
from megatune.data.formats import messages, strings
from megatune.data.formats.form import Columns, Form, Tags, detect
from megatune.data.formats.pairs import preference_pair

__all__ = ["Columns", "Form", "Tags", "detect", "to_example"]


def to_example(row: Mapping[str, Any], form: Form, stage: str) -> Example:
    """Read one row as the stage trains it.

    Args:
        stage: "pt" makes a text, "sft" a conversation, "dpo" a preference pair.

    Raises:
        RowError: the row is not what its form says.
        UnsupportedRow: the row has images, videos or audio, or its form has nothing for this stage.
    """
    columns = form.columns
    for kind, column in (("images", columns.images), ("videos", columns.videos), ("audio", columns.audios)):
        if column is not None and row.get(column):
            raise UnsupportedRow(f"field {column!r}: training on {kind} is not built")
    if stage == "pt":
        return strings.text(row, form)
    if form.formatting == "text":
        what = f"its rows are texts, which stage pt trains; stage {stage} trains conversations"
        raise UnsupportedRow(what, "write stage: pt")
    if stage == "dpo":
        return preference_pair(row, form)
    return (messages if form.formatting in ("sharegpt", "openai") else strings).conversation(row, form)

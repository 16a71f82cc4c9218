"""The formats of rows: each is a class that detects its rows and converts them to examples.

docs/data-formats.md lists the errors of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatune.data.formats.base import RowFormat
from megatune.data.formats.columns import OPENAI_TAGS, Columns
from megatune.data.formats.standard import AlpacaFormat, MessagesFormat, OpenAIFormat, QueryFormat, TextFormat

__all__ = [
    "FORMATS",
    "AlpacaFormat",
    "MessagesFormat",
    "OpenAIFormat",
    "QueryFormat",
    "RowFormat",
    "TextFormat",
    "detect",
]

# By their names in dataset_info.json, whose entries may name other columns and tags.
FORMATS: dict[str, RowFormat] = {
    each.formatting: each
    for each in (
        AlpacaFormat(),
        MessagesFormat(),
        OpenAIFormat(Columns(messages="messages"), OPENAI_TAGS),
        QueryFormat(Columns(prompt=None, query=None, response=None)),
        TextFormat(Columns(prompt="text")),
    )
}
_IN_ORDER = (MessagesFormat, AlpacaFormat, QueryFormat, TextFormat)  # the first that matches a row is its format


def detect(fields: Mapping[str, object], own: Mapping[str, str] | None = None) -> RowFormat | None:
    """Detect the format of a row; return None if no format matches its fields.

    Fields that are null are ignored, unless nothing matches without them.

    Args:
        own: standard name -> own name of columns, which this row need not have (see `own_names`). The row is detected
            as if its columns had their standard names; the format has the columns' own names.
    """
    own = own or {}
    taken = {name: usual for usual, name in own.items()}
    usual = {name: value for name, value in fields.items() if name not in own and name not in taken}
    usual |= {taken[name]: value for name, value in fields.items() if name in taken}
    present = {name: value for name, value in usual.items() if value is not None}
    found = (kind.detect(each) for each in (present, usual) for kind in _IN_ORDER)
    return next((each.with_own_names(own) for each in found if each is not None), None)

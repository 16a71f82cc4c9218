"""Where rows come from: dataset_info.json, paths and hubs.

`resolve_datasets` turns the names of a user's settings into `DatasetSource`s, each the files of a data set and the form
of its rows; `DatasetSource.rows_from` reads them from any place on.
"""

from __future__ import annotations

from megatune.data.sources.dataset import (
    FORMATTINGS,
    OPENAI_COLUMNS,
    OPENAI_TAGS,
    QUERY_RESPONSE_COLUMNS,
    TEXT_COLUMNS,
    Columns,
    DatasetSource,
    Formatting,
    SourcePosition,
    Tags,
)
from megatune.data.sources.registry import DATASET_INFO
from megatune.data.sources.resolve import resolve_datasets

__all__ = [
    "DATASET_INFO",
    "FORMATTINGS",
    "OPENAI_COLUMNS",
    "OPENAI_TAGS",
    "QUERY_RESPONSE_COLUMNS",
    "TEXT_COLUMNS",
    "Columns",
    "DatasetSource",
    "Formatting",
    "SourcePosition",
    "Tags",
    "resolve_datasets",
]

"""Where rows come from: dataset_info.json, paths and hubs.

`resolve_datasets` turns the names of a user's settings into `DatasetSource`s, each the files of a data set and the form
of its rows; `DatasetSource.rows_from` reads them from any position.
"""

from __future__ import annotations

from megatune.data.sources.registry import DATASET_INFO
from megatune.data.sources.resolve import DatasetSource, SourcePosition, resolve_datasets

__all__ = ["DATASET_INFO", "DatasetSource", "SourcePosition", "resolve_datasets"]

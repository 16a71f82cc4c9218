"""Strict readers: every row comes with its place in its file, and what is wrong with it where something is."""

from megatune.data.readers.kinds import data_suffix, read_rows, supported_suffixes
from megatune.data.readers.row import Position, RawRow, json_type

__all__ = ["Position", "RawRow", "data_suffix", "json_type", "read_rows", "supported_suffixes"]

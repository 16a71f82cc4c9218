"""Prompts with answers to other prompts: what KTO measures the model's distance from its reference on.

A row's prompt gets the answer of the next row with another prompt; behind the last row comes the first one. Rows next
to each other may share a prompt, as those that were made of a pair: the first of them takes the answer of the first row
of the next prompt, the second that of the second one, and so on, so that answers of both kinds are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatune.data.rows import ColumnFile, Document, TokenRows
from megatune.data.store import Column, write_array

_PARTNERS_FILE = "partners.npy"


class MismatchedRows(TokenRows):
    """Row i is the prompt of row i of the folder and, behind it, the answer of another row, cut to cutoff_len.

    An answer is what follows a document's first trained token, and that token; what of it is trained there is here.
    """

    def __init__(self, directory: Path | str, cutoff_len: int, columns: Sequence[ColumnFile] = ()) -> None:
        super().__init__(directory, columns)
        assert self.arrangement == "single", "a row is one document"
        self._cutoff_len = cutoff_len

    def __getitem__(self, row: int) -> tuple[Document, ...]:
        (own,), (other,) = super().__getitem__(row), super().__getitem__(int(self._partners[row]))
        prompt, room = self._prompts[row], self._lengths[row] - self._prompts[row]
        answer = slice(self._prompts[self._partners[row]], self._prompts[self._partners[row]] + room)
        input_ids = np.concatenate((own.input_ids[:prompt], other.input_ids[answer]))
        labels = np.concatenate((own.labels[:prompt], other.labels[answer]))
        return (Document(input_ids, labels, tuple(each for each in own.pictures if each.start < prompt)),)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.directory, self._cutoff_len, self._columns)

    @property
    def digest(self) -> str:
        return f"{super().digest} with other answers, {self._cutoff_len}"

    def document_lengths(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._lengths[np.asarray(rows, dtype=np.int64)]

    def row_lengths(self) -> np.ndarray:
        return self._lengths

    def batch_lengths(self) -> np.ndarray:
        return self._lengths

    @cached_property
    def _prompts(self) -> np.ndarray:
        """Tokens of each document before its first trained one: int64 [rows]."""
        trained = self._trained.values != 0
        begins = np.flatnonzero(trained[1:] & ~trained[:-1]) + 1  # one for almost every document
        starts, stops = self._documents[:, 0], self._documents[:, 1]
        firsts = np.append(begins, len(trained))[np.searchsorted(begins, starts, side="right")]
        return np.asarray(np.where(trained[starts], starts, np.minimum(firsts, stops)) - starts)

    @cached_property
    def _partners(self) -> np.ndarray:
        """The row that each row's answer is from, int64 [rows]: as noted when they were prepared, or computed here."""
        path = self.directory / _PARTNERS_FILE
        return Column(path).whole() if path.exists() else self._find_partners()

    def write_partners(self) -> None:
        """Compute the partners once, which takes minutes for millions of rows, and keep them beside the rows."""
        write_array(self.directory / _PARTNERS_FILE, self._find_partners())

    def _find_partners(self) -> np.ndarray:
        rows = np.arange(len(self))
        same = self._prompts[:-1] == self._prompts[1:]
        same[same] = [self._is_same_prompt(row) for row in np.flatnonzero(same).tolist()]
        begins = np.concatenate(([0], 1 + np.flatnonzero(~same)))
        sizes = np.diff(np.append(begins, len(self)))
        run = np.repeat(np.arange(len(begins)), sizes)
        following = (run + 1) % len(begins)
        place = rows - begins[run] + (len(begins) == 1)  # of one prompt alone, at least another answer
        return np.asarray(begins[following] + place % sizes[following])

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Tokens of each document: int64 [rows]."""
        answers = self._documents[:, 1] - self._documents[:, 0] - self._prompts
        return np.minimum(self._prompts + answers[self._partners], self._cutoff_len)

    def _is_same_prompt(self, row: int) -> bool:
        """Return whether this row and the next, whose prompts are equally long, have the same prompt."""
        (start, other), size = self._documents[row : row + 2, 0], self._prompts[row]
        if not np.array_equal(self._tokens.values[start : start + size], self._tokens.values[other : other + size]):
            return False
        return self._pictures.between(start, start + size) == self._pictures.between(other, other + size)

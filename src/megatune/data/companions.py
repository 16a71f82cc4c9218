"""Mismatched prompts and answers, from which KTO estimates the KL divergence between the policy and its reference.

The companion of a document is its prompt followed by the answer of the next document with another prompt, in the order
of the samples (the first one follows the last), cut to cutoff_len. Neighbouring documents may share a prompt, such as
the two that were made of a pair: the first of them gets the answer of the first document with the next prompt, the
second the answer of the second one, and so on, so that desirable and undesirable answers both occur.

An answer begins at a document's first trained token. It keeps its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from megatune.data.media_table import MediaTable
from megatune.data.rows import TOKENS_FILE, TRAINED_FILE, ColumnFile, Document, TokenRows
from megatune.data.store import Column, write_array

_FILE = "companions.npy"


class Companions(NamedTuple):
    """For each document, int64 [documents] each: the index of the document whose answer its companion has, the length
    of its prompt, and the length of the companion."""

    partners: np.ndarray
    prompts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def find(cls, folder: Path, spans: np.ndarray, cutoff_len: int) -> Companions:
        """Find the companions of documents that are in the order of their samples; millions of them may take minutes.

        Args:
            folder: the folder with their tokens.
            spans: int64 [documents, 2], start and end of each document's tokens.
        """
        tokens = Column(folder / TOKENS_FILE).values
        prompts = _prompts(Column(folder / TRAINED_FILE).values != 0, spans)
        partners = _partners(_begins(tokens, MediaTable(folder), spans[:, 0], prompts), len(spans))
        answers = spans[:, 1] - spans[:, 0] - prompts
        return cls(partners, prompts, np.minimum(prompts + answers[partners], cutoff_len))

    def reordered(self, order: np.ndarray) -> Companions:
        """Return the companions with the documents in another order: int64 [documents], their indices here."""
        numbers = np.empty_like(order)
        numbers[order] = np.arange(len(order))
        return Companions(numbers[self.partners[order]], self.prompts[order], self.sizes[order])

    def write(self, part: Path) -> None:
        """Write the companions of a part's documents into its folder."""
        write_array(part / _FILE, np.stack(self))


class CompanionRows(TokenRows):
    """The rows of a part in stage kto, with each document replaced by its companion."""

    def __init__(self, directory: Path | str, columns: Sequence[ColumnFile] = ()) -> None:
        super().__init__(directory, columns)
        try:
            self._table = Column(self.directory / _FILE).whole()
        except (OSError, ValueError) as error:
            raise self._incomplete(str(error)) from error
        self._companions = Companions(*self._table)

    @property
    def digest(self) -> str:
        return f"{super().digest} with other answers, {xxhash.xxh3_128_hexdigest(self._table.data)}"

    @property
    def _sizes(self) -> np.ndarray:
        return self._companions.sizes

    def _document(self, number: int) -> Document:
        partner, prompt, size = (int(column[number]) for column in self._companions)
        own, other = super()._document(number), super()._document(partner)
        start = int(self._companions.prompts[partner])
        answer = slice(start, start + size - prompt)
        input_ids = np.concatenate((own.input_ids[:prompt], other.input_ids[answer]))
        labels = np.concatenate((own.labels[:prompt], other.labels[answer]))
        return Document(input_ids, labels, tuple(each for each in own.media if each.start < prompt))


def _prompts(trained: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the number of tokens before the first trained one of each document: int64 [documents].

    Args:
        trained: bool [tokens].
    """
    begins = np.flatnonzero(trained[1:] & ~trained[:-1]) + 1
    starts, stops = spans[:, 0], spans[:, 1]
    firsts = np.append(begins, len(trained))[np.searchsorted(begins, starts, side="right")]
    return np.asarray(np.where(trained[starts], starts, np.minimum(firsts, stops)) - starts)


def _begins(tokens: np.ndarray, media: MediaTable, starts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Return the first document of each run of documents with the same prompt: int64 [runs]."""
    same = prompts[:-1] == prompts[1:]
    for number in np.flatnonzero(same).tolist():
        (start, other), size = starts[number : number + 2], prompts[number]
        same[number] = np.array_equal(tokens[start : start + size], tokens[other : other + size]) and (
            media.between(start, start + size) == media.between(other, other + size)
        )
    return np.concatenate(([0], 1 + np.flatnonzero(~same)))


def _partners(begins: np.ndarray, num_documents: int) -> np.ndarray:
    """Return, for each document, the document whose answer its companion has: int64 [documents]."""
    sizes = np.diff(np.append(begins, num_documents))
    run = np.repeat(np.arange(len(begins)), sizes)
    following = (run + 1) % len(begins)
    # If all documents have the same prompt, take at least another answer.
    place = np.arange(num_documents) - begins[run] + (len(begins) == 1)
    return np.asarray(begins[following] + place % sizes[following])

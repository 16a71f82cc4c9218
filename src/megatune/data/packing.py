"""Packing: which documents share a row, so that little of a batch is padding.

Best-fit decreasing over all documents at once: the longest first, each into the fullest row that still has room for it.
The number of rows tends to at most 11/9 of the fewest possible (Johnson, "Near-optimal bin packing algorithms", 1973);
where many documents are short, hardly any room is left over.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np

from megatune.data.order import packing_order


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to rows of at most `capacity` tokens; each is in one row, whole.

    Takes time in proportion to documents plus capacity, beside the sort. Nothing but the arguments decides.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        seed: decides among documents of the same length, so that neighbours in a file do not end up in one row.

    Returns:
        Document ids, row by row and in ascending order within a row: int64 [documents]; and where each row begins
        there, with the end behind the last: int64 [rows + 1].
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"documents of {lengths.min()} to {lengths.max()} tokens for rows of {capacity}")
    shuffled = packing_order(len(lengths), seed)
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows = np.empty(len(lengths), dtype=np.int64)
    rows[longest_first] = _best_fit(lengths[longest_first].tolist(), capacity)
    documents = np.argsort(rows, kind="stable")
    return documents, np.concatenate(([0], np.cumsum(np.bincount(rows)))).astype(np.int64)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the row of each document; lengths fall.

    Since they fall, a row with room for the present document never regains what it gives away, and one without room
    waits until documents are short enough. So the rows with room are a stack with the fullest on top: rows that come
    in from waiting are fuller than all on it, and so is a row that is put back.
    """
    waiting: list[list[int]] = [[] for _ in range(capacity)]  # by room
    with_room: list[tuple[int, int]] = []  # (room, row)
    chosen: list[int] = []
    num_rows, previous = 0, capacity
    for length in lengths:
        for room in range(previous - 1, length - 1, -1):
            with_room += [(room, row) for row in waiting[room]]
        previous = length
        if with_room:
            room, row = with_room.pop()
        else:
            room, row = capacity, num_rows
            num_rows += 1
        chosen.append(row)
        room -= length
        if room >= length:
            with_room.append((room, row))
        else:
            waiting[room].append(row)
    return chosen


def concatenate(spans: np.ndarray, capacity: int, *, joined: bool) -> tuple[np.ndarray, np.ndarray]:
    """Cut texts to rows of at most `capacity` tokens, in their order and without loss.

    A piece that continues a text starts with the token that the piece before it ends with: a document's first token
    is never predicted, so each token of a text but its first is predicted exactly once.

    Args:
        spans: int64 [texts, 2], where each text's tokens begin and end; two tokens or more.
        joined: texts share rows, each row as full as it can be; otherwise every text begins a row.

    Returns:
        Pieces in order: int64 [pieces, 2]; and where each row's pieces begin there: int64 [rows + 1].
    """
    pieces = array("q")  # flat: a list of ten million pairs would take a gigabyte
    rows = array("q", [0])
    room = capacity
    for start, stop in chain.from_iterable(part.tolist() for part in np.array_split(spans, len(spans) // 65536 + 1)):
        if room < 2 or not joined:
            if 2 * rows[-1] < len(pieces):
                rows.append(len(pieces) // 2)
            room = capacity
        while True:
            end = min(start + room, stop)
            pieces.extend((start, end))
            room -= end - start
            if end == stop:
                break
            rows.append(len(pieces) // 2)
            room, start = capacity, end - 1
    if 2 * rows[-1] < len(pieces):
        rows.append(len(pieces) // 2)
    return np.asarray(pieces, dtype=np.int64).reshape(-1, 2), np.asarray(rows, dtype=np.int64)

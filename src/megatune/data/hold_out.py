"""val_size: which rows of the training data are held out for evaluation.

A row's rank is a hash of the seed and its own texts. So the split does not move when rows are added or sorted, nor with
the template, the tokenizer, cutoff_len or other data sets: only the number that is held out does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import ceil

import numpy as np

from megatune.data.conversation import Example, texts
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Split:
    """What becomes of each usable row of the training data.

    Attributes:
        held_out: bool [rows].
        left_out: bool [rows]; neither trained nor held out, because a row with the same texts is held out.
        on_both_sides: rows with the texts of a held-out row that are trained, since there are no others.
    """

    held_out: np.ndarray
    left_out: np.ndarray
    on_both_sides: int = 0


def rank(example: Example, seed: int) -> int:
    """The place of an example in the order in which rows are held out: 0 to 2^64 - 1, the lowest first."""
    said = "\0".join((str(seed), *texts(example)))
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def hold_out(ranks: np.ndarray, val_size: float) -> Split:
    """Hold out the rows of the lowest ranks.

    Rows with the same texts have the same rank, and the earlier ones are held out first. What is left of a text that is
    held out is left out of training, unless all rows have it.

    Args:
        ranks: uint64 [rows], see `rank`.
        val_size: a number of rows, or a share below 1, rounded up.

    Raises:
        MegatuneError: no row would be left to train (exit code 64).
    """
    num_rows = len(ranks)
    count = int(val_size) if val_size >= 1 else ceil(val_size * num_rows)
    if count >= num_rows:
        raise MegatuneError(
            Finding(
                f"val_size: {val_size:g} leaves nothing to train on",
                why=f"{num_rows} rows are usable",
                fix=f"at most {num_rows - 1}",
            ),
            ExitCode.SETTINGS,
        )
    order = np.argsort(ranks, kind="stable")
    held_out = np.zeros(num_rows, dtype=bool)
    held_out[order[:count]] = True
    copies = (ranks == ranks[order[count - 1]]) & ~held_out
    if (copies | held_out).all():
        return Split(held_out, np.zeros(num_rows, dtype=bool), on_both_sides=int(copies.sum()))
    return Split(held_out, copies)

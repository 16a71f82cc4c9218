"""The order of rows: pure functions of (seed, epoch), the same in every layout and after every resume.

Only numpy's bit generators and SeedSequence promise the same numbers in every numpy version; Generator.permutation
does not. So a permutation here is the stable sort order of raw 64-bit draws: a run resumed after an upgrade of numpy
still sees each row once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the row ids of one epoch, each once: int64 [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return _permutation(num_rows, np.random.SeedSequence([seed, epoch]))


def grouped_order(lengths: np.ndarray, seed: int, epoch: int, global_batch_size: int) -> np.ndarray:
    """Return the row ids of one epoch, each once, with rows of similar length in a batch: int64 [rows].

    Rows are shuffled, cut into groups of 50 batches (of fewer, where 4 groups would not come together), and sorted by
    length, longest first, within each. The longest row of all is in the first batch, so that memory that does not
    suffice shows at once. The rule is that of Transformers' group_by_length, for global batches.

    Args:
        lengths: tokens of every row, int64 [rows].
    """
    group = global_batch_size * max(1, min(len(lengths) // (global_batch_size * 4), 50))
    order = epoch_order(len(lengths), seed, epoch)
    for start in range(0, len(order), group):
        rows = order[start : start + group]
        order[start : start + group] = rows[np.argsort(-lengths[rows], kind="stable")]
    if len(order):
        longest = int(np.argmax(lengths[order]))
        order[[0, longest]] = order[[longest, 0]]
    return order


def sample_order(num_rows: int, seed: int) -> np.ndarray:
    """Return the order in which num_samples draws rows of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(1,)))


def packing_order(num_documents: int, seed: int) -> np.ndarray:
    """Return the order in which packing takes documents of the same length: int64 [num_documents]."""
    return _permutation(num_documents, np.random.SeedSequence(seed, spawn_key=(2,)))


def weight_order(num_rows: int, seed: int, dataset: int) -> np.ndarray:
    """Return the order in which a fractional weight draws the samples of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(3, dataset)))


def mixing_bits(seed: int, size: int) -> Iterator[np.ndarray]:
    """Yield random bits that draw data sets: uint64 [size] each, without end, one sequence for every size."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(4,)))
    while True:
        yield generator.random_raw(size)


def block_order(size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Return the order of the samples, and of the packed rows, of one block of streamed data: int64 [size]."""
    return _permutation(size, np.random.SeedSequence(seed, spawn_key=(5, epoch, block)))


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Return the optimizer steps that train every row once; the last may be a short one."""
    return -(-num_rows // global_batch_size)


def _permutation(num_rows: int, seed: np.random.SeedSequence) -> np.ndarray:
    draws = np.random.PCG64(seed).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)

"""The order of rows: pure functions of (seed, epoch), the same in every layout and after every resume.

Only numpy's bit generators and SeedSequence promise the same numbers in every numpy version; Generator.permutation
does not. So a permutation here is the stable sort order of raw 64-bit draws: a run resumed after an upgrade of numpy
still sees each row once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Row ids of one epoch, each once: int64 [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return _permutation(num_rows, np.random.SeedSequence([seed, epoch]))


def split_order(num_rows: int, seed: int) -> np.ndarray:
    """The order in which rows are offered to the evaluation set: int64 [num_rows]; unrelated to any epoch's order."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(0,)))


def sample_order(num_rows: int, seed: int) -> np.ndarray:
    """The order in which num_samples draws rows of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(1,)))


def packing_order(num_documents: int, seed: int) -> np.ndarray:
    """The order in which packing takes documents of the same length: int64 [num_documents]."""
    return _permutation(num_documents, np.random.SeedSequence(seed, spawn_key=(2,)))


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Optimizer steps that train every row once; the last may be a short one."""
    return -(-num_rows // global_batch_size)


def global_batch_rows(num_rows: int, global_batch_size: int, seed: int, step: int, shuffle: bool = True) -> np.ndarray:
    """Row ids of one optimizer step, over all data-parallel ranks and micro-batches.

    Args:
        step: counted from 0 over the whole run.

    Returns:
        int64 [at most global_batch_size]; shorter at the end of an epoch, since a batch never crosses epochs.
    """
    if num_rows < 1:
        raise ValueError("no rows")
    epoch, batch = divmod(step, steps_per_epoch(num_rows, global_batch_size))
    order = _remembered_epoch_order(num_rows, seed, epoch, shuffle)
    return order[batch * global_batch_size : (batch + 1) * global_batch_size]


@lru_cache(maxsize=2)
def _remembered_epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    order = epoch_order(num_rows, seed, epoch, shuffle)
    order.flags.writeable = False
    return order


def _permutation(num_rows: int, seed: np.random.SeedSequence) -> np.ndarray:
    draws = np.random.PCG64(seed).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)

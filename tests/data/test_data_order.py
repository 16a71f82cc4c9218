from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import repeat
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import get_length_grouped_indices

from megatune.data.order import epoch_order, grouped_order, sample_order, steps_per_epoch, weight_order
from megatune.data.samples import drawn_samples

SEEDS = st.integers(0, 2**32)


@settings(deadline=None)
@given(st.integers(1, 200), SEEDS, st.integers(0, 5))
def test_an_epoch_has_each_row_once(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_rows))


def test_the_order_is_the_same_for_ever() -> None:
    """Golden values: a resumed run must see the order it started with, whatever numpy is installed."""
    assert epoch_order(10, seed=42, epoch=0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]
    assert epoch_order(10, seed=42, epoch=1).tolist() == [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]
    assert sample_order(10, seed=42).tolist() == [1, 7, 3, 9, 5, 0, 2, 8, 6, 4]
    assert weight_order(10, seed=42, dataset=1).tolist() == [2, 8, 9, 0, 5, 6, 7, 3, 1, 4]


def test_unshuffled_is_the_order_of_rows() -> None:
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=120), st.integers(1, 6), SEEDS, st.integers(0, 3))
def test_grouping_by_length_is_what_transformers_does(lengths: list[int], batch: int, seed: int, epoch: int) -> None:
    """For the same shuffle: its own comes from torch, so it is given ours."""
    shuffled = torch.from_numpy(epoch_order(len(lengths), seed, epoch))
    with patch.object(torch, "randperm", lambda size, generator: shuffled):
        expected = get_length_grouped_indices(lengths, batch)
    order = grouped_order(np.asarray(lengths), seed, epoch, batch)
    assert order.tolist() == expected
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_grouped_batches_have_rows_of_similar_length() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, size=10_000)
    order = grouped_order(lengths, seed=0, epoch=0, global_batch_size=10)
    batches = lengths[order].reshape(-1, 10)
    assert batches[0].max() == lengths.max()
    padded, shuffled = batches.max(axis=1).sum(), lengths.reshape(-1, 10).max(axis=1).sum()
    assert padded < 0.6 * shuffled
    assert order.tolist() != grouped_order(lengths, seed=0, epoch=1, global_batch_size=10).tolist()


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20))
def test_the_last_step_of_an_epoch_may_be_short(num_rows: int, batch: int) -> None:
    steps = steps_per_epoch(num_rows, batch)
    assert (steps - 1) * batch < num_rows <= steps * batch


@pytest.mark.parametrize("seed", [None, 3])
def test_drawing_rows_takes_a_few_bytes_a_row(seed: int | None) -> None:
    """A Python set of their numbers took 60, in addition to the order of the draw."""
    number, size = 100_000, 75_000

    class Source:
        num_samples = size

        def rows(self) -> Iterator[None]:
            return repeat(None, number)

        def rows_from(self) -> Iterator[tuple[int, None]]:
            return ((row, None) for row in range(number))

    source: Any = Source()
    tracemalloc.start()
    drawn = sum(sample.copies for sample in drawn_samples(source, seed))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn == size
    assert peak < 30 * number  # most of it for the order of the draw
    chosen = [sample.row for sample in drawn_samples(source, seed)]
    assert chosen == sorted(range(size) if seed is None else sample_order(number, seed)[:size].tolist())

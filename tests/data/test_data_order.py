from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data.order import epoch_order, global_batch_rows, sample_order, split_order, steps_per_epoch

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
    assert split_order(10, seed=42).tolist() == [8, 5, 3, 9, 7, 2, 1, 0, 4, 6]
    assert sample_order(10, seed=42).tolist() == [1, 7, 3, 9, 5, 0, 2, 8, 6, 4]


def test_unshuffled_is_the_order_of_rows() -> None:
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), SEEDS)
def test_steps_of_an_epoch_concatenate_to_its_order(num_rows: int, batch: int, seed: int) -> None:
    steps = steps_per_epoch(num_rows, batch)
    for epoch in (0, 2):
        batches = [global_batch_rows(num_rows, batch, seed, epoch * steps + step) for step in range(steps)]
        assert np.concatenate(batches).tolist() == epoch_order(num_rows, seed, epoch).tolist()
        assert all(len(rows) == batch for rows in batches[:-1])


def test_the_order_cannot_be_changed_through_a_batch() -> None:
    rows = global_batch_rows(4, 4, seed=0, step=0)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 7


def test_no_rows_have_no_steps() -> None:
    with pytest.raises(ValueError, match="no rows"):
        global_batch_rows(0, 4, seed=0, step=0)

"""Pieces of page-locked memory that a model is moved out into."""

from __future__ import annotations

import pytest

from megatune.engine.offload import piece_sizes


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 1, 3 * 2**30 + 12345, 2**33, 5_000_000_000, 17_179_869_183])
def test_pieces_are_hardly_larger_when_they_are_rounded_up_to_powers_of_two(num_bytes: int) -> None:
    sizes = piece_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    pinned = sum(1 << (size - 1).bit_length() for size in sizes)
    assert pinned - num_bytes <= 2**20
    assert len(sizes) < 20

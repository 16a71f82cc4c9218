"""Images and videos are assigned to ranks by their patches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatune.data.batches import assign_to_ranks


def test_the_largest_first() -> None:
    assert assign_to_ranks([4, 16, 8, 8, 4], 2) == [0, 0, 1, 1, 1]
    assert assign_to_ranks([5, 5, 5], 8) == [0, 1, 2]
    assert assign_to_ranks([], 4) == []
    assert assign_to_ranks([3, 1], 1) == [0, 0]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_no_rank_has_much_more_than_it_must(patches: list[int], size: int) -> None:
    """Graham's bound of longest first: 4/3 of the best, which is at least the mean and the largest."""
    owners = assign_to_ranks(patches, size)
    loads = [sum(count for count, owner in zip(patches, owners, strict=True) if owner == rank) for rank in range(size)]
    ordered = sorted(patches, reverse=True)
    pair = sum(ordered[size - 1 : size + 1]) if len(ordered) > size else 0
    least = max([sum(patches) / size, *ordered[:1], pair])
    assert max(loads, default=0) <= 4 / 3 * least

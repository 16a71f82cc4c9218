"""How data sets are mixed: against the datasets library, and against the draws one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data.order import draws, mixed_order
from megatune.errors import ExitCode, MegatuneError

STRATEGIES = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def endless(num_sets: int, probabilities: Sequence[float] | None, seed: int) -> Iterator[int]:
    """The draws from data sets none of which is ever used up."""
    return draws(num_sets, "interleave_over", probabilities, seed, lambda: 0)


def interleaved(sizes: Sequence[int], strategy: str, probabilities: Sequence[float] | None, seed: int) -> list[int]:
    """The datasets library's answer."""
    ends = np.cumsum([0, *sizes]).tolist()
    sets = [Dataset.from_dict({"number": list(range(*span))}) for span in pairwise(ends)]
    mixed = interleave_datasets(sets, probabilities, seed=seed, stopping_strategy=STRATEGIES[strategy])
    return list(mixed["number"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sizes", [[3], [3, 4, 5], [5, 1, 3, 1], [2, 2]])
def test_in_turn_is_what_the_datasets_library_does(strategy: str, sizes: list[int]) -> None:
    order = mixed_order(sizes, strategy, None, None, seed=1)
    assert order.dtype == np.int64
    assert order.tolist() == interleaved(sizes, strategy, None, seed=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_probabilities_shares_are_those_of_the_datasets_library(strategy: str) -> None:
    sizes, probabilities = [4000, 1500, 3000], [0.5, 0.2, 0.3]
    first = [0, 4000, 5500]
    found, expected = (
        np.bincount(np.searchsorted(first, order, side="right") - 1, minlength=3)
        for order in (
            mixed_order(sizes, strategy, probabilities, None, seed=3),
            interleaved(sizes, strategy, probabilities, seed=3),
        )
    )
    # Where drawing ends is random, too: both counts are sums of some thousand draws.
    np.testing.assert_allclose(found, expected, rtol=0.1)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.sampled_from(list(STRATEGIES)), st.integers(0, 2**32), st.data())
def test_with_probabilities_every_draw_counts(sizes: list[int], strategy: str, seed: int, data: st.DataObject) -> None:
    """One sample a draw, by the rule in words: the sequence that streaming follows."""
    raw = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    probabilities = [share / sum(raw) for share in raw]
    first = np.cumsum([0, *sizes]).tolist()
    taken = Counter[int]()
    expected: list[int] = []
    for number in endless(len(sizes), probabilities, seed):
        if strategy != "interleave_once" or taken[number] < sizes[number]:
            expected.append(first[number] + taken[number] % sizes[number])
        taken[number] += 1
        used_up = [taken[n] >= size for n, size in enumerate(sizes)]
        if any(used_up) if strategy == "interleave_under" else all(used_up):
            break
    assert mixed_order(sizes, strategy, probabilities, None, seed).tolist() == expected


def test_many_draws_continue_over_chunks() -> None:
    """More samples than are drawn at a time; an unlikely data set comes to its end, too."""
    sizes, probabilities = [150_000, 40], [0.9999, 0.0001]
    once = mixed_order(sizes, "interleave_once", probabilities, None, seed=5)
    assert np.array_equal(np.sort(once), np.arange(sum(sizes)))
    over = mixed_order(sizes, "interleave_over", probabilities, None, seed=5)
    assert len(np.unique(over)) == sum(sizes)
    drawn = np.fromiter(islice(endless(2, probabilities, 5), len(over)), dtype=np.int64)
    assert np.array_equal(over >= sizes[0], drawn == 1)


def test_the_draws_are_the_same_for_ever() -> None:
    assert list(islice(endless(3, [0.5, 0.25, 0.25], 42), 16)) == [0, 2, 2, 1, 2, 0, 1, 0, 1, 2, 1, 0, 0, 2, 0, 1]
    assert list(islice(endless(3, None, 42), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_draws_follow_the_probabilities() -> None:
    counts = np.bincount(list(islice(endless(3, [0.7, 0.2, 0.1], 1), 20_000)))
    np.testing.assert_allclose(counts / 20_000, [0.7, 0.2, 0.1], atol=0.01)


def test_concat_takes_each_whole() -> None:
    assert mixed_order([2, 0, 3], "concat", None, None, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert mixed_order([], "concat", None, None, seed=0).tolist() == []


def test_weights_repeat_and_sample() -> None:
    order = mixed_order([3, 10, 4, 100], "concat", None, [2, 0.5, 1.5, 0.001], seed=9).tolist()
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    half = order[6:11]
    assert len(set(half)) == 5
    assert set(half) <= set(range(3, 13))
    assert half == sorted(half)  # a random half, in the order of the data
    assert order[11:15] == [13, 14, 15, 16]
    assert len(set(order[15:17]) & {13, 14, 15, 16}) == 2
    assert len(order) == 18, "something of every data set"
    assert mixed_order([3, 10, 4, 100], "concat", None, [2, 0.5, 1.5, 0.001], seed=9).tolist() == order
    others = [mixed_order([10, 10], "concat", None, [0.5, 0.5], seed).tolist() for seed in range(8)]
    assert len({tuple(other) for other in others}) > 6
    assert any([number + 10 for number in other[:5]] != other[5:] for other in others), "each set has draws of its own"


@pytest.mark.parametrize(
    ("strategy", "probabilities", "weights", "key"),
    [
        ("interleave_over", [1e-6, 1 - 1e-6], None, "interleave_probs"),
        ("concat", None, [1e6, 1], "dataset_weights"),
    ],
)
def test_repeating_beyond_measure_is_refused(
    strategy: str, probabilities: list[float] | None, weights: list[float] | None, key: str
) -> None:
    with pytest.raises(MegatuneError, match=rf"{key} would make an epoch of about 1e\+12 samples") as caught:
        mixed_order([1_000_000, 10], strategy, probabilities, weights, seed=0)
    assert caught.value.exit_code == ExitCode.SETTINGS


def test_data_sets_without_samples_are_not_waited_for() -> None:
    assert mixed_order([0, 2], "interleave_under", None, None, seed=0).tolist() == []
    for strategy in ("interleave_over", "interleave_once"):
        for probabilities in (None, [0.5, 0.5]):
            assert mixed_order([0, 2], strategy, probabilities, None, seed=0).tolist() == [0, 1]

"""How long samples are, counted exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatune.data.report import LengthReport


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(2, 2000))
def test_every_sample_is_in_one_bin(lengths: list[int], cutoff_len: int) -> None:
    report = LengthReport.of(np.array(lengths, dtype=np.int32), cutoff_len)
    assert (report.samples, report.longest, report.mean) == (
        len(lengths),
        max(lengths),
        pytest.approx(np.mean(lengths)),
    )
    assert report.over == sum(length > cutoff_len for length in lengths)
    for percent, found in ((50, report.p50), (90, report.p90), (99, report.p99)):
        assert found in lengths
        assert 100 * sum(length <= found for length in lengths) >= percent * len(lengths)
        assert 100 * sum(length < found for length in lengths) < percent * len(lengths)
    edges = report.edges
    assert list(edges) == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, max(lengths))
    assert len(report.counts) == len(edges) - 1 <= 16
    assert cutoff_len in edges or report.longest < cutoff_len
    assert list(report.counts) == [
        sum(low < length <= high for length in lengths) for low, high in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("longest", [3, 100, 1023, 1024, 1025, 2000, 2048, 100_000])
def test_there_are_enough_bins_to_see_a_shape(longest: int) -> None:
    assert min(longest, 8) <= len(LengthReport.of(np.array([1, longest]), 1024).counts) <= 16


def test_the_line_before_step_1() -> None:
    lengths = np.array([5] * 8 + [15] * 4 + [100] + [400])
    assert LengthReport.of(lengths, 64).line() == (
        "lengths: |█   ¦  ▁ ▁| to 400 tokens, p50 5, p90 100, p99 400, mean 43; 2 (14.3%) over cutoff_len 64"
    )
    assert LengthReport.of(np.array([1, 2, 2]), 1024).line() == (
        "lengths: |▄█| to 2 tokens, p50 2, p90 2, p99 2, mean 2; none over cutoff_len 1024"
    )

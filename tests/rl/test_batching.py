"""Which samples go together: each once, as many micro-batches on every rank, about the same to compute."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.rl.worker.batching import BatchLayout, cost, mini_batches


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    ranks=st.integers(1, 5),
    rows=st.integers(1, 4),
    tokens=st.one_of(st.none(), st.integers(8, 100)),
    multiple=st.sampled_from((1, 4)),
    round_=st.integers(1, 3),
)
def test_every_sample_is_computed_once(lengths, ranks, rows, tokens, multiple, round_):
    shares = BatchLayout(ranks, rows, tokens, multiple, round_).assign(lengths)
    assert sorted(chain.from_iterable(chain.from_iterable(shares))) == list(range(len(lengths)))
    assert len(shares) == ranks
    assert len({len(of_rank) for of_rank in shares}) == 1
    assert len(shares[0]) % round_ == 0
    for samples in chain.from_iterable(shares):
        if tokens is None:
            assert len(samples) <= rows
        else:
            assert len(samples) <= 1 or sum(-(-lengths[each] // multiple) * multiple for each in samples) <= tokens


@pytest.mark.parametrize("tokens", [None, 4096])
def test_ranks_have_as_much_to_compute(tokens):
    lengths = np.random.default_rng(0).integers(50, 4000, 512).tolist()
    shares = BatchLayout(8, 2, tokens).assign(lengths)
    costs = [sum(cost(lengths[each]) for each in chain.from_iterable(of_rank)) for of_rank in shares]
    assert max(costs) < 1.01 * min(costs)
    if tokens is not None:
        # Of the fewest micro-batches that tokens could be packed into.
        assert len(shares[0]) <= 1.05 * sum(lengths) / (8 * tokens) + 1


def test_updates_take_each_sample_once_an_epoch():
    plan = mini_batches(22, 8, 2, seed=5, step=3)
    assert [len(samples) for samples in plan] == [8, 7, 7, 8, 7, 7]
    assert sorted(chain(*plan[:3])) == sorted(chain(*plan[3:])) == list(range(22))
    assert plan[:3] != plan[3:]
    assert plan == mini_batches(22, 8, 2, seed=5, step=3) != mini_batches(22, 8, 2, seed=5, step=4)
    assert [len(samples) for samples in mini_batches(16, 8, 1, 0, 0)] == [8, 8]

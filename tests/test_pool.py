"""The tests' own pool of ranks: what hangs or dies is named, and what is only slow is waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def one_hangs() -> None:
    if torch.distributed.get_rank() == 1:
        time.sleep(600)
    torch.distributed.barrier()


def one_dies() -> None:
    if torch.distributed.get_rank() == 1:
        os._exit(3)
    torch.distributed.barrier()


def works(seconds: float) -> int:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return torch.distributed.get_rank()


def test_ranks_that_wait_for_each_other_are_named_with_where_they_wait(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0, 1\]") as failure:
        ranks.run(2, one_hangs, limit=3.0)
    first, second = str(failure.value).split("rank 1:")
    assert "in barrier" in first
    assert "in barrier" not in second
    assert "in one_hangs" in second


def test_a_rank_that_dies_is_named(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="rank 1:\nthe process died"):
        ranks.run(2, one_dies)


def test_ranks_that_work_are_waited_for(ranks: RankPool) -> None:
    assert ranks.run(2, works, 4.0, limit=3.0) == [0, 1]

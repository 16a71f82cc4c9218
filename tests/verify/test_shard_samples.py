"""How samples become the micro-batches of a layout, one in a row and packed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from layouts import LAYOUTS, MORE_LAYOUTS

from megatune.data.batches import Batch
from megatune.engine.groups import RankCoordinates
from megatune.verify.measure import shard_samples
from megatune.verify.samples import Sample, random_samples, sample_rows

LENGTHS = (17, 5, 30, 12, 9, 25, 21, 8)
ALONE = RankCoordinates(**dict.fromkeys(RankCoordinates.__slots__, 0) | {"dp_size": 1})


def trained(batches: list[Batch]) -> Counter[tuple[int, int, int]]:
    """(token, label, position) of what is trained."""
    fields = zip(
        *([t for b in batches for t in getattr(b, name).flatten().tolist()]
          for name in ("input_ids", "labels", "position_ids")),
        strict=True,
    )  # fmt: skip
    return Counter(triple for triple in fields if triple[1] != -100)


def expected(samples: list[Sample]) -> Counter[tuple[int, int, int]]:
    return Counter(
        (sample.input_ids[position], sample.labels[position + 1], position)
        for sample in samples
        for position in range(len(sample.input_ids) - 1)
        if sample.labels[position + 1] != -100
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize(
    ("layout", "dp_size"), [("1", 1), ("dp2", 2), ("pp2 vpp2", 1), ("tp4 sp", 1), ("dp4", 4), ("tp2 pp2 dp2 sp", 2)]
)
def test_all_ranks_together_train_every_sample_once(
    layout: str, dp_size: int, micro_batch_size: int, packed: bool
) -> None:
    parallel = {**LAYOUTS, **MORE_LAYOUTS}[layout].settings().parallel
    samples = random_samples(301, LENGTHS)
    shares = [
        shard_samples(
            samples,
            replace(ALONE, dp_rank=rank, dp_size=dp_size),
            parallel,
            micro_batch_size=micro_batch_size,
            packed=packed,
        )
        for rank in range(dp_size)
    ]
    batches = [batch for share in shares for batch in share]
    assert trained(batches) == expected(samples)
    assert len({len(share) for share in shares}) == 1
    assert len({batch.input_ids.shape for batch in batches}) == 1
    rows, length = batches[0].input_ids.shape
    assert rows == (1 if packed else micro_batch_size)
    assert length % parallel.sequence_multiple == 0
    if parallel.virtual_stages:
        assert len(shares[0]) % parallel.pipeline_model_parallel_size == 0


def test_packed_rows_hold_several_samples_and_different_numbers_of_them() -> None:
    samples = random_samples(301, LENGTHS)
    rows = sample_rows(samples, packed=True)
    assert sorted(number for row in rows for number in row) == list(range(len(samples)))
    assert len({len(row) for row in rows}) > 1
    assert len(rows) > 2
    (batch,) = shard_samples(samples, ALONE, LAYOUTS["1"].settings().parallel, micro_batch_size=len(rows), packed=True)
    assert [length for length in batch.lengths if length] == [LENGTHS[number] for row in rows for number in row]

"""Packing: which documents share a row, and the micro-batches made of such rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_kit import step_batches

from megatune.config.settings import ParallelSettings
from megatune.data.batches import Batch, Collator
from megatune.data.build import RowsBuilder, RowShape, pack
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.data.rows import Document, ExtraColumn, TokenRows

PAD = 7
CAPACITY = 40
LENGTHS = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


def packed_rows(lengths: list[int] | np.ndarray, capacity: int, seed: int = 0) -> list[list[int]]:
    documents, rows = pack(lengths, capacity, seed)
    return [documents[start:stop].tolist() for start, stop in pairwise(rows)]


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The lengths of each row, by the definition: look at every row for every document."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        with_room = [row for row in rows if sum(row) + length <= capacity]
        if with_room:
            max(with_room, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def next_fit(lengths: list[int], capacity: int) -> int:
    """Rows that are needed when only the newest one is looked at."""
    rows, room = 0, 0
    for length in lengths:
        if length > room:
            rows, room = rows + 1, capacity
        room -= length
    return rows


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2**32))
def test_no_document_is_lost_doubled_or_split(case: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = case
    rows = packed_rows(lengths, capacity, seed)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)
    loads = [sum(lengths[document] for document in row) for row in rows]
    assert all(0 < load <= capacity for load in loads)
    # No two rows would fit into one: more than half of the room is used.
    assert all(one + other > capacity for one, other in pairwise(sorted(loads)))


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2**32))
def test_rows_are_those_of_best_fit_decreasing(case: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = case
    loads = [sum(lengths[document] for document in row) for row in packed_rows(lengths, capacity, seed)]
    assert sorted(loads) == sorted(map(sum, naive_best_fit_decreasing(lengths, capacity)))


@pytest.mark.parametrize("mean", [100, 300, 900])
def test_fuller_than_next_fit(mean: int) -> None:
    lengths = np.clip(np.random.default_rng(0).exponential(mean, 3000), 1, 2048).astype(int)
    rows = packed_rows(lengths, 2048)
    assert len(rows) < next_fit(lengths.tolist(), 2048)
    assert sum(lengths) / (len(rows) * 2048) > 0.98


def test_a_million_documents() -> None:
    """A search among all rows for each document would not end within any limit."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 1_000_000), 1, 8192).astype(int)
    documents, rows = pack(lengths, 8192, seed=1)
    assert len(np.unique(documents)) == len(lengths)
    assert np.add.reduceat(lengths[documents], rows[:-1]).max() <= 8192
    assert lengths.sum() / ((len(rows) - 1) * 8192) > 0.999


def test_the_same_rows_for_ever() -> None:
    """Golden: a resumed run must see the rows it began with. The seed decides among documents of one length only."""
    lengths = [5, 3, 9, 3, 3, 1, 7, 5, 2]
    assert packed_rows(lengths, 10, seed=1) == [[2, 5], [1, 6], [0, 7], [3, 4, 8]]
    # One of the three documents of 3 tokens goes to the one of 7.
    assert {str(packed_rows(lengths, 10, seed)) for seed in range(20)} == {
        "[[2, 5], [1, 6], [0, 7], [3, 4, 8]]",
        "[[2, 5], [3, 6], [0, 7], [1, 4, 8]]",
        "[[2, 5], [4, 6], [0, 7], [1, 3, 8]]",
    }


def test_documents_that_fit_no_row_are_refused() -> None:
    for lengths in ([4, 11], [0, 4]):
        with pytest.raises(ValueError, match=r"documents of . to 1?. tokens for rows of 10"):
            pack(lengths, 10, seed=0)


def document(tokens: list[int], labels: list[int]) -> Document:
    return Document(np.array(tokens, dtype=np.int32), np.array(labels, dtype=np.int32))


def test_a_packed_batch_by_hand() -> None:
    collator = Collator(2, True, sequence_multiple=8, document_multiple=4, pad_token_id=PAD)
    documents = [
        document([11, 12, 13, 14, 15], [-100, -100, 13, 14, 15]),
        document([21, 22], [21, 22]),
        document([31, 32, 33, 34], [-100, 32, 33, -100]),
    ]
    assert collator.length([5, 2, 4]) == 16
    batch = collator(documents, 24)
    _ = -100
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 7, 7, 7, 21, 22, 7, 7, 31, 32, 33, 34, *[7] * 8]]
    assert batch.labels.tolist() == [[_, 13, 14, 15, _, _, _, _, 22, _, _, _, 32, 33, _, _, *[_] * 8]]
    assert batch.position_ids.tolist() == [[*range(8), *range(4), *range(4), *range(8)]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 16, 24]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths == (5, 2, 4, 0)
    assert len(collator(documents, 16).lengths) == 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenRows, TokenRows]:
    """The same 60 documents as they are, and packed. No token is in two documents."""
    folder = tmp_path_factory.mktemp("packed")
    generator = np.random.default_rng(3)
    documents = []
    for number in range(60):
        tokens = 100 * (number + 1) + np.arange(generator.integers(2, CAPACITY // 2), dtype=np.int32)
        documents.append(Document(tokens, np.where(generator.random(len(tokens)) < 0.7, tokens, np.int32(-100))))
    for name in ("plain", "packed"):
        (folder / name).mkdir()
        with RowsBuilder(folder / name, RowShape("sft", CAPACITY, name == "packed", seed=5)) as builder:
            builder.write_part("train", [builder.add([document]) for document in documents])
    return TokenRows(folder / "plain" / "train"), TokenRows(folder / "packed" / "train")


@dataclass(frozen=True)
class OneStep:
    """A step of rows that a test chooses."""

    rows: TokenRows
    ids: Sequence[int]
    global_batch_size: int
    is_packed: bool = True

    def lengths(self, step: int) -> list[np.ndarray]:
        return [self.rows.document_lengths([row]) for row in self.ids]

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        return [self.rows[self.ids[place]] for place in places]

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        return self.rows.extras([self.ids[place] for place in places])

    def names(self, step: int) -> list[str]:
        return [f"row {row}" for row in self.ids]


def trained(batch: Batch) -> Counter[tuple[int, int, int]]:
    """(token, label, position) of what is trained."""
    values = zip(
        *(field.flatten().tolist() for field in (batch.input_ids, batch.labels, batch.position_ids)), strict=True
    )
    return Counter(triple for triple in values if triple[1] != -100)


def real_tokens(batch: Batch) -> list[list[int]]:
    """The tokens of each document."""
    assert batch.cu_seqlens is not None
    starts = batch.cu_seqlens.tolist()
    return [
        batch.input_ids[0, start : start + n].tolist() for start, n in zip(starts, batch.lengths, strict=False) if n
    ]


PARALLEL = st.builds(
    ParallelSettings,
    tensor_model_parallel_size=st.sampled_from([1, 2, 4]),
    context_parallel_size=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
)


def collator_of(parallel: ParallelSettings, micro_batch_size: int, packed: bool = True) -> Collator:
    return Collator(micro_batch_size, packed, parallel.sequence_multiple, parallel.document_multiple, PAD)


@settings(max_examples=60, deadline=None)
@given(PARALLEL, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 9))
def test_packed_batches_train_what_unpacked_ones_train(
    folders: tuple[TokenRows, TokenRows],
    parallel: ParallelSettings,
    size: int,
    accumulation: int,
    dp_size: int,
    same_length: bool,
    seed: int,
) -> None:
    """Over an epoch, in any layout: the same trained triples, and shapes as the layout needs them."""
    plain, packed = folders
    steps = PreparedSteps(packed, size * accumulation * dp_size, seed)
    found: Counter[tuple[int, int, int]] = Counter()
    for rank in range(dp_size):
        loader = StepLoader(
            steps,
            collator_of(parallel, size),
            data_parallel_rank=rank,
            data_parallel_size=dp_size,
            num_micro_batches=accumulation,
            same_length=same_length,
            stop_step=steps.steps_per_epoch,
        )
        for _, batches in loader:
            assert len(batches) == accumulation
            assert len({batch.input_ids.shape for batch in batches}) == 1 or not same_length
            for batch in batches:
                check_shape(batch, parallel)
                found += trained(batch)
    whole = [document for row in plain for document in row]
    everything = collator_of(ParallelSettings(), len(whole), packed=False)(whole, CAPACITY)
    assert found == trained(everything)
    assert found.total() == sum(int((labels[1:] != -100).sum()) for _, labels, _ in whole)


def check_shape(batch: Batch, parallel: ParallelSettings) -> None:
    """Boundaries and length as the layout needs them, positions from 0, and no label beyond its document."""
    assert batch.cu_seqlens is not None
    s = batch.input_ids.shape[1]
    starts = batch.cu_seqlens.tolist()
    assert (starts[0], starts[-1], len(starts)) == (0, s, len(batch.lengths) + 1)
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (1, s)
    assert s % parallel.sequence_multiple == 0
    for (start, stop), length in zip(pairwise(starts), batch.lengths, strict=True):
        span = stop - start
        assert span > 0
        assert span % parallel.document_multiple == 0
        assert batch.position_ids[0, start:stop].tolist() == list(range(span))
        # A document of padding, which is the last, or one that is padded no more than it must be.
        assert length <= span < length + parallel.document_multiple or (length, stop) == (0, s)
        assert (batch.labels[0, max(start, start + length - 1) : stop] == -100).all()
        for position in range(length - 1):
            label = int(batch.labels[0, start + position])
            assert label in (-100, int(batch.input_ids[0, start + position + 1]))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("parallel", [{}, {"context_parallel_size": 2}])
def test_the_order_is_the_same_in_every_layout(
    folders: tuple[TokenRows, TokenRows], dp_size: int, parallel: dict[str, Any]
) -> None:
    """The documents of each global batch, for dp 1, 2 and 4; workers change nothing, nor does a start in between."""
    _, rows = folders
    steps = PreparedSteps(rows, 4, seed=11)

    def loader(rank: int, size: int, accumulation: int, **options: Any) -> StepLoader:
        return StepLoader(
            steps,
            collator_of(ParallelSettings(**parallel), 1),
            data_parallel_rank=rank,
            data_parallel_size=size,
            num_micro_batches=accumulation,
            same_length=False,
            stop_step=2 * len(rows) // 4,
            **options,
        )

    whole = StepLoader(
        steps,
        collator_of(ParallelSettings(), 4),
        data_parallel_rank=0,
        data_parallel_size=1,
        num_micro_batches=1,
        same_length=False,
        stop_step=2 * len(rows) // 4,
    )
    expected = {step: real_tokens(batches[0]) for step, batches in whole}
    accumulation = 4 // dp_size
    for workers in (0, 2):
        for start in (0, 3):
            ranks = [
                dict(loader(rank, dp_size, accumulation, num_workers=workers, start_step=start))
                for rank in range(dp_size)
            ]
            assert list(ranks[0]) == list(expected)[start:]
            for step in ranks[0]:
                assigned = [ranks[rank][step][m] for m in range(accumulation) for rank in range(dp_size)]
                assert [tokens for batch in assigned for tokens in real_tokens(batch)] == expected[step]


def test_slots_without_rows_are_padding(folders: tuple[TokenRows, TokenRows]) -> None:
    _, rows = folders
    parallel = ParallelSettings(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True)
    batches = step_batches(
        OneStep(rows, [3], 4),
        0,
        collator_of(parallel, 2),
        data_parallel_rank=0,
        data_parallel_size=1,
        num_micro_batches=2,
        same_length=False,
    )
    full, empty = batches
    assert full.num_trained > 0
    assert (empty.num_trained, empty.lengths, empty.input_ids.shape) == (0, (0,), (1, 8))
    assert empty.cu_seqlens is not None
    assert empty.cu_seqlens.tolist() == [0, 8]


def test_same_length_fills_up_with_one_document_of_padding(folders: tuple[TokenRows, TokenRows]) -> None:
    """On all data-parallel ranks the length is that of the longest micro-batch of any."""
    _, rows = folders
    parallel = ParallelSettings(context_parallel_size=2)
    collator = collator_of(parallel, 1)
    fullest_first = sorted(range(len(rows)), key=lambda row: -collator.length(rows.document_lengths([row])))
    row_ids = [fullest_first[-1], fullest_first[0], fullest_first[-2]]
    longest = collator.length(rows.document_lengths(row_ids[1:2]))
    lengths = {collator.length(rows.document_lengths([row])) for row in row_ids}
    assert len(lengths) > 1
    for rank in (0, 1):
        batches = step_batches(
            OneStep(rows, row_ids, 4),
            0,
            collator,
            data_parallel_rank=rank,
            data_parallel_size=2,
            num_micro_batches=2,
            same_length=True,
        )
        assert [batch.input_ids.shape[1] for batch in batches] == [longest, longest]
        assert all(batch.lengths.count(0) <= 1 for batch in batches)

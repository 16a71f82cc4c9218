from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_kit import step_batches

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.batches import Batch, Collator
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps, StepRows, epoch_order, grouped_order
from megatune.data.rows import Document, ExtraColumn, TokenRows

PAD = 0
SETTINGS = settings(max_examples=25, deadline=None)
ORDERS = [{}, {"shuffle": False}, {"group_by_length": True}]


def write(folder: Path, documents: Sequence[tuple[Sequence[int], Sequence[int]]], packing: bool = False) -> TokenRows:
    """Token rows of documents: (input_ids, labels)."""
    folder.mkdir()
    with RowsBuilder(folder, RowShape("sft", 12, packing, seed=0)) as builder:
        for input_ids, labels in documents:
            builder.add([Document(np.asarray(input_ids), np.asarray(labels))])
        builder.write_part("train", range(len(documents)))
    return TokenRows(folder / "train")


def written(folder: Path, packing: bool = False) -> TokenRows:
    """Sample i has i % 7 + 2 tokens, all of them i + 1, so that a batch shows which samples it has."""
    lengths = [i % 7 + 2 for i in range(23)]
    samples = [([i + 1] * length, [-100] + [i + 1] * (length - 1)) for i, length in enumerate(lengths)]
    return write(folder, samples, packing)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    """Every sample a row."""
    return written(tmp_path_factory.mktemp("batches") / "rows")


@pytest.fixture(scope="module")
def packed_rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    """The same samples, packed into rows of up to 12 tokens."""
    return written(tmp_path_factory.mktemp("batches") / "packed", packing=True)


@dataclass(frozen=True)
class Listed:
    """Steps whose rows are listed: what a test of one step needs."""

    rows: TokenRows
    steps: Sequence[Sequence[int]]
    global_batch_size: int = 4

    @property
    def is_packed(self) -> bool:
        return self.rows.is_packed

    def lengths(self, step: int) -> list[np.ndarray]:
        return [self.rows.document_lengths([row]) for row in self.steps[step]]

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        return [self.rows[self.steps[step][place]] for place in places]

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        return self.rows.extras([self.steps[step][place] for place in places])

    def names(self, step: int) -> list[str]:
        return [str(row) for row in self.steps[step]]


def one_step(rows: TokenRows, row_ids: Sequence[int], **placed: Any) -> list[Batch]:
    """The micro-batches of a step of these rows."""
    size = placed["data_parallel_size"] * placed["collator"].micro_batch_size * placed["num_micro_batches"]
    return step_batches(Listed(rows, [row_ids], size), 0, **placed)


def layout(micro_batch_size: int = 2, **overrides: Any) -> dict[str, Any]:
    return {
        "collator": Collator(micro_batch_size, False, sequence_multiple=4, document_multiple=4, pad_token_id=PAD),
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
        "num_micro_batches": 2,
        "same_length": False,
        **overrides,
    }


def row_ids(batch: Batch) -> list[int]:
    """The rows of a batch in order; -1 for an empty one."""
    return [int(tokens[0]) - 1 for tokens in batch.input_ids]


def test_a_batch_by_hand(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows", [([11, 12, 13, 14, 15], [-100, -100, 13, 14, 15]), ([21, 22], [-100, 22])])
    collator = Collator(2, False, sequence_multiple=4, document_multiple=1, pad_token_id=9)
    (batch,) = one_step(rows, [1, 0], **layout(collator=collator, num_micro_batches=1))
    assert batch.input_ids.tolist() == [[21, 22, 9, 9, 9, 9, 9, 9], [11, 12, 13, 14, 15, 9, 9, 9]]
    _ = -100
    assert batch.labels.tolist() == [[22, _, _, _, _, _, _, _], [_, 13, 14, 15, _, _, _, _]]
    assert batch.position_ids.tolist() == [list(range(8))] * 2
    assert (batch.lengths, batch.cu_seqlens) == ((2, 5), None)
    assert batch.num_trained == 4
    assert {t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}


def test_rows_are_assigned_to_micro_batches_then_ranks(rows: TokenRows) -> None:
    assigned = {
        rank: [
            row_ids(batch)
            for batch in one_step(rows, range(8), **layout(data_parallel_rank=rank, data_parallel_size=2))
        ]
        for rank in (0, 1)
    }
    assert assigned == {0: [[0, 1], [4, 5]], 1: [[2, 3], [6, 7]]}


def test_missing_rows_train_nothing(rows: TokenRows) -> None:
    batches = one_step(rows, [3], **layout())
    assert [row_ids(batch) for batch in batches] == [[3, -1], [-1, -1]]
    assert [batch.num_trained for batch in batches] == [4, 0]
    assert batches[1].input_ids.shape == (2, 4)
    assert (batches[1].input_ids == PAD).all()


def test_same_length_is_one_of_all_ranks(rows: TokenRows) -> None:
    for rank in (0, 1):
        placed = layout(micro_batch_size=1, data_parallel_rank=rank, data_parallel_size=2, same_length=True)
        batches = one_step(rows, [0, 6, 1], **placed)
        assert [batch.input_ids.shape for batch in batches] == [(1, 8), (1, 8)]


def test_same_length_pads_to_the_longest_of_the_step(rows: TokenRows) -> None:
    lengths = [batch.input_ids.shape[1] for batch in one_step(rows, [0, 1, 5, 6], **layout())]
    same = [batch.input_ids.shape[1] for batch in one_step(rows, [0, 1, 5, 6], **layout(same_length=True))]
    assert lengths == [4, 8]
    assert same == [8, 8]


def test_too_many_rows_are_refused(rows: TokenRows) -> None:
    with pytest.raises(ValueError, match="5 rows for 4 slots"):
        one_step(rows, range(5), **layout())


def samples_of(batch: Batch) -> list[int]:
    """The samples of a batch in order, of packed ones too; padding left out."""
    rows, length = batch.input_ids.shape
    starts = range(0, rows * length, length) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    tokens = batch.input_ids.flatten()
    return [int(tokens[start]) - 1 for start, size in zip(starts, batch.lengths, strict=False) if size]


def stream(
    steps: StepRows, size: int, micro: int, accumulation: int, *, stop: int, start: int = 0, num_workers: int = 0
) -> list[tuple[int, list[int], int]]:
    """Of each step: its number, its samples over all ranks in the order of the global batch, and trained tokens."""
    collator = Collator(micro, steps.is_packed, sequence_multiple=4, document_multiple=4, pad_token_id=PAD)
    by_rank = [
        list(
            StepLoader(
                steps,
                collator,
                data_parallel_rank=rank,
                data_parallel_size=size,
                num_micro_batches=accumulation,
                same_length=False,
                start_step=start,
                stop_step=stop,
                num_workers=num_workers,
            )
        )
        for rank in range(size)
    ]
    seen = []
    for ranks in zip(*by_rank, strict=True):
        assert len({number for number, _ in ranks}) == 1
        in_order = [batches[m] for m in range(accumulation) for _, batches in ranks]
        samples = [sample for batch in in_order for sample in samples_of(batch)]
        seen.append((ranks[0][0], samples, sum(batch.num_trained for batch in in_order)))
    return seen


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@SETTINGS
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1, 2, 4]), batch=st.sampled_from([4, 8, 12]))
def test_every_layout_trains_the_same_samples(
    rows: TokenRows, packed_rows: TokenRows, packing: bool, order: dict[str, bool], seed: int, size: int, batch: int
) -> None:
    """Over three epochs: the same samples in the same step and order, each once an epoch, every token counted."""
    steps = PreparedSteps(packed_rows if packing else rows, batch, seed, **order)
    one_epoch = steps.steps_per_epoch
    whole = stream(steps, 1, batch, 1, stop=3 * one_epoch)
    for micro in (1, 2):
        if batch % (size * micro) == 0:
            assert stream(steps, size, micro, batch // (size * micro), stop=3 * one_epoch) == whole
    epochs = [whole[first : first + one_epoch] for first in range(0, 3 * one_epoch, one_epoch)]
    for epoch in epochs:
        assert sorted(sample for _, samples, _ in epoch for sample in samples) == list(range(23))
        assert sum(trained for *_, trained in epoch) == sum(i % 7 + 1 for i in range(23))
    in_order = [[samples for _, samples, _ in epoch] for epoch in epochs]
    assert (in_order[0] == in_order[1] == in_order[2]) is (order == {"shuffle": False})


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_resuming_at_any_step_is_the_rest(
    rows: TokenRows, packed_rows: TokenRows, packing: bool, order: dict[str, bool]
) -> None:
    def steps() -> PreparedSteps:
        return PreparedSteps(packed_rows if packing else rows, 4, 7, **order)

    stop = 2 * steps().steps_per_epoch + 1
    whole = stream(steps(), 1, 2, 2, stop=stop)
    assert [number for number, *_ in whole] == list(range(stop))
    for start in range(stop + 1):
        assert stream(steps(), 2, 1, 2, start=start, stop=stop) == whole[start:]


def as_lists(loader: StepLoader) -> list[Any]:
    return [(step, [(b.input_ids.tolist(), b.labels.tolist()) for b in batches]) for step, batches in loader]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_workers_change_nothing(rows: TokenRows, order: dict[str, bool]) -> None:
    steps = PreparedSteps(rows, 4, 7, **order)
    whole = as_lists(StepLoader(steps, **layout(), stop_step=14))
    assert as_lists(StepLoader(steps, **layout(), stop_step=14, num_workers=2, pin_memory=True)) == whole
    assert as_lists(StepLoader(steps, **layout(), start_step=5, stop_step=14, num_workers=2)) == whole[5:]


def test_loading_leaves_the_global_random_state_alone(rows: TokenRows) -> None:
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    as_lists(StepLoader(PreparedSteps(rows, 4), **layout(), stop_step=6))
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_layout_for_another_batch_is_refused(rows: TokenRows) -> None:
    with pytest.raises(ValueError, match="steps of 5 rows, a layout for 4"):
        StepLoader(PreparedSteps(rows, 5), **layout(), stop_step=1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_epochs_order_is_made_once(rows: TokenRows, order: dict[str, bool]) -> None:
    steps = PreparedSteps(rows, 4, **order)
    first = steps.row_ids(0)
    assert np.shares_memory(steps.row_ids(0), first)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 7
    for step in range(60):
        steps.row_ids(step)
    assert len(steps._orders) == 2, "memory does not grow with epochs"


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_worker_processes_are_sent_no_orders(rows: TokenRows, order: dict[str, bool]) -> None:
    steps = PreparedSteps(rows, 4, 3, **order)
    before = pickle.dumps(steps)
    expected = [steps.row_ids(step).tolist() for step in range(12)]
    sent = pickle.dumps(steps)
    assert sent == before
    assert [pickle.loads(sent).row_ids(step).tolist() for step in range(12)] == expected


def test_steps_follow_the_settings(rows: TokenRows) -> None:
    def ids(**data: bool) -> list[int]:
        chosen = Settings(run=RunSettings(seed=5), data=DataSettings(**data))
        return PreparedSteps.from_settings(rows, chosen, 4).row_ids(0).tolist()

    assert ids() == epoch_order(23, 5, 0)[:4].tolist()
    assert ids(disable_shuffling=True) == [0, 1, 2, 3]
    assert ids(group_by_length=True) == grouped_order(rows.row_lengths(), 5, 0, 4)[:4].tolist()


def test_no_rows_have_no_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        PreparedSteps(write(tmp_path / "rows", []), 4).row_ids(0)

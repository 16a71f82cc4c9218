from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data.batches import Batch, Collator
from megatune.data.loader import StepLoader, step_batches
from megatune.data.rows import RowWriter, TokenRows

PAD = 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    """Row i has i % 7 + 2 tokens, all of them i + 1, so that a batch shows which rows it has."""
    folder = tmp_path_factory.mktemp("batches") / "rows"
    with RowWriter(folder) as writer:
        for i in range(23):
            length = i % 7 + 2
            writer.append([i + 1] * length, [-100] + [i + 1] * (length - 1))
    return TokenRows(folder)


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
    with RowWriter(tmp_path / "rows") as writer:
        writer.append([11, 12, 13, 14, 15], [-100, -100, 13, 14, 15])
        writer.append([21, 22], [-100, 22])
    collator = Collator(2, False, sequence_multiple=4, document_multiple=1, pad_token_id=9)
    rows = TokenRows(tmp_path / "rows")
    (batch,) = step_batches(rows, [1, 0], **layout(collator=collator, num_micro_batches=1))
    assert batch.input_ids.tolist() == [[21, 22, 9, 9, 9, 9, 9, 9], [11, 12, 13, 14, 15, 9, 9, 9]]
    _ = -100
    assert batch.labels.tolist() == [[22, _, _, _, _, _, _, _], [_, 13, 14, 15, _, _, _, _]]
    assert batch.position_ids.tolist() == [list(range(8))] * 2
    assert (batch.lengths, batch.cu_seqlens) == ((2, 5), None)
    assert batch.num_trained == 4
    assert {t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}


def test_rows_are_dealt_to_micro_batches_then_ranks(rows: TokenRows) -> None:
    dealt = {
        rank: [
            row_ids(batch)
            for batch in step_batches(rows, range(8), **layout(data_parallel_rank=rank, data_parallel_size=2))
        ]
        for rank in (0, 1)
    }
    assert dealt == {0: [[0, 1], [4, 5]], 1: [[2, 3], [6, 7]]}


def test_missing_rows_train_nothing(rows: TokenRows) -> None:
    batches = step_batches(rows, [3], **layout())
    assert [row_ids(batch) for batch in batches] == [[3, -1], [-1, -1]]
    assert [batch.num_trained for batch in batches] == [4, 0]
    assert batches[1].input_ids.shape == (2, 4)
    assert (batches[1].input_ids == PAD).all()


def test_same_length_is_one_of_all_ranks(rows: TokenRows) -> None:
    for rank in (0, 1):
        placed = layout(micro_batch_size=1, data_parallel_rank=rank, data_parallel_size=2, same_length=True)
        batches = step_batches(rows, [0, 6, 1], **placed)
        assert [batch.input_ids.shape for batch in batches] == [(1, 8), (1, 8)]


def test_same_length_pads_to_the_longest_of_the_step(rows: TokenRows) -> None:
    lengths = [batch.input_ids.shape[1] for batch in step_batches(rows, [0, 1, 5, 6], **layout())]
    same = [batch.input_ids.shape[1] for batch in step_batches(rows, [0, 1, 5, 6], **layout(same_length=True))]
    assert lengths == [4, 8]
    assert same == [8, 8]


def test_too_many_rows_are_refused(rows: TokenRows) -> None:
    with pytest.raises(ValueError, match="5 rows for 4 slots"):
        step_batches(rows, range(5), **layout())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_an_epoch_trains_each_row_once(rows: TokenRows, size: int, micro: int, accumulation: int, seed: int) -> None:
    """Whatever the layout: no row lost or doubled, every trained token counted, and the same rows in the same step."""
    shape = layout(data_parallel_size=size, micro_batch_size=micro, num_micro_batches=accumulation, seed=seed)
    loaders = [StepLoader(rows, **{**shape, "data_parallel_rank": rank}) for rank in range(size)]
    one_rank = StepLoader(rows, **layout(micro_batch_size=size * micro * accumulation, num_micro_batches=1, seed=seed))
    seen: list[int] = []
    trained = 0
    for step in range(len(one_rank)):
        batches = [loader.batches(step) for loader in loaders]
        in_order = [row for m in range(accumulation) for rank in range(size) for row in row_ids(batches[rank][m])]
        assert in_order == row_ids(one_rank.batches(step)[0])
        seen += [row for row in in_order if row >= 0]
        trained += sum(batch.num_trained for ranks in batches for batch in ranks)
    assert sorted(seen) == list(range(len(rows)))
    assert trained == sum(len(document.input_ids) - 1 for (document,) in rows)


def as_lists(loader: StepLoader) -> list[Any]:
    return [(step, [(b.input_ids.tolist(), b.labels.tolist()) for b in batches]) for step, batches in loader]


def test_workers_and_resume_change_nothing(rows: TokenRows) -> None:
    whole = as_lists(StepLoader(rows, **layout(), seed=7, stop_step=14))
    assert [step for step, _ in whole] == list(range(14))
    assert as_lists(StepLoader(rows, **layout(), seed=7, stop_step=14, num_workers=2, pin_memory=True)) == whole
    for start in (0, 5, 6, 13):
        assert as_lists(StepLoader(rows, **layout(), seed=7, start_step=start, stop_step=14)) == whole[start:]


def test_loading_leaves_the_global_random_state_alone(rows: TokenRows) -> None:
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    as_lists(StepLoader(rows, **layout()))
    assert torch.equal(torch.get_rng_state(), expected)


def test_evaluation_is_one_pass_in_order(rows: TokenRows) -> None:
    loader = StepLoader(rows, **layout(), shuffle=False)
    seen = [row for _, batches in loader for batch in batches for row in row_ids(batch)]
    assert len(loader) == 6
    assert seen == [*range(23), -1]

"""Preference pairs from rows to micro-batches: both answers stay together, whatever the micro-batch and the packing."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kit import qwen_tokenizer

from megatune.config.settings import DataSettings, ParallelSettings, RunSettings, Settings
from megatune.data.batches import ANSWER_TOKEN_WEIGHTS, Batch, Collator, scored_tokens
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.data.pipeline import Pipeline
from megatune.data.report import TokenReport
from megatune.data.rows import Document, TokenRows
from megatune.data.streaming.producer import StreamFolder, StreamRequest
from megatune.data.streaming.stream import StreamedSteps
from megatune.errors import ExitCode, MegatuneError
from megatune.objectives.base import tokens_of_documents
from megatune.objectives.preference import TOKEN_WEIGHTS

PAD = 0
TOKENIZER = qwen_tokenizer()
CUTOFF = 12
NUM_PAIRS = 11
REFERENCE = "reference_log_probs"


def document(number: int, prompt: int, answer: int) -> Document:
    """Tokens that name their document; those of the answer are trained."""
    tokens = np.full(prompt + answer, number, dtype=np.int32)
    return Document(tokens, np.where(np.arange(prompt + answer) < prompt, np.int32(-100), tokens))


def pair(number: int) -> list[Document]:
    """The chosen answer of pair i is of documents 2i + 1, the rejected one 2i + 2; prompts have i % 3 + 1 tokens."""
    prompt = number % 3 + 1
    return [document(2 * number + 1, prompt, number % 5 + 1), document(2 * number + 2, prompt, (3 * number) % 7 + 1)]


def write(folder: Path, packing: bool, num_pairs: int = NUM_PAIRS) -> tuple[TokenRows, TokenReport]:
    folder.mkdir(parents=True)
    with RowsBuilder(folder, RowShape("dpo", CUTOFF, packing, 0)) as builder:
        for number in range(num_pairs):
            builder.add(pair(number))
        report = builder.write_part("train", range(num_pairs))
    return TokenRows(folder / "train"), report


@pytest.fixture(params=[False, True], ids=["single", "packed"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> TokenRows:
    return write(tmp_path / "rows", request.param)[0]


def reference_of(rows: TokenRows, path: Path) -> TokenRows:
    """The rows with a value of every document, its number and a half."""
    numbers = [float(each.input_ids[0]) + 0.5 for row in rows for each in row]
    np.save(path, np.array(numbers, dtype=np.float32))
    return rows.with_column(REFERENCE, path)


def batches(
    rows: TokenRows,
    micro_batch_size: int,
    num_micro_batches: int,
    *,
    data_parallel_size: int = 1,
    parallel: ParallelSettings | None = None,
    ld_alpha: float | None = None,
    num_workers: int = 0,
) -> list[Batch]:
    """Those of an epoch, rank after rank in each step."""
    parallel = parallel or ParallelSettings()
    steps = PreparedSteps(rows, micro_batch_size * num_micro_batches * data_parallel_size, seed=1)
    collator = Collator(
        micro_batch_size,
        rows.is_packed,
        parallel.sequence_multiple,
        parallel.document_multiple,
        PAD,
        documents_per_row=2 if rows.is_pairs else 1,
        ld_alpha=ld_alpha,
    )
    loaders = [
        StepLoader(
            steps,
            collator,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
            num_micro_batches=num_micro_batches,
            same_length=False,
            stop_step=steps.steps_per_epoch,
            num_workers=num_workers,
        )
        for rank in range(data_parallel_size)
    ]
    return [batch for ranks in zip(*loaders, strict=True) for _, of_rank in ranks for batch in of_rank]


def starts(batch: Batch) -> list[int]:
    """Where documents begin in the flattened rows."""
    if batch.cu_seqlens is not None:
        return batch.cu_seqlens.tolist()[: len(batch.lengths)]
    return list(range(0, batch.input_ids.numel(), batch.input_ids.shape[1]))


def numbers(batch: Batch) -> list[int]:
    """The document at each place of a batch, 0 for padding."""
    tokens = batch.input_ids.flatten()
    return [int(tokens[start]) if size else 0 for start, size in zip(starts(batch), batch.lengths, strict=True)]


def test_the_names_of_extras_are_those_that_the_objective_reads() -> None:
    assert ANSWER_TOKEN_WEIGHTS == TOKEN_WEIGHTS


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_documents_of_a_micro_batch_are_pairs(
    rows: TokenRows, tmp_path: Path, micro_batch_size: int, num_workers: int
) -> None:
    """Chosen at even places, its rejected one behind it; slots without a row are padding; values go with documents."""
    rows = reference_of(rows, tmp_path / "reference.npy")
    assert rows.is_pairs
    seen = []
    for batch in batches(rows, micro_batch_size, 2, num_workers=num_workers):
        found = numbers(batch)
        if not rows.is_packed:
            assert len(found) == len(batch.input_ids) == 2 * micro_batch_size
        for chosen, rejected in zip(found[::2], found[1::2], strict=False):
            assert rejected == (chosen + 1 if chosen else 0)
        counts = [int(count) for count in tokens_of_documents(batch.labels >= 0, batch)]
        assert [count > 0 for count in counts] == [number > 0 for number in found]
        values = batch.extras[REFERENCE].on_rank(None, "cpu")
        assert (values.dtype, values.tolist()) == (torch.float32, [number + 0.5 if number else 0 for number in found])
        seen += [number for number in found if number]
    assert sorted(seen) == list(range(1, 2 * NUM_PAIRS + 1))


@pytest.mark.parametrize("packing", [False, True])
def test_every_layout_trains_the_same_pairs_in_the_same_steps(tmp_path: Path, packing: bool) -> None:
    rows, _ = write(tmp_path / "rows", packing)
    found = []
    for size, micro, accumulation in ((1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)):
        made = batches(rows, micro, accumulation, data_parallel_size=size)
        per_step = size * accumulation
        steps = [made[first : first + per_step] for first in range(0, len(made), per_step)]
        found.append([sorted(n for batch in step for n in numbers(batch) if n) for step in steps])
    assert all(one == found[0] for one in found)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_packed_pairs_are_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A row holds twice cutoff_len: no pair is cut for packing, and every pair is in one row, its answers adjacent."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, CUTOFF), st.integers(1, CUTOFF)), min_size=1, max_size=20))
    folder = tmp_path_factory.mktemp("pairs")
    with RowsBuilder(folder, RowShape("dpo", CUTOFF, True, 3)) as builder:
        for number, (chosen, rejected) in enumerate(sizes):
            builder.add([document(2 * number + 1, 0, chosen), document(2 * number + 2, 0, rejected)])
        report = builder.write_part("train", range(len(sizes)))
    rows = pickle.loads(pickle.dumps(TokenRows(folder / "train")))
    assert (rows.is_packed, rows.is_pairs, rows.arrangement) == (True, True, "packed_pairs")
    found = []
    for row in rows:
        assert sum(len(each.input_ids) for each in row) <= 2 * CUTOFF
        for chosen, rejected in zip(row[::2], row[1::2], strict=True):
            number = int(chosen.input_ids[0]) // 2
            assert (int(chosen.input_ids[0]), int(rejected.input_ids[0])) == (2 * number + 1, 2 * number + 2)
            assert (len(chosen.input_ids), len(rejected.input_ids)) == sizes[number]
            found.append(number)
    assert sorted(found) == list(range(len(sizes)))
    assert (report.capacity, report.samples, report.documents) == (2 * CUTOFF, len(sizes), 2 * len(sizes))
    assert report.packing_efficiency == sum(map(sum, sizes)) / (len(rows) * 2 * CUTOFF)


def test_packing_changes_the_rows_and_not_the_documents(tmp_path: Path) -> None:
    (single, alone), (packed, together) = write(tmp_path / "a", False), write(tmp_path / "b", True)
    documents = [sorted((d.input_ids.tolist(), d.labels.tolist()) for row in rows for d in row)
                 for rows in (single, packed)]  # fmt: skip
    assert documents[0] == documents[1]
    assert (alone.rows, alone.capacity, alone.trained) == (NUM_PAIRS, None, together.trained)
    assert together.rows < NUM_PAIRS


def weights_by_hand(batch: Batch, alpha: float) -> torch.Tensor:
    """Token by token: the weight of the k-th trained label of an answer, at the place that predicts it."""
    weights = torch.zeros(batch.input_ids.numel())
    labels = batch.labels.flatten().tolist()
    spans = list(zip(starts(batch), batch.lengths, strict=True))
    counts = [sum(label >= 0 for label in labels[start : start + size]) for start, size in spans]
    for number, (start, size) in enumerate(spans):
        if not size:
            continue
        shorter, seen = min(counts[number], counts[number ^ 1]), 0
        for place in range(start, start + size):
            seen += labels[place] >= 0
            weights[place] = alpha if labels[place] >= 0 and seen > shorter else 1.0
    return weights.view(batch.input_ids.shape)


@pytest.mark.parametrize("parallel", [ParallelSettings(), ParallelSettings(context_parallel_size=2)], ids=["1", "cp2"])
def test_tokens_beyond_the_shorter_answer_weigh_alpha(rows: TokenRows, parallel: ParallelSettings) -> None:
    for batch in batches(rows, 2, 2, parallel=parallel, ld_alpha=0.25):
        weights = batch.extras[ANSWER_TOKEN_WEIGHTS].on_rank(None, "cpu")
        assert weights.dtype == torch.float32
        assert torch.equal(weights, weights_by_hand(batch, 0.25))
    assert ANSWER_TOKEN_WEIGHTS not in batches(rows, 2, 2)[0].extras


def test_weights_of_a_pair_by_hand() -> None:
    """Answers of 1 and 3 tokens after a prompt of 2: the last two labels of the longer one are beyond."""
    collator = Collator(1, False, 1, 1, PAD, documents_per_row=2, ld_alpha=0.5)
    batch = collator([document(1, 2, 1), document(2, 2, 3)], 5)
    assert batch.labels.tolist() == [[-100, 1, -100, -100, -100], [-100, 2, 2, 2, -100]]
    weights = batch.extras[ANSWER_TOKEN_WEIGHTS].on_rank(None, "cpu")
    assert weights.tolist() == [[1, 1, 1, 0, 0], [1, 1, 0.5, 0.5, 1]]
    cut = batch.extras[ANSWER_TOKEN_WEIGHTS].on_rank(torch.tensor([3, 0]), "cpu")
    assert cut.tolist() == [[0, 1], [0.5, 1]]


def test_a_pair_is_left_out_whole(rows: TokenRows) -> None:
    """Whichever of its documents is named."""
    for batch in batches(rows, 4, 1):
        trained = (tokens_of_documents(batch.labels >= 0, batch) > 0).tolist()
        for place in (2, 3):
            without = batch.without([place])
            left = (tokens_of_documents(without.labels >= 0, without) > 0).tolist()
            assert left == [trained[0], trained[1], False, False, *trained[4:]]
        assert not batch.without(range(len(batch.lengths))).num_trained


def test_columns_of_rows(rows: TokenRows, tmp_path: Path) -> None:
    """They go with the rows to other processes; the digest of the rows is without them, and is not computed again."""
    more = reference_of(rows, tmp_path / "reference.npy")
    expected = [np.array([int(d.input_ids[0]) + 0.5 for d in row]) for row in rows]
    for found in (more, pickle.loads(pickle.dumps(more))):
        assert found.digest == rows.digest
        assert found._content_digest() == rows._content_digest()
        for chosen in ([0], [1, 0, 1], []):
            values = found.extras(chosen)[REFERENCE]
            assert values.per == "document"
            assert values.values.tolist() == [v for row in chosen for v in expected[row]]
    assert rows.extras([0]) == {}


def test_columns_that_do_not_fit(rows: TokenRows, tmp_path: Path) -> None:
    path = tmp_path / "reference.npy"
    with pytest.raises(MegatuneError) as missing:
        rows.with_column(REFERENCE, path)
    assert missing.value.exit_code == ExitCode.INPUT
    np.save(path, np.zeros(3))
    wrong = rf"3 values of {REFERENCE} for {2 * NUM_PAIRS} documents\n    fix: delete the file; it is recreated"
    with pytest.raises(MegatuneError, match=wrong):
        rows.with_column(REFERENCE, path)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(MegatuneError, match=r"values of token rows are incomplete"):
        rows.with_column(REFERENCE, path)


def streamed(folder: Path, packing: bool, buffer_size: int = 6) -> StreamRequest:
    """A stream of 20 pairs, of which one is bad."""
    made = [{"instruction": f"question {n}", "chosen": f"good {n} it is", "rejected": f"bad {n}"} for n in range(20)]
    made.insert(3, {"instruction": "question", "chosen": "same", "rejected": "same"})
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made), encoding="utf-8")
    data = DataSettings(
        dataset=[str(folder / "pairs.jsonl")], template="chatml", streaming=True, buffer_size=buffer_size,
        packing=packing, cutoff_len=64,
    )  # fmt: skip
    chosen = Settings(run=RunSettings(stage="dpo", seed=3), data=data)
    return StreamRequest(StreamFolder.make(folder / "stream", "test"), Pipeline.of(chosen, TOKENIZER), "key", None)


@pytest.mark.parametrize("packing", [False, True])
def test_streamed_pairs(tmp_path: Path, packing: bool) -> None:
    """Blocks of whole pairs; steps of them are micro-batches of whole pairs, across blocks."""
    asked = streamed(tmp_path, packing)
    mixed = asked.stream(asked.held_out())
    metas = [asked.write(mixed) for _ in range(4)]
    assert [meta.tokens.samples for meta in metas] == [6, 6, 6, 2]
    assert [meta.tokens.documents for meta in metas] == [12, 12, 12, 4]
    assert sum(meta.dropped.total() for meta in metas) == 1
    steps = StreamedSteps(asked.folder, 2, packing, limit=0.1, is_pairs=True)
    steps = pickle.loads(pickle.dumps(steps))
    assert (steps.is_packed, steps.is_pairs) == (packing, True)
    collator = Collator(2, packing, 1, 1, PAD, documents_per_row=2, ld_alpha=0.5)
    num_rows = sum(meta.tokens.rows for meta in metas)
    assert num_rows == 20 or packing
    seen = []
    for step in range(num_rows // 2):
        found = [document for row in steps.documents(step, (0, 1)) for document in row]
        batch = collator(found, collator.length([len(each.input_ids) for each in found]))
        assert torch.equal(batch.extras[ANSWER_TOKEN_WEIGHTS].on_rank(None, "cpu"), weights_by_hand(batch, 0.5))
        texts = [TOKENIZER.decode(each.input_ids) for each in found]
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            number = chosen.partition("good ")[2].split(" it")[0]
            assert f"question {number}<" in chosen
            assert f"question {number}<" in rejected
            assert f"bad {number}<" in rejected
            seen.append(int(number))
    if num_rows % 2 == 0:
        assert sorted(seen) == list(range(20))
    assert len(set(seen)) == len(seen) >= 10


def test_positions_begin_again_in_every_answer(rows: TokenRows) -> None:
    for batch in batches(rows, 3, 1):
        ids = batch.position_ids.flatten().tolist()
        spans = [*starts(batch), len(ids)]
        assert ids == [place for start, stop in pairwise(spans) for place in range(stop - start)]


def test_pairs_of_similar_length_are_those_with_a_similar_longer_answer(tmp_path: Path) -> None:
    """That is what a micro-batch is padded to; the longest comes first."""
    sizes = [(2, 11), (9, 8), (3, 3), (12, 1), (7, 7), (1, 4), (10, 10), (6, 5)]
    with RowsBuilder(tmp_path, RowShape("dpo", CUTOFF, False, 0)) as builder:
        for chosen, rejected in sizes:
            builder.add([document(1, 0, chosen), document(2, 0, rejected)])
        builder.write_part("train", range(len(sizes)))
    rows = TokenRows(tmp_path / "train")
    assert rows.batch_lengths().tolist() == [max(pair) for pair in sizes]
    order = PreparedSteps(rows, len(sizes), seed=4, group_by_length=True).row_ids(0)
    found = [max(sizes[row]) for row in order]
    assert found == sorted(found, reverse=True)


def test_a_score_is_read_at_the_last_token_that_is_no_padding() -> None:
    """As Transformers reads it: of nothing but padding, at the first token."""
    documents = [Document(np.array(ids, np.int32), np.array(ids, np.int32)) for ids in ([5, 6, PAD], [PAD, 7], [PAD])]
    assert scored_tokens(documents, PAD).values.tolist() == [False, True, False, False, True, True]

"""What micro-batches carry beside tokens: kept beside the rows, loaded, padded, and cut for context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megatune.config.settings import ParallelSettings
from megatune.data.batches import Batch, Collator, DocumentValues, TokenValues
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps
from megatune.data.rows import Document, ExtraColumn, TokenRows

CP2 = ParallelSettings(context_parallel_size=2)
NUM_DOCUMENTS = 21


class WithLogProbabilities(TokenRows):
    """Rows with a value of every token, which shows which token it is."""

    def extras(self, rows: Sequence[int] | np.ndarray) -> dict[str, ExtraColumn]:
        tokens = np.concatenate([np.empty(0), *(document.input_ids for row in rows for document in self[int(row)])])
        return {**super().extras(rows), "ref_logps": ExtraColumn("token", -tokens.astype(np.float32))}


@pytest.fixture(params=[False, True], ids=["single", "packed"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> TokenRows:
    """Document i has i % 7 + 2 tokens; no token is in two documents."""
    with RowsBuilder(tmp_path, RowShape("sft", 24, request.param, 0)) as builder:
        for number in range(NUM_DOCUMENTS):
            tokens = 100 * (number + 1) + np.arange(number % 7 + 2, dtype=np.int32)
            builder.add([Document(tokens, tokens)])
        builder.write_part("train", range(NUM_DOCUMENTS))
    made = WithLogProbabilities(tmp_path / "train")
    values = [(int(document.input_ids[0]), len(document.input_ids)) for row in made for document in row]
    np.save(tmp_path / "rewards.npy", np.array(values, dtype=np.float64))
    return made.with_column("reward", tmp_path / "rewards.npy")


def batches(rows: TokenRows, num_workers: int = 0) -> list[Batch]:
    """An epoch; its last step is a short one, with a micro-batch of nothing but padding."""
    steps = PreparedSteps(rows, 12, seed=1)
    collator = Collator(2, rows.is_packed, CP2.sequence_multiple, CP2.document_multiple, pad_token_id=7)
    loader = StepLoader(
        steps,
        collator,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_micro_batches=6,
        same_length=False,
        stop_step=steps.steps_per_epoch,
        num_workers=num_workers,
        pin_memory=True,
    )
    return [batch for _, step in loader for batch in step]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_values_lie_where_their_tokens_and_documents_do(rows: TokenRows, num_workers: int) -> None:
    seen = 0
    for batch in batches(rows, num_workers):
        values, reward = (batch.extras[name].on_rank(None, "cpu") for name in ("ref_logps", "reward"))
        assert (values.shape, values.dtype) == (batch.input_ids.shape, torch.float32)
        is_real = batch.input_ids != 7
        assert torch.equal(values, torch.where(is_real, -batch.input_ids, 0).float())
        assert reward.shape == (len(batch.lengths), 2)
        assert reward[:, 1].tolist() == list(batch.lengths), "0 for documents of padding"
        length = batch.input_ids.shape[1]
        starts = range(0, batch.input_ids.numel(), length) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        first = [int(batch.input_ids.flatten()[start]) for start in starts[: len(batch.lengths)]]
        assert reward[:, 0].tolist() == [token if size else 0 for token, size in zip(first, batch.lengths, strict=True)]
        seen += sum(size > 0 for size in batch.lengths)
    assert seen == NUM_DOCUMENTS
    assert any(not any(batch.lengths) for batch in batches(rows))


def test_context_parallel_ranks_get_the_values_of_their_tokens(rows: TokenRows) -> None:
    for batch in batches(rows):
        s = batch.input_ids.shape[1]
        starts = (0, s) if batch.cu_seqlens is None else tuple(batch.cu_seqlens.tolist())
        by_rank = []
        for rank in (0, 1):  # every document is cut into four, of which rank r has parts r and 3 - r
            parts = [(start, (stop - start) // 4) for start, stop in pairwise(starts)]
            places = [torch.arange(a + p * n, a + (p + 1) * n) for a, n in parts for p in (rank, 3 - rank)]
            mine = torch.cat(places)
            values = batch.extras["ref_logps"].on_rank(mine, torch.device("cpu"))
            tokens = batch.input_ids[:, mine]
            assert torch.equal(values, torch.where(tokens != 7, -tokens, 0).float())
            by_rank.append(values)
            assert len(batch.extras["reward"].on_rank(mine, "cpu")) == len(batch.lengths)
        assert sum(int((part != 0).sum()) for part in by_rank) == sum(batch.lengths)


def test_vectors_of_tokens_are_cut_like_tokens() -> None:
    values = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(TokenValues(values).on_rank(torch.tensor([3, 0]), "cpu"), values[:, [3, 0]])
    assert torch.equal(DocumentValues(values).on_rank(torch.tensor([3, 0]), "cpu"), values)


def test_batches_made_by_hand_carry_what_they_are_given() -> None:
    """As a loop makes them that has no rows on disk."""
    collator = Collator(2, False, sequence_multiple=4, document_multiple=1, pad_token_id=0)
    documents = [Document(np.arange(1, size), np.arange(1, size)) for size in (4, 3)]
    advantages = ExtraColumn("token", np.array([0.5, 1.5, 2.5, -1.0, -2.0]))
    batch = collator(documents, 4, {"advantages": advantages})
    assert batch.extras["advantages"].on_rank(None, "cpu").tolist() == [[0.5, 1.5, 2.5, 0], [-1.0, -2.0, 0, 0]]
    assert collator(documents, 4).extras == {}
    with pytest.raises(ValueError, match="5 extra values for 2 documents"):
        collator(documents, 4, {"advantages": advantages._replace(per="document")})

"""The rows of a step: random documents of random lengths, the same for every engine."""

from __future__ import annotations

import numpy as np
import torch

from megatune.data.batches import Batch, Collator
from megatune.data.rows import IGNORE_INDEX, Document
from training.case import Case

_SPREAD = 0.8  # of the logarithm of a document's length, about that of conversations
_SHORTEST = 8


def document_lengths(case: Case, step: int, index: int) -> list[int]:
    """Tokens of each document of a micro-batch; they fill the row."""
    if case.document_median is None:
        return [case.tokens]
    generator = np.random.default_rng([step, index])
    lengths: list[int] = []
    while (left := case.tokens - sum(lengths)) > 0:
        drawn = max(round(generator.lognormal(np.log(case.document_median), _SPREAD)), _SHORTEST)
        lengths.append(left if left - drawn < _SHORTEST else drawn)
    return lengths


def micro_batches(case: Case, step: int) -> list[Batch]:
    """The micro-batches of a step, packed, as the training loop makes them; every token is trained."""
    collate = Collator(micro_batch_size=1, packed=True, sequence_multiple=1, document_multiple=1, pad_token_id=0)
    batches = []
    for index in range(case.micro_batches):
        generator = np.random.default_rng([step, index, 1])
        tokens = (
            generator.integers(0, case.shape.config["vocab_size"], length, dtype=np.int32)
            for length in document_lengths(case, step, index)
        )
        batches.append(collate([Document(document, document) for document in tokens], case.tokens))
    return batches


def transformers_inputs(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch as Transformers takes packed rows: positions that begin anew say where documents do.

    Its labels belong to their own token, and Transformers shifts them: the first of a document, which the last token
    of the document before would predict, is not trained.
    """
    labels = batch.input_ids.masked_fill(batch.position_ids == 0, IGNORE_INDEX)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "labels": labels}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}

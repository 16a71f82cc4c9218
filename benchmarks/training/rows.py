"""The rows of a step: random documents of random lengths, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatune.data.batches import Batch, BatchMedia, Collator
from megatune.data.media.arguments import rotary_position_ids
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.encoders import Vision
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
    """The micro-batches of a step, packed, as the training loop makes them; every token of text is trained."""
    collate = Collator(micro_batch_size=1, packed=True, sequence_multiple=1, document_multiple=1, pad_token_id=0)
    architecture, batches = case.shape.architecture(), []
    vision = architecture.vision
    # Tokens of pictures are the last ones of the vocabulary.
    num_words = architecture.vocab_size if vision is None else vision.image_token_id
    for index in range(case.micro_batches):
        generator = np.random.default_rng([step, index, 1])
        lengths = document_lengths(case, step, index)
        tokens = [generator.integers(0, num_words, length, dtype=np.int32) for length in lengths]
        if vision is None or not case.images:
            batches.append(collate([Document(document, document) for document in tokens], case.tokens))
            continue
        documents = [_with_images(document, case.images, vision) for document in tokens]
        batches.append(_with_media(collate(documents, case.tokens), documents, case.images, vision, generator))
    return batches


def _with_images(tokens: np.ndarray, grids: Sequence[tuple[int, int, int]], vision: Vision) -> Document:
    """Put images among the tokens, in place of as many of them; they are not trained."""
    labels, part = tokens.copy(), len(tokens) // (len(grids) + 1)
    for number, grid in enumerate(grids):
        size = math.prod(grid) // vision.spatial_merge_size**2
        start = (number + 1) * part - size
        tokens[start - 1], tokens[start : start + size] = vision.vision_start_token_id, vision.image_token_id
        tokens[start + size] = vision.vision_end_token_id
        labels[start - 1 : start + size + 1] = IGNORE_INDEX
    return Document(tokens, labels)


def _with_media(
    batch: Batch,
    documents: Sequence[Document],
    grids: Sequence[tuple[int, int, int]],
    vision: Vision,
    generator: np.random.Generator,
) -> Batch:
    """Give a micro-batch the pixels of its images, random ones, and the positions of its tokens."""
    all_grids = torch.tensor(grids).repeat(len(documents), 1)
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = generator.standard_normal((int(all_grids.prod(1).sum()), channels), dtype=np.float32)
    positions = [
        rotary_position_ids(document.input_ids, [(grid, None) for grid in grids], vision) for document in documents
    ]
    media = BatchMedia(
        pixel_values=torch.from_numpy(pixels),
        grids=all_grids,
        owners=torch.zeros(len(all_grids), dtype=torch.int64),
        places=(batch.input_ids.flatten() == vision.image_token_id).nonzero()[:, 0],
        rotary_position_ids=torch.from_numpy(np.concatenate(positions, 1))[:, None],
    )
    return replace(batch, media=media)


def transformers_inputs(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch as Transformers takes packed rows: positions that begin anew say where documents do.

    Its labels belong to their own token, and Transformers shifts them: the first of a document, which the last token
    of the document before would predict, is not trained. With pictures positions have four rows, of which the first
    says where documents begin.
    """
    labels = torch.nn.functional.pad(batch.labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "labels": labels}
    if batch.media is not None:
        rows = torch.cat((batch.position_ids[None], batch.media.rotary_position_ids))
        inputs |= {"position_ids": rows, "pixel_values": batch.media.pixel_values}
        inputs["image_grid_thw"] = batch.media.grids
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}

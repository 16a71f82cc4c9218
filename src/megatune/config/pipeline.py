"""Assignment of layers to pipeline stages, a pure function of the settings for the engine, the rules and the planner.

A model is split into pp · vpp consecutive chunks; chunk c is virtual stage c // pp of pipeline stage c % pp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.settings import ParallelSettings


class PipelineChunk(NamedTuple):
    """One chunk: its number of layers, and whether it has the word embedding or computes the loss."""

    num_layers: int
    embedding: bool = False
    loss: bool = False


def pipeline_chunks(parallel: ParallelSettings, num_layers: int) -> tuple[PipelineChunk, ...]:
    """Split the model into chunks, in order.

    Raises:
        ValueError: the settings do not fit this number of layers; its text is the reason, for `config.rules`.
    """
    return _chunks(
        parallel.pipeline_model_parallel_layout,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_stages or 1,
        (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers),
        (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split),
        num_layers,
    )


def holds_deepstack(parallel: ParallelSettings, architecture: Architecture) -> bool:
    """Return whether the first chunk, which has the vision encoder, has all layers that get deepstack features.

    Raises:
        ValueError: as `pipeline_chunks`.
    """
    fed = architecture.vision.num_deepstack_mergers if architecture.vision is not None else 0
    if parallel.pipeline_model_parallel_size == 1 or not fed:
        return True
    return pipeline_chunks(parallel, architecture.num_layers)[0].num_layers >= fed


@lru_cache(maxsize=1024)  # a plan calls it many times with the same arguments
def _chunks(
    layout: str | None,
    pp: int,
    vpp: int,
    ends: tuple[int | None, int | None],
    counted: tuple[bool, bool],
    num_layers: int,
) -> tuple[PipelineChunk, ...]:
    """Split the model into chunks.

    If layers do not divide equally, earlier chunks get one more, since the last one also computes the loss.

    Args:
        ends: requested layers of the first and of the last stage.
        counted: whether the embedding and the loss each count as a layer.
    """
    if layout is not None:
        chunks = parse_layout(layout)
        found = sum(chunk.num_layers for chunk in chunks)
        if found != num_layers:
            raise ValueError(f"it has {found} layers, the model {num_layers}")
        return tuple(chunks)
    counts: list[int | None] = [None] * (pp * vpp)
    for stage, asked in zip((0, -1), ends, strict=True):
        if asked is None:
            continue
        if asked % vpp:
            raise ValueError(f"{asked} layers cannot be divided into {vpp} virtual stages")
        for virtual in range(vpp):
            counts[virtual * pp + stage % pp] = asked // vpp
    embedding, loss = counted
    weights = num_layers + embedding + loss
    free = [index for index, count in enumerate(counts) if count is None]
    left = weights - sum(count or 0 for count in counts)
    if left < 0 or (left and not free):
        raise ValueError(f"{weights - left} layers are requested, the model has {num_layers}")
    share, more = divmod(left, len(free)) if free else (0, 0)
    for position, index in enumerate(free):
        counts[index] = share + (position < more)
    layers = [count or 0 for count in counts]
    if min(layers) < 1:
        raise ValueError(f"with {num_layers} layers some of {len(layers)} parts have none")
    layers[0] -= embedding
    layers[-1] -= loss
    last = len(layers) - 1
    return tuple(PipelineChunk(count, index == 0, index == last) for index, count in enumerate(layers))


def parse_layout(text: str) -> list[PipelineChunk]:
    """Read a pipeline_model_parallel_layout: E embedding, t layer, L loss, | between chunks, x*n and (xy|)*n repeat.

    Raises:
        ValueError: with what is wrong.
    """
    plain = re.sub(r"[\s,]", "", text)
    while "(" in plain:
        unrolled = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), plain)
        if unrolled == plain:
            raise ValueError("a parenthesis is not closed, or not followed by * and a number")
        plain = unrolled
    plain = re.sub(r"([^*])\*(\d+)", lambda match: match[1] * int(match[2]), plain)
    if unknown := sorted(set(plain) - set("EtL|")):
        why = "only E, t, L, | and repetitions are allowed"
        if "m" in unknown:
            why = "multi-token prediction layers (m) are always in the last part, and not written"
        raise ValueError(f"unknown {', '.join(unknown)}: {why}")
    joined = plain.replace("|", "")
    if not re.fullmatch(r"Et+L", joined):
        raise ValueError("it must have one E, then layers, then one L")
    return [PipelineChunk(part.count("t"), "E" in part, "L" in part) for part in plain.split("|")]


def write_layout(counts: Sequence[int]) -> str:
    """Return the pipeline_model_parallel_layout of chunks with these numbers of layers."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return f"E{'|'.join(parts)}L"

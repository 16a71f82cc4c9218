"""Which layers each pipeline stage holds: one pure function of the settings, for the engine, the rules and the plan.

A model is cut into pp · vpp chunks, one after the other; chunk c is virtual stage c // pp of pipeline stage c % pp.
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
    """What one chunk holds: its number of layers, and whether it has the word embedding or computes the loss."""

    num_layers: int
    embedding: bool = False
    loss: bool = False


def pipeline_chunks(parallel: ParallelSettings, num_layers: int) -> tuple[PipelineChunk, ...]:
    """Cut the model into chunks, in its order.

    Raises:
        ValueError: the settings cannot be met with this many layers; its text says why, for `config.rules`.
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
    """Return whether the first chunk, which has the vision encoder, has every layer that deepstack mergers feed.

    Raises:
        ValueError: as `pipeline_chunks`.
    """
    fed = architecture.vision.num_deepstack_mergers if architecture.vision is not None else 0
    if parallel.pipeline_model_parallel_size == 1 or not fed:
        return True
    return pipeline_chunks(parallel, architecture.num_layers)[0].num_layers >= fed


@lru_cache(maxsize=1024)  # a plan asks for the same ones many times
def _chunks(
    layout: str | None,
    pp: int,
    vpp: int,
    ends: tuple[int | None, int | None],
    counted: tuple[bool, bool],
    num_layers: int,
) -> tuple[PipelineChunk, ...]:
    """Cut the model into chunks.

    Shares that are not whole go up in the chunks before the last and down from it: the last one computes the loss.

    Args:
        ends: layers asked for in the first and in the last stage.
        counted: whether the embedding and the loss take the place of a layer each.
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
            raise ValueError(f"{asked} layers are not cut into {vpp} virtual stages")
        for virtual in range(vpp):
            counts[virtual * pp + stage % pp] = asked // vpp
    embedding, loss = counted
    weights = num_layers + embedding + loss
    free = [index for index, count in enumerate(counts) if count is None]
    left = weights - sum(count or 0 for count in counts)
    if left < 0 or (left and not free):
        raise ValueError(f"{weights - left} layers are asked for, the model has {num_layers}")
    share, more = divmod(left, len(free)) if free else (0, 0)
    for position, index in enumerate(free):
        counts[index] = share + (position < more)
    layers = [count or 0 for count in counts]
    if min(layers) < 1:
        raise ValueError(f"{num_layers} layers leave some of {len(layers)} parts without one")
    layers[0] -= embedding
    layers[-1] -= loss
    last = len(layers) - 1
    return tuple(PipelineChunk(count, index == 0, index == last) for index, count in enumerate(layers))


def parse_layout(text: str) -> list[PipelineChunk]:
    """Read a pipeline_model_parallel_layout: E embedding, t layer, L loss, | between chunks, x*n and (xy|)*n repeat.

    Raises:
        ValueError: what is wrong with it.
    """
    plain = re.sub(r"[\s,]", "", text)
    while "(" in plain:
        unrolled = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), plain)
        if unrolled == plain:
            raise ValueError("a parenthesis is not followed by *, a number, or not closed")
        plain = unrolled
    plain = re.sub(r"([^*])\*(\d+)", lambda match: match[1] * int(match[2]), plain)
    if unknown := sorted(set(plain) - set("EtL|")):
        why = "it is made of E, t, L, | and repeats"
        if "m" in unknown:
            why = "layers that predict further tokens (m) are in the last part, and not written"
        raise ValueError(f"{', '.join(unknown)} means nothing in it: {why}")
    joined = plain.replace("|", "")
    if not re.fullmatch(r"Et+L", joined):
        raise ValueError("E comes first, once, then layers, and L last, once")
    return [PipelineChunk(part.count("t"), "E" in part, "L" in part) for part in plain.split("|")]


def write_layout(counts: Sequence[int]) -> str:
    """Write the pipeline_model_parallel_layout of chunks of these numbers of layers, embedding first and loss last."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return f"E{'|'.join(parts)}L"

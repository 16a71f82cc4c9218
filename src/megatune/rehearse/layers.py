"""Fewer layers, dealt to pipeline stages and virtual stages in the way of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatune.config.pipeline import parse_layout, pipeline_chunks, write_layout
from megatune.config.settings import ParallelSettings

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_LAYOUT = "pipeline_model_parallel_layout"
_MOST_SHARE = 16  # layers of a stage


def fewer_layers(parallel: ParallelSettings, num_layers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of layers, the smallest first, that are cut as the model's are: stages with layers keep some,
    equal ones stay equal, and unequal ones unequal.

    Args:
        num_layers: that the file's own layout can cut.

    Yields:
        Layers, and the settings of the layout that say another number with them.
    """
    real = [chunk.num_layers for chunk in pipeline_chunks(parallel, num_layers)]
    for share in range(1, _MOST_SHARE + 1):
        for count, changes in _candidates(parallel, real, share):
            if count > num_layers:
                continue
            try:
                chunks = pipeline_chunks(parallel.model_copy(update=changes), count)
            except ValueError:
                continue
            counts = [chunk.num_layers for chunk in chunks]
            kept = all(now or not was for now, was in zip(counts, real, strict=True))
            if kept and (len(set(real)) == 1) == (len(set(counts)) == 1):
                yield count, changes
    yield num_layers, {}


def _candidates(parallel: ParallelSettings, real: list[int], share: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield layers with about so many in each chunk."""
    if parallel.pipeline_model_parallel_layout:
        most = max(real)
        written = parse_layout(parallel.pipeline_model_parallel_layout)
        counts = [min(chunk.num_layers, share + (chunk.num_layers == most > share)) for chunk in written]
        yield sum(counts), {_LAYOUT: write_layout(counts)}
        return
    chunks, virtual = len(real), parallel.virtual_stages or 1
    asked = {name: getattr(parallel, name) for name in (_FIRST, _LAST)}
    ends = {name: number for name, number in asked.items() if number is not None}
    if ends:
        middle = real[len(real) // 2] if len(real) > 2 else share
        changes = {name: virtual * _beside(number // virtual, middle, share) for name, number in ends.items()}
        free = chunks - virtual * len(ends)
        yield sum(changes.values()) + share * free, changes
        return
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    for more in (0, 1) if chunks > 1 else (0,):
        if (count := chunks * share - counted + more) > 0:
            yield count, {}


def _beside(asked: int, middle: int, share: int) -> int:
    """Return a number that is to `share` as `asked` is to `middle`: less, as much, or more."""
    return max(1, share + (asked > middle) - (asked < middle))

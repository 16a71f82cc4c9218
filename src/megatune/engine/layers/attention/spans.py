"""Which queries attend to which keys, and in which order a context-parallel rank gets them.

Everything here follows from the sequence boundaries of a row, which are known on the host. It is computed once for each
pattern of boundaries and cached, so that layers do not repeat it and never synchronize with a GPU.

Legend: s tokens of a whole row, cp context-parallel ranks. A sequence is cut into 2 · cp equal parts, of which rank r
holds r and 2 · cp - 1 - r (`engine.sequences`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatune.engine import device
from megatune.engine.sequences import local_tokens

# Number of cached boundary patterns: more than the micro-batches in flight in a pipeline.
_REMEMBERED = 64


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of queries; each only attends to its own run of keys.

    Attributes:
        queries: start of each run of queries, and the end of the last one.
        keys: the same for the runs of keys.
        causal: the last query of a run sees all keys of its run, each earlier query one key fewer. Otherwise every
            query sees every key of its run.
        window: with `causal`, the largest number of keys that a query sees, counted back from its last one; None for
            all.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None

    @property
    def is_one_square(self) -> bool:
        """Whether there is a single causal run, as for a row that is one sequence."""
        return self.causal and self.window is None and len(self.queries) == 2 and self.queries == self.keys

    @cached_property
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """The slices of queries and keys of each run."""
        queries, keys = ([slice(*bounds) for bounds in pairwise(ends)] for ends in (self.queries, self.keys))
        return tuple(zip(queries, keys, strict=True))

    @cached_property
    def equal_runs(self) -> tuple[EqualRuns, ...]:
        """The runs grouped by their numbers of queries and of keys."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, (queries, keys) in enumerate(self.runs):
            groups.setdefault((queries.stop - queries.start, keys.stop - keys.start), []).append(number)
        return tuple(
            EqualRuns(_tokens_of(self.queries, numbers), _tokens_of(self.keys, numbers), len(numbers))
            for numbers in groups.values()
        )

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor, int, int]:
        """`queries` and `keys`, int32 [runs + 1], on the device; and the length of the longest run of each."""
        bounds = device.send(torch.tensor((self.queries, self.keys), dtype=torch.int32))
        longest = [max(stop - start for start, stop in pairwise(ends)) for ends in (self.queries, self.keys)]
        return bounds[0], bounds[1], longest[0], longest[1]


class EqualRuns(NamedTuple):
    """Runs of equal lengths: indices of their queries and keys, as a slice or int64 on the CPU; and their number."""

    queries: slice | Tensor
    keys: slice | Tensor
    num_runs: int


def _tokens_of(bounds: tuple[int, ...], numbers: list[int]) -> slice | Tensor:
    """Return the indices of the tokens of these runs."""
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return slice(bounds[first], bounds[last + 1])
    starts, size = torch.tensor(bounds)[numbers], bounds[first + 1] - bounds[first]
    return (starts[:, None] + torch.arange(size)).flatten()


# A rank's queries and keys that take part in a step of ring attention, and their spans: slices if the row is one
# sequence, otherwise int64 [s / (2 · cp)] on the device.
RingStep: TypeAlias = tuple[slice | Tensor, slice | Tensor, Spans]


@lru_cache(_REMEMBERED)
def causal_spans(boundaries: tuple[int, ...], window: int | None = None) -> Spans:
    """Return the causal spans of whole rows: every sequence attends to itself."""
    return Spans(boundaries, boundaries, causal=True, window=window)


@lru_cache(_REMEMBERED)
def gather_order(boundaries: tuple[int, ...], cp_size: int) -> tuple[Tensor, Tensor]:
    """Return the indices that reorder tokens gathered from all context-parallel ranks into row order, and back.

    Returns:
        The index of each of the row's tokens among the gathered ones, and the inverse: int64 [s], on the device.
    """
    from_row = torch.cat([local_tokens(boundaries, rank, cp_size) for rank in range(cp_size)])
    return device.send(from_row.argsort()), device.send(from_row)


@lru_cache(_REMEMBERED)
def prefixes(
    boundaries: tuple[int, ...], cp_rank: int, cp_size: int, window: int | None = None
) -> tuple[Tensor, Spans]:
    """Return which gathered keys one rank's queries see: the parts of each sequence up to their own.

    Returns:
        int64 [keys], on the device: indices of the gathered tokens in the order of the spans; early tokens occur twice,
        for the queries of both parts. And two spans for each sequence, for this rank's two parts.
    """
    to_row = torch.cat([local_tokens(boundaries, rank, cp_size) for rank in range(cp_size)]).argsort()
    sizes, runs = [], []
    for start, stop in pairwise(boundaries):
        size = (stop - start) // (2 * cp_size)
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            sizes.append(size)
            runs.append(to_row[start : start + (part + 1) * size])
    queries, keys = (tuple(accumulate(each, initial=0)) for each in (sizes, map(len, runs)))
    return device.send(torch.cat(runs)), Spans(queries, keys, causal=True, window=window)


@lru_cache(_REMEMBERED)
def ring(boundaries: tuple[int, ...], cp_size: int) -> tuple[RingStep, RingStep, RingStep]:
    """Return the spans for the keys and values that a rank gets in ring attention.

    Returns:
        For the rank's own keys: both parts, causally. For keys of an earlier rank: all queries see the first parts. For
        keys of a later rank: the queries of the second parts see all.
    """
    whole = tuple(boundary // cp_size for boundary in boundaries)
    half = tuple(boundary // (2 * cp_size) for boundary in boundaries)
    return (
        (slice(None), slice(None), Spans(whole, whole, causal=True)),
        (slice(None), _parts(whole, 0), Spans(whole, half, causal=False)),
        (_parts(whole, 1), slice(None), Spans(half, whole, causal=False)),
    )


def _parts(boundaries: tuple[int, ...], which: int) -> slice | Tensor:
    """Return the indices of the first or second half of each sequence among a rank's tokens."""
    middles = [(start, (start + stop) // 2, stop) for start, stop in pairwise(boundaries)]
    halves = [edges[which : which + 2] for edges in middles]
    if len(halves) == 1:
        return slice(*halves[0])
    return device.send(torch.cat([torch.arange(start, stop) for start, stop in halves]))


class LaterTokens(NamedTuple):
    """The later image tokens that image tokens see: indices of queries and keys, int64 [n] on the device, and spans."""

    queries: Tensor
    keys: Tensor
    spans: Spans


@lru_cache(_REMEMBERED)
def later_tokens(runs: tuple[tuple[int, int], ...], rows: int, length: int) -> LaterTokens | None:
    """Return which later tokens of the same image the image tokens see, which causal attention excludes.

    In reverse order later tokens come first: the last token but one sees one key, the one before it two.

    Args:
        runs: of tokens that all see each other, start and end in the flattened rows, [rows · length].

    Returns:
        Indices of queries and keys in tokens [length · rows], where tokens of different rows at the same position are
        adjacent; None if no run has two tokens.
    """
    long = [(start, stop) for start, stop in runs if stop - start > 1]
    if not long:
        return None
    edges = tuple(accumulate((stop - start - 1 for start, stop in long), initial=0))
    queries = torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in long])
    queries, keys = (each % length * rows + each // length for each in (queries, queries + 1))
    return LaterTokens(device.send(queries), device.send(keys), Spans(edges, edges, causal=True))

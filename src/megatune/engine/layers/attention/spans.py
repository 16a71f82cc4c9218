"""Which queries attend to which keys, and in which order a context-parallel rank finds them.

Everything here follows from the boundaries of a row's documents, which are known on the host. It is made once for each
pattern of boundaries and remembered, so that layers do not compute it again and a GPU is never waited for.

Legend: s tokens of a whole row, cp context-parallel ranks. A document is cut into 2 · cp equal parts, of which rank r
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

# Patterns that are remembered: more than micro-batches are under way in a pipeline.
_REMEMBERED = 64


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of queries; each attends to its own run of keys, and to no other.

    Attributes:
        queries: where each run of queries begins, and where the last one ends.
        keys: the same of the runs of keys.
        causal: the last query of a run sees all keys of its run, each one before it one key fewer. Otherwise every
            query sees every key of its run.
        window: with `causal`, the most keys that a query sees, its last ones; None for all.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None

    @property
    def is_one_square(self) -> bool:
        """One causal run: the attention of a row that is one document."""
        return self.causal and self.window is None and len(self.queries) == 2 and self.queries == self.keys

    @cached_property
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """The queries and the keys of each run."""
        queries, keys = ([slice(*bounds) for bounds in pairwise(ends)] for ends in (self.queries, self.keys))
        return tuple(zip(queries, keys, strict=True))

    @cached_property
    def equal_runs(self) -> tuple[EqualRuns, ...]:
        """The runs in groups that have as many queries, and as many keys."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, (queries, keys) in enumerate(self.runs):
            groups.setdefault((queries.stop - queries.start, keys.stop - keys.start), []).append(number)
        return tuple(
            EqualRuns(_tokens_of(self.queries, numbers), _tokens_of(self.keys, numbers), len(numbers))
            for numbers in groups.values()
        )

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor, int, int]:
        """`queries` and `keys`, int32 [runs + 1], on the device; and the longest run of each."""
        bounds = device.send(torch.tensor((self.queries, self.keys), dtype=torch.int32))
        longest = [max(stop - start for start, stop in pairwise(ends)) for ends in (self.queries, self.keys)]
        return bounds[0], bounds[1], longest[0], longest[1]


class EqualRuns(NamedTuple):
    """Runs of equal lengths: where their queries and their keys are, a slice or int64 on the CPU; and how many."""

    queries: slice | Tensor
    keys: slice | Tensor
    num_runs: int


def _tokens_of(bounds: tuple[int, ...], numbers: list[int]) -> slice | Tensor:
    """Return where the tokens of these runs are."""
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return slice(bounds[first], bounds[last + 1])
    starts, size = torch.tensor(bounds)[numbers], bounds[first + 1] - bounds[first]
    return (starts[:, None] + torch.arange(size)).flatten()


# The queries and the keys of a rank that take part in a step of the ring, and how: a slice where the row is one
# document, otherwise int64 [s / (2 · cp)] on the device.
RingStep: TypeAlias = tuple[slice | Tensor, slice | Tensor, Spans]


@lru_cache(_REMEMBERED)
def causal_spans(boundaries: tuple[int, ...], window: int | None = None) -> Spans:
    """Return the spans of whole rows: every document attends to itself."""
    return Spans(boundaries, boundaries, causal=True, window=window)


@lru_cache(_REMEMBERED)
def gather_order(boundaries: tuple[int, ...], cp_size: int) -> tuple[Tensor, Tensor]:
    """Return how tokens that were gathered from all context-parallel ranks are brought into the row's order, and back.

    Returns:
        Where the row's tokens are among the gathered ones, and where those are in the row: int64 [s], on the device.
    """
    from_row = torch.cat([local_tokens(boundaries, rank, cp_size) for rank in range(cp_size)])
    return device.send(from_row.argsort()), device.send(from_row)


@lru_cache(_REMEMBERED)
def prefixes(
    boundaries: tuple[int, ...], cp_rank: int, cp_size: int, window: int | None = None
) -> tuple[Tensor, Spans]:
    """Return what the queries of one rank see of the gathered keys: of each document the parts up to theirs.

    Returns:
        int64 [keys], on the device: the gathered tokens in the order of the spans; early ones come twice, for the
        queries of the earlier and of the later part. And two spans for each document, of this rank's two parts.
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
    """Return who sees what of the keys and values that come around a ring of context-parallel ranks.

    Returns:
        For a rank's own keys, both parts in order, causally; for an earlier rank's, of which all queries see the first
        parts; and for a later one's, which the queries of the second parts see.
    """
    whole = tuple(boundary // cp_size for boundary in boundaries)
    half = tuple(boundary // (2 * cp_size) for boundary in boundaries)
    return (
        (slice(None), slice(None), Spans(whole, whole, causal=True)),
        (slice(None), _parts(whole, 0), Spans(whole, half, causal=False)),
        (_parts(whole, 1), slice(None), Spans(half, whole, causal=False)),
    )


def _parts(boundaries: tuple[int, ...], which: int) -> slice | Tensor:
    """Return where the first or second half of each document is among a rank's tokens."""
    middles = [(start, (start + stop) // 2, stop) for start, stop in pairwise(boundaries)]
    halves = [edges[which : which + 2] for edges in middles]
    if len(halves) == 1:
        return slice(*halves[0])
    return device.send(torch.cat([torch.arange(start, stop) for start, stop in halves]))


class LaterTokens(NamedTuple):
    """What tokens of pictures see behind them: places int64 [n] on the device, of queries and of keys, and how."""

    queries: Tensor
    keys: Tensor
    spans: Spans


@lru_cache(_REMEMBERED)
def later_tokens(runs: tuple[tuple[int, int], ...], rows: int, length: int) -> LaterTokens | None:
    """Return what the tokens of a picture see of those behind them in it, which causal attention leaves out.

    In reverse order the tokens behind one are those before it: the last but one sees one key, the one before it two.

    Args:
        runs: of tokens that all see each other, begin and end in the flattened rows, [rows · length].

    Returns:
        Places of queries and keys in tokens [length · rows], where the rows' tokens at one place lie side by side;
        None where no run has two tokens.
    """
    long = [(start, stop) for start, stop in runs if stop - start > 1]
    if not long:
        return None
    edges = tuple(accumulate((stop - start - 1 for start, stop in long), initial=0))
    queries = torch.cat([torch.arange(stop - 2, start - 1, -1) for start, stop in long])
    queries, keys = (each % length * rows + each // length for each in (queries, queries + 1))
    return LaterTokens(device.send(queries), device.send(keys), Spans(edges, edges, causal=True))

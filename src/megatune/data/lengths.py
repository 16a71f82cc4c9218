"""How long samples are before anything is cut: what cutoff_len does to the data, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MOST_BINS = 16

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class LengthReport:
    """Lengths of samples, in tokens; of a preference pair the longer one's."""

    cutoff_len: int
    samples: int  # rows that are dropped for their length count too, copies do not
    mean: float
    p50: int  # the least length that 50 % do not exceed
    p90: int
    p99: int
    longest: int
    over: int  # samples longer than cutoff_len
    # Where the bins of the histogram end: bin i holds the lengths above edges[i] up to edges[i + 1]. Multiples of a
    # fraction of cutoff_len, which is an edge where lengths reach it; the last is the longest length.
    edges: tuple[int, ...]
    counts: tuple[int, ...]  # samples in each bin

    @classmethod
    def of(cls, lengths: np.ndarray, cutoff_len: int) -> LengthReport:
        """Count lengths, int [samples], 1 or more of 1 or more tokens."""
        ordered = np.sort(lengths)
        longest = int(ordered[-1])
        edges = _edges(longest, cutoff_len)
        up_to = np.searchsorted(ordered, edges, side="right")
        p50, p90, p99 = (int(ordered[-(-len(ordered) * percent // 100) - 1]) for percent in (50, 90, 99))
        over = len(ordered) - int(np.searchsorted(ordered, cutoff_len, side="right"))
        counts = tuple(int(b - a) for a, b in pairwise(up_to))
        mean = float(ordered.mean())
        return cls(cutoff_len, len(ordered), mean, p50, p90, p99, longest, over, tuple(edges), counts)

    @property
    def share_over(self) -> float:
        """The share of samples longer than cutoff_len, 0 to 1."""
        return self.over / self.samples

    def line(self) -> str:
        """Return the report in words, with a bar for each bin, and a mark at cutoff_len where something is beyond
        it."""
        most = max(self.counts)
        bars = [_BLOCKS[-(-count * len(_BLOCKS) // most) - 1] if count else " " for count in self.counts]
        if self.over:
            bars.insert(self.edges.index(self.cutoff_len), "¦")
        over = f"{self.over} ({self.share_over:.1%}) over" if self.over else "none over"
        return (
            f"lengths: |{''.join(bars)}| to {self.longest} tokens, p50 {self.p50}, p90 {self.p90}, p99 {self.p99}, "
            f"mean {self.mean:.0f}; {over} cutoff_len {self.cutoff_len}"
        )


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """Return 0, multiples of cutoff_len / 2^j up to twice cutoff_len at most, and the longest."""
    covered = min(longest, 2 * cutoff_len)
    parts = 1
    while 2 * parts <= cutoff_len and 2 * parts * covered <= (MOST_BINS - 1) * cutoff_len:
        parts *= 2
    inner = [number * cutoff_len // parts for number in range(1, covered * parts // cutoff_len + 1)]
    return [0, *(edge for edge in inner if edge < longest), longest]

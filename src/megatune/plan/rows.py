"""Lengths of rows: of prepared data, of a sample of it, or given.

Memory is planned for the longest row, time for the mean row and the padding of micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AliasChoices, Field

# Quantiles that separate the slices of lengths; the last slice has the longest 1/4096 of the rows.
_SHARES = (*(1 - 2 ** (-part / 2) for part in range(25)), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """Lengths in tokens: of each sequence, or of each packed row.

    Attributes:
        slices: mean length between each two quantiles of `_SHARES`, ascending.
        longest: length of the longest row.
        document: mean length of a document, weighted by tokens.
        origin: the source of the lengths, for a sentence: "of all rows".
        media: image and video tokens of the mean row; None if unknown.
    """

    slices: tuple[float, ...]
    longest: int
    document: float
    origin: str
    # A plan.json of before has it as `pictures`.
    media: Annotated[float | None, Field(validation_alias=AliasChoices("media", "pictures"))] = None

    @classmethod
    def of(
        cls, lengths: Sequence[int], origin: str, *, document: float | None = None, media: float | None = None
    ) -> RowLengths:
        """Summarize the lengths of one or more rows; `document` is None if each row is one document."""
        ordered = sorted(map(int, lengths))
        summed = list(itertools.accumulate(ordered, initial=0))

        def below(share: float) -> float:
            """Return the sum of this share of the rows, the shortest ones."""
            place = share * len(ordered)
            whole = min(int(place), len(ordered) - 1)
            return summed[whole] + (place - whole) * ordered[whole]

        weighted = sum(length * length for length in ordered) / max(summed[-1], 1)
        return cls(
            slices=tuple(len(ordered) ** -1 * (below(end) - below(start)) / (end - start) for start, end in _steps()),
            longest=ordered[-1],
            document=weighted if document is None else document,
            origin=origin,
            media=media,
        )

    @classmethod
    def stated(cls, mean: float, longest: int, origin: str) -> RowLengths:
        """Assume lengths with this mean, distributed exponentially up to the longest."""
        scale = cut_scale(mean, longest)

        def above(rest: float) -> float:
            """Return the sum of the longest `rest` of the rows, over the number of rows."""
            if math.isinf(scale):
                return rest * longest
            cut = math.exp(-longest / scale)  # the share that would exceed the longest
            return rest * longest if rest <= cut else cut * longest + scale * (_entropy(rest) - _entropy(cut))

        slices = tuple((above(1 - start) - above(1 - end)) / (end - start) for start, end in _steps())
        weighted = sum(share * size * size for share, size in zip(_weights(1), slices, strict=True)) / mean
        return cls(slices=slices, longest=longest, document=min(weighted, longest), origin=origin)

    @property
    def mean(self) -> float:
        """Mean length of a row."""
        return longest_of(self, 1)[0]


@lru_cache(maxsize=4096)
def longest_of(rows: RowLengths, count: int) -> tuple[float, float]:
    """Return mean and standard deviation of the longest of `count` random rows."""
    weights = _weights(count)
    mean = sum(weight * size for weight, size in zip(weights, rows.slices, strict=True))
    square = sum(weight * size * size for weight, size in zip(weights, rows.slices, strict=True))
    return mean, math.sqrt(max(0.0, square - mean * mean))


def _steps() -> Iterator[tuple[float, float]]:
    return itertools.pairwise(_SHARES)


@lru_cache(maxsize=256)
def _weights(count: int) -> tuple[float, ...]:
    """Return the probability that the longest of `count` rows is in each slice."""
    return tuple(end**count - start**count for start, end in _steps())


def _entropy(rest: float) -> float:
    """Return ∫ -ln v dv from 0 to `rest`."""
    return rest - rest * math.log(rest) if rest > 0 else 0.0


def cut_scale(mean: float, longest: float) -> float:
    """Return s with mean = s · (1 - e^(-longest / s)), the mean of an exponential distribution cut at the longest."""
    if mean >= longest:
        return math.inf
    low, high = mean, mean
    while high * -math.expm1(-longest / high) < mean:
        low, high = high, 2 * high
        if high > 1e6 * longest:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-longest / middle) < mean else (low, middle)
    return high

"""Least squares of at most two unknowns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_HUBER = 0.2  # residual from which a run counts less
_PULL = 0.003  # weight of the pull towards 1, of one run's weight
_RANGE = (0.02, 50.0)


def least_squares(residuals: Callable[[Sequence[float]], list[float]], count: int) -> list[float]:
    """Solve for at most two unknowns, from 0: Gauss-Newton with Huber's weights and a pull towards 0."""
    unknowns = [0.0] * count
    if not count:
        return unknowns
    low, high = map(math.log, _RANGE)
    for _ in range(30):
        now = residuals(unknowns)
        weights = [min(1.0, _HUBER / abs(each)) if each else 1.0 for each in now]
        slopes = []
        for index in range(count):
            moved = [each + 1e-3 * (index == other) for other, each in enumerate(unknowns)]
            slopes.append([(after - before) / 1e-3 for before, after in zip(now, residuals(moved), strict=True)])
        normal = [
            [
                sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) + _PULL * (i == j)
                for j, other in enumerate(slopes)
            ]
            for i, one in enumerate(slopes)
        ]
        right = [
            -sum(w * a * r for w, a, r in zip(weights, slope, now, strict=True)) - _PULL * unknown
            for slope, unknown in zip(slopes, unknowns, strict=True)
        ]
        step = _solve(normal, right)
        unknowns = [
            min(high, max(low, each + max(-1.0, min(1.0, move)))) for each, move in zip(unknowns, step, strict=True)
        ]
        if max(map(abs, step)) < 1e-5:
            break
    return unknowns


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve one or two linear equations."""
    if len(right) == 1:
        return [right[0] / matrix[0][0]]
    (a, b), (c, d) = matrix
    determinant = a * d - b * c
    return [(right[0] * d - b * right[1]) / determinant, (a * right[1] - right[0] * c) / determinant]

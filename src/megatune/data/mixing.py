"""How several data sets become one sequence of samples: one after the other, or drawn from in turn.

Pure functions of sizes, settings and seed. The strategies mean what they mean in the datasets library: interleave_under
is its first_exhausted, interleave_over its all_exhausted, interleave_once its all_exhausted_without_replacement.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, cycle, islice
from operator import mul, truediv

import numpy as np

from megatune.data.order import mixing_bits, weight_order
from megatune.errors import ExitCode, Finding, MegatuneError

MOST_SAMPLES = 2**30  # of an epoch: more is a probability that was not meant
_CHUNK = 2**16
_Shares = Sequence[float] | None


def mixed_order(sizes: Sequence[int], strategy: str, probabilities: _Shares, weights: _Shares, seed: int) -> np.ndarray:
    """Return the samples of an epoch, before they are packed or shuffled: int64 [samples].

    Args:
        sizes: samples of each data set.
        strategy: "concat", "interleave_under", "interleave_over" or "interleave_once".
        probabilities: of drawing from each data set, when interleaving; None draws from one after the other, in whole
            rounds.
        weights: how often each data set is taken, with concat; None takes each once.

    Returns:
        Numbers of samples as if the data sets were joined, one after the other, 0 to sum(sizes) - 1, with repeats.

    Raises:
        MegatuneError: data sets would be repeated beyond measure (exit code 64).
    """
    if strategy == "concat":
        weights = weights or [1.0] * len(sizes)
        _check_length(
            sum(map(mul, sizes, weights)), "dataset_weights", "a whole number repeats a data set that many times"
        )
        return _concatenated(sizes, weights, seed)
    if strategy not in ("interleave_under", "interleave_over", "interleave_once"):
        raise ValueError(f"mix_strategy {strategy}")
    if strategy == "interleave_over":
        shares = probabilities or [1 / len(sizes)] * len(sizes)
        why = "interleave_over draws until every data set is used up, and one is drawn from too rarely for its size"
        _check_length(max(map(truediv, sizes, shares)), "interleave_probs", why)
    return _interleaved(sizes, strategy, probabilities, seed)


def draws(
    num_sets: int, strategy: str, probabilities: _Shares, seed: int, num_used_up: Callable[[], int], first: int = 0
) -> Iterator[int]:
    """Yield which data set is drawn from next, until one is used up (interleave_under) or all are.

    Without probabilities data sets come in turn, and the last round is whole.

    Args:
        num_used_up: returns of how many data sets every sample has been taken by now.
        first: the draw to begin with; those before it are skipped.
    """
    drawn = cycle(range(num_sets)) if probabilities is None else _drawn(probabilities, seed)
    most = 1 if strategy == "interleave_under" else num_sets
    for count, number in enumerate(islice(drawn, first, None), first):
        if (probabilities is not None or count % num_sets == 0) and num_used_up() >= most:
            return
        yield number


def _drawn(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    shares = [Fraction(share) for share in probabilities]
    thresholds = [int(reached * 2**64 / sum(shares)) for reached in accumulate(shares)][:-1]
    for bits in mixing_bits(seed, _CHUNK):
        yield from np.searchsorted(np.asarray(thresholds, dtype=np.uint64), bits, side="right").tolist()


def _concatenated(sizes: Sequence[int], weights: Sequence[float], seed: int) -> np.ndarray:
    parts = [np.empty(0, dtype=np.int64)]
    first = 0
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        wanted = size * Fraction(weight)  # to the nearest whole number; a half goes up, and something is never nothing
        rounds, rest = divmod(max(int(wanted + Fraction(1, 2)), 1 if wanted else 0), max(size, 1))
        parts += [np.arange(first, first + size, dtype=np.int64)] * rounds
        parts.append(first + np.sort(weight_order(size, seed, number)[:rest]))
        first += size
    return np.concatenate(parts)


def _check_length(samples: float, key: str, why: str) -> None:
    if samples > MOST_SAMPLES:
        what = f"{key} would make an epoch of about {samples:.3g} samples"
        raise MegatuneError(Finding(what, why=why, fix=f"change {key}"), ExitCode.SETTINGS)


def _interleaved(sizes: Sequence[int], strategy: str, probabilities: _Shares, seed: int) -> np.ndarray:
    first = [reached - size for reached, size in zip(accumulate(sizes), sizes, strict=True)]
    taken, left = [0] * len(sizes), {number for number, size in enumerate(sizes) if size}
    samples = array("q")
    for drawn in draws(len(sizes), strategy, probabilities, seed, lambda: len(sizes) - len(left)):
        if strategy == "interleave_once" and len(left) == 1:  # whatever is drawn meanwhile, the rest comes in order
            (last,) = left
            samples.extend(range(first[last] + taken[last], first[last] + sizes[last]))
            break
        if drawn in left or (strategy == "interleave_over" and sizes[drawn]):
            samples.append(first[drawn] + taken[drawn] % sizes[drawn])
            taken[drawn] += 1
            if taken[drawn] == sizes[drawn]:
                left.remove(drawn)
    return np.asarray(samples)

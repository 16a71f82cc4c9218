"""Which problem comes next: a pure function of (seed, domain, place), so that a run that is resumed goes on exactly."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from megatune.data.order import epoch_order
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.samples import Problem


def domain_batch_sizes(shares: Mapping[str, float], rollout_batch_size: int) -> dict[str, int]:
    """Return the prompts of a step by domain: each share rounded down, the last domain takes the rest, as in ROLL.

    Shares are taken as they are written: 0.29 of 100 is 29, not what its binary fraction rounds down to.

    Raises:
        MegatuneError: (SETTINGS) a domain gets no prompt.
    """
    *first, last = shares
    sizes = {domain: int(Fraction(str(shares[domain])) * rollout_batch_size) for domain in first}
    sizes[last] = rollout_batch_size - sum(sizes.values())
    empty = [domain for domain, size in sizes.items() if size < 1]
    if empty:
        what = f"domain_interleave_probs: {', '.join(empty)} would get no prompt of rollout_batch_size"
        why = f"of {rollout_batch_size} prompts a step each share is rounded down, and {last} takes the rest"
        finding = Finding(what, why=why, fix="raise its share or rollout_batch_size, or leave the domain out")
        raise MegatuneError(finding, ExitCode.SETTINGS)
    return sizes


class ProblemOrder:
    """The problems of each domain in its own order: every problem once an epoch, shuffled anew.

    Args:
        problems: by domain.
    """

    def __init__(self, problems: Mapping[str, Sequence[Problem]], seed: int) -> None:
        self._problems = {domain: each for domain, each in problems.items() if each}
        self._seed = seed
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    def at(self, domain: str, place: int) -> Problem:
        """Return the problem at a place of a domain, over all epochs."""
        problems = self._problems[domain]
        epoch, within = divmod(place, len(problems))
        known, order = self._orders.get(domain, (-1, ()))
        if known != epoch:
            # Domains of the same size get orders of their own.
            order = epoch_order(len(problems), self._seed ^ zlib.crc32(domain.encode()), epoch).tolist()
            self._orders[domain] = epoch, order
        return problems[order[within]]

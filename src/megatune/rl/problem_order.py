"""Which problem comes next: a pure function of (seed, domain, place), so that a run that is resumed goes on exactly."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from megatune.data.order import epoch_order
from megatune.rl.samples import Problem


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
